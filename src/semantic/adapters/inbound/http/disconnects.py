"""Work ends when the client that asked for it goes away.

Abandoned work would stand in the queue before the same request, sent again.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

CLIENT_LEFT = 499  # nobody reads this answer
_T = TypeVar("_T")


class Cancellable(Protocol):
    """A reply, or several."""

    def cancel(self) -> None:
        """Stop computing, if it has not ended."""
        ...


class ReplyStream(StreamingResponse):
    """A stream that cancels its reply however it ends, even before its first frame was asked for.

    Args:
        frames: What is sent.
        reply: What the frames are made from.
        headers: Of the response.
    """

    def __init__(
        self, frames: AsyncIterator[str], reply: Cancellable, headers: Mapping[str, str]
    ) -> None:
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.cancel()


async def unless_disconnected(work: Coroutine[Any, Any, _T], http: Request) -> _T | None:
    """Wait for some work, unless the client goes away first: then it is cancelled."""
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
