"""Passes events from the engine's thread to the coroutines that read replies.

All events of an engine step cross to the event loop in one call. Unread deltas are joined, so the
memory for a slow reader is bounded by the text it has not read.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from semantic.application.engine.request import EventBatch, ReplyState
from semantic.application.parsing import MessageFold, ReplyParser
from semantic.application.requests.thinking_budget import ThinkingCounter
from semantic.domain.agents import Reuse
from semantic.domain.chat import Message
from semantic.domain.errors import SemanticError, internal_error
from semantic.domain.events import (
    CacheReport,
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
    """A complete reply.

    Attributes:
        raw_text: The text as the model wrote it, with markup.
    """

    state: ReplyState
    event: Finished
    message: Message
    raw_text: str


class UnloggedReplyError(Exception):
    """Fails a reply because its turn could not be logged."""

    def __init__(self, error: SemanticError) -> None:
        super().__init__(error.message)
        self.error = error


# Logs a reply; returns `Finished.is_durable`. Raises `UnloggedReplyError` to fail the reply.
LogReply: TypeAlias = Callable[[FinishedReply], Awaitable[bool | None]]
EndHook: TypeAlias = Callable[[Finished | Failed, Reuse], None]


class LiveReply:
    """A `Reply` in progress. Used on the event loop's thread.

    Attributes:
        state: The reply's tokens and sealed KV cache; None until the engine reports them.
        report: Describes what the prompt reused; None unless the request asks for that.
    """

    def __init__(
        self,
        first: Event,
        parser: ReplyParser,
        on_cancel: Callable[[], None],
        *,
        log: LogReply | None = None,
        thinking: ThinkingCounter | None = None,
        beginning: str = "",
    ) -> None:
        """Start with one event to read.

        Args:
            log: Logs the reply; awaited before the reader gets the final event.
            beginning: The beginning of the message, given by the client; not sent as an event.
        """
        self.state: ReplyState | None = None
        self.report: Callable[[ReplyState], CacheReport] | None = None
        self._parser = parser
        self._on_cancel = on_cancel
        self._log = log
        self._thinking = thinking
        self._end_hooks: list[EndHook] = []
        self._raw: list[str] = []
        self._fold = MessageFold()
        if beginning:
            self._fold.add(TextDelta(beginning))
        self._events: deque[Event] = deque([first])
        self._has_events = asyncio.Event()
        self._has_events.set()
        self._is_final = False  # nothing is left to cancel
        self._is_ended = False  # the final event was added

    def on_end(self, hook: EndHook) -> None:
        """Call `hook` once with the final event, before the reader gets it, even if none reads."""
        self._end_hooks.append(hook)

    def push(self, event: Event) -> None:
        for parsed in self._parsed(event):
            self._add(parsed)

    def fail(self, error: SemanticError) -> None:
        """Cancel the computation and end with an error, unless the reply has ended."""
        self.cancel()
        self._add(Failed(error))

    async def finish(self, event: Finished) -> None:
        """Log the turn, then queue the final event, which reports whether logging failed."""
        self._is_final = True
        last: Finished | Failed = Failed(internal_error())
        try:
            last = await self._finished(event)
        except Exception:  # noqa: BLE001 - a bug must end this reply only
            _log.exception("failed to finish a reply")
        finally:
            self._add(last)

    async def _finished(self, event: Finished) -> Finished | Failed:
        event = self._counted(event)
        last = event
        for parsed in self._parsed(event):
            if isinstance(parsed, Finished):
                last = parsed
            else:
                self._add(parsed)
        if self.report is not None and self.state is not None:
            last = replace(last, cache=self.report(self.state))
        log = self._log
        if log is None or self.state is None:
            return last
        finished = FinishedReply(self.state, event, self._fold.message(), "".join(self._raw))
        return await self._logged(log, finished, last)

    async def _logged(
        self, log: LogReply, finished: FinishedReply, last: Finished
    ) -> Finished | Failed:
        try:
            return replace(last, is_durable=await log(finished))
        except UnloggedReplyError as unlogged:
            return Failed(unlogged.error)
        except Exception:  # noqa: BLE001 - a logging failure must not lose the reply
            _log.exception("turn not logged")
            return replace(last, is_durable=False)

    def _counted(self, event: Finished) -> Finished:
        if self._thinking is None or self.state is None:
            return event
        for token in self.state.tokens:
            self._thinking.feed(token)
        usage = replace(event.usage, thinking_tokens=self._thinking.num_tokens)
        return replace(event, usage=usage)

    def _parsed(self, event: Event) -> list[Event]:
        if isinstance(event, TextDelta):
            self._raw.append(event.text)
        events = self._parser.push(event)
        for parsed in events:
            self._fold.add(parsed)
        return events

    def _add(self, event: Event) -> None:
        """Queue an event, joined with the last one if possible; nothing follows the final event."""
        if self._is_ended:
            return
        if isinstance(event, Finished | Failed):
            self._is_final = self._is_ended = True
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
            try:
                hook(event, self.state.reuse if self.state else Reuse())
            except Exception:  # noqa: BLE001 - the other hooks and the reader must see the end
                _log.exception("end hook of a reply failed")

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        """Yield events up to the final one; leaving the loop early cancels the reply."""
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

    def discard(self) -> None:
        """Cancel the reply, and log no turn even if a part of it is written. Thread-safe."""
        self._log = None
        self.cancel()

    def cancel(self) -> None:
        if not self._is_final:
            self._is_final = True
            self._on_cancel()


def _joined(last: Event | None, event: Event) -> Event | None:
    """Return two events merged into one; None if merging would lose information."""
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
    """Routes events to replies by request id."""

    def __init__(self) -> None:
        self._replies: dict[str, LiveReply] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finishing: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        return len(self._replies)

    def open(self, request_id: str, reply: LiveReply) -> None:
        """Route a request's events to a reply. Call on the event loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._replies[request_id] = reply

    def discard(self, request_id: str) -> None:
        self._replies.pop(request_id, None)

    def emit(self, events: EventBatch) -> None:
        """Pass events to the event loop. Thread-safe; does not block."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return  # no reader is left
        loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: EventBatch) -> None:
        for request_id, event in events:
            reply = self._replies.get(request_id)
            if reply is None:
                continue
            if isinstance(event, Finished | Failed):
                del self._replies[request_id]
            try:
                self._deliver(reply, event)
            except Exception:  # noqa: BLE001 - a bug must end this reply only
                _log.exception("failed to deliver an event of request %s", request_id)
                self.discard(request_id)
                reply.fail(event.error if isinstance(event, Failed) else internal_error())

    def _deliver(self, reply: LiveReply, event: Event | ReplyState) -> None:
        match event:
            case ReplyState():
                reply.state = event
            case Finished():
                task = asyncio.ensure_future(reply.finish(event))
                self._finishing.add(task)
                task.add_done_callback(self._finishing.discard)
            case _:
                reply.push(event)
