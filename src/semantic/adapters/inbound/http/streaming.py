"""Sends replies to clients: server-sent events, heartbeats, cancellation on disconnect.

`ReplySet` reads all replies to one request and has the one loop that writes streams. A `FrameLog`
keeps a stream for readers that connect late or reconnect. When a client disconnects, its replies
are cancelled: otherwise they would delay the same request when the client retries.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from semantic.domain.events import Event, Failed, Finished, ModelProgress, PrefillProgress
from semantic.ports.inbound import Reply

CLIENT_LEFT = 499  # the client has disconnected; only the access log shows this status
HEARTBEAT_S = 5.0
WAITING = "waiting"
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
Json: TypeAlias = dict[str, object]
_T = TypeVar("_T")
# Many clients split a stream at every Unicode line end, so these are escaped.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


def one_line(payload: object) -> str:
    """Format a JSON payload as text without line ends."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() else text.translate(_LINE_ENDS)


def data(payload: object) -> str:
    """Format a JSON payload as a server-sent event."""
    return f"data: {one_line(payload)}\n\n"


def named_event(event: str, payload: object) -> str:
    """Format a JSON payload as a named server-sent event."""
    return f"event: {event}\n{data(payload)}"


def comment(text: str) -> str:
    """Format a comment, which clients ignore."""
    return f": {text}\n\n"


def progress_comment(progress: PrefillProgress | ModelProgress) -> str:
    """Return the text of a comment about the progress of a model load or a prefill."""
    if isinstance(progress, ModelProgress):
        return " ".join(progress.detail.split())
    return f"prefill {progress.done}/{progress.total}"


class Cancellable(Protocol):
    """One or more replies that can be cancelled."""

    def cancel(self) -> None:
        """Stop computing, unless it has ended."""


class Heartbeat:
    """Signals that no event came for `heartbeat_s` seconds."""


class ReplySet:
    """Replies that are read and cancelled together. Use it on the event loop's thread."""

    def __init__(self, replies: Sequence[Reply], heartbeat_s: float | None = None) -> None:
        self._replies = tuple(replies)
        self.heartbeat_s = HEARTBEAT_S if heartbeat_s is None else heartbeat_s

    def __len__(self) -> int:
        return len(self._replies)

    async def frames(
        self,
        write: Callable[[int, Event], Awaitable[str]],
        *,
        opening: str = "",
        ping: str = "",
        end: Callable[[], str] = str,
    ) -> AsyncIterator[str]:
        """Write all replies as server-sent events; the first failure ends them.

        Args:
            write: Formats the next event of a reply, given the reply's index; empty for no frame.
            ping: Frames to send with each heartbeat comment.
            end: Returns the last frames; not called if a reply failed.
        """
        progress = WAITING
        if opening:
            yield opening
        async with contextlib.aclosing(self.events_and_heartbeats()) as items:
            async for item in items:
                if isinstance(item, Heartbeat):
                    yield comment(progress) + ping
                    continue
                index, event = item
                if isinstance(event, PrefillProgress | ModelProgress):
                    progress = progress_comment(event)
                if frames := await write(index, event):
                    yield frames
                if isinstance(event, Failed):
                    return
        if last := end():
            yield last

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield the events of all replies, each with the index of its reply."""
        async for item in self.events_and_heartbeats():
            if not isinstance(item, Heartbeat):
                yield item

    async def events_and_heartbeats(self) -> AsyncGenerator[tuple[int, Event] | Heartbeat, None]:
        """Yield the same, and a `Heartbeat` after every `heartbeat_s` seconds without an event.

        Progress events do not postpone the heartbeat: most protocols do not write them to the
        stream, and a prefill can take minutes. No heartbeat follows the final event of the last
        reply: clients have then read the end of the stream.
        """
        streams = [aiter(reply) for reply in self._replies]
        pending = {_next_of(stream): index for index, stream in enumerate(streams)}
        unfinished = set(range(len(streams)))
        now = asyncio.get_running_loop().time
        due = now() + self.heartbeat_s
        try:
            while pending:
                timeout = max(0.0, due - now()) if unfinished else None
                done, _ = await asyncio.wait(
                    pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                for task in sorted(done, key=pending.__getitem__):
                    index = pending.pop(task)
                    event = _result_of(task)
                    if event is None:
                        continue
                    pending[_next_of(streams[index])] = index
                    if not isinstance(event, PrefillProgress | ModelProgress):
                        due = now() + self.heartbeat_s
                    if isinstance(event, Finished | Failed):
                        unfinished.discard(index)
                    yield index, event
                if pending and unfinished and now() >= due:
                    due = now() + self.heartbeat_s
                    yield Heartbeat()
        finally:
            for task in pending:
                task.cancel()
            self.cancel()

    def cancel(self) -> None:
        for reply in self._replies:
            reply.cancel()


def _next_of(stream: AsyncIterator[Event]) -> "asyncio.Task[Event]":
    async def step() -> Event:
        return await anext(stream)

    return asyncio.create_task(step())


def _result_of(task: "asyncio.Task[Event]") -> Event | None:
    try:
        return task.result()
    except StopAsyncIteration:
        return None


class FrameLog:
    """Frames in order; any number of readers may read while frames are appended.

    Use it on the event loop's thread. `progress` is the text of the heartbeat comment.
    """

    def __init__(self, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.progress = WAITING
        self._heartbeat_s = heartbeat_s
        self._frames: list[str] = []
        self._is_ended = False
        self._changed = asyncio.Event()

    def append(self, frame: str) -> None:
        self._frames.append(frame)
        self._wake_readers()

    def end(self) -> None:
        self._is_ended = True
        self._wake_readers()

    async def read(self, start: int = 0) -> AsyncIterator[str]:
        """Yield all frames from index `start`, and heartbeat comments while none arrive."""
        while True:
            while start < len(self._frames):
                yield self._frames[start]
                start += 1
            if self._is_ended:
                return
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._changed.wait()
            except TimeoutError:
                yield comment(self.progress)

    def _wake_readers(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class EventStream(StreamingResponse):
    """A stream, by default of server-sent events, that proxies do not buffer.

    It cancels its reply however it ends, even if no frame was sent.
    """

    def __init__(
        self,
        frames: AsyncIterator[str],
        reply: Cancellable | None = None,
        media_type: str = EVENTS,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(frames, media_type=media_type, headers=headers)
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._reply is not None:
                self._reply.cancel()


async def answer(
    http: Request, body: Coroutine[None, None, object], replies: Cancellable
) -> Response:
    """Respond with the body once it is complete; stop if the client disconnects first."""
    try:
        made = await unless_disconnected(body, http)
    finally:
        replies.cancel()
    return Response(status_code=CLIENT_LEFT) if made is None else JSONResponse(made)


async def unless_disconnected(work: Coroutine[Any, Any, _T], http: Request) -> _T | None:
    """Await some work; cancel it and return None if the client disconnects first."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def reply_or_stream(body: Any, stream_type: str = EVENTS) -> dict[int | str, dict[str, Any]]:
    """Document a response that is an object or a stream."""
    what = "Server-sent events." if stream_type == EVENTS else "One JSON object on each line."
    stream = {stream_type: {"schema": {"description": what}}}
    return {200: {"model": body, "content": stream, "description": "The reply."}}
