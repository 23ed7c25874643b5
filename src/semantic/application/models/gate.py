"""Where requests wait for the model they ask for.

A request whose model is there goes through at once, and is refused, if it must be, before its
client sees a header. One that waits becomes a reply whose first events say what is being done; a
refusal is then its last event. Those that waited go on in the order they came.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from semantic.application.engine.model import LoadedModel
from semantic.application.models.registry import ModelRegistry
from semantic.domain.errors import GenerationTimeoutError, ModelSwapError, OverloadedError
from semantic.domain.errors import SemanticError as Refusal
from semantic.domain.events import Event, Failed, Finished, ModelProgress, Usage
from semantic.domain.sampling import FinishReason
from semantic.ports.inbound import Reply

_POLL_S = 0.05
_MAX_TRIES = 20  # a model may go while a request is being prepared for it

StartReply: TypeAlias = Callable[[], Awaitable[Reply]]


@dataclass(slots=True, eq=False)
class _Ticket:
    """A request that waits."""

    name: str
    deadline: float
    progress: str
    passed: asyncio.Future[None] = field(default_factory=asyncio.Future)


class ModelGate:
    """Lets requests through to the model they name. Used on the event loop's thread.

    Attributes:
        timeout_s: The longest a request may wait, and the longest it may take.
        on_refused: Is told of every reply that was refused.
    """

    def __init__(self, models: ModelRegistry, *, max_waiting: int, timeout_s: float) -> None:
        self._models = models
        self._max_waiting = max_waiting
        self.timeout_s = timeout_s
        self.on_refused: Callable[[Refusal], None] = lambda _: None
        self._waiting: deque[_Ticket] = deque()
        self._watch: asyncio.Task[None] | None = None

    def model_for(self, name: str) -> LoadedModel:
        """The model for a request that cannot wait; see `ModelRegistry.model_for`."""
        return self._models.model_for(name)

    async def model(self, name: str) -> LoadedModel:
        """Wait for a model.

        Raises:
            SemanticError: as for `reply`.
        """
        while isinstance(admitted := self._models.admit(name), str):
            await self._enter(name, admitted).passed
        return admitted

    async def reply(self, name: str, start: StartReply) -> Reply:
        """Start a reply of the model that is named, now or when it is there.

        Raises:
            OverloadedError: too many wait.
            GenerationTimeoutError: it did not come in time.
            SemanticError: there is no such model, or what `start` raises.
        """
        try:
            if self._waiting or isinstance(self._models.admit(name), str):
                return _WaitingReply(self, name, start)
            try:
                return await start()
            except ModelSwapError:
                # It may have gone while the request was prepared; if so there is one to wait for.
                if isinstance(self._models.admit(name), str):
                    return _WaitingReply(self, name, start)
                return await start()
        except Refusal as error:
            self.on_refused(error)
            raise

    async def progress(self, name: str) -> AsyncGenerator[str, None]:
        """Wait until a model is there, yielding now and then what is being done."""
        admitted = self._models.admit(name)
        if isinstance(admitted, LoadedModel) and not self._waiting:
            return
        ticket = self._enter(name, admitted if isinstance(admitted, str) else "waiting")
        try:
            while not ticket.passed.done():
                yield ticket.progress
                await asyncio.wait([ticket.passed], timeout=_POLL_S)
            ticket.passed.result()
        finally:
            ticket.passed.cancel()

    def _enter(self, name: str, progress: str) -> _Ticket:
        if len(self._waiting) >= self._max_waiting:
            raise OverloadedError(
                f"{len(self._waiting)} requests are waiting for a model; try again.",
                retry_after_s=5,
            )
        now = asyncio.get_running_loop().time()
        ticket = _Ticket(name, now + self.timeout_s, progress)
        self._waiting.append(ticket)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._let_through())
        return ticket

    async def _let_through(self) -> None:
        """Let those go on whose model is there, the first first, until nobody waits."""
        while self._waiting:
            self._waiting = deque(ticket for ticket in self._waiting if not self._is_over(ticket))
            await asyncio.sleep(_POLL_S)

    def _is_over(self, ticket: _Ticket) -> bool:
        """Whether a request need not wait any longer; it is told so."""
        if ticket.passed.done():
            return True
        try:
            if asyncio.get_running_loop().time() > ticket.deadline:
                raise GenerationTimeoutError("the model was not loaded in time.")
            admitted = self._models.admit(ticket.name)
        except Refusal as error:
            ticket.passed.set_exception(error)
            return True
        if isinstance(admitted, str):
            ticket.progress = admitted
            return False
        ticket.passed.set_result(None)
        return True


class _WaitingReply:
    """A reply that begins when its model is there."""

    def __init__(self, gate: ModelGate, name: str, start: StartReply) -> None:
        self._gate = gate
        self._name = name
        self._start = start
        self._reply: Reply | None = None
        self._is_cancelled = False

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        """Yield progress until it begins, then its events."""
        try:
            for _ in range(_MAX_TRIES):
                told = ""
                async with contextlib.aclosing(self._gate.progress(self._name)) as progress:
                    async for detail in progress:
                        if self._is_cancelled:
                            break
                        if detail != told:
                            yield ModelProgress(detail)
                        told = detail
                if self._is_cancelled:
                    yield Finished(FinishReason.CANCELLED, Usage(0))
                    return
                try:
                    self._reply = await self._start()
                    break
                except ModelSwapError:
                    continue  # it went again while the request was prepared
            if self._reply is None:
                self._reply = await self._start()
        except Refusal as error:
            self._gate.on_refused(error)
            yield Failed(error)
            return
        async for event in self._reply:
            yield event

    def cancel(self) -> None:
        """Stop waiting, or computing."""
        self._is_cancelled = True
        if self._reply is not None:
            self._reply.cancel()
