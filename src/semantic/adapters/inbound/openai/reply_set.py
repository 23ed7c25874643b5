"""Several replies to one request, read as one."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from semantic.adapters.inbound.http import sse
from semantic.adapters.inbound.http.disconnects import (
    CLIENT_LEFT,
    Cancellable,
    unless_disconnected,
)
from semantic.domain.agents import Principal
from semantic.domain.chat import ChatRequest, Event, PrefillProgress
from semantic.ports.inbound import InferencePort, Reply

Json: TypeAlias = dict[str, object]


class ReplySet:
    """Replies that are read together and end together. Used on the event loop's thread."""

    def __init__(self, replies: Sequence[Reply], heartbeat_s: float = sse.HEARTBEAT_S) -> None:
        self._replies = tuple(replies)
        self._heartbeat_s = heartbeat_s

    def __len__(self) -> int:
        return len(self._replies)

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield the events of all replies with the number of the reply."""
        async for item in self.events_and_heartbeats():
            if not isinstance(item, sse.Heartbeat):
                yield item

    async def events_and_heartbeats(
        self,
    ) -> AsyncGenerator[tuple[int, Event] | sse.Heartbeat, None]:
        """Yield the same, and a `Heartbeat` whenever nothing came for a while.

        Progress is no sign of life: it is not written out, and may come for minutes.
        """
        streams = [aiter(reply) for reply in self._replies]
        pending = {_next_of(stream): index for index, stream in enumerate(streams)}
        now = asyncio.get_running_loop().time
        due = now() + self._heartbeat_s
        try:
            while pending:
                done, _ = await asyncio.wait(
                    pending, timeout=max(0.0, due - now()), return_when=asyncio.FIRST_COMPLETED
                )
                for task in sorted(done, key=pending.__getitem__):
                    index = pending.pop(task)
                    event = _result_of(task)
                    if event is None:
                        continue
                    pending[_next_of(streams[index])] = index
                    if not isinstance(event, PrefillProgress):
                        due = now() + self._heartbeat_s
                    yield index, event
                if pending and now() >= due:
                    due = now() + self._heartbeat_s
                    yield sse.Heartbeat()
        finally:
            for task in pending:
                task.cancel()
            self.cancel()

    def cancel(self) -> None:
        """Stop computing those that have not ended."""
        for reply in self._replies:
            reply.cancel()


async def with_heartbeats(
    reply: Reply, interval_s: float = sse.HEARTBEAT_S
) -> AsyncGenerator[Event | sse.Heartbeat, None]:
    """Yield one reply's events, and a `Heartbeat` whenever nothing came for a while."""
    beats = ReplySet([reply], interval_s).events_and_heartbeats()
    async with contextlib.aclosing(beats):
        async for item in beats:
            yield item if isinstance(item, sse.Heartbeat) else item[1]


def _next_of(stream: AsyncIterator[Event]) -> "asyncio.Task[Event]":
    async def step() -> Event:
        return await anext(stream)

    return asyncio.create_task(step())


def _result_of(task: "asyncio.Task[Event]") -> Event | None:
    """The event a stream gave; None at its end."""
    try:
        return task.result()
    except StopAsyncIteration:
        return None


def times(request: ChatRequest, num_replies: int) -> list[ChatRequest]:
    """Repeat a request; each gets a seed of its own, the first the one that was given."""
    seed = request.sampling.seed
    if seed is None:
        return [request] * num_replies
    seeds = [(seed + index + 2**63) % 2**64 - 2**63 for index in range(1, num_replies)]
    others = [replace(request, sampling=replace(request.sampling, seed=seed)) for seed in seeds]
    return [request, *others]


async def start_all(
    inference: InferencePort, requests: Iterable[ChatRequest], principal: Principal
) -> ReplySet:
    """Start requests; if one is refused or fails to start, none runs.

    Raises:
        SemanticError: see `InferencePort.start`.
    """
    replies: list[Reply] = []
    try:
        for request in requests:
            replies.append(await inference.start(request, principal))  # noqa: PERF401
    except BaseException:
        ReplySet(replies).cancel()
        raise
    return ReplySet(replies)


async def answer(
    http: Request, body: Coroutine[None, None, Json], replies: Cancellable
) -> Response:
    """Answer with a body once it is made, unless the client goes away first."""
    try:
        made = await unless_disconnected(body, http)
    finally:
        replies.cancel()
    return Response(status_code=CLIENT_LEFT) if made is None else JSONResponse(made)
