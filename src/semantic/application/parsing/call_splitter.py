"""Finds tool calls in a reply's text."""

import enum
import json
from collections.abc import Callable, Sequence

from semantic.application.parsing.call_blocks import json_call
from semantic.application.parsing.call_syntax import (
    JSON_JUNK,
    BlockCall,
    CallSyntax,
    EmptyCall,
    StreamedCall,
    TextHead,
)
from semantic.application.parsing.cursor import SPACE, Cursor, NeedMore, NoCall
from semantic.application.parsing.json_arguments import ArgumentParser, JsonArguments
from semantic.application.parsing.splitter import PendingText, Splitter
from semantic.domain.chat import ToolSpec
from semantic.domain.events import Event, TextDelta, ToolCallDelta, ToolCallEnded, ToolCallStarted
from semantic.domain.reply_format import CallNotation
from semantic.domain.sampling import num_undecided


class CallNumbers:
    """Creates the events of one reply's tool calls, with their index and id."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self.num_calls = 0

    def start(self, name: str) -> ToolCallStarted:
        self.num_calls += 1
        return ToolCallStarted(self.num_calls - 1, self._new_id(), name)

    def delta(self, arguments: str) -> list[Event]:
        return [ToolCallDelta(self.num_calls - 1, arguments)] if arguments else []

    def end(self) -> ToolCallEnded:
        return ToolCallEnded(self.num_calls - 1)

    def read(
        self, arguments: ArgumentParser, pending: PendingText, size: int, *, is_final: bool
    ) -> list[Event]:
        """Read more arguments of the current call; ends the call at their end or a syntax error.

        Args:
            pending: Text to read from; characters that were read are dropped.
            size: How many characters of it may belong to the arguments.
            is_final: No more text follows, so open brackets and strings are closed.
        """
        used, given = arguments.feed(pending.text[:size], is_final=is_final)
        pending.drop(used)
        if arguments.is_broken or (is_final and not arguments.is_done):
            given += arguments.close()
        return [*self.delta(given), *([self.end()] if arguments.is_done else [])]

    def read_cut(self, arguments: ArgumentParser, pending: PendingText) -> list[Event]:
        """Read the rest of a reply that was cut off inside the arguments.

        The call gets no end event, unless its arguments are complete. Undecided text, such as an
        incomplete key, is dropped.
        """
        events = self.read(arguments, pending, len(pending.text), is_final=False)
        if not arguments.is_done:
            pending.drop(len(pending.text))
        return events

    def whole(self, name: str, arguments: str) -> list[Event]:
        return [self.start(name), *self.delta(arguments), self.end()]


class _State(enum.Enum):
    TEXT = enum.auto()
    HEAD = enum.auto()
    BLOCK = enum.auto()
    ARGUMENTS = enum.auto()
    TAIL = enum.auto()


class CallSplitter(Splitter):
    """Separates tool calls from text, with the markers and syntax of one model family.

    Whitespace between text and calls is dropped, so no blank text precedes or follows a call.
    """

    def __init__(
        self,
        notation: CallNotation,
        tools: Sequence[ToolSpec],
        new_id: Callable[[], str],
        *,
        must_call: bool = False,
    ) -> None:
        """Start before a reply; `must_call` drops a cut-off reply that begins as a call."""
        super().__init__()
        self._must_call = must_call
        self._tools = {tool.name: tool for tool in tools}
        self._syntax = CallSyntax(notation, self._tools)
        self._numbers = CallNumbers(new_id)
        begins_in_head = self._syntax.begins_in_head
        self._is_surely_call = begins_in_head  # if the reply is cut off in the head, drop it
        self._state = _State.HEAD if begins_in_head else _State.TEXT
        self._leading = self._syntax.leading  # begins a call here without the marker
        self._is_after_call = False
        self._opened = 0  # where the head of the call begins in the pending text
        self._rejected = 0  # how many characters become text if this is not a call
        self._block_closer = ""
        self._scanned = 0
        self._arguments: ArgumentParser = JsonArguments()
        self._closers: Sequence[str] = self._syntax.closers  # of the last call
        self._junk = SPACE

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
            self._opened = gap
            self._is_surely_call = bool(size or self._numbers.num_calls or self._must_call)
            self._state = _State.HEAD
            return [*given]
        text = self._pending.text
        is_leading = any(leading.startswith(text.lstrip()) for leading in self._leading)
        is_next_call = is_leading and self._numbers.num_calls > 0
        may_begin_call = not is_final or (self._is_cut and (self._must_call or is_next_call))
        if not may_begin_call:
            return [*self._give(len(text))]
        if is_leading:
            return self._abandon() if is_final else []
        held = num_undecided(text, (self._syntax.opener,))
        given = self._give(len(text[: len(text) - held].rstrip()))
        return [*given, *(self._abandon() if is_final else [])]

    def _find_opener(self) -> tuple[int, int] | None:
        text = self._pending.text
        stripped = text.lstrip()
        if stripped.startswith(self._leading):
            return len(text) - len(stripped), 0
        start = text.find(self._syntax.opener)
        return (start, len(self._syntax.opener)) if start >= 0 else None

    def _give(self, size: int) -> list[TextDelta]:
        if size:
            self._leading = ()
        return self._pending.take(size)

    # -- the beginning of a call ----------------------------------------------------------------

    def _head(self, is_final: bool) -> list[Event]:
        cursor = Cursor(self._pending.text, self._opened)
        try:
            head = self._syntax.head(cursor, self._tools)
        except NeedMore:
            if not is_final:
                return []
            return self._abandon() if self._is_cut and self._is_surely_call else self._reject()
        except NoCall:
            return self._reject()
        self._closers, self._junk = self._syntax.closers, JSON_JUNK
        if isinstance(head, BlockCall):
            self._block_closer, self._state = head.closer, _State.BLOCK
            self._opened = self._scanned = cursor.at
            return []
        self._pending.drop(cursor.at)
        match head:
            case TextHead():
                self._state = _State.TEXT
                return []
            case EmptyCall(name):
                self._state = _State.TAIL
                return self._numbers.whole(name, "{}")
            case StreamedCall(name, arguments, closers, junk):
                self._arguments, self._junk, self._state = arguments, junk, _State.ARGUMENTS
                self._closers = self._closers if closers is None else closers
                return [self._numbers.start(name)]

    def _reject(self) -> list[Event]:
        """Emit the beginning of what is not a call as text; the rest is scanned again."""
        self._state = _State.TEXT
        return [*self._give(self._rejected)]

    def _abandon(self) -> list[Event]:
        self._pending.drop(len(self._pending.text))
        self._state = _State.TEXT
        return []

    # -- calls that are parsed when complete ----------------------------------------------------

    def _read_block(self, is_final: bool) -> list[Event]:
        text = self._pending.text
        end = text.find(self._block_closer, self._scanned)
        if end < 0 and not is_final:
            # The pending text may end with the beginning of the closer.
            self._scanned = max(self._opened, len(text) - len(self._block_closer))
            return []
        block = text[self._opened :] if end < 0 else text[self._opened : end]
        call = json_call(block, self._tools)
        if call is not None:
            name, arguments = call
            self._pending.drop(self._opened + len(block))
            self._state = _State.TAIL
            return self._numbers.whole(name, json.dumps(arguments, ensure_ascii=False))
        is_cut = end < 0 and self._is_cut and (self._must_call or block.lstrip().startswith("{"))
        return self._abandon() if is_cut else self._reject()

    # -- calls that are streamed ----------------------------------------------------------------

    def _read_arguments(self, is_final: bool) -> list[Event]:
        size = len(self._pending.text)
        if is_final and self._is_cut:
            events = self._numbers.read_cut(self._arguments, self._pending)
        else:
            events = self._numbers.read(self._arguments, self._pending, size, is_final=is_final)
        if self._arguments.is_done:
            self._state = _State.TEXT if self._arguments.is_broken else _State.TAIL
        return events

    def _tail(self, is_final: bool) -> list[Event]:
        """Drop what closes the call, and what closes all calls."""
        cursor = Cursor(self._pending.text)
        try:
            if self._junk == JSON_JUNK:
                self._syntax.pass_members(cursor)
            for closer in (*self._closers, *self._syntax.ends, ""):
                cursor.skip(closer, self._junk)
        except NeedMore:
            if not is_final:
                return []
            cursor.at = len(self._pending.text)  # the reply ended inside a marker
        self._pending.drop(cursor.at)
        self._leading = self._syntax.again
        self._is_after_call = True
        self._state = _State.TEXT
        return []
