"""Turns a request into a job: render, identify, constrain and check, in separate threads."""

import asyncio
import contextlib
import contextvars
import functools
import logging
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any, ParamSpec, TypeVar

from semantic.application.agents.ledger import AgentLedger
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import LoadedModel
from semantic.application.engine.request import Job, monotonic
from semantic.application.prompt.fill_in import fill_in_ends, raw_tokens
from semantic.application.prompt.images import ImagePreparer
from semantic.application.prompt.renderer import FrozenDates, Prompt, Renderer
from semantic.application.prompt.replay import ReplayStore, TenantReplays
from semantic.application.requests.identity import Claim, Identities, Identity
from semantic.application.requests.rewriting.image_text import ImageTexts
from semantic.application.requests.thinking_budget import ThinkingBudget, ThinkingCounter
from semantic.domain.agents import Agent, Principal
from semantic.domain.blocks import BlockName
from semantic.domain.chat import ChatRequest, Thinking, images_in, require_whole_characters
from semantic.domain.errors import (
    ContextLengthError,
    GenerationTimeoutError,
    InvalidRequestError,
    OverloadedError,
    StateQuotaError,
)
from semantic.domain.reply_format import ReplyFormat, ReplyShape
from semantic.domain.sampling import DEFAULT_REPLY_TOKENS, SamplingParams, StopRules
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.domain.volatile.rules import AppliedRepairs
from semantic.ports.backend import ModelBackendPort
from semantic.ports.text import TokenConstraint

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")

NUM_THREADS = 8
_TAIL_TOKENS = 32  # enough to contain a thinking marker at the end of a prompt


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready to be queued.

    Attributes:
        day: The date shown in the prompt; None if it shows none.
        repairs: What rules changed before it was rendered.
    """

    request: ChatRequest
    principal: Principal
    model: LoadedModel
    job: Job
    shape: ReplyShape
    identity: Identity
    prompt: Prompt
    thinking: ThinkingCounter | None = None
    day: date | None = None
    repairs: AppliedRepairs = field(default_factory=AppliedRepairs)


class Preparation:
    """Turns requests into jobs. Thread-safe; a long prompt can take long.

    Attributes:
        image_texts: Shows images to models that accept only text.
    """

    def __init__(
        self,
        device: DeviceThread,
        agents: AgentLedger,
        identities: Identities,
        replays: ReplayStore,
        *,
        request_timeout_s: float,
    ) -> None:
        self._device = device
        self._agents = agents
        self._identities = identities
        self._replays = replays
        self._request_timeout_s = request_timeout_s
        self._renderer: Renderer | None = None
        self._past = PastConversations(agents)
        self._dates = FrozenDates(replays)
        self._images = ImagePreparer(agents.image_file)
        self.image_texts = ImageTexts(agents.image_file)

    def prepare(
        self, request: ChatRequest, principal: Principal, model: LoadedModel, claim: Claim
    ) -> PreparedRequest:
        """Render, identify, constrain and check a request; claims its agent, writes nothing.

        Raises:
            InvalidRequestError: the model does not support a part of the request, or the output
                format cannot be enforced.
            ContextLengthError: the prompt leaves too little room for a reply.
            QuotaExceededError: the agent's turns or the tenant's disk quota are used up.
            StateQuotaError: the prompt's KV cache exceeds the agent's quota.
        """
        is_kept = not request.agent.is_ephemeral
        if is_kept:
            self._agents.check_storage(principal.tenant)
        root, texts = model.root(principal), model.text_root(principal)
        replays = TenantReplays(texts, self._replays, is_used=is_kept)
        prompt, day = self._render(request, principal, model, replays)
        identity = self._identities.identify(
            principal.tenant, request.agent, prompt.tokens, prompt.num_head, claim
        )
        agent = identity.fork or self._agents.find_agent(principal.tenant, identity.agent_id)
        max_kept = self.max_kept(agent, len(prompt.tokens), model) if agent else None
        visible, shape = _shape(request, prompt, model)
        max_tokens = self._max_tokens(request, len(prompt.tokens), model)
        constraint = _constraint(shape, max_tokens, request.beginning, model)
        constraint = _within_budget(request, shape, model, visible, constraint)
        job = Job(
            id=secrets.token_hex(12),
            agent=f"{principal.tenant}/{identity.agent_id}",
            root=root,
            tokens=prompt.tokens,
            sampling=_seeded(request.sampling.with_defaults(model.defaults)),
            stop=_stop_rules(request, model),
            max_tokens=max_tokens,
            boundaries=block_ends(prompt, model.backend.spec),
            service_class=request.service_class,
            weight=principal.weight,
            deadline=monotonic() + self._request_timeout_s,
            constraint=constraint,
            visible=visible,
            max_kept=max_kept,
            prediction=_predicted(request, model),
            past=self._past.of(principal.tenant, root, model) if is_kept else (),
            spelled=_spelled(request, model),
            is_prompt_scored=request.raw_prompt is not None and request.raw_prompt.is_scored,
            is_ephemeral=not is_kept,
            images=prompt.images,
        )
        return PreparedRequest(
            request,
            principal,
            model,
            job,
            shape,
            identity,
            prompt,
            thinking=_thinking_counter(shape, model, visible),
            day=day,
        )

    def render(self, request: ChatRequest, principal: Principal, model: LoadedModel) -> Prompt:
        """Return the prompt that `prepare` would render; changes nothing."""
        return self.render_dated(request, principal, model)[0]

    def render_dated(
        self, request: ChatRequest, principal: Principal, model: LoadedModel
    ) -> tuple[Prompt, date | None]:
        """Return that prompt, and the date it shows."""
        replays = TenantReplays(model.text_root(principal), self._replays, is_used=False)
        return self._render(request, principal, model, replays)

    def keep_day(
        self, request: ChatRequest, principal: Principal, model: LoadedModel, day: date
    ) -> None:
        """Store the date shown in a prompt, so that later prompts of the agent show the same."""
        self._dates.keep(model.text_root(principal), request.without_beginning, day)

    def _render(
        self,
        request: ChatRequest,
        principal: Principal,
        model: LoadedModel,
        replays: TenantReplays,
    ) -> tuple[Prompt, date | None]:
        if (raw := request.raw_prompt) is not None:
            num_top = request.sampling.top_logprobs or 0
            return Prompt(raw_tokens(raw, num_top, model.tokenizer)), None
        if not request.is_continued:
            return self._render_chat(request, principal, model, replays)
        beginning = request.beginning
        require_whole_characters(beginning, param=f"messages[{len(request.messages) - 1}]")
        # The client has given the beginning of the answer, so thinking is over.
        asked = replace(request.without_beginning, thinking=Thinking(is_enabled=False))
        prompt, day = self._render_chat(asked, principal, model, replays)
        visible = model.reply_format.visible_ids(model.tokenizer.special_ids, has_tools=False)
        opening = model.reply_format.opening(_tail(prompt, model, visible))
        # Encoded separately from the prompt, as the model would have generated it.
        written = model.tokenizer.encode_plain(beginning)
        return prompt.followed_by((*model.tokenizer.encode(opening), *written)), day

    def _render_chat(
        self,
        request: ChatRequest,
        principal: Principal,
        model: LoadedModel,
        replays: TenantReplays,
    ) -> tuple[Prompt, date | None]:
        renderer, vision = self._renderer, model.vision
        if renderer is None or renderer.tokenizer is not model.tokenizer:
            marker = vision.marker_id if vision else None
            renderer = self._renderer = Renderer(model.tokenizer, marker)
        images = list(images_in(request.messages))
        tenant, is_kept = principal.tenant, not request.agent.is_ephemeral
        if not is_kept:
            renderer = renderer.with_empty_caches()
        today = self._dates.of(replays.root, request) if renderer.traits.shows_date else None
        if images and vision:
            max_tokens = model.backend.spec.max_context
            prepared = self._images.prepare(
                images, tenant, vision, is_kept=is_kept, max_tokens=max_tokens
            )
        else:
            prepared = ()
            if images:
                request = self.image_texts.replace_images(request, tenant, model.id)
        try:
            return renderer.render(request, today=today, replays=replays, images=prepared), today
        except RecursionError:
            raise InvalidRequestError("messages or tools are nested too deeply.") from None

    def max_kept(self, agent: Agent, num_prompt: int, model: LoadedModel) -> int | None:
        """Return how many tokens of KV cache the agent may keep; raises if the turn exceeds it."""
        self._agents.check_quota(agent)
        max_bytes = agent.quota.max_bytes
        if max_bytes is None:
            return None
        spec, bits = model.backend.spec, model.backend.traits.state_bits
        # Counted by tokens, wherever their KV cache is stored, so eviction does not change it.
        limit = spec.tokens_within(max_bytes, bits)
        if (nbytes := spec.bytes_per_context(num_prompt, bits)) > max_bytes:
            raise StateQuotaError(
                f"KV cache quota of agent {agent.id} exceeded: the conversation takes {nbytes} "
                f"bytes of {max_bytes}; rewind the agent, or raise its quota.",
                num_prompt=num_prompt,
                limit=limit,
            )
        return limit

    def _max_tokens(self, request: ChatRequest, num_prompt: int, model: LoadedModel) -> int:
        limit, limited_by = model.backend.spec.max_context, "the model's context"
        if self._device.longest_sequence < limit:
            limit, limited_by = self._device.longest_sequence, "this server's memory"
        if request.max_prompt is not None and num_prompt > request.max_prompt:
            raise ContextLengthError(
                num_prompt=num_prompt,
                limit=request.max_prompt,
                limited_by="the request's own limit",
                param="messages",
            )
        going_on, room = request.agent.continuation, limit - num_prompt
        min_room = 0 if request.stop.max_tokens == 0 else 1
        if room < (going_on.min_room if going_on else min_room):
            raise ContextLengthError(
                num_prompt=num_prompt, limit=limit, limited_by=limited_by, param="messages"
            )
        # Clients often request more than the context allows, so the value is cut, not refused.
        default = self._device.limits.default_max_tokens or model.defaults.max_tokens
        wanted = request.stop.max_tokens
        return min(default or DEFAULT_REPLY_TOKENS if wanted is None else wanted, room)


class PastConversations:
    """Conversations from before the model was loaded, as a source of draft tokens.

    Each tenant's conversations are returned once per loaded model. Thread-safe; reads the ledger.
    """

    _MAX_AGENTS = 16
    _MAX_TOKENS = 8192  # last tokens of each conversation

    def __init__(self, agents: AgentLedger) -> None:
        self._agents = agents
        self._backend: Callable[[], ModelBackendPort | None] = lambda: None  # a weak reference
        self._returned: set[BlockName] = set()

    def of(self, tenant: str, root: BlockName, model: LoadedModel) -> tuple[tuple[int, ...], ...]:
        """Return the latest conversations of a tenant's agents with a model, oldest first.

        Empty on later calls for the same root, and for a backend that accepts no draft tokens.
        """
        if model.backend is not self._backend():
            self._backend, self._returned = weakref.ref(model.backend), set()
        if root in self._returned or not model.backend.traits.max_draft:
            return ()
        self._returned.add(root)
        log, found = self._agents.log, []
        for agent in self._agents.agents(tenant)[: self._MAX_AGENTS]:
            place = log.place(tenant, agent.head) if agent.head else None
            if place and place.pointer and place.pointer.root == root:
                found.append(tuple(log.tokens(tenant, agent.head)[-self._MAX_TOKENS :]))
        return tuple(found[::-1])


def _shape(
    request: ChatRequest, prompt: Prompt, model: LoadedModel
) -> tuple[Mapping[int, bytes], ReplyShape]:
    reply_format = ReplyFormat() if request.raw_prompt is not None else model.reply_format
    if prompt.has_tool_markup:
        reply_format = ReplyFormat(thinking=reply_format.thinking)
    visible = reply_format.visible_ids(model.tokenizer.special_ids, has_tools=bool(request.tools))
    is_open = reply_format.is_opened_by(_tail(prompt, model, visible))
    may_think = request.thinking is None or request.thinking.is_enabled
    return visible, ReplyShape(
        format=reply_format,
        output=request.output_format,
        tools=request.known_tools,
        tool_choice=request.tool_choice,
        is_thinking_open=is_open and not request.is_continued,
        may_think=may_think and not request.is_continued,
        opening=reply_format.opening("") if request.is_continued else "",
    )


def _constraint(
    shape: ReplyShape, max_tokens: int, beginning: str, model: LoadedModel
) -> TokenConstraint | None:
    if model.grammar is None or shape.is_free:
        return None
    encode, encode_plain = model.tokenizer.encode, model.tokenizer.encode_plain
    begun = (*encode(shape.opening), *encode_plain(beginning))
    constraint = model.grammar.constrain(shape, max_tokens + len(begun))
    if constraint is None:
        return None
    for token in begun:
        allowed = constraint.allowed()
        if allowed is not None and not allowed[token // 8] >> token % 8 & 1:
            raise InvalidRequestError(
                "the assistant's message cannot be continued to match response_format.",
                param="response_format",
            )
        constraint.accept(token)
    return constraint


def _thinking_counter(
    shape: ReplyShape, model: LoadedModel, visible: Mapping[int, bytes]
) -> ThinkingCounter | None:
    markers = shape.format.thinking_markers
    if markers is None:
        return None

    def piece(token: int) -> bytes:
        return visible.get(token) or model.tokenizer.token_bytes(token)

    return ThinkingCounter(markers, piece, is_open=shape.is_thinking_open)


def _within_budget(
    request: ChatRequest,
    shape: ReplyShape,
    model: LoadedModel,
    visible: Mapping[int, bytes],
    inner: TokenConstraint | None,
) -> TokenConstraint | None:
    budget = request.thinking.budget if request.thinking else None
    if budget is None or request.is_continued:
        return inner
    thinking, markers = _thinking_counter(shape, model, visible), shape.format.thinking_markers
    if thinking is None or markers is None:
        return inner
    # Models write the end marker on its own line.
    way_out = model.tokenizer.encode(f"\n{markers.end}")
    return ThinkingBudget(budget, thinking, way_out, model.tokenizer.vocab_size, inner)


def _predicted(request: ChatRequest, model: LoadedModel) -> tuple[int, ...]:
    require_whole_characters(request.prediction, param="prediction")
    return tuple(model.tokenizer.encode_plain(request.prediction)) if request.prediction else ()


def _spelled(request: ChatRequest, model: LoadedModel) -> Mapping[int, bytes] | None:
    """Return the text of special tokens in log-probabilities; None unless they need it."""
    if request.raw_prompt is None or request.sampling.top_logprobs is None:
        return None
    return {token.id: token.text.encode() for token in model.tokenizer.special_tokens}


def _seeded(sampling: SamplingParams) -> SamplingParams:
    has_seed = sampling.seed is not None
    return sampling if has_seed else replace(sampling, seed=secrets.randbits(63))


def _stop_rules(request: ChatRequest, model: LoadedModel) -> StopRules:
    stop, prompt = request.stop, request.raw_prompt
    if prompt is None or not prompt.suffix or stop.ignore_eos:
        return stop
    return replace(stop, token_ids=stop.token_ids | fill_in_ends(model.tokenizer))


def _tail(prompt: Prompt, model: LoadedModel, visible: Mapping[int, bytes]) -> str:
    pieces = (
        visible.get(token) or model.tokenizer.token_bytes(token)
        for token in prompt.tokens[-_TAIL_TOKENS:]
    )
    return b"".join(pieces).decode("utf-8", "replace")


def block_ends(prompt: Prompt, spec: ModelCacheSpec) -> tuple[int, ...]:
    """Return the positions where a block ends even if it is not full.

    With full attention only, that is the end of the head, which agents share, and the start and end
    of each image. Other kinds of layers can resume only where a block ends, so blocks end at every
    boundary.
    """
    if spec.kinds != (LayerKind.FULL,):
        return prompt.boundaries
    ends = {place for span in prompt.images for place in (span.start, span.end)}
    return tuple(sorted({prompt.num_head, *ends} - {0}))


def _start_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="prepare", daemon=True).start()


class PreparationThreads:
    """A limited number of daemon threads, with a deadline. Used on the event loop's thread.

    A thread that exceeds the deadline keeps its slot, and its request fails; when such threads
    occupy all slots, `problem` reports it. Shutdown does not wait for threads.
    """

    def __init__(
        self,
        timeout_s: float,
        num_threads: int = NUM_THREADS,
        start: Callable[[Callable[[], None]], None] = _start_thread,
    ) -> None:
        """Start with all slots free; `timeout_s` bounds the wait for a slot, and then the work."""
        self._start = start
        self._timeout_s = timeout_s
        self._num_threads = num_threads
        self._places = asyncio.Semaphore(num_threads)
        self._late: set[asyncio.Future[Any]] = set()

    @property
    def problem(self) -> str:
        if len(self._late) < self._num_threads:
            return ""
        return (
            f"requests cannot be prepared: {len(self._late)} preparations have run for more than "
            f"{self._timeout_s:g} s each; restart the server"
        )

    async def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run work in a thread and return its result.

        Raises:
            OverloadedError: no slot became free in time, or no thread can be started.
            GenerationTimeoutError: the work took too long; it continues and its result is dropped.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise OverloadedError(
                "too many requests are being prepared; try again.", retry_after_s=5
            ) from None
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_T] = loop.create_future()
        result.add_done_callback(self._settled)

        def do() -> None:
            try:
                settle = functools.partial(result.set_result, work(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - raised in the awaiting coroutine
                settle = functools.partial(result.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                loop.call_soon_threadsafe(settle)

        try:
            self._start(functools.partial(contextvars.copy_context().run, do))
        except Exception as error:  # noqa: BLE001 - raised below, after the slot is free
            _log.warning("cannot start a thread to prepare a request: %s", error)
            result.set_exception(
                OverloadedError("the server cannot start a thread; try again.", retry_after_s=5)
            )
        done, _ = await asyncio.wait({result}, timeout=self._timeout_s)
        if done:
            return result.result()
        self._late.add(result)
        raise GenerationTimeoutError(
            "preparing this request (rendering, tokenising, reading images, compiling its schema) "
            f"took more than {self._timeout_s:g} s; send a shorter conversation, fewer images or a "
            "simpler schema."
        )

    def _settled(self, result: "asyncio.Future[Any]") -> None:
        self._places.release()
        self._late.discard(result)
        result.exception()  # marks it as retrieved: the caller may have given up
