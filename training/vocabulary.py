"""What a picture can contain, and how questions about it are worded; see `vocabulary.toml`."""

import tomllib
from pathlib import Path

_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

COLOURS: dict[str, list[list[int]]] = _DATA["colours"]
PLURALS: dict[str, str] = _DATA["shapes"]
SHAPES = tuple(PLURALS)
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
WIDGETS = ("button", "checked box", "empty box")
# What the auxiliary losses predict for each part of a picture.
CLASSES = (*SHAPES, *CHARACTERS, *WIDGETS, *COLOURS)
LABELS: list[str] = _DATA["labels"].split()
BOX_LABELS: list[str] = _DATA["box_labels"].split()
WORDS: list[str] = _DATA["words"].split()
PLACES = (
    ("top left", "top", "top right"),
    ("left", "middle", "right"),
    ("bottom left", "bottom", "bottom right"),
)
WORDINGS: dict[str, list[str]] = {
    name: question["wordings"] for name, question in _DATA["questions"].items()
}
KINDS: dict[str, str] = {name: question["kind"] for name, question in _DATA["questions"].items()}
