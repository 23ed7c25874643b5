"""Finding tool calls in a reply's text."""

import enum
import json
from collections.abc import Callable, Sequence

from semantic.application.parsing.call_blocks import Calls
from semantic.application.parsing.call_syntax import (
    SYNTAXES,
    BlockCall,
    Cursor,
    EmptyCall,
    NeedMore,
    NoCall,
    StreamedCall,
)
from semantic.application.parsing.json_arguments import JsonArguments
from semantic.application.parsing.splitter import PendingText, Splitter
from semantic.domain.chat import ToolSpec
from semantic.domain.events import Event, TextDelta, ToolCallDelta, ToolCallEnded, ToolCallStarted
from semantic.domain.reply_format import CALL_MARKERS, ToolFormat
from semantic.domain.sampling import num_undecided


class CallNumbers:
    """Numbers the calls of one reply and gives them ids."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self.num_calls = 0

    def start(self, name: str) -> ToolCallStarted:
        """Begin the next call."""
        self.num_calls += 1
        return ToolCallStarted(self.num_calls - 1, self._new_id(), name)

    def delta(self, arguments: str) -> list[Event]:
        """More of the arguments of the call begun last."""
        return [ToolCallDelta(self.num_calls - 1, arguments)] if arguments else []

    def end(self) -> ToolCallEnded:
        """End the call begun last."""
        return ToolCallEnded(self.num_calls - 1)

    def read(
        self, arguments: JsonArguments, pending: PendingText, size: int, *, is_final: bool
    ) -> list[Event]:
        """Read on in the arguments of the call begun last, which end it where they end or break."""
        used, given = arguments.feed(pending.text[:size], is_final=is_final)
        pending.drop(used)
        if arguments.is_broken or (is_final and not arguments.is_done):
            given += arguments.close()
        return [*self.delta(given), *([self.end()] if arguments.is_done else [])]

    def whole(self, name: str, arguments: str) -> list[Event]:
        """A call that is complete."""
        return [self.start(name), *self.delta(arguments), self.end()]


class _State(enum.Enum):
    TEXT = enum.auto()
    HEAD = enum.auto()
    BLOCK = enum.auto()
    ARGUMENTS = enum.auto()
    TAIL = enum.auto()


class CallSplitter(Splitter):
    """Splits tool calls off, by one family's markers and syntax.

    Whitespace between text and calls belongs to neither, so no empty text stands beside a call.
    """

    def __init__(
        self, tool_format: ToolFormat, tools: Sequence[ToolSpec], numbers: CallNumbers
    ) -> None:
        super().__init__()
        self._markers = CALL_MARKERS[tool_format]
        self._syntax = SYNTAXES[tool_format]
        self._tools = {tool.name: tool for tool in tools}
        self._numbers = numbers
        self._state = _State.TEXT
        self._leading = self._syntax.leading  # what may begin a call here besides the marker
        self._is_after_call = False
        self._opened = 0  # where the head of the call begins in the pending text
        self._rejected = 0  # how much is text if it is no call
        self._block: BlockCall | None = None
        self._scanned = 0
        self._arguments = JsonArguments()

    def _run(self, *, is_final: bool) -> list[Event]:
        events: list[Event] = []
        steps = {
            _State.TEXT: self._text,
            _State.HEAD: self._head,
            _State.BLOCK: self._read_block,
            _State.ARGUMENTS: self._read_arguments,
            _State.TAIL: self._tail,
        }
        before: tuple[_State, int] | None = None
        while before != (self._state, len(self._pending.text)):
            before = (self._state, len(self._pending.text))
            events += steps[self._state](is_final)
        return events

    # -- text -----------------------------------------------------------------------------------

    def _text(self, is_final: bool) -> list[Event]:
        if self._is_after_call:
            stripped = self._pending.text.lstrip()
            self._pending.drop(len(self._pending.text) - len(stripped))
            self._is_after_call = not stripped
        found = self._find_opener()
        if found is not None:
            start, size = found
            given = self._give(len(self._pending.text[:start].rstrip()))
            gap = start - sum(len(delta.text) for delta in given)
            self._rejected = gap + max(size, 1)
            self._opened = gap + size
            self._state = _State.HEAD
            return [*given]
        text = self._pending.text
        if is_final:
            return [*self._give(len(text))]
        stripped = text.lstrip()
        if self._leading.startswith(stripped):
            return []
        held = num_undecided(text, (self._markers.start,))
        return [*self._give(len(text[: len(text) - held].rstrip()))]

    def _find_opener(self) -> tuple[int, int] | None:
        """Where a call may begin, and how much of that is not part of its head."""
        text = self._pending.text
        stripped = text.lstrip()
        if self._leading and stripped.startswith(self._leading):
            return len(text) - len(stripped), 0
        start = text.find(self._markers.start)
        return (start, len(self._markers.start)) if start >= 0 else None

    def _give(self, size: int) -> list[TextDelta]:
        if size:
            self._leading = ""
        return self._pending.take(size)

    # -- the beginning of a call ----------------------------------------------------------------

    def _head(self, is_final: bool) -> list[Event]:
        cursor = Cursor(self._pending.text, self._opened)
        try:
            head = self._syntax.head(cursor, self._tools)
        except NeedMore:
            return self._reject() if is_final else []
        except NoCall:
            return self._reject()
        if isinstance(head, BlockCall):
            self._block, self._state = head, _State.BLOCK
            self._opened = self._scanned = cursor.at
            return []
        self._pending.drop(cursor.at)
        match head:
            case StreamedCall(name):
                self._arguments, self._state = JsonArguments(), _State.ARGUMENTS
                return [self._numbers.start(name)]
            case EmptyCall(name):
                self._state = _State.TAIL
                return self._numbers.whole(name, "{}")

    def _reject(self) -> list[Event]:
        """It was no call: its beginning is text, and what follows is looked at again."""
        self._state = _State.TEXT
        return [*self._give(self._rejected)]

    # -- calls that are read when complete ------------------------------------------------------

    def _read_block(self, is_final: bool) -> list[Event]:
        text, block = self._pending.text, self._block
        if block is None:
            return self._reject()
        end = block.find_end(text, self._scanned)
        if end < 0 and is_final and block.is_ended_by_reply:
            end = len(text)
        if end < 0:
            # A closing text may have begun at the end of what is there.
            self._scanned = max(self._opened, len(text) - 32)
            return self._reject() if is_final else []
        calls = block.parse(text[self._opened : end], self._tools)
        if calls is None:
            return self._reject()
        self._pending.drop(end)
        self._state = _State.TAIL
        return self._whole(calls)

    def _whole(self, calls: Calls) -> list[Event]:
        events: list[Event] = []
        for name, arguments in calls:
            events += self._numbers.whole(name, json.dumps(arguments, ensure_ascii=False))
        return events

    # -- calls that are streamed ----------------------------------------------------------------

    def _read_arguments(self, is_final: bool) -> list[Event]:
        size = len(self._pending.text)
        events = self._numbers.read(self._arguments, self._pending, size, is_final=is_final)
        if self._arguments.is_done:
            self._state = _State.TEXT if self._arguments.is_broken else _State.TAIL
        return events

    def _tail(self, is_final: bool) -> list[Event]:
        """Pass over what ends a call, once it is known what follows."""
        text, closer = self._pending.text, self._markers.end
        stripped = text.lstrip(self._syntax.junk)
        if closer and stripped.startswith(closer):
            stripped = stripped[len(closer) :]
        elif closer.startswith(stripped):
            if not is_final:
                return []
            stripped = ""  # the reply was cut in the middle of what ends the call
        self._pending.drop(len(text) - len(stripped))
        self._leading = self._syntax.again
        self._is_after_call = True
        self._state = _State.TEXT
        return []
