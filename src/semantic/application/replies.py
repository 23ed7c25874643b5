"""Events from the engine's thread, handed to the coroutines that wait for them.

The engine's events cross to the event loop in one call a step. A reader that is slower than the
device costs no more than the text it has not read: pieces that wait are joined.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeAlias

from semantic.application.batch_engine import EventBatch, PutAway
from semantic.domain.chat import Event, Failed, Finished, PrefillProgress, TextDelta

_log = logging.getLogger(__name__)

# Gets what a reply left behind and its text; what it awaits comes before the client's last event.
OnFinish: TypeAlias = Callable[[PutAway, Finished, str], Awaitable[None]]


class LiveReply:
    """A `Reply` that is being made. Used on the event loop's thread.

    Attributes:
        put_away: What the reply left behind, once that is known.
        on_end: Called with the final event, before it is read.
    """

    def __init__(
        self, on_cancel: Callable[[], None], first: Event, on_finish: OnFinish | None = None
    ) -> None:
        self.put_away: PutAway | None = None
        self.on_end: Callable[[Event], None] | None = None
        self._on_cancel = on_cancel
        self._on_finish = on_finish
        self._text: list[str] = []
        self._events: deque[Event] = deque([first])
        self._has_events = asyncio.Event()
        self._has_events.set()
        self._is_final = False

    def push(self, event: Event) -> None:
        """Add an event, joining it to the last one where that loses nothing."""
        self._is_final = isinstance(event, Finished | Failed)
        if self._is_final and self.on_end is not None:
            self.on_end(event)
        if isinstance(event, TextDelta):
            self._text.append(event.text)
        last = self._events[-1] if self._events else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            event = TextDelta(last.text + event.text, last.logprobs + event.logprobs)
            self._events.pop()
        elif isinstance(event, PrefillProgress) and isinstance(last, PrefillProgress):
            self._events.pop()
        self._events.append(event)
        self._has_events.set()

    async def finish(self, event: Finished) -> None:
        """Log the turn, then give the final event; a log that fails costs no reply."""
        self._is_final = True
        if self._on_finish is not None and self.put_away is not None:
            try:
                await self._on_finish(self.put_away, event, "".join(self._text))
            except Exception:  # noqa: BLE001 - the reply goes out, whatever became of the log
                _log.exception("a turn could not be logged")
        self.push(event)

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

    def open(
        self,
        request_id: str,
        first: Event,
        cancel: Callable[[str], None],
        on_finish: OnFinish | None = None,
    ) -> LiveReply:
        """Make the reply that will get a request's events. On the event loop's thread."""
        self._loop = asyncio.get_running_loop()
        reply = LiveReply(lambda: cancel(request_id), first, on_finish)
        self._replies[request_id] = reply
        return reply

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
            if isinstance(event, PutAway):
                reply.put_away = event
            elif isinstance(event, Finished):
                task = asyncio.ensure_future(reply.finish(event))
                self._finishing.add(task)
                task.add_done_callback(self._finishing.discard)
            else:
                reply.push(event)
