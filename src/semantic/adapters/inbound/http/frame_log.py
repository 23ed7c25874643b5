"""The events of a stream, kept for readers who come late or come back."""

import asyncio
from collections.abc import AsyncIterator

from semantic.adapters.inbound.http import sse


class FrameLog:
    """Frames in their order; any number may read them while they are written.

    Used on the event loop's thread.

    Attributes:
        progress: What readers are told while nothing else comes.
    """

    def __init__(self, heartbeat_s: float = sse.HEARTBEAT_S) -> None:
        self.progress = "waiting"
        self._heartbeat_s = heartbeat_s
        self._frames: list[str] = []
        self._is_ended = False
        self._changed = asyncio.Event()

    def append(self, frame: str) -> None:
        """Add a frame."""
        self._frames.append(frame)
        self._tell()

    def end(self) -> None:
        """Say that no more will come."""
        self._is_ended = True
        self._tell()

    async def read(self, start: int = 0) -> AsyncIterator[str]:
        """Yield all frames from number `start` on, and a comment whenever none came for a while."""
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
                yield sse.comment(self.progress)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
