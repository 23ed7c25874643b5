"""The queue of requests that wait for their model to be loaded.

A request whose model is loaded passes at once; if it is rejected, the error is raised before the
response headers are sent. A request that waits gets a reply whose first events report progress; a
rejection is then its last event. Waiting requests continue in the order of arrival.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from semantic.application.engine.model import LoadedModel
from semantic.application.models.registry import ModelRegistry
from semantic.domain.errors import (
    GenerationTimeoutError,
    ModelSwapError,
    OverloadedError,
    SemanticError,
    internal_error,
)
from semantic.domain.events import Event, Failed, Finished, ModelProgress, Usage
from semantic.domain.sampling import FinishReason
from semantic.ports.inbound import Reply

_log = logging.getLogger(__name__)
_POLL_S = 0.05
_MAX_TRIES = 20  # a model may be swapped out while a request is being prepared for it

StartReply: TypeAlias = Callable[[], Awaitable[Reply]]


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    """A waiting request; `passed` resolves when it may continue, or holds its rejection."""

    name: str
    deadline: float
    progress: str
    passed: asyncio.Future[None] = field(default_factory=asyncio.Future)


class ModelGate:
    """Admits requests to the model they name. Used on the event loop's thread.

    Attributes:
        timeout_s: Longest wait of a request for its model, and longest duration of a request.
        on_refused: Called with the error of every rejected reply.
    """

    def __init__(self, models: ModelRegistry, *, max_waiting: int, timeout_s: float) -> None:
        self._models = models
        self._max_waiting = max_waiting
        self.timeout_s = timeout_s
        self.on_refused: Callable[[SemanticError], None] = lambda _: None
        self._waiting: deque[_WaitingRequest] = deque()
        self._watch: asyncio.Task[None] | None = None

    def model_for(self, name: str) -> LoadedModel:
        return self._models.model_for(name)

    async def model(self, name: str) -> LoadedModel:
        """Wait until a model is loaded, and return it; raises the errors of `reply`."""
        while isinstance(admitted := await self._admit(name), str):
            await self._enqueue(name, admitted).passed
        return admitted

    async def reply(self, name: str, start: StartReply) -> Reply:
        """Start a reply once the named model is loaded.

        If the model is not loaded, or other requests wait already, returns a reply that waits.
        Such a reply ends with a `Failed` event for the errors below.

        Raises:
            OverloadedError: too many requests wait.
            GenerationTimeoutError: the model was not loaded in time.
            SemanticError: the model does not exist, or `start` raised this error.
        """
        try:
            if self._waiting or isinstance(await self._admit(name), str):
                return _WaitingReply(self, name, start)
            try:
                return await start()
            except ModelSwapError:
                # The model may have been swapped out while the request was prepared: then wait.
                if isinstance(await self._admit(name), str):
                    return _WaitingReply(self, name, start)
                return await start()
        except SemanticError as error:
            self.on_refused(error)
            raise

    async def progress(self, name: str) -> AsyncGenerator[str, None]:
        """Wait until a model is loaded, regularly yielding a description of the progress."""
        admitted = await self._admit(name)
        if isinstance(admitted, LoadedModel) and not self._waiting:
            return
        request = self._enqueue(name, admitted if isinstance(admitted, str) else "waiting")
        try:
            while not request.passed.done():
                yield request.progress
                await asyncio.wait([request.passed], timeout=_POLL_S)
            request.passed.result()
        finally:
            request.passed.cancel()

    async def _admit(self, name: str) -> LoadedModel | str:
        if not self._models.is_known(name):
            await asyncio.to_thread(self._models.refresh)  # reads the disk
        return self._models.admit(name)

    def _enqueue(self, name: str, progress: str) -> _WaitingRequest:
        if len(self._waiting) >= self._max_waiting:
            raise OverloadedError(
                f"{len(self._waiting)} requests are waiting for a model; try again.",
                retry_after_s=5,
            )
        now = asyncio.get_running_loop().time()
        request = _WaitingRequest(name, now + self.timeout_s, progress)
        self._waiting.append(request)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._admit_waiting())
        return request

    async def _admit_waiting(self) -> None:
        while self._waiting:
            self._waiting = deque(
                request for request in self._waiting if not self._is_over(request)
            )
            await asyncio.sleep(_POLL_S)

    def _is_over(self, request: _WaitingRequest) -> bool:
        """Whether a request's wait is over; resolves its future if so."""
        if request.passed.done():
            return True
        try:
            if asyncio.get_running_loop().time() > request.deadline:
                raise GenerationTimeoutError("the model was not loaded in time.")
            admitted = self._models.admit(request.name)
        except SemanticError as error:
            request.passed.set_exception(error)
            return True
        if isinstance(admitted, str):
            request.progress = admitted
            return False
        request.passed.set_result(None)
        return True


class _WaitingReply:
    """A reply that starts when its model is loaded."""

    def __init__(self, gate: ModelGate, name: str, start: StartReply) -> None:
        self._gate = gate
        self._name = name
        self._start = start
        self._reply: Reply | None = None
        self._is_cancelled = False

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        try:
            for _ in range(_MAX_TRIES):
                last = ""
                async with contextlib.aclosing(self._gate.progress(self._name)) as progress:
                    async for detail in progress:
                        if self._is_cancelled:
                            break
                        if detail != last:
                            yield ModelProgress(detail)
                        last = detail
                if self._is_cancelled:
                    yield Finished(FinishReason.CANCELLED, Usage(0))
                    return
                try:
                    self._reply = await self._start()
                    break
                except ModelSwapError:
                    continue  # the model was swapped out again during preparation
            if self._reply is None:
                self._reply = await self._start()
        except Exception as error:  # noqa: BLE001 - every reply has a final event
            yield self._failed(error)
            return
        async for event in self._reply:
            yield event

    def _failed(self, error: Exception) -> Failed:
        if isinstance(error, SemanticError):
            self._gate.on_refused(error)
            return Failed(error)
        _log.error("failed to start a reply", exc_info=error)
        return Failed(internal_error())

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._reply is not None:
            self._reply.cancel()
