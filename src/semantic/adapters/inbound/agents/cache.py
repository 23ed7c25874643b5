"""Cache endpoints: statistics, manual operations, and a stream of events."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, TypeAlias, assert_never

from fastapi import APIRouter, Query
from fastapi.responses import Response, StreamingResponse

from semantic.adapters.inbound.agents.cache_views import (
    BlocksOut,
    CacheOut,
    CollectOut,
    EvictOut,
    PrefetchOut,
    RunningList,
    RunningOut,
)
from semantic.adapters.inbound.agents.requests import AgentPath, Collect, Evict
from semantic.adapters.inbound.agents.views import Json, ReuseOut, StateOut, UsageOut
from semantic.adapters.inbound.http import streaming
from semantic.adapters.inbound.http.errors import refusals
from semantic.application.agents.cache_admin import CacheService
from semantic.application.agents.feed import (
    AgentChanged,
    EventFeed,
    FeedEvent,
    MissedEvents,
    ModelChanged,
    Subscription,
    TurnEnded,
    TurnStarted,
)
from semantic.domain.agents import Principal
from semantic.ports.inbound import CheckProgress
from semantic.ports.telemetry import CacheCounts

Sample: TypeAlias = tuple[dict[str, int], str]
_SAMPLE_S = 1.0
_QUIET_SAMPLES = 5
_PROGRESS_STEPS = 100


def _stream(description: str, example: str) -> dict[int | str, dict[str, Any]]:
    content = {"schema": {}, "example": example}
    return {200: {"description": description, "content": {"text/event-stream": content}}}


_VERIFY = _stream(
    "progress events, then a `done` event",
    'data: {"type":"done","checked":9,"total":9,"bad":0}\n\n',
)
_BLOCKS: dict[int | str, dict[str, Any]] = {
    200: {"description": "the blocks, one row each", "model": BlocksOut}
}
_EVENTS = _stream("events until the client disconnects", 'data: {"type":"cache","sealed":3}\n\n')


class CacheApi:
    """Endpoints for the KV cache. They may read a disk, so FastAPI runs them on its threads."""

    def __init__(
        self, cache: CacheService, feed: EventFeed, principal: Callable[[], Principal]
    ) -> None:
        self._cache = cache
        self._feed = feed
        self._principal = principal

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1", tags=["cache"])
        add, one = router.add_api_route, "/agents/{agent_id}"
        add(f"{one}/prefetch", self.prefetch, methods=["POST"], responses=refusals(400, 404, 503))
        add(f"{one}/evict", self.evict, methods=["POST"], responses=refusals(400, 404, 503))
        add("/running", self.running, methods=["GET"], responses=refusals(400))
        add("/cache", self.overview, methods=["GET"], responses=refusals(400, 503))
        add(
            "/cache/blocks",
            self.blocks,
            methods=["GET"],
            response_model=None,
            responses=_BLOCKS | refusals(400, 503),
        )
        add("/cache/gc", self.collect, methods=["POST"], responses=refusals(400, 503))
        stream: Json = {"response_class": StreamingResponse, "response_model": None}
        add(
            "/cache/verify",
            self.verify,
            methods=["POST"],
            responses=_VERIFY | refusals(400, 503),
            **stream,
        )
        add(
            "/events",
            self.events,
            methods=["GET"],
            responses=_EVENTS | refusals(400, 503),
            **stream,
        )
        return router

    def prefetch(self, agent_id: AgentPath) -> PrefetchOut:
        """Start reading an agent's KV cache from disk, so that its next turn starts at once."""
        num_parts = self._cache.prefetch(self._principal(), agent_id)
        return PrefetchOut(agent_id=agent_id, parts=num_parts)

    def evict(self, agent_id: AgentPath, body: Evict | None = None) -> EvictOut:
        """Evict an agent's KV cache from memory, or from disk too; shared blocks stay."""
        is_cold = body is not None and body.to == "cold"
        state = self._cache.evict(self._principal(), agent_id, is_cold=is_cold)
        return EvictOut(agent_id=agent_id, state=StateOut.of(state))

    def overview(self) -> CacheOut:
        """Return tiers, bytes, hit rates, sharing, queues and budgets."""
        return CacheOut.about(self._cache.overview())

    def running(self) -> RunningList:
        """List the waiting and running requests, with the progress of each."""
        turns = self._cache.running(self._principal())
        return RunningList(data=[RunningOut.of(turn) for turn in turns])

    def blocks(
        self,
        since: Annotated[
            int | None, Query(ge=0, le=2**62, description="`mark` of an earlier response")
        ] = None,
        after: Annotated[
            str, Query(pattern="^[0-9a-f]{0,64}$", description="`next` of the previous page")
        ] = "",
        limit: Annotated[int, Query(ge=1, le=20_000)] = 10_000,
    ) -> Response:
        """List all blocks, a page at a time; with `since`, only new, changed and removed ones."""
        if since is None:
            page = self._cache.blocks(after, limit)
        else:
            page = self._cache.changed_blocks(since, limit)
        return Response(BlocksOut.about(page).model_dump_json(), media_type="application/json")

    def collect(self, body: Collect | None = None) -> CollectOut:
        """Delete orphans: data that no agent references."""
        age_s = body.orphan_age_s if body else None
        return CollectOut(freed_bytes=self._cache.collect(age_s))

    def verify(self) -> StreamingResponse:
        """Check every file on disk and quarantine corrupt ones; streams its progress as events."""
        checking = self._cache.verify()
        # The first step raises errors before the stream begins.
        first = next(checking, CheckProgress(0, 0, 0))
        return streaming.EventStream(_progress(first, checking))

    async def events(self) -> StreamingResponse:
        """Stream events about agents, blocks and models as they happen.

        A client that reads too slowly misses events; a `{"type": "missed"}` event counts them.
        """
        principal = self._principal()
        sample = self._cache.sample if principal.is_admin else _no_sample
        return streaming.EventStream(_watch(self._feed.subscribe(principal.tenant), sample))


def _no_sample() -> Sample:
    """Return zero counts: a tenant may not see the totals of all tenants."""
    return CacheCounts().totals, "none"


async def _watch(subscription: Subscription, sample: Callable[[], Sample]) -> AsyncIterator[str]:
    counts, pressure = sample()
    num_quiet = 0
    try:
        nothing = dict.fromkeys(counts, 0)
        yield streaming.data({"type": "cache", **nothing, "pressure": pressure})
        while True:
            event = await subscription.next(_SAMPLE_S)
            if event is not None:
                yield streaming.data(_event_json(event))
            seen, level = sample()
            num_quiet += 1
            if (seen, level) != (counts, pressure):
                news = {name: count - counts[name] for name, count in seen.items()}
                yield streaming.data({"type": "cache", **news, "pressure": level})
                counts, pressure, num_quiet = seen, level, 0
            elif event is None and num_quiet >= _QUIET_SAMPLES:
                num_quiet = 0
                yield streaming.comment("quiet")
    except StopAsyncIteration:
        return
    finally:
        subscription.close()


async def _progress(first: CheckProgress, rest: Iterator[CheckProgress]) -> AsyncIterator[str]:
    step = max(1, first.num_total // _PROGRESS_STEPS)
    latest = first
    yield streaming.data({"type": "progress", **_checked(first)})
    while (progress := await asyncio.to_thread(next, rest, None)) is not None:
        latest = progress
        if progress.num_checked % step == 0:
            yield streaming.data({"type": "progress", **_checked(progress)})
    yield streaming.data({"type": "done", **_checked(latest)})


def _checked(progress: CheckProgress) -> Json:
    return {
        "checked": progress.num_checked,
        "total": progress.num_total,
        "bad": progress.num_bad,
    }


def _event_json(event: FeedEvent | MissedEvents) -> Json:
    match event:
        case AgentChanged():
            return {"type": f"agent.{event.action.value}", "agent_id": event.agent_id}
        case TurnStarted():
            named = {"agent_id": event.agent_id, "turn_id": event.turn_id}
            return {"type": "turn.started", **named, "prompt_tokens": event.prompt_tokens}
        case TurnEnded():
            return {
                "type": "turn.finished",
                "agent_id": event.agent_id,
                "turn_id": event.turn_id,
                "reason": event.reason,
                "usage": UsageOut.json_of(event.usage),
                "reuse": ReuseOut.json_of(event.reuse),
            }
        case ModelChanged(model, state, detail):
            return {"type": f"model.{state}", "model": model, "detail": detail}
        case MissedEvents():
            return {"type": "missed", "events": event.num_events}
        case _:
            assert_never(event)
