"""Endpoints of OpenAI's Responses API, thin over the inbound ports.

A response is a turn, and has the turn's id.
"""

import asyncio
import functools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from semantic.adapters.inbound.http.errors import error_response, refusals
from semantic.adapters.inbound.http.streaming import (
    EventStream,
    FrameLog,
    Json,
    ReplySet,
    answer,
    named_event,
    progress_comment,
    reply_or_stream,
)
from semantic.adapters.inbound.openai.fields import Hint
from semantic.adapters.inbound.responses.compaction import (
    CompactedBody,
    compacted,
    user_messages,
)
from semantic.adapters.inbound.responses.events import (
    PREFIX,
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseBody,
    ResponseWriter,
)
from semantic.adapters.inbound.responses.requests import ResponsesRequest
from semantic.adapters.inbound.responses.stored import (
    StoredItems,
    items_of,
    response_of,
    settings_of,
)
from semantic.adapters.inbound.wire import ReadImages, client_params, refuse, with_images
from semantic.application.agents.turn_log import PastTurns
from semantic.application.models.registry import ModelRegistry
from semantic.application.requests.compaction.summary import Summariser
from semantic.domain.agents import Principal
from semantic.domain.errors import GenerationTimeoutError, SemanticError
from semantic.domain.events import Failed, ModelProgress, PrefillProgress
from semantic.ports.inbound import InferencePort, PastTurn

_MAX_KEPT = 1024
_MAX_LOGS = 16  # a log takes some hundred bytes per token
_CANCEL_TIMEOUT_S = 30.0


class ResponseRun:
    """One response, running or ended. Use it on the event loop's thread.

    `log` has its events for clients that connect later; None if they are not kept.
    """

    def __init__(
        self,
        replies: ReplySet,
        writer: ResponseWriter,
        recent: "RecentResponses",
        *,
        is_stored: bool,
    ) -> None:
        self._replies = replies
        self._writer = writer
        self._recent = recent
        self._is_stored = is_stored
        self._failure: SemanticError | None = None
        self.log: FrameLog | None = None
        self.is_begun = asyncio.Event()
        self.is_ended = asyncio.Event()

    @property
    def response(self) -> Json:
        made = self._writer.response
        output = made.get("output")
        return {**made, "output": list(output) if isinstance(output, list) else []}

    async def frames(self) -> AsyncIterator[str]:
        """Yield it as server-sent events; a slow reader does not delay the response."""
        log = FrameLog(self._replies.heartbeat_s)
        self._recent.keep_running(self, log)
        async for frame in log.read():
            yield frame

    async def collect(self) -> Json:
        """Wait for the complete response; raises `SemanticError` if it failed."""
        await self.write(None)
        if self._failure is not None:
            raise self._failure
        return self.response

    async def write(self, log: FrameLog | None) -> None:
        """Run to the end and append the events to `log`.

        A failure is not raised: the response and its events report it.
        """
        try:
            async for _, event in self._replies.events():
                if isinstance(event, PrefillProgress | ModelProgress) and log is not None:
                    log.progress = progress_comment(event)
                if isinstance(event, Failed):
                    self._failure = event.error
                for written in self._writer.feed(event):
                    self._begin()
                    if log is not None:
                        log.append(named_event(str(written["type"]), written))
        finally:
            self._replies = ReplySet(())  # releases the rest of the ended reply
            self.is_ended.set()
            self._recent.end_run(self, is_kept=self._is_stored)
            if log is not None:
                log.end()

    async def cancel(self) -> None:
        """Cancel it and wait for its end; `GenerationTimeoutError` after `_CANCEL_TIMEOUT_S`."""
        self._replies.cancel()
        try:
            async with asyncio.timeout(_CANCEL_TIMEOUT_S):
                await self.is_ended.wait()
        except TimeoutError as error:
            raise GenerationTimeoutError("the response did not stop in time.") from error

    def _begin(self) -> None:
        if not self.is_begun.is_set():
            self._recent.add_run(self)
            self.is_begun.set()


class RecentResponses:
    """The responses of one tenant that are running or have ended recently."""

    def __init__(self) -> None:
        self._runs: dict[str, ResponseRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add_run(self, run: ResponseRun) -> None:
        self._runs[str(run.response["id"])] = run

    def end_run(self, run: ResponseRun, *, is_kept: bool) -> None:
        """Handle the end of a response; keep it if `is_kept` and it has a final status.

        Of the responses that have ended, the oldest beyond `_MAX_KEPT` are dropped, and the oldest
        logs beyond `_MAX_LOGS`.
        """
        name = str(run.response.get("id"))
        self._runs.pop(name, None)
        if not is_kept or run.response.get("status") in (None, "in_progress"):
            return
        self._runs[name] = run
        ended = [name for name, known in self._runs.items() if known.is_ended.is_set()]
        for name in ended[:-_MAX_KEPT]:
            del self._runs[name]
        logged = [known for known in self._runs.values() if known.is_ended.is_set() and known.log]
        for known in logged[:-_MAX_LOGS]:
            known.log = None

    def keep_running(self, run: ResponseRun, log: FrameLog | None) -> None:
        """Run a response in its own task, whether or not its events are read from `log`."""
        task = asyncio.create_task(run.write(log))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def find_run(self, response_id: str) -> ResponseRun | None:
        return self._runs.get(response_id)

    def drop_ended(self, response_id: str) -> bool:
        """Drop a response that has ended; return False if there is none."""
        return self._runs.pop(response_id, None) is not None


_StartingAfter = Annotated[
    int | None, Query(ge=0, description="`sequence_number` of the last event seen")
]


class ResponsesApi:
    """Endpoints under `/v1/responses`."""

    def __init__(
        self,
        inference: InferencePort,
        models: ModelRegistry,
        turns: PastTurns,
        principal: Callable[[], Principal],
        summariser: Summariser,
        read_images: ReadImages,
    ) -> None:
        self._inference = inference
        self._models = models
        self._turns = turns
        self._principal = principal
        self._summariser = summariser
        self._read_images = read_images
        self._recent_by_tenant: defaultdict[str, RecentResponses] = defaultdict(RecentResponses)

    def router(self) -> APIRouter:
        errors = refusals("4XX", 503, 504)
        router = APIRouter(prefix="/v1/responses", tags=["openai"], responses=errors)
        router.add_api_route("/input_tokens", self.count, methods=["POST"])
        router.add_api_route("/compact", self.compact, methods=["POST"])
        add, one = functools.partial(router.add_api_route, response_model=None), "/{response_id}"
        add(f"{one}/input_items", self.input_items, methods=["GET"], responses=_shown(ItemList))
        add("", self.create, methods=["POST"], responses=reply_or_stream(ResponseBody))
        add(one, self.retrieve, methods=["GET"], responses=reply_or_stream(ResponseBody))
        add(one, self.delete, methods=["DELETE"], responses=_shown(DeletedResponse))
        add(f"{one}/cancel", self.cancel, methods=["POST"], responses=_shown(ResponseBody))
        return router

    async def create(self, body: ResponsesRequest, http: Request, hint: Hint) -> Response:
        """Create a response: whole, as a stream of events, or in the background."""
        if hint.is_ephemeral:
            body = body.model_copy(update={"store": False})
        past = await self._context(body)
        with client_params(body.client_param, past):
            request = await with_images(body.to_domain(hint, past), self._read_images)
            replies = ReplySet([await self._inference.start(request, self._principal())])
        writer = ResponseWriter(
            settings_of(body),
            wants_handles=body.wants_handles,
            has_diagnostics=body.comparison_id is not None,
            is_explained=hint.comparison is not None,
        )
        run = ResponseRun(replies, writer, self._recent, is_stored=body.is_stored)
        if body.background:
            return await _in_background(run, self._recent, is_streamed=bool(body.stream))
        if body.stream:
            return EventStream(run.frames(), replies)
        return await answer(http, run.collect(), replies)

    async def retrieve(
        self, response_id: str, stream: bool = False, starting_after: _StartingAfter = None
    ) -> Response:
        """Return a stored or running response, or its events if it streams in the background."""
        run = self._recent.find_run(response_id)
        if stream and run is not None and run.log is not None:
            return EventStream(run.log.read(0 if starting_after is None else starting_after + 1))
        response = run.response if run else await self._logged(response_id)
        refuse(
            stream and response,
            "stream",
            "events are kept only of recent responses created with background and stream.",
        )
        return JSONResponse(response) if response else _missing(response_id)

    async def cancel(self, response_id: str) -> Response:
        """Cancel a response; one that has ended is returned unchanged."""
        run = self._recent.find_run(response_id)
        if run is None:
            return await self.retrieve(response_id)
        await run.cancel()
        return JSONResponse(run.response)

    async def delete(self, response_id: str) -> Response:
        """Remove a response; the KV cache stays."""
        run = self._recent.find_run(response_id)
        if run is not None:
            await run.cancel()
        is_dropped = self._recent.drop_ended(response_id)
        name = response_id.removeprefix(PREFIX)
        is_removed = await asyncio.to_thread(self._turns.forget_text, name, self._principal())
        if not is_dropped and not is_removed:
            return _missing(response_id)
        deleted: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
        return JSONResponse(deleted)

    async def count(self, body: ResponsesRequest, hint: Hint) -> InputTokens:
        """Count the prompt tokens that the same request would have."""
        past = await self._context(body)
        with client_params(body.client_param, past):
            request = await with_images(body.to_domain(hint, past), self._read_images)
            number = await self._inference.count_tokens(request, self._principal())
        return {"object": "response.input_tokens", "input_tokens": number}

    async def compact(self, body: ResponsesRequest, hint: Hint) -> CompactedBody:
        """Replace a conversation by its user messages and a summary, to send as input later.

        The summary reuses the KV cache of the conversation. What the next request begins with is
        computed in the background.
        """
        past = await self._context(body)
        with client_params(body.client_param, past):
            request = await with_images(body.to_domain(hint, past), self._read_images)
            who, limit = self._principal(), request.stop.max_tokens
            usual = self._summariser.policy
            policy = replace(usual, sampling=request.sampling, max_tokens=limit or usual.max_tokens)
            summary = await self._summariser.summarise(request, who, policy)
        system = [one for one in request.messages if one.is_instruction]
        kept = user_messages(request.messages)
        if not hint.is_ephemeral:
            self._summariser.expect(request, (*system, *kept, summary.message), who)
        return compacted(kept, summary)

    async def input_items(
        self,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List the input items of a stored response, with the conversation before it."""
        past = await self._past(response_id)
        if past is None:
            return _missing(response_id)
        items = items_of(response_id.removeprefix(PREFIX), past.messages[:-1])
        return JSONResponse(_page(items if order == "asc" else items[::-1], after, limit))

    # -- helpers --------------------------------------------------------------------------------

    @property
    def _recent(self) -> RecentResponses:
        return self._recent_by_tenant[self._principal().tenant]

    async def _context(self, body: ResponsesRequest) -> PastTurn | None:
        """Resolve the references in the body, and return the turn that it continues."""
        if body.has_references:
            stored = StoredItems(self._turns, self._principal())
            await asyncio.to_thread(body.resolve_references, stored.find_item)
        return await self._previous(body)

    async def _previous(self, body: ResponsesRequest) -> PastTurn | None:
        name = body.previous_response_id
        if not name:
            return None
        past = await self._past(name)
        known = self._recent.find_run(name) if past is None else None
        if known is not None:
            why = f"response {name!r} is {known.response['status']} and cannot be continued."
        elif past is None:
            why = f"there is no stored response {name!r}."
        else:
            why = f"a response before {name!r} was deleted."
        refuse(past is None or not past.is_whole, "previous_response_id", why)
        return past

    async def _logged(self, response_id: str) -> Json | None:
        past = await self._past(response_id)
        if past is None:
            return None
        served = self._models.current().id
        return response_of(response_id.removeprefix(PREFIX), past, served)

    async def _past(self, response_id: str) -> PastTurn | None:
        name = response_id.removeprefix(PREFIX)
        return await asyncio.to_thread(self._turns.find_turn, name, self._principal())


def _shown(body: Any) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": body}}


def _page(items: list[Json], after: str | None, limit: int) -> ItemList:
    names = [str(item["id"]) for item in items]
    refuse(after is not None and after not in names, "after", "there is no such item.")
    start = names.index(after) + 1 if after else 0
    data = items[start : start + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": str(data[0]["id"]) if data else None,
        "last_id": str(data[-1]["id"]) if data else None,
        "has_more": start + limit < len(items),
    }


async def _in_background(
    run: ResponseRun, recent: RecentResponses, *, is_streamed: bool
) -> Response:
    """Run a response to its end even if the client disconnects."""
    log = run.log = FrameLog() if is_streamed else None
    recent.keep_running(run, log)
    if log is not None:
        return EventStream(log.read())
    await run.is_begun.wait()
    return JSONResponse(run.response)


def _missing(response_id: str) -> Response:
    message = f"there is no stored response {response_id!r}."
    return error_response(404, message, "response_not_found", param="response_id")
