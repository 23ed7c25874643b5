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

from semantic.application.engine.request import EventBatch, ReplyState
from semantic.application.parsing import MessageFold, ReplyParser
from semantic.application.requests.thinking_budget import ThinkingSpan
from semantic.domain.agents import Reuse
from semantic.domain.chat import Message
from semantic.domain.errors import SemanticError
from semantic.domain.events import (
    Event,
    Failed,
    Finished,
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
        state: What it left behind.
        event: Its last event.
        message: What it said.
        raw_text: The same as the model wrote it, markup included.
    """

    state: ReplyState
    event: Finished
    message: Message
    raw_text: str


class UnloggedReplyError(Exception):
    """A reply that must not count, since its turn could not be logged."""

    def __init__(self, error: SemanticError) -> None:
        super().__init__(error.message)
        self.error = error


# Logs a reply; returns `Finished.is_durable`. Raises `UnloggedReplyError` to let the reply fail.
LogReply: TypeAlias = Callable[[FinishedReply], Awaitable[bool | None]]
EndHook: TypeAlias = Callable[[Finished | Failed, Reuse], None]


class LiveReply:
    """A `Reply` that is being made. Used on the event loop's thread.

    Attributes:
        state: What the reply left behind, once that is known.
    """

    def __init__(
        self,
        first: Event,
        parser: ReplyParser,
        on_cancel: Callable[[], None],
        *,
        log: LogReply | None = None,
        span: ThinkingSpan | None = None,
        beginning: str = "",
    ) -> None:
        """Begin with the first event.

        Args:
            first: What the reader sees first.
            parser: Turns text into thinking, text and calls.
            on_cancel: Stops computing.
            log: Logs the reply; what it awaits comes before the reader's last event.
            span: Counts the tokens of its thinking; None if it has none.
            beginning: What the message begins with; the reader knows it.
        """
        self.state: ReplyState | None = None
        self._parser = parser
        self._on_cancel = on_cancel
        self._log = log
        self._span = span
        self._end_hooks: list[EndHook] = []
        self._raw: list[str] = []
        self._fold = MessageFold()
        if beginning:
            self._fold.add(TextDelta(beginning))
        self._events: deque[Event] = deque([first])
        self._has_events = asyncio.Event()
        self._has_events.set()
        self._is_final = False

    def on_end(self, hook: EndHook) -> None:
        """Let `hook` be called once with the final event, before that is read, if it ever is."""
        self._end_hooks.append(hook)

    def push(self, event: Event) -> None:
        """Add an event of the engine."""
        for parsed in self._parsed(event):
            self._add(parsed)

    async def finish(self, event: Finished) -> None:
        """Log the turn, then give the final event; if logging fails, the reply says so."""
        self._is_final = True
        try:
            event = self._counted(event)
            *events, last = self._parsed(event)
            for parsed in events:
                self._add(parsed)
            if self._log is not None and self.state is not None and isinstance(last, Finished):
                raw_text = "".join(self._raw)
                finished = FinishedReply(self.state, event, self._fold.message(), raw_text)
                last = await self._logged(self._log, finished, last)
            self._add(last)
        finally:
            self._end(event)

    async def _logged(
        self, log: LogReply, finished: FinishedReply, last: Finished
    ) -> Finished | Failed:
        """The last event, after the reply was logged."""
        try:
            return replace(last, is_durable=await log(finished))
        except UnloggedReplyError as unlogged:
            return Failed(unlogged.error)
        except Exception:  # noqa: BLE001 - the reply goes out, whatever became of the log
            _log.exception("a turn could not be logged")
            return replace(last, is_durable=False)

    def _counted(self, event: Finished) -> Finished:
        """Add how many of the tokens were thinking."""
        if self._span is None or self.state is None:
            return event
        for token in self.state.tokens:
            self._span.feed(token)
        usage = replace(event.usage, thinking_tokens=self._span.num_tokens)
        return replace(event, usage=usage)

    def _parsed(self, event: Event) -> list[Event]:
        if isinstance(event, TextDelta):
            self._raw.append(event.text)
        events = self._parser.push(event)
        for parsed in events:
            self._fold.add(parsed)
        return events

    def _add(self, event: Event) -> None:
        """Hand an event to the reader, joined to the last one where that loses nothing."""
        if isinstance(event, Finished | Failed):
            self._is_final = True
            self._end(event)
        last = self._events[-1] if self._events else None
        joined = _joined(last, event)
        if joined is not None:
            self._events.pop()
        self._events.append(joined or event)
        self._has_events.set()

    def _end(self, event: Finished | Failed) -> None:
        hooks, self._end_hooks = self._end_hooks, []
        for hook in hooks:
            hook(event, self.state.reuse if self.state else Reuse())

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
        self._finishing: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        """Replies that still expect events."""
        return len(self._replies)

    def open(self, request_id: str, reply: LiveReply) -> None:
        """Let a reply get a request's events. On the event loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._replies[request_id] = reply

    def discard(self, request_id: str) -> None:
        """Forget a reply whose request was refused after all."""
        self._replies.pop(request_id, None)

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
            if isinstance(event, ReplyState):
                reply.state = event
            elif isinstance(event, Finished):
                task = asyncio.ensure_future(reply.finish(event))
                self._finishing.add(task)
                task.add_done_callback(self._finishing.discard)
            else:
                reply.push(event)
