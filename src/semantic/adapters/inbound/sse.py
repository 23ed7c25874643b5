"""Server-sent events: framing, and signs of life while a client waits."""

import asyncio
import json
from collections.abc import AsyncIterator

from fastapi.responses import StreamingResponse

from semantic.domain.chat import Event
from semantic.ports.inbound import Reply

HEARTBEAT_S = 5.0


def data(payload: object) -> str:
    """Frame a JSON payload."""
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"


def comment(text: str) -> str:
    """Frame a comment, which clients pass over."""
    return f": {text}\n\n"


class Heartbeat:
    """Nothing happened for a while."""


async def with_heartbeats(
    reply: Reply, interval_s: float = HEARTBEAT_S
) -> AsyncIterator[Event | Heartbeat]:
    """Yield a reply's events, and a `Heartbeat` whenever none came for `interval_s`."""
    events = aiter(reply)
    pending: asyncio.Task[Event] | None = None
    try:
        while True:
            pending = pending or asyncio.create_task(_next(events))
            done, _ = await asyncio.wait({pending}, timeout=interval_s)
            if not done:
                yield Heartbeat()
                continue
            try:
                event = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            yield event
    finally:
        if pending is not None:
            pending.cancel()
        reply.cancel()


async def _next(events: AsyncIterator[Event]) -> Event:
    return await anext(events)


def event_stream(frames: AsyncIterator[str]) -> StreamingResponse:
    """Answer with a stream that no proxy holds back."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(frames, media_type="text/event-stream", headers=headers)
