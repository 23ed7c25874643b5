"""Server-sent events: framing, and signs of life while a client waits."""

import asyncio
import json
from collections.abc import AsyncIterator

from fastapi.responses import StreamingResponse

from semantic.adapters.inbound.disconnects import ReplyStream
from semantic.domain.chat import Event, PrefillProgress
from semantic.ports.inbound import Reply

HEARTBEAT_S = 5.0


def data(payload: object) -> str:
    """Frame a JSON payload."""
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"


def named(event: str, payload: object) -> str:
    """Frame a JSON payload with the event's name, for clients that go by it."""
    return f"event: {event}\n{data(payload)}"


def comment(text: str) -> str:
    """Frame a comment, which clients pass over."""
    return f": {text}\n\n"


class Heartbeat:
    """Nothing happened for a while."""


async def with_heartbeats(
    reply: Reply, interval_s: float = HEARTBEAT_S
) -> AsyncIterator[Event | Heartbeat]:
    """Yield a reply's events, and a `Heartbeat` whenever none came for `interval_s`.

    Progress is no sign of life: it is not always written out, and may come for minutes.
    """
    events = aiter(reply)
    pending: asyncio.Task[Event] | None = None
    now = asyncio.get_running_loop().time
    due = now() + interval_s
    try:
        while True:
            pending = pending or asyncio.create_task(_next(events))
            done, _ = await asyncio.wait({pending}, timeout=max(0.0, due - now()))
            event: Event | None = None
            if done:
                try:
                    event = pending.result()
                except StopAsyncIteration:
                    return
                pending = None
                yield event
            is_quiet = event is None or isinstance(event, PrefillProgress)
            if is_quiet and now() < due:
                continue
            if is_quiet:
                yield Heartbeat()
            due = now() + interval_s
    finally:
        if pending is not None:
            pending.cancel()
        reply.cancel()


async def _next(events: AsyncIterator[Event]) -> Event:
    return await anext(events)


def event_stream(frames: AsyncIterator[str], reply: Reply | None = None) -> StreamingResponse:
    """Answer with a stream that no proxy holds back; it cancels the reply when it ends."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    if reply is not None:
        return ReplyStream(frames, reply, headers)
    return StreamingResponse(frames, media_type="text/event-stream", headers=headers)
