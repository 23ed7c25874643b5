"""Draws a picture from a random generator and records what is in it."""

import functools
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from training.vocabulary import CHARACTERS, CLASSES, COLOURS, SHAPES, WORDS

SIZE = 192  # pixels a side, as the tower sees a picture
_LEAST_CONTRAST = 110
Colour = tuple[int, int, int]
Box = tuple[float, float, float, float]


@dataclass
class Thing:
    """Something drawn: what it is, its colour and its box in pixels of the canvas."""

    name: str
    colour: str
    box: Box
    text: str = ""

    @property
    def centre(self) -> tuple[float, float]:
        """The centre of the box."""
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


@dataclass
class Picture:
    """A canvas being drawn on, and what it shows."""

    scene: str
    canvas: Image.Image
    background: str
    background_rgb: Colour
    things: list[Thing] = field(default_factory=list)
    # Marks for the auxiliary losses: a box and the class of what fills it.
    marks: list[tuple[Box, int]] = field(default_factory=list)

    @property
    def unit(self) -> float:
        """Pixels of the canvas for one pixel that the tower sees."""
        return min(self.canvas.size) / SIZE

    @property
    def draw(self) -> ImageDraw.ImageDraw:
        """Draws on the canvas."""
        return ImageDraw.Draw(self.canvas)

    def add(self, thing: Thing) -> None:
        """Record a thing and its marks."""
        self.things.append(thing)
        self.mark(thing.box, thing.name)
        self.mark(thing.box, thing.colour)

    def mark(self, box: Box, name: str) -> None:
        """Record what fills a box, if the auxiliary losses know it."""
        if name in _CLASS_IDS:
            self.marks.append((box, _CLASS_IDS[name]))

    def place_of(self, thing: Thing) -> tuple[float, float]:
        """The centre of a thing as fractions of width and height."""
        x, y = thing.centre
        return x / self.canvas.width, y / self.canvas.height


_CLASS_IDS = {name: index for index, name in enumerate(CLASSES)}


@functools.cache
def find_fonts(directory: Path) -> tuple[Path, ...]:
    """Font files of a directory, except those without Latin letters."""
    found = [path for path in sorted(directory.glob("*.ttf")) if path.name.startswith(_FONT_NAMES)]
    if not found:
        raise FileNotFoundError(f"{directory} contains no DejaVu or Liberation fonts")
    return tuple(found)


_FONT_NAMES = ("DejaVuSans", "DejaVuSerif", "Liberation")


@functools.lru_cache(maxsize=4096)
def load_font(path: Path, size: int) -> ImageFont.FreeTypeFont:
    """A font in a size in pixels."""
    return ImageFont.truetype(str(path), size)


def pick_rgb(rng: random.Random, name: str) -> Colour:
    """A random shade of a named colour."""
    base = rng.choice(COLOURS[name])
    red, green, blue = (min(255, max(0, part + rng.randint(-10, 10))) for part in base)
    return red, green, blue


def pick_contrast(rng: random.Random, against: Colour, but: str = "") -> tuple[str, Colour]:
    """A colour's name and shade that is easy to tell from ``against``."""
    while True:
        name = rng.choice([*COLOURS])
        rgb = pick_rgb(rng, name)
        if name != but and math.dist(rgb, against) >= _LEAST_CONTRAST:
            return name, rgb


def is_bright(rgb: Colour) -> bool:
    """Whether black text is easier to read on a colour than white text."""
    red, green, blue = rgb
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140


def new_picture(rng: random.Random, scene: str) -> Picture:
    """An empty canvas with a plain, graded or ruled background."""
    width = rng.randint(200, 340)
    height = round(width * math.exp(rng.uniform(-0.3, 0.3)))
    name = rng.choice(["white", "white", "white", "black", "gray", *COLOURS])
    rgb = pick_rgb(rng, name)
    canvas = Image.new("RGB", (width, height), rgb)
    picture = Picture(scene, canvas, name, rgb)
    style = rng.random()
    if style < 0.15:
        other = tuple(min(255, max(0, part + rng.choice((-22, 22)))) for part in rgb)
        mask = Image.linear_gradient("L").resize((width, height))
        canvas.paste(Image.new("RGB", (width, height), other), mask=mask)
    elif style < 0.25:
        line = tuple(part - 18 if part > 127 else part + 18 for part in rgb)
        gap = rng.randint(12, 40)
        for start in range(gap, max(width, height), gap):
            picture.draw.line((start, 0, start, height), fill=line)
            picture.draw.line((0, start, width, start), fill=line)
    return picture


def finish(rng: random.Random, picture: Picture) -> np.ndarray:
    """The picture as the tower sees it: ``[SIZE, SIZE, 3]`` bytes, some blurred or noisy."""
    canvas = picture.canvas
    if rng.random() < 0.15:
        canvas = canvas.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.9) * picture.unit))
    pixels = np.asarray(canvas.resize((SIZE, SIZE), Image.Resampling.LANCZOS))
    if rng.random() < 0.4:
        noise = np.random.default_rng(rng.getrandbits(32)).integers(
            -128, 128, (SIZE, SIZE, 3), dtype=np.int8
        )
        strength = rng.randint(4, 28)
        noisy = pixels.astype(np.int16) + (noise.astype(np.int16) * strength >> 7)
        pixels = np.clip(noisy, 0, 255).astype(np.uint8)
    return pixels


# -- shapes ------------------------------------------------------------------------------------


def draw_shapes(rng: random.Random, picture: Picture) -> None:
    """Draw one to six shapes that do not overlap."""
    width, height = picture.canvas.size
    count = rng.choice((1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6))
    names = rng.sample(SHAPES, rng.randint(1, 3) if count > 2 else min(count, len(SHAPES)))
    palette = [pick_contrast(rng, picture.background_rgb, picture.background) for _ in range(3)]
    largest = {1: 75, 2: 42, 3: 34}.get(count, 26)
    taken: list[tuple[float, float, float]] = []
    for _ in range(200):
        if len(taken) == count:
            break
        radius = rng.uniform(13, largest) * picture.unit
        if 2 * radius + 4 > min(width, height):
            continue
        x = rng.uniform(radius + 2, width - radius - 2)
        y = rng.uniform(radius + 2, height - radius - 2)
        if any(math.dist((x, y), (a, b)) < radius + r + 5 * picture.unit for a, b, r in taken):
            continue
        taken.append((x, y, radius))
        name = names[len(taken) - 1] if count <= 2 else rng.choice(names)
        free = count <= 2 or rng.random() < 0.4
        colour, rgb = (
            pick_contrast(rng, picture.background_rgb, picture.background)
            if free
            else rng.choice(palette)
        )
        _draw_shape(rng, picture, name, rgb, (x, y, radius))
        reach = radius * 0.85
        picture.add(Thing(name, colour, (x - reach, y - reach, x + reach, y + reach)))


def _outline(name: str, turn: float) -> list[tuple[float, float]]:
    """The corners of a shape in a circle of radius 1."""
    if name == "star":
        radii = (1.0, 0.42) * 5
        turns = [turn + math.pi * index / 5 for index in range(10)]
        return [(math.sin(a) * r, -math.cos(a) * r) for a, r in zip(turns, radii, strict=True)]
    if name == "cross":
        arm = 0.3
        corner = [(arm, -0.95), (arm, -arm), (0.95, -arm), (0.95, arm)]
        points = [_rotate(point, quarter * math.pi / 2) for quarter in range(4) for point in corner]
        return [_rotate(point, turn) for point in points]
    if name == "heart":
        steps = [2 * math.pi * index / 40 for index in range(40)]
        return [
            _rotate((math.sin(t) ** 3 * 0.95, -_heart_height(t) / 17 - 0.08), turn) for t in steps
        ]
    corners, start = {"square": (4, math.pi / 4), "triangle": (3, 0.0)}[name]
    turns = [turn + start + 2 * math.pi * index / corners for index in range(corners)]
    return [(math.sin(a), -math.cos(a)) for a in turns]


def _heart_height(t: float) -> float:
    return 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)


def _rotate(point: tuple[float, float], turn: float) -> tuple[float, float]:
    x, y = point
    return x * math.cos(turn) - y * math.sin(turn), x * math.sin(turn) + y * math.cos(turn)


def _draw_shape(
    rng: random.Random, picture: Picture, name: str, rgb: Colour, where: tuple[float, float, float]
) -> None:
    x, y, radius = where
    edge = None
    if rng.random() < 0.2:
        edge = tuple(part // 2 for part in rgb) if sum(rgb) > 120 else (90, 90, 90)
    if name == "circle":
        reach = radius * 0.95
        box = (x - reach, y - reach, x + reach, y + reach)
        picture.draw.ellipse(box, fill=rgb, outline=edge)
        return
    turn = rng.uniform(-0.2, 0.2) if rng.random() < 0.5 else 0.0
    if name == "triangle" and rng.random() < 0.2:
        turn += math.pi
    points = [(x + radius * dx, y + radius * dy) for dx, dy in _outline(name, turn)]
    picture.draw.polygon(points, fill=rgb, outline=edge)


# -- text --------------------------------------------------------------------------------------


def draw_text(
    picture: Picture,
    text: str,
    font: ImageFont.FreeTypeFont,
    at: tuple[float, float],
    colour: tuple[str, Colour],
) -> Box:
    """Draw a line of text with its left end and middle at ``at``; returns its box."""
    x, y = at
    picture.draw.text((x, y), text, font=font, fill=colour[1], anchor="lm")
    half = font.size * 0.42
    for index, character in enumerate(text):
        if character in CHARACTERS:
            start, end = font.getlength(text[:index]), font.getlength(text[: index + 1])
            picture.mark((x + start, y - half, x + end, y + half), character)
    return x, y - half, x + font.getlength(text), y + half


def draw_line(rng: random.Random, picture: Picture, fonts: Path, text: str, name: str) -> None:
    """Draw one word or number anywhere on the canvas."""
    width, height = picture.canvas.size
    path = rng.choice(find_fonts(fonts))
    size = round(rng.uniform(20, 62) * picture.unit)
    font = load_font(path, size)
    while font.getlength(text) > width * 0.94:
        size = max(int(size * 0.85), 8)
        font = load_font(path, size)
    x = rng.uniform(2, width - font.getlength(text) - 2)
    y = rng.uniform(size * 0.6, height - size * 0.6)
    name_and_rgb = pick_contrast(rng, picture.background_rgb, picture.background)
    box = draw_text(picture, text, font, (x, y), name_and_rgb)
    picture.mark(box, name_and_rgb[0])
    picture.things.append(Thing(name, name_and_rgb[0], box, text))


def pick_word(rng: random.Random, others: tuple[str, ...]) -> str:
    """A word of the list or, sometimes, one of ``others``; in lower or title case."""
    word = rng.choice(others) if others and rng.random() < 0.1 else rng.choice(WORDS)
    return rng.choice((str.lower, str.title))(word)


def pick_number(rng: random.Random) -> str:
    """A number of one to four digits."""
    return "".join(rng.choice("0123456789") for _ in range(rng.choice((1, 1, 2, 2, 3, 3, 4))))
