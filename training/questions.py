"""Makes pictures and asks questions about them; a seed always gives the same ones."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from training.interface import draw_window
from training.pictures import (
    Picture,
    Thing,
    draw_line,
    draw_shapes,
    finish,
    new_picture,
    pick_number,
    pick_word,
)
from training.vocabulary import COLOURS, KINDS, PLACES, PLURALS, SHAPES, WORDINGS

SCENES = ("shapes",) * 9 + ("digits",) * 4 + ("words",) * 5 + ("interface",) * 6 + ("plain",)
_CLEAR = 0.045  # how far a centre is at least from the border between two places


@dataclass(frozen=True)
class Question:
    """A question about a picture, its only right answer, and the kind it counts to."""

    kind: str
    text: str
    answer: str


@dataclass(frozen=True)
class Example:
    """A picture as the tower sees it, its marks in pixels, and questions about it."""

    scene: str
    pixels: np.ndarray
    marks: np.ndarray  # rows of left, top, right, bottom, class
    questions: tuple[Question, ...]
    num_things: int


class Asker:
    """Words questions; held-out wordings only if told so."""

    def __init__(self, rng: random.Random, *, is_held_out: bool = False) -> None:
        self._rng = rng
        self._is_held_out = is_held_out

    def ask(self, about: str, answer: str, **parts: str) -> Question:
        """A question in one of the wordings of ``about``."""
        *trained, held_out = WORDINGS[about]
        text = held_out if self._is_held_out else self._rng.choice(trained)
        text = text.format(**parts).replace(" a orange", " an orange")
        return Question(KINDS[about], text, answer)


def make_example(
    seed: str,
    fonts: Path,
    others: tuple[str, ...] = (),
    *,
    is_held_out: bool = False,
    limit: int = 3,
) -> Example:
    """Draw the picture of a seed and ask up to ``limit`` questions about it.

    Args:
        others: Words besides the list's own that may be drawn.
        is_held_out: Use the wordings that are never trained.
    """
    rng = random.Random(seed)  # noqa: S311 - pictures, not secrets
    scene = rng.choice(SCENES)
    picture = new_picture(rng, scene)
    if scene == "shapes":
        draw_shapes(rng, picture)
    elif scene == "digits":
        draw_line(rng, picture, fonts, pick_number(rng), "number")
    elif scene == "words":
        draw_line(rng, picture, fonts, pick_word(rng, others), "word")
    elif scene == "interface":
        draw_window(rng, picture, fonts)
    asker = Asker(rng, is_held_out=is_held_out)
    asked = _QUESTIONS[scene](rng, picture, asker)
    by_kind: dict[str, list[Question]] = {}
    for question in asked:
        by_kind.setdefault(question.kind, []).append(question)
    one_each = [rng.choice(same) for same in by_kind.values()]
    rest = [question for question in asked if question not in one_each]
    rng.shuffle(one_each)
    rng.shuffle(rest)
    chosen = tuple((one_each + rest)[:limit])
    pixels = finish(rng, picture)
    return Example(scene, pixels, _scaled_marks(picture), chosen, len(picture.things))


def _scaled_marks(picture: Picture) -> np.ndarray:
    x, y = (192 / side for side in picture.canvas.size)
    rows = [(a * x, b * y, c * x, d * y, name) for (a, b, c, d), name in picture.marks]
    return np.array(rows, np.float32).reshape(-1, 5)


def _with_article(thing: Thing) -> str:
    return f"{'an' if thing.colour == 'orange' else 'a'} {thing.colour} {thing.name}"


def _number_of(count: int, one: str, many: str) -> str:
    if count == 1:
        return f"There is 1 {one}."
    return f"There are {count or 'no'} {many}."


def _place(picture: Picture, thing: Thing) -> str | None:
    """The ninth of the picture in which a thing clearly is."""
    index = []
    for part in picture.place_of(thing):
        if min(abs(part - 1 / 3), abs(part - 2 / 3)) < _CLEAR:
            return None
        index.append(int(part * 3))
    column, row = index
    return PLACES[row][column]


def _in_the(place: str) -> str:
    return f"{'in' if place == 'middle' else 'at'} the {place}"


def _background(picture: Picture, asker: Asker) -> Question:
    return asker.ask("background", f"The background is {picture.background}.")


# -- shapes ------------------------------------------------------------------------------------


def _ask_shapes(rng: random.Random, picture: Picture, asker: Asker) -> list[Question]:
    things = picture.things
    asked = [_background(picture, asker)]
    names = Counter(thing.name for thing in things)
    colours = Counter(thing.colour for thing in things)
    pairs = Counter((thing.colour, thing.name) for thing in things)
    for thing in things:
        if names[thing.name] == 1:
            answer = f"The {thing.name} is {thing.colour}."
            asked.append(asker.ask("colour", answer, thing=thing.name))
        if colours[thing.colour] == 1:
            answer = f"The {thing.colour} shape is a {thing.name}."
            asked.append(asker.ask("shape", answer, colour=thing.colour))
        if pairs[thing.colour, thing.name] == 1 and (place := _place(picture, thing)) is not None:
            name = thing.name if names[thing.name] == 1 else f"{thing.colour} {thing.name}"
            asked.append(asker.ask("place", f"The {name} is {_in_the(place)}.", thing=name))
    if len(things) == 1:
        [thing] = things
        asked.append(asker.ask("its colour", f"It is {thing.colour}."))
        asked.append(asker.ask("its shape", f"It is a {thing.name}."))
    asked += _ask_counts(rng, picture, asker)
    asked.append(_ask_presence(rng, picture, asker))
    asked += _ask_relations(rng, picture, asker, [t for t in things if names[t.name] == 1])
    return asked + _ask_description(picture, asker)


def _ask_counts(rng: random.Random, picture: Picture, asker: Asker) -> list[Question]:
    things = picture.things
    answer = _number_of(len(things), "shape", "shapes")
    asked = [asker.ask("count", answer, things="shapes")]
    present = [thing.name for thing in things]
    name = rng.choice(present) if rng.random() < 0.85 else rng.choice(SHAPES)
    answer = _number_of(present.count(name), name, PLURALS[name])
    asked.append(asker.ask("count", answer, things=PLURALS[name]))
    colour = rng.choice(things).colour
    count = sum(thing.colour == colour for thing in things)
    answer = _number_of(count, f"{colour} shape", f"{colour} shapes")
    return [*asked, asker.ask("count", answer, things=f"{colour} shapes")]


def _ask_presence(rng: random.Random, picture: Picture, asker: Asker) -> Question:
    there = {(thing.colour, thing.name) for thing in picture.things}
    if rng.random() < 0.5:
        colour, name = rng.choice(sorted(there))
    else:
        colour, name = rng.choice(sorted(there))
        if rng.random() < 0.5:
            colour = rng.choice([*COLOURS])
        else:
            name = rng.choice(SHAPES)
    article = "an" if colour == "orange" else "a"
    answer = f"Yes, there is {article} {colour} {name}."
    if (colour, name) not in there:
        answer = f"No, there is no {colour} {name}."
    return asker.ask("presence", answer, thing=f"{colour} {name}")


def _ask_relations(
    rng: random.Random, picture: Picture, asker: Asker, single: list[Thing]
) -> list[Question]:
    if len(single) < 2:
        return []
    one, other = rng.sample(single, 2)
    (x, y), (u, v) = picture.place_of(one), picture.place_of(other)
    asked = []
    parts = {"thing": one.name, "other": other.name}
    if abs(x - u) > 0.15:
        side = "left" if x < u else "right"
        answer = f"The {one.name} is {side} of the {other.name}."
        asked.append(asker.ask("sideways", answer, **parts))
    if abs(y - v) > 0.15:
        side = "above" if y < v else "below"
        answer = f"The {one.name} is {side} the {other.name}."
        asked.append(asker.ask("upright", answer, **parts))
    return asked


def _ask_description(picture: Picture, asker: Asker) -> list[Question]:
    ordered = sorted(picture.things, key=lambda thing: thing.centre[0])
    columns = [picture.place_of(thing)[0] for thing in ordered]
    gaps = [b - a for a, b in pairwise(columns)]
    if len(ordered) > 3 or min(gaps, default=1.0) < 0.08:
        return []
    *first, last = [_with_article(thing) for thing in ordered]
    text = f"{', '.join(first)} and {last}" if first else last
    return [asker.ask("description", f"{text[0].upper()}{text[1:]}.")]


# -- text, windows and plain pictures ----------------------------------------------------------


def _ask_text(_rng: random.Random, picture: Picture, asker: Asker) -> list[Question]:
    [line] = picture.things
    about = "digits" if line.name == "number" else "words"
    answer = f"The number is {line.text}." if about == "digits" else f'It says "{line.text}".'
    text = f'"{line.text}"' if line.name == "word" else line.text
    return [
        asker.ask(about, answer),
        asker.ask("colour", f"The {line.name} is {line.colour}.", thing=line.name),
        asker.ask("description", f"The {line.name} {text} in {line.colour}."),
        _background(picture, asker),
    ]


def _ask_window(_rng: random.Random, picture: Picture, asker: Asker) -> list[Question]:
    buttons = [thing for thing in picture.things if thing.name == "button"]
    asked = [asker.ask("button count", _number_of(len(buttons), "button", "buttons"))]
    shown = f"{len(buttons)} button{'s' if len(buttons) > 1 else ''}"
    asked.append(asker.ask("description", f"A window with {shown}."))
    places = Counter(_place(picture, button) for button in buttons)
    for button in buttons:
        label, place = button.text, _place(picture, button)
        answer = f"The {label} button is {button.colour}."
        asked.append(asker.ask("button colour", answer, label=label))
        if place is not None:
            answer = f"The {label} button is {_in_the(place)}."
            asked.append(asker.ask("button place", answer, label=label))
            if places[place] == 1 and places[None] == 0:
                asked.append(asker.ask("button label", f'It says "{label}".', place=place))
    for box in picture.things:
        if box.name != "button":
            is_checked = box.name == "checked box"
            answer = f"Yes, {box.text} is checked."
            if not is_checked:
                answer = f"No, {box.text} is not checked."
            asked.append(asker.ask("box state", answer, label=box.text))
    return asked


def _ask_plain(_rng: random.Random, picture: Picture, asker: Asker) -> list[Question]:
    return [
        asker.ask("picture colour", f"The picture is {picture.background}."),
        asker.ask("description", f"A plain {picture.background} picture."),
        _background(picture, asker),
    ]


_QUESTIONS: dict[str, Callable[[random.Random, Picture, Asker], list[Question]]] = {
    "shapes": _ask_shapes,
    "digits": _ask_text,
    "words": _ask_text,
    "interface": _ask_window,
    "plain": _ask_plain,
}
