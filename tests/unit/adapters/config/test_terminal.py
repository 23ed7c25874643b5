"""Foreign text on a terminal."""

import pytest

from semantic.adapters.config.terminal import keep_colours, printable, printable_line

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain, ümlaut, 日本語, 🎉, אב", "plain, ümlaut, 日本語, 🎉, אב"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[2J\x1b]0;title\x07", "[2J]0;title"),
        ("\x9b2J\x7f\x08\r", "2J"),
        ("\u202egnp.exe", "gnp.exe"),
        ("half \ud800", "half \ufffd"),
    ],
)
def test_terminal_control_sequences_are_removed(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable_line(text) == shown.replace("\n", "\\n")


def test_colours_stay_in_what_was_rendered() -> None:
    assert keep_colours("\x1b[1;31mred\x1b[0m\x1b[2J\x1b") == "\x1b[1;31mred\x1b[0m[2J"
