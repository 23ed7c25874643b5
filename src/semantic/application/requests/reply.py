"""Events from the engine's thread, handed to the coroutines that wait for them.

The engine's events cross to the event loop in one call a step. A reader that is slower than the
device costs no more than the text it has not read: pieces that wait are joined.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from semantic.application.engine.engine import EventBatch, PutAway
from semantic.application.parsing import MessageFold, ReplyParser
from semantic.application.requests.thinking_budget import ThinkingSpan
from semantic.domain.chat import (
    Event,
    Failed,
    Finished,
    Message,
    PrefillProgress,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedReply:
    """A reply that is complete.

    Attributes:
        put_away: What it left behind.
        event: Its last event.
        message: What it said.
        raw_text: The same as the model wrote it, markup included.
    """

    put_away: PutAway
    event: Finished
    message: Message
    raw_text: str


# Returns `Finished.is_durable`.
OnFinish: TypeAlias = Callable[[FinishedReply], Awaitable[bool | None]]


class LiveReply:
    """A `Reply` that is being made. Used on the event loop's thread.

    Attributes:
        put_away: What the reply left behind, once that is known.
        span: Counts the tokens of its thinking; None if it has none.
        on_end: Called with the final event, before it is read.
    """

    def __init__(
        self,
        on_cancel: Callable[[], None],
        first: Event,
        parser: ReplyParser | None = None,
        on_finish: OnFinish | None = None,
    ) -> None:
        """Begin with the first event.

        Args:
            on_cancel: Stops computing.
            first: What the reader sees first.
            parser: Turns text into thinking, text and calls; None leaves it as it is.
            on_finish: Logs the reply; what it awaits comes before the reader's last event.
        """
        self.put_away: PutAway | None = None
        self.span: ThinkingSpan | None = None
        self.on_end: Callable[[Event], None] | None = None
        self._on_cancel = on_cancel
        self._parser = parser
        self._on_finish = on_finish
        self._raw: list[str] = []
        self._fold = MessageFold()
        self._events: deque[Event] = deque([first])
        self._has_events = asyncio.Event()
        self._has_events.set()
        self._is_final = False

    def begin(self, text: str) -> None:
        """Let the message begin with text that the reader knows; before the first event."""
        if text:
            self._fold.add(TextDelta(text))

    def push(self, event: Event) -> None:
        """Add an event of the engine."""
        for parsed in self._parsed(event):
            self._add(parsed)

    async def finish(self, event: Finished) -> None:
        """Log the turn, then give the final event; a log that fails costs no reply, and is told."""
        self._is_final = True
        event = self._counted(event)
        *events, last = self._parsed(event)
        for parsed in events:
            self._add(parsed)
        if self._on_finish is not None and self.put_away is not None:
            raw_text = "".join(self._raw)
            finished = FinishedReply(self.put_away, event, self._fold.message(), raw_text)
            is_durable = await self._logged(self._on_finish, finished)
            last = replace(last, is_durable=is_durable) if isinstance(last, Finished) else last
        self._add(last)

    async def _logged(self, log: OnFinish, finished: FinishedReply) -> bool | None:
        try:
            return await log(finished)
        except Exception:  # noqa: BLE001 - the reply goes out, whatever became of the log
            _log.exception("a turn could not be logged")
            return False

    def _counted(self, event: Finished) -> Finished:
        """Add how many of the tokens were thinking."""
        if self.span is None or self.put_away is None:
            return event
        for token in self.put_away.tokens:
            self.span.feed(token)
        usage = replace(event.usage, thinking_tokens=self.span.num_tokens)
        return replace(event, usage=usage)

    def _parsed(self, event: Event) -> list[Event]:
        if isinstance(event, TextDelta):
            self._raw.append(event.text)
        events = self._parser.push(event) if self._parser else [event]
        for parsed in events:
            self._fold.add(parsed)
        return events

    def _add(self, event: Event) -> None:
        """Hand an event to the reader, joined to the last one where that loses nothing."""
        if isinstance(event, Finished | Failed):
            self._is_final = True
            if self.on_end is not None:
                self.on_end(event)
        last = self._events[-1] if self._events else None
        joined = _joined(last, event)
        if joined is not None:
            self._events.pop()
        self._events.append(joined or event)
        self._has_events.set()

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        """Yield events up to the final one; leaving early cancels."""
        try:
            while True:
                await self._has_events.wait()
                while self._events:
                    event = self._events.popleft()
                    yield event
                    if isinstance(event, Finished | Failed):
                        return
                self._has_events.clear()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Stop computing, if it has not ended."""
        if not self._is_final:
            self._is_final = True
            self._on_cancel()


def _joined(last: Event | None, event: Event) -> Event | None:
    """Two events as one; None where that would lose something."""
    match last, event:
        case TextDelta(), TextDelta():
            return TextDelta(last.text + event.text, last.logprobs + event.logprobs)
        case ThinkingDelta(), ThinkingDelta():
            return ThinkingDelta(last.text + event.text)
        case ToolCallDelta(), ToolCallDelta() if last.index == event.index:
            return ToolCallDelta(event.index, last.arguments + event.arguments)
        case PrefillProgress(), PrefillProgress():
            return event
        case _:
            return None


class ReplyHub:
    """Finds the reply an event belongs to."""

    def __init__(self) -> None:
        self._replies: dict[str, LiveReply] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_end: dict[str, Callable[[], None]] = {}
        self._finishing: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        """Replies that still expect events."""
        return len(self._replies)

    def open(
        self,
        request_id: str,
        first: Event,
        cancel: Callable[[str], None],
        parser: ReplyParser | None = None,
        *,
        on_finish: OnFinish | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> LiveReply:
        """Make the reply that will get a request's events. On the event loop's thread.

        Args:
            request_id: Whose.
            first: What its reader sees first.
            cancel: Stops a request.
            parser: See `LiveReply`.
            on_finish: See `LiveReply`.
            on_end: Called once when no more events will come, however it ended.
        """
        self._loop = asyncio.get_running_loop()
        reply = LiveReply(lambda: cancel(request_id), first, parser, on_finish)
        self._on_end[request_id] = on_end
        self._replies[request_id] = reply
        return reply

    def discard(self, request_id: str) -> None:
        """Forget a reply whose request was refused after all."""
        self._replies.pop(request_id, None)
        self._on_end.pop(request_id, None)

    def emit(self, events: EventBatch) -> None:
        """Hand events over; safe on any thread, never waits."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return  # nobody is left to read them
        loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: EventBatch) -> None:
        for request_id, event in events:
            reply = self._replies.get(request_id)
            if reply is None:
                continue
            if isinstance(event, Finished | Failed):
                del self._replies[request_id]
            if isinstance(event, PutAway):
                reply.put_away = event
            elif isinstance(event, Finished):
                self._finish(request_id, reply, event)
            else:
                reply.push(event)
                if isinstance(event, Failed):
                    self._on_end.pop(request_id)()

    def _finish(self, request_id: str, reply: LiveReply, event: Finished) -> None:
        async def finish() -> None:
            try:
                await reply.finish(event)
            finally:
                self._on_end.pop(request_id)()

        task = asyncio.ensure_future(finish())
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
