"""Text that models, clients and servers wrote, as commands print it."""

import json
from typing import Any

import pytest
from rich.panel import Panel
from rich.text import Text

from semantic.entrypoints.cli.flags import Answer
from semantic.entrypoints.cli.screen import Spinner, console, table

pytestmark = pytest.mark.unit

HOSTILE = "[/INST] [bold]x[/] :smile: \x1b[2J\x9b2J\x07 'semantic-server[torch]'"
SHOWN = "[/INST] [bold]x[/] :smile: [2J2J 'semantic-server[torch]'"


def in_table(text: str) -> Any:
    made = table("", "~")
    made.add_row("name", text)
    return made


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(HOSTILE, id="a string"),
        pytest.param(Text(HOSTILE), id="text"),
        pytest.param(in_table(HOSTILE), id="a cell"),
        pytest.param(Panel(Text(HOSTILE), title=Text(HOSTILE)), id="a panel"),
    ],
)
def test_foreign_text_is_printed_as_it_is(shown: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for is_terminal in ("", "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "200")
            if is_terminal:
                patch.setenv("FORCE_COLOR", is_terminal)
                patch.setenv("TERM", "dumb")
            Answer(None, shown, note=HOSTILE).print(as_json=False)
        captured = capsys.readouterr()
        assert SHOWN in captured.out
        assert "\x1b[2J" not in captured.out
        assert captured.err == f"{SHOWN}\n"


def test_json_keeps_every_character_and_commands_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    value = {"text": f"{HOSTILE}\u202e\ud800ü"}
    Answer(value).print(as_json=True)
    out = capsys.readouterr().out
    assert json.loads(out) == value
    assert out.replace("\n", "").isprintable()


def test_what_is_going_on_may_have_any_name() -> None:
    with Spinner(HOSTILE) as working:
        working.show(HOSTILE)


def test_a_conversation_shows_foreign_text_in_colour(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(HOSTILE, style="dim", end="")
    assert capsys.readouterr().out == SHOWN
