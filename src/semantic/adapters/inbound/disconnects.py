"""Work ends when the client that asked for it goes away.

Abandoned work would stand in the queue before the same request, sent again.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from semantic.ports.inbound import Reply


class ReplyStream(StreamingResponse):
    """A stream that cancels its reply however it ends, even before its first frame was asked for.

    Args:
        frames: What is sent.
        reply: What the frames are made from.
        headers: Of the response.
    """

    def __init__(
        self, frames: AsyncIterator[str], reply: Reply, headers: Mapping[str, str]
    ) -> None:
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.cancel()


async def unless_disconnected(
    making: Coroutine[None, None, Response], reply: Reply, http: Request
) -> Response:
    """Make a response from a whole reply, unless the client goes away first."""
    collecting = asyncio.create_task(making)
    leaving = asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if collecting.done():
            return collecting.result()
        return Response(status_code=499)
    finally:
        collecting.cancel()
        leaving.cancel()
        reply.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
