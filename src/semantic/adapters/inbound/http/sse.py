"""Server-sent events: framing."""

import json
from collections.abc import AsyncIterator

from fastapi.responses import StreamingResponse

from semantic.adapters.inbound.http.disconnects import Cancellable, ReplyStream

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


def event_stream(frames: AsyncIterator[str], reply: Cancellable | None = None) -> StreamingResponse:
    """Answer with a stream that no proxy holds back; it cancels the reply when it ends."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    if reply is not None:
        return ReplyStream(frames, reply, headers)
    return StreamingResponse(frames, media_type="text/event-stream", headers=headers)
