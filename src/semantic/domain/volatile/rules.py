"""Rules that repair requests whose prompts change from turn to turn.

A rule finds text in one place of a request, and freezes it, moves it or drops it; or it sorts the
tools. Rules are off unless an operator switches them on.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

# Finds the parts of a text that a rule is about: start and end of each, in ascending order.
FindText: TypeAlias = Callable[[str], Sequence[tuple[int, int]]]
_NOTE = "<system-reminder>\n%s\n</system-reminder>"


class RepairAction(enum.Enum):
    """What a rule does with the text that it finds."""

    FREEZE = "freeze"  # later turns of the conversation repeat the text of the first
    MOVE_TO_START = "move_to_start"  # system messages with the text go before the first question
    MOVE_TO_END = "move_to_end"  # the text becomes a note at the end of the last user message
    SORT_TOOLS = "sort_tools"  # tools are shown in the order of their names
    DROP = "drop"  # the model does not see the text


class RepairPlace(enum.Enum):
    """The part of a request in which a rule looks."""

    SYSTEM = "system"
    USER = "user"
    TOOL_RESULT = "tool_result"
    TOOLS = "tools"


@dataclass(slots=True)
class CallingClient:
    """The client that sent a request, and the rules that changed the request.

    Attributes:
        protocol: Name of the API: anthropic, openai, responses, ollama or agents; empty if unknown.
        repairs: Names of the rules; the preparation of the request adds them.
    """

    user_agent: str = ""
    protocol: str = ""
    repairs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RepairRule:
    """One rule.

    Attributes:
        find: Finds the text; finds nothing if the action is to sort tools.
        is_client: Whether a user agent belongs to the clients of the rule.
        protocol: The only API that the rule is for; None means all.
    """

    name: str
    action: RepairAction
    place: RepairPlace
    find: FindText
    is_client: Callable[[str], bool] = lambda _: True
    protocol: str | None = None
    is_enabled: bool = False

    def is_for(self, client: CallingClient) -> bool:
        return self.protocol in (None, client.protocol) and self.is_client(client.user_agent)


@dataclass(frozen=True, slots=True)
class AppliedRepairs:
    """What rules did to a request.

    Attributes:
        rules: Names of the rules that changed it.
        notes: Texts that later turns repeat, by two digests that identify their place; they are
            stored once the turn is logged.
    """

    rules: tuple[str, ...] = ()
    notes: tuple[tuple[tuple[bytes, bytes], tuple[str, ...]], ...] = ()


def found_texts(text: str, find: FindText) -> list[str]:
    """Return the parts of a text that a rule is about."""
    return [text[start:end] for start, end in find(text)]


def with_texts(text: str, find: FindText, texts: Iterable[str]) -> str:
    r"""Replace the parts that a rule is about; `texts` has one for each.

    Example:
        >>> with_texts("day 2 of 9", lambda _: [(4, 5)], ["1"])
        'day 1 of 9'
    """
    pieces, position = [], 0
    # The spans come first: `zip` must not take a text from an iterator that it does not use.
    for (start, end), replacement in zip(find(text), texts, strict=False):
        pieces += [text[position:start], replacement]
        position = end
    return "".join([*pieces, text[position:]])


def without_texts(text: str, find: FindText) -> str:
    r"""Remove the parts that a rule is about; a line of which nothing is left goes as a whole.

    Example:
        >>> without_texts("a\nb\nc", lambda _: [(2, 3)])
        'a\nc'
    """
    pieces, position = [], 0
    for start, end in find(text):
        is_line = (start == 0 or text[start - 1] == "\n") and text[end : end + 1] in ("", "\n")
        pieces.append(text[position:start])
        position = end + 1 if is_line else end
    return "".join([*pieces, text[position:]])


def as_note(texts: Sequence[str]) -> str:
    """Write texts that were moved as one note, in the form that coding agents use for reminders."""
    return _NOTE % "\n".join(texts)
