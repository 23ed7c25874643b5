"""From a request to a job: render, identify, constrain and check, before anything is queued."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date

from semantic.application.agents.ledger import AgentLedger
from semantic.application.engine.device_thread import DeviceThread, LoadedModel
from semantic.application.engine.request import Job, monotonic
from semantic.application.prompt.dates import FrozenDates
from semantic.application.prompt.renderer import Prompt, Renderer
from semantic.application.prompt.replay import ReplayStore, TenantReplays
from semantic.application.requests.identity import Claim, Identities, Identity
from semantic.application.requests.thinking_budget import ThinkingBudget, ThinkingSpan
from semantic.domain.agents import Agent, Principal
from semantic.domain.chat import ChatRequest, RawPrompt, Thinking, require_whole_characters
from semantic.domain.errors import ContextLengthError, InvalidRequestError, StateQuotaError
from semantic.domain.reply_format import ReplyFormat, ReplyShape
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.text import TokenConstraint

_TAIL_TOKENS = 32  # enough to see a marker at the end of a prompt


@dataclass(frozen=True, slots=True)
class Prepared:
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
        self._dates = FrozenDates(replays)

    def prepare(
        self,
        request: ChatRequest,
        principal: Principal,
        model: LoadedModel,
        claim: Claim,
    ) -> Prepared:
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
        )
        span = _span(shape, model, visible)
        num_begun = prompt.num_begun
        return Prepared(request, principal, model, job, shape, identity, span, day, num_begun)

    def count_tokens(self, request: ChatRequest, principal: Principal, model: LoadedModel) -> int:
        """Count the tokens of the prompt that `prepare` would make; changes nothing."""
        replays = TenantReplays(model.root(principal), self._replays, is_used=False)
        prompt, _ = self._render(request, model, replays)
        return len(prompt.tokens)

    def keep_day(self, prepared: Prepared) -> None:
        """Let the agent of a request that was answered go on with the date it was shown."""
        if prepared.day is not None:
            self._dates.keep(prepared.job.root, prepared.request.asked, prepared.day)

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
        asked = replace(request.asked, thinking=Thinking(is_enabled=False))
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
        return renderer.render(request, today=today, replays=replays), today

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
                f"agent {agent.id} may keep {max_bytes} bytes of attention state, and its "
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
                "the assistant's message cannot be continued to the form that the reply must have.",
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
