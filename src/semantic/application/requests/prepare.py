"""From a request to a job: render, identify, constrain and check, in threads of their own."""

import asyncio
import contextlib
import contextvars
import functools
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, ParamSpec, TypeVar

from semantic.application.agents.ledger import AgentLedger
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import LoadedModel
from semantic.application.engine.request import Job, monotonic
from semantic.application.prompt.renderer import FrozenDates, Prompt, Renderer
from semantic.application.prompt.replay import ReplayStore, TenantReplays
from semantic.application.requests.identity import Claim, Identities, Identity
from semantic.application.requests.thinking_budget import ThinkingBudget, ThinkingSpan
from semantic.domain.agents import Agent, Principal
from semantic.domain.blocks import BlockName
from semantic.domain.chat import ChatRequest, RawPrompt, Thinking, require_whole_characters
from semantic.domain.errors import (
    ContextLengthError,
    GenerationTimeoutError,
    InvalidRequestError,
    OverloadedError,
    StateQuotaError,
)
from semantic.domain.reply_format import ReplyFormat, ReplyShape
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import ModelBackendPort
from semantic.ports.text import TokenConstraint

_P = ParamSpec("_P")
_T = TypeVar("_T")

NUM_THREADS = 8
_TAIL_TOKENS = 32  # enough to see a marker at the end of a prompt


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready to run.

    Attributes:
        shape: What its reply must look like.
        identity: Whose turn it is.
        span: Counts the reply's thinking; None if the model has none.
        day: The date its prompt shows; None if it shows none.
        num_begun: Tokens at the end of the prompt that the reply begins with.
    """

    request: ChatRequest
    principal: Principal
    model: LoadedModel
    job: Job
    shape: ReplyShape
    identity: Identity
    span: ThinkingSpan | None = None
    day: date | None = None
    num_begun: int = 0


class Preparation:
    """Makes jobs of requests. Safe on any thread; may take long for long prompts."""

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

    def prepare(
        self, request: ChatRequest, principal: Principal, model: LoadedModel, claim: Claim
    ) -> PreparedRequest:
        """Render, identify, constrain and check; claims the agent, and writes nothing yet.

        Raises:
            InvalidRequestError: a part cannot be shown to the model, or cannot be enforced.
            ContextLengthError: it does not fit.
            QuotaExceededError: its agent has had all its turns.
            StateQuotaError: its agent may not keep that much.
        """
        root = model.root(principal)
        prompt, day = self._render(request, model, TenantReplays(root, self._replays))
        identity = self._identities.identify(
            principal.tenant, request.agent, prompt.tokens, prompt.num_head, claim
        )
        agent = identity.fork or self._agents.find(principal.tenant, identity.agent_id)
        max_kept = self._max_kept(agent, len(prompt.tokens), model) if agent else None
        visible, shape = _shape(request, prompt, model)
        max_tokens = self._max_tokens(request, len(prompt.tokens), model)
        constraint = _constraint(shape, max_tokens, request.beginning, model)
        budget = request.thinking.budget if request.thinking else None
        if budget is not None and not request.is_continued:
            constraint = _within(budget, shape, model, visible, constraint)
        sampling = request.sampling.with_defaults(model.defaults)
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        job = Job(
            id=secrets.token_hex(12),
            agent=f"{principal.tenant}/{identity.agent_id}",
            root=root,
            tokens=prompt.tokens,
            sampling=sampling,
            stop=request.stop,
            max_tokens=max_tokens,
            boundaries=_block_ends(prompt, model.backend.spec),
            service_class=request.service_class,
            weight=principal.weight,
            deadline=monotonic() + self._request_timeout_s,
            constraint=constraint,
            visible=visible,
            max_kept=max_kept,
            prediction=_predicted(request, model),
            past=self._past.of(principal.tenant, root, model),
        )
        span = _span(shape, model, visible)
        num_begun = prompt.num_begun
        return PreparedRequest(
            request, principal, model, job, shape, identity, span, day, num_begun
        )

    def count_tokens(self, request: ChatRequest, principal: Principal, model: LoadedModel) -> int:
        """Count the tokens of the prompt that `prepare` would make; changes nothing."""
        replays = TenantReplays(model.root(principal), self._replays, is_used=False)
        prompt, _ = self._render(request, model, replays)
        return len(prompt.tokens)

    def keep_day(self, prepared: PreparedRequest) -> None:
        """Let the agent of a request that was answered go on with the date it was shown."""
        if prepared.day is not None:
            self._dates.keep(prepared.job.root, prepared.request.without_beginning, prepared.day)

    def _render(
        self, request: ChatRequest, model: LoadedModel, replays: TenantReplays
    ) -> tuple[Prompt, date | None]:
        """Write the prompt with what the reply begins with; returns the date it shows too."""
        if request.raw_prompt is not None:
            return Prompt(_raw_tokens(request.raw_prompt, model)), None
        if not request.is_continued:
            return self._render_chat(request, model, replays)
        beginning = request.beginning
        require_whole_characters(beginning, param=f"messages[{len(request.messages) - 1}]")
        # An answer that has begun is not thought about any more.
        asked = replace(request.without_beginning, thinking=Thinking(is_enabled=False))
        prompt, day = self._render_chat(asked, model, replays)
        visible = model.reply_format.visible_ids(model.tokenizer.special_ids, has_tools=False)
        opening = model.reply_format.opening(_tail(prompt, model, visible))
        # Encoded apart from what comes before it, as the model would have written it.
        written = model.tokenizer.encode_plain(beginning)
        return prompt.followed_by((*model.tokenizer.encode(opening), *written)), day

    def _render_chat(
        self, request: ChatRequest, model: LoadedModel, replays: TenantReplays
    ) -> tuple[Prompt, date | None]:
        renderer = self._renderer
        if renderer is None or renderer.tokenizer is not model.tokenizer:
            renderer = self._renderer = Renderer(model.tokenizer)
        today = self._dates.of(replays.root, request) if renderer.traits.shows_date else None
        try:
            return renderer.render(request, today=today, replays=replays), today
        except RecursionError:
            raise InvalidRequestError("messages or tools are nested too deeply.") from None

    def _max_kept(self, agent: Agent, num_prompt: int, model: LoadedModel) -> int | None:
        """How many tokens an agent may keep; refuses a turn that its quota does not allow."""
        self._agents.check_quota(agent)
        max_bytes = agent.quota.max_bytes
        if max_bytes is None:
            return None
        spec, bits = model.backend.spec, model.backend.traits.state_bits
        # By its tokens, wherever their state is and however it rests: evicting changes nothing.
        limit = spec.tokens_within(max_bytes, bits)
        if (nbytes := spec.bytes_per_context(num_prompt, bits)) > max_bytes:
            raise StateQuotaError(
                f"agent {agent.id} may keep {max_bytes} bytes of KV cache, and its "
                f"conversation takes {nbytes}; rewind it, or raise its quota.",
                num_prompt=num_prompt,
                limit=limit,
            )
        return limit

    def _max_tokens(self, request: ChatRequest, num_prompt: int, model: LoadedModel) -> int:
        """How long the reply may be: what was asked for, cut to the room that is left."""
        limit, limited_by = model.backend.spec.max_context, "the model's context"
        if self._device.longest_sequence < limit:
            limit, limited_by = self._device.longest_sequence, "this server's memory"
        going_on, room = request.agent.continuation, limit - num_prompt
        if room < (going_on.min_room if going_on else 1):
            raise ContextLengthError(
                num_prompt=num_prompt, limit=limit, limited_by=limited_by, param="messages"
            )
        # Clients ask for the longest reply they can take, whatever the model can make.
        default = self._device.limits.default_max_tokens or model.defaults.max_tokens
        return min(request.stop.max_tokens or default or room, room)


class PastConversations:
    """What agents said before a model was loaded, told once for each tenant: guesses start there.

    Safe on any thread; reads the ledger.
    """

    _MAX_AGENTS = 16
    _MAX_TOKENS = 8192  # of each, the last ones

    def __init__(self, agents: AgentLedger) -> None:
        self._agents = agents
        self._backend: Callable[[], ModelBackendPort | None] = lambda: None  # not to keep it
        self._told: set[BlockName] = set()

    def of(self, tenant: str, root: BlockName, model: LoadedModel) -> tuple[tuple[int, ...], ...]:
        """The latest conversations of a tenant's agents with a model, the oldest first."""
        if model.backend is not self._backend():
            self._backend, self._told = weakref.ref(model.backend), set()
        if root in self._told or not model.backend.traits.max_draft:
            return ()
        self._told.add(root)
        log, found = self._agents.log, []
        for agent in self._agents.agents(tenant)[: self._MAX_AGENTS]:
            place = log.place(tenant, agent.head) if agent.head else None
            if place and place.pointer and place.pointer.root == root:
                found.append(tuple(log.tokens(tenant, agent.head)[-self._MAX_TOKENS :]))
        return tuple(found[::-1])


def _shape(
    request: ChatRequest, prompt: Prompt, model: LoadedModel
) -> tuple[Mapping[int, bytes], ReplyShape]:
    """What the reply must look like, and the special tokens that are text in it."""
    is_plain = prompt.has_tool_markup or request.raw_prompt is not None
    reply_format = ReplyFormat() if is_plain else model.reply_format
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
    """Enforce a reply's form, from its beginning on."""
    if model.grammar is None:
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


def _span(
    shape: ReplyShape, model: LoadedModel, visible: Mapping[int, bytes]
) -> ThinkingSpan | None:
    markers = shape.format.thinking_markers
    if markers is None:
        return None

    def piece(token: int) -> bytes:
        return visible.get(token) or model.tokenizer.token_bytes(token)

    return ThinkingSpan(markers, piece, is_open=shape.is_thinking_open)


def _within(
    budget: int,
    shape: ReplyShape,
    model: LoadedModel,
    visible: Mapping[int, bytes],
    inner: TokenConstraint | None,
) -> TokenConstraint | None:
    """Constrain a reply to think for so many tokens at most."""
    span, markers = _span(shape, model, visible), shape.format.thinking_markers
    if span is None or markers is None:
        return inner
    # Models put it on a line of its own.
    way_out = model.tokenizer.encode(f"\n{markers.end}")
    return ThinkingBudget(budget, span, way_out, model.tokenizer.vocab_size, inner)


def _predicted(request: ChatRequest, model: LoadedModel) -> tuple[int, ...]:
    """What a client expects, as the model would write it."""
    require_whole_characters(request.prediction, param="prediction")
    return tuple(model.tokenizer.encode_plain(request.prediction)) if request.prediction else ()


def _raw_tokens(prompt: RawPrompt, model: LoadedModel) -> tuple[int, ...]:
    """Tokens of a prompt that is taken as it stands."""
    content = prompt.content
    if isinstance(content, str):
        require_whole_characters(content, param="prompt")
        content = tuple(model.tokenizer.encode_prompt(content))
    if not content:
        raise InvalidRequestError("the prompt is empty.", param="prompt")
    size = model.tokenizer.vocab_size
    if min(content) < 0 or max(content) >= size:
        raise InvalidRequestError(f"a token id is not in [0, {size}).", param="prompt")
    return content


def _tail(prompt: Prompt, model: LoadedModel, visible: Mapping[int, bytes]) -> str:
    """The end of a prompt as text, markers that are special tokens included."""
    pieces = (
        visible.get(token) or model.tokenizer.token_bytes(token)
        for token in prompt.tokens[-_TAIL_TOKENS:]
    )
    return b"".join(pieces).decode("utf-8", "replace")


def _block_ends(prompt: Prompt, spec: ModelCacheSpec) -> tuple[int, ...]:
    """Where blocks end early: after the shared head; everywhere if only there can be resumed."""
    if spec.kinds == (LayerKind.FULL,):
        return (prompt.num_head,) if prompt.num_head else ()
    return prompt.boundaries


class PreparationThreads:
    """A few threads, with a deadline, never waited for at the end; used on the loop's thread.

    A thread cannot be ended. One that does not come back keeps its place, its request is answered
    with an error, and when all places are lost that way the server says that it is stuck.
    """

    def __init__(self, timeout_s: float, num_threads: int = NUM_THREADS) -> None:
        self._timeout_s = timeout_s
        self._num_threads = num_threads
        self._places = asyncio.Semaphore(num_threads)
        self._late: set[asyncio.Future[Any]] = set()

    @property
    def problem(self) -> str:
        """What is wrong, for `/health`; empty if nothing is."""
        if len(self._late) < self._num_threads:
            return ""
        return (
            f"no request can be prepared: {len(self._late)} have taken more than "
            f"{self._timeout_s:g} s each and are not done; restart the server"
        )

    async def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Do some work and return its result.

        Raises:
            OverloadedError: no thread became free in time.
            GenerationTimeoutError: the work took too long; it goes on, and its result is dropped.
        """
        try:
            await asyncio.wait_for(self._places.acquire(), self._timeout_s)
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
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                settle = functools.partial(result.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop may be gone
                loop.call_soon_threadsafe(settle)

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=[do], name="prepare", daemon=True).start()
        done, _ = await asyncio.wait({result}, timeout=self._timeout_s)
        if done:
            return result.result()
        self._late.add(result)
        raise GenerationTimeoutError(
            f"preparing this request (rendering, tokenising, compiling its schema) took more than "
            f"{self._timeout_s:g} s; send a shorter conversation or a simpler schema."
        )

    def _settled(self, result: "asyncio.Future[Any]") -> None:
        self._places.release()
        self._late.discard(result)
        result.exception()  # nobody may be left to look at it
