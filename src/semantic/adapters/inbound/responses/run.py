"""Responses while they are made, and for a while after."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator

from semantic.adapters.inbound.http.streaming import (
    FrameLog,
    Json,
    ReplySet,
    named,
    progress_comment,
)
from semantic.adapters.inbound.responses.events import ResponseWriter
from semantic.domain.errors import GenerationTimeoutError, SemanticError
from semantic.domain.events import Failed, ModelProgress, PrefillProgress

_MAX_KEPT = 1024
_MAX_LOGS = 16  # a log is some hundred bytes a token
_CANCEL_TIMEOUT_S = 30.0


class ResponseRun:
    """One response on its way. Used on the event loop's thread.

    Attributes:
        log: Its events, where they are kept for those who come late.
    """

    def __init__(
        self, replies: ReplySet, writer: ResponseWriter, book: "ResponseBook", *, is_stored: bool
    ) -> None:
        self._replies = replies
        self._writer = writer
        self._book = book
        self._is_stored = is_stored
        self._failure: SemanticError | None = None
        self.log: FrameLog | None = None
        self.is_begun = asyncio.Event()
        self.is_ended = asyncio.Event()

    @property
    def response(self) -> Json:
        """The response as it stands."""
        made = self._writer.response
        output = made.get("output")
        return {**made, "output": list(output) if isinstance(output, list) else []}

    async def frames(self) -> AsyncIterator[str]:
        """Write it as server-sent events; it goes on and ends however slowly they are read."""
        log = FrameLog(self._replies.heartbeat_s)
        self._book.keep_running(self, log)
        async for frame in log.read():
            yield frame

    async def collect(self) -> Json:
        """Wait for its end.

        Raises:
            SemanticError: it failed.
        """
        await self.write(None)
        if self._failure is not None:
            raise self._failure
        return self.response

    async def write(self, log: FrameLog | None) -> None:
        """Wait for its end, its events written to a log; the response itself tells of a failure."""
        try:
            async for _, event in self._replies.events():
                if isinstance(event, PrefillProgress | ModelProgress):
                    if log is not None:
                        log.progress = progress_comment(event)
                    continue
                if isinstance(event, Failed):
                    self._failure = event.error
                for written in self._writer.feed(event):
                    self._begin()
                    if log is not None:
                        log.append(named(str(written["type"]), written))
        finally:
            self.is_ended.set()
            self._book.leave(self, is_kept=self._is_stored)
            if log is not None:
                log.end()

    async def cancel(self) -> None:
        """Stop it, and wait until it has ended.

        Raises:
            GenerationTimeoutError: the device does not let it go.
        """
        self._replies.cancel()
        try:
            await asyncio.wait_for(self.is_ended.wait(), _CANCEL_TIMEOUT_S)
        except TimeoutError as error:
            raise GenerationTimeoutError("the response did not stop in time.") from error

    def _begin(self) -> None:
        if not self.is_begun.is_set():
            self._book.enter(self)
            self.is_begun.set()


class ResponseBook:
    """The responses of one tenant that are on their way or have ended lately."""

    def __init__(self) -> None:
        self._running: dict[str, ResponseRun] = {}
        self._kept: OrderedDict[str, Json] = OrderedDict()
        self._logs: OrderedDict[str, FrameLog] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def enter(self, run: ResponseRun) -> None:
        """Note a response that has begun."""
        self._running[str(run.response["id"])] = run

    def leave(self, run: ResponseRun, *, is_kept: bool) -> None:
        """Note that a response has ended, or nobody waits for it any more."""
        response = run.response
        name = str(response.get("id"))
        self._running.pop(name, None)
        if is_kept and response.get("status") not in (None, "in_progress"):
            self._kept[name] = response
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
            if run.log is not None:
                self._logs[name] = run.log
                if len(self._logs) > _MAX_LOGS:
                    self._logs.popitem(last=False)

    def keep_running(self, run: ResponseRun, log: FrameLog | None) -> None:
        """Go on with a response though nobody waits for it; its events go to a log."""
        task = asyncio.create_task(run.write(log))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def running(self, response_id: str) -> ResponseRun | None:
        """Find a response that has not ended."""
        return self._running.get(response_id)

    def find(self, response_id: str) -> Json | None:
        """Find a response; None if it is unknown or was dropped."""
        run = self._running.get(response_id)
        return run.response if run else self._kept.get(response_id)

    def log(self, response_id: str) -> FrameLog | None:
        """Find the events of a response; None if they are not kept."""
        run = self._running.get(response_id)
        return run.log if run else self._logs.get(response_id)

    def forget(self, response_id: str) -> bool:
        """Drop a response that has ended; False if there is none."""
        self._logs.pop(response_id, None)
        return self._kept.pop(response_id, None) is not None
