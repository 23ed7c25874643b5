"""The agent API: create, fork, rewind and delete agents, and generate replies.

It is thin over `StatefulInferencePort` and the services of `application/agents`.
"""

import asyncio
import functools
import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from semantic.adapters.inbound.agents.generate import GENERATED, ReplyWriter
from semantic.adapters.inbound.agents.requests import (
    AgentId,
    AgentPath,
    Compact,
    CreateAgent,
    Fork,
    Generate,
    ListAgents,
    PatchAgent,
    Rewind,
    Text,
    new_agent,
)
from semantic.adapters.inbound.agents.views import (
    AgentList,
    AgentOut,
    CompactedOut,
    ComparisonOut,
    ExplanationOut,
    ImportedOut,
    Timeline,
    TimelineEntry,
    TurnList,
    TurnOut,
)
from semantic.adapters.inbound.http.errors import refusals
from semantic.adapters.inbound.http.streaming import (
    CLIENT_LEFT,
    EventStream,
    ReplySet,
    answer,
    unless_disconnected,
)
from semantic.adapters.inbound.http.uploads import uploaded
from semantic.adapters.inbound.wire import (
    EPHEMERAL,
    EXPLAIN,
    ReadImages,
    client_params,
    comparison_of,
    is_ephemeral,
    with_images,
)
from semantic.application.agents.service import AgentService
from semantic.application.agents.transfer import AgentTransfer
from semantic.application.requests.compaction.successor import AgentCompaction
from semantic.domain.agents import Principal, Turn
from semantic.domain.errors import AgentNotFoundError
from semantic.ports.inbound import AgentPage, StatefulInferencePort

_MAX_ID = 128
MEDIA_TYPE = "application/x-tar"
IMPORT_PATH = "/v1/agents/import"
TAR_CONTENT: dict[str, Any] = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}


class AgentApi:
    """Endpoints under `/v1/agents`.

    Those that may read a disk are not coroutines, so that FastAPI runs them on its threads.
    """

    def __init__(
        self,
        inference: StatefulInferencePort,
        agents: AgentService,
        transfer: AgentTransfer,
        compaction: AgentCompaction,
        principal: Callable[[], Principal],
        read_images: ReadImages,
    ) -> None:
        self._inference = inference
        self._agents = agents
        self._transfer = transfer
        self._compaction = compaction
        self._principal = principal
        self._read_images = read_images

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/agents", tags=["agents"])
        add, one = router.add_api_route, "/{agent_id}"
        add_new = functools.partial(add, methods=["POST"], status_code=201)
        made: dict[int | str, dict[str, Any]] = {
            200: {"model": AgentOut, "description": "the agent already exists with these settings"}
        }
        # Added before the paths with an agent's id, which would match `import` too.
        add_new(
            IMPORT_PATH.removeprefix(router.prefix),
            self.import_file,
            responses=refusals(400, 409, 413, 429, 503),
            openapi_extra={"requestBody": {"required": True, "content": TAR_CONTENT}},
        )
        create = made | refusals(400, 409, 429, 503)
        add_new("", self.create, responses=create)
        add("", self.page, methods=["GET"], responses=refusals(400))
        add(one, self.get, methods=["GET"], responses=refusals(400, 404))
        add(one, self.patch, methods=["PATCH"], responses=refusals(400, 404, 429, 503))
        add(
            one,
            self.delete,
            methods=["DELETE"],
            status_code=204,
            response_class=Response,
            responses=refusals(400, 404, 503),
        )
        add_new(f"{one}/fork", self.fork, responses=refusals(400, 404, 409, 429, 503))
        add(
            f"{one}/generate",
            self.generate,
            methods=["POST"],
            response_model=None,
            responses={200: GENERATED, **refusals(400, 404, 429, 503, 504)},
        )
        add_new(
            f"{one}/compact",
            self.compact,
            response_model=CompactedOut,
            responses=refusals(400, 404, 409, 429, 503, 504),
        )
        add(
            f"{one}/export",
            self.export,
            methods=["GET"],
            response_class=StreamingResponse,
            response_model=None,
            responses={
                200: {"description": "the file", "content": TAR_CONTENT},
                **refusals(400, 404, 503),
            },
        )
        add(f"{one}/rewind", self.rewind, methods=["POST"], responses=refusals(400, 404, 503))
        add(f"{one}/turns", self.turns, methods=["GET"], responses=refusals(400, 404))
        add(f"{one}/timeline", self.timeline, methods=["GET"], responses=refusals(400, 404))
        add(f"{one}/compare", self.compare, methods=["GET"], responses=refusals(400, 404))
        add(f"{one}/explain", self.explain, methods=["GET"], responses=refusals(400, 404))
        return router

    def create(self, body: CreateAgent, response: Response) -> AgentOut:
        """Create an agent. The same id and settings again return the existing one."""
        agent_id = body.id or f"agent-{secrets.token_hex(6)}"
        agent = new_agent(body, self._principal().tenant, agent_id, time.time())
        view, is_new = self._agents.create(agent)
        if not is_new:
            response.status_code = 200
        return AgentOut.of(view)

    def page(self, query: Annotated[ListAgents, Query()]) -> AgentList:
        """List agents, a page at a time."""
        return AgentList.of(self._agents.page(self._principal(), query.to_domain()))

    def get(self, agent_id: AgentPath) -> AgentOut:
        """Return an agent, and where its KV cache is."""
        return AgentOut.of(self._agents.get(self._principal(), agent_id))

    def patch(self, agent_id: AgentPath, body: PatchAgent) -> AgentOut:
        """Change settings; absent fields stay. A new system prompt applies from the next turn."""
        return AgentOut.of(self._agents.update(self._principal(), agent_id, body.apply))

    def delete(self, agent_id: AgentPath) -> None:
        """Delete an agent and cancel its running turn. Forks keep the turns they share."""
        self._agents.delete(self._principal(), agent_id)

    def fork(self, agent_id: AgentPath, body: Fork) -> AgentList:
        """Fork an agent once or many times, all or none; no KV cache is copied."""
        count = body.n or 1
        ids = body.ids or [_random_id(agent_id) for _ in range(count)]
        views = self._agents.fork(self._principal(), agent_id, ids, body.turn_id)
        return AgentList.of(AgentPage(views, len(views), None))

    def rewind(self, agent_id: AgentPath, body: Rewind) -> AgentOut:
        """Go back to an earlier turn, or undo that; cancels a running turn."""
        return AgentOut.of(self._agents.rewind(self._principal(), agent_id, body.turn_id))

    def turns(
        self,
        agent_id: AgentPath,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        before: Annotated[Text | None, Query(description="`next` of the previous page")] = None,
    ) -> TurnList:
        """List an agent's turns, latest first."""
        turns = self._agents.turns(self._principal(), agent_id, before, limit)
        has_more = bool(turns) and turns[-1].parent is not None
        next_page = turns[-1].id if has_more else None
        return TurnList(data=[TurnOut.of(turn) for turn in turns], next=next_page)

    def timeline(
        self, agent_id: AgentPath, limit: Annotated[int, Query(ge=1, le=100)] = 30
    ) -> Timeline:
        """List what each turn reused and computed, and why, latest first.

        Includes turns from which a later prompt diverged, for as long as they are stored.
        """
        turns = self._agents.timeline(self._principal(), agent_id, limit)
        return Timeline(data=[TimelineEntry.of(turn) for turn in turns])

    def compare(
        self,
        agent_id: AgentPath,
        other: Annotated[AgentId, Query(alias="with", description="the agent to compare with")],
        limit: Annotated[int, Query(ge=1, le=100, description="turns of each agent")] = 50,
    ) -> ComparisonOut:
        """Compare two agents: the turns that they share, and those of each after that."""
        found = self._agents.compare(self._principal(), agent_id, other, limit)
        return ComparisonOut.between(agent_id, other, found)

    def explain(
        self,
        agent_id: AgentPath,
        turn_id: Annotated[Text | None, Query(description="absent: the latest turn")] = None,
    ) -> ExplanationOut:
        """Explain what a turn reused, where its prompt diverged, and what the next turn reuses."""
        explanation = self._agents.explain(self._principal(), agent_id, turn_id)
        return ExplanationOut.about(agent_id, explanation)

    # -- turns ----------------------------------------------------------------------------------

    async def generate(
        self,
        agent_id: AgentPath,
        body: Generate,
        http: Request,
        x_agent_ephemeral: Annotated[str | None, Header(description=EPHEMERAL)] = None,
        x_cache_explain: Annotated[str | None, Header(description=EXPLAIN)] = None,
    ) -> Response:
        """Answer new messages in the agent's conversation, whole or as a stream.

        Turns of one agent run in the order in which they were requested.
        """
        ask = body.to_domain(
            is_ephemeral=is_ephemeral(x_agent_ephemeral), comparison=comparison_of(x_cache_explain)
        )
        with client_params(body.client_param):
            ask = await with_images(ask, self._read_images)
        starting = self._inference.generate(self._principal(), agent_id, ask)
        with client_params(body.turn_param):
            reply = await unless_disconnected(starting, http)
        if reply is None:
            return Response(status_code=CLIENT_LEFT)
        writer = ReplyWriter(agent_id, functools.partial(self._turn, agent_id))
        replies = ReplySet([reply])
        if body.stream:
            return EventStream(replies.frames(writer.write), replies)
        return await answer(http, writer.collect(replies), replies)

    async def compact(self, agent_id: AgentPath, body: Compact, http: Request) -> Any:
        """Create a branch that continues from a summary and its latest turns, already computed.

        The agent itself does not change. Compaction waits for its running turn, and turns that
        come later wait for the compaction.
        """
        compacting = self._compaction.compact(self._principal(), agent_id, body.to_domain())
        made = await unless_disconnected(compacting, http)
        return Response(status_code=CLIENT_LEFT) if made is None else CompactedOut.of(made)

    def _turn(self, agent_id: str, wanted: str) -> Turn | None:
        try:
            latest = self._agents.turns(self._principal(), agent_id, None, 1)
        except AgentNotFoundError:
            return None
        return next((turn for turn in latest if turn.id == wanted), None)

    # -- files ----------------------------------------------------------------------------------

    def export(self, agent_id: AgentPath) -> StreamingResponse:
        """Export settings, turns and the KV cache as a tar archive with checksums and signature."""
        pieces = self._transfer.export(self._principal(), agent_id)
        headers = {"content-disposition": f'attachment; filename="{agent_id}.tar"'}
        return StreamingResponse(pieces, media_type=MEDIA_TYPE, headers=headers)

    async def import_file(
        self,
        http: Request,
        id: Annotated[AgentId | None, Query(description="the agent's new name")] = None,  # noqa: A002
        messages_only: Annotated[bool, Query(description="leave the KV cache out")] = False,
    ) -> ImportedOut:
        """Import an agent from an exported file, which is checked before anything changes.

        The KV cache of another model is refused; its messages can still be imported. If neither
        this server nor a trusted one signed the file, its KV cache is left out and the next turn
        recomputes it; `import_state` says which is the case.
        """
        with self._transfer.admit_import(self._principal()):
            async with uploaded(http) as open_file:
                imported = await asyncio.to_thread(
                    lambda: self._transfer.import_agent(
                        self._principal(), open_file, id, is_messages_only=messages_only
                    )
                )
        view = await asyncio.to_thread(self._agents.get, self._principal(), imported.agent.id)
        return ImportedOut(
            **dict(AgentOut.of(view)),
            import_state="imported" if imported.has_state else "recomputed",
            import_reason=imported.reason,
        )


def _random_id(agent_id: str) -> str:
    suffix = f"-{secrets.token_hex(4)}"
    return f"{agent_id[: _MAX_ID - len(suffix)]}{suffix}"
