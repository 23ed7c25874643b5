"""Draws windows of a user interface: a title, buttons and checkboxes."""

import random
from pathlib import Path

from PIL import ImageFont

from training.pictures import (
    Picture,
    Thing,
    draw_text,
    find_fonts,
    is_bright,
    load_font,
    pick_contrast,
)
from training.vocabulary import BOX_LABELS, LABELS

_GRAY_EDGE = (120, 120, 120)


def draw_window(rng: random.Random, picture: Picture, fonts: Path) -> None:
    """Fill the canvas with a window of one to four buttons and up to two checkboxes."""
    width, height = picture.canvas.size
    font_path = rng.choice(find_fonts(fonts))
    top = 0.0
    if rng.random() < 0.5:
        top = rng.uniform(14, 20) * picture.unit
        _, rgb = pick_contrast(rng, picture.background_rgb, picture.background)
        picture.draw.rectangle((0, 0, width, top), fill=rgb)
    num_columns = rng.choice((1, 2, 2, 2, 3))
    num_rows = rng.choice((2, 3, 3, 4))
    cells = [(row, column) for row in range(num_rows) for column in range(num_columns)]
    cell = width / num_columns, (height - top) / num_rows
    num_buttons = rng.randint(1, min(4, len(cells) - 1))
    num_boxes = rng.randint(0, min(2, len(cells) - num_buttons)) if num_columns < 3 else 0
    chosen = rng.sample(cells, num_buttons + num_boxes)
    labels = rng.sample([w for w in LABELS if num_columns < 3 or len(w) <= 5], num_buttons)
    size = round(rng.uniform(16, 21 if num_columns > 1 else 28) * picture.unit)
    shared = pick_contrast(rng, picture.background_rgb, picture.background)
    for (row, column), label in zip(chosen, labels, strict=False):
        box = (column * cell[0], top + row * cell[1], cell[0], cell[1])
        colour = shared
        if rng.random() < 0.5:
            colour = pick_contrast(rng, picture.background_rgb, picture.background)
        _draw_button(rng, picture, label, (font_path, size), (box, colour))
    box_labels = rng.sample(BOX_LABELS, num_boxes)
    for (row, column), label in zip(chosen[num_buttons:], box_labels, strict=True):
        box = (column * cell[0], top + row * cell[1], cell[0], cell[1])
        _draw_checkbox(rng, picture, label, (font_path, size), box)


def _fit(path: Path, size: int, text: str, room: float) -> ImageFont.FreeTypeFont:
    font = load_font(path, size)
    while font.getlength(text) > room and size > 8:
        size -= 1
        font = load_font(path, size)
    return font


def _draw_button(
    rng: random.Random,
    picture: Picture,
    label: str,
    style: tuple[Path, int],
    where: tuple[tuple[float, float, float, float], tuple[str, tuple[int, int, int]]],
) -> None:
    (left, top, width, height), (name, rgb) = where
    font = _fit(*style, label, width * 0.86)
    text_width, pad = font.getlength(label), rng.uniform(3, 8) * picture.unit
    half_width = min(text_width / 2 + pad, width / 2 - 1)
    half_height = min(font.size * rng.uniform(0.7, 1.0), height / 2 - 1)
    x = left + width / 2 + rng.uniform(-1, 1) * max(0.0, width / 2 - half_width - 2)
    y = top + height / 2 + rng.uniform(-1, 1) * max(0.0, height / 2 - half_height - 2)
    box = (x - half_width, y - half_height, x + half_width, y + half_height)
    edge = _GRAY_EDGE if rng.random() < 0.5 else rgb
    radius = rng.choice((0, 2, 5)) * picture.unit
    picture.draw.rounded_rectangle(box, radius, fill=rgb, outline=edge)
    text_rgb = (0, 0, 0) if is_bright(rgb) else (255, 255, 255)
    draw_text(picture, label, font, (x - text_width / 2, y), ("", text_rgb))
    picture.add(Thing("button", name, box, label))


def _draw_checkbox(
    rng: random.Random,
    picture: Picture,
    label: str,
    style: tuple[Path, int],
    where: tuple[float, float, float, float],
) -> None:
    left, top, width, height = where
    font = _fit(*style, label, width * 0.6)
    side = font.size * rng.uniform(0.8, 1.0)
    text_width = font.getlength(label)
    slack = max(0.0, width - side * 1.5 - text_width - 4)
    x, y = left + 2 + rng.random() * slack, top + height / 2
    box = (x, y - side / 2, x + side, y + side / 2)
    is_checked = rng.random() < 0.5
    ink = (20, 20, 20) if is_bright(picture.background_rgb) else (240, 240, 240)
    picture.draw.rectangle(box, fill=(255, 255, 255), outline=(60, 60, 60), width=2)
    if is_checked:
        line = max(2, round(side / 7))
        tick_rgb = rng.choice(((0, 0, 0), (0, 90, 200), (0, 130, 0)))
        tick = ((0.2, 0.0), (0.42, 0.25), (0.82, -0.3))
        points = [(x + side * across, y + side * down) for across, down in tick]
        picture.draw.line(points, fill=tick_rgb, width=line)
    end = draw_text(picture, label, font, (x + side * 1.4, y), ("", ink))
    name = "checked box" if is_checked else "empty box"
    picture.mark(box, name)
    picture.things.append(Thing(name, "", (*box[:2], end[2], box[3]), label))
