"""One request inside the engine: what was asked, how far it got, and what its reader is told."""

import codecs
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Optional, TypeAlias

from semantic.application.cache.restore_plan import RestorePlan
from semantic.application.engine.restore import Restore
from semantic.domain.agents import Reuse
from semantic.domain.blocks import BlockName, PartKey, block_end, common_prefix
from semantic.domain.chat import ServiceClass
from semantic.domain.errors import BackendError, DeviceLostError, SemanticError
from semantic.domain.events import (
    Event,
    Failed,
    Finished,
    PrefillProgress,
    ScoredToken,
    TextDelta,
    Usage,
)
from semantic.domain.sampling import (
    FinishReason,
    SamplingParams,
    StopMatcher,
    StopRules,
    TokenLogprob,
)
from semantic.ports.backend import LAST_SAMPLED, Chunk, Draw, Sampled, SequenceId, Ticket
from semantic.ports.telemetry import Measure, RequestTrace, TelemetryPort
from semantic.ports.text import TokenConstraint

Clock = Callable[[], float]
monotonic: Clock = time.monotonic
NO_SEQUENCE: Final = SequenceId(-1)


@dataclass(frozen=True, slots=True)
class Job:
    """What the engine is asked to do.

    Attributes:
        id: Names the request in events and in `cancel`.
        agent: Whose turn it is; shares of the device are counted per agent.
        root: Root of the tenant's block names; only sequences of one root share state.
        tokens: The prompt.
        boundaries: Prompt positions worth resuming at; blocks end there.
        sampling: With the seed set.
        stop: Strings and tokens that end the reply.
        max_tokens: The most tokens to generate; prompt and reply fit the context.
        deadline: On the engine's clock; None waits forever.
        constraint: Restricts the tokens of the reply; the engine advances it.
        visible: Special tokens that count as text; see `ReplyFormat.visible_ids`.
        max_kept: The most tokens of its conversation that are sealed; None has no limit.
        prediction: What its client expects the reply to be.
        past: Other conversations of its tenant, from before the start, to guess from.
        trace: When it got where, for those who watch.
    """

    id: str
    agent: str
    root: BlockName
    tokens: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRules
    max_tokens: int
    boundaries: tuple[int, ...] = ()
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    weight: float = 1.0
    deadline: float | None = None
    constraint: TokenConstraint | None = None
    visible: Mapping[int, bytes] = field(default_factory=dict)
    max_kept: int | None = None
    prediction: tuple[int, ...] = ()
    past: tuple[tuple[int, ...], ...] = ()
    trace: RequestTrace = field(default_factory=RequestTrace, compare=False)


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses of a reply's next tokens.

    Attributes:
        masks: What its constraint allows after each; none without one.
        states: The constraint after each.
    """

    tokens: tuple[int, ...] = ()
    masks: tuple[bytes | None, ...] = ()
    states: tuple[TokenConstraint, ...] = ()

    def cut(self, size: int) -> "Draft":
        """Its first guesses."""
        return Draft(self.tokens[:size], self.masks[:size], self.states[:size])


NO_DRAFT: Final = Draft()


@dataclass(frozen=True, slots=True)
class ReplyState:
    """What a reply left behind; comes right before `Finished`, for the log of turns.

    Attributes:
        tokens: The reply's ids.
        block: Where its state ends; None if nothing was kept.
        num_sealed: Tokens of prompt and reply whose state was kept.
        reuse: Where the prompt's state came from.
    """

    tokens: tuple[int, ...]
    block: BlockName | None
    num_sealed: int
    reuse: Reuse


EngineEvent: TypeAlias = Event | ReplyState
EventBatch: TypeAlias = list[tuple[str, EngineEvent]]
EventSink: TypeAlias = Callable[[EventBatch], None]


class TextAssembler:
    """From sampled tokens to text that may be shown. Not thread-safe; one per request.

    Works on bytes, so that a character split over tokens is held until it is whole and spaces are
    never lost; the pieces joined are exactly the decoding of all tokens. Stop strings are cut out.

    Special tokens are no text, except the `visible` ones: those the reply's parser looks for.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stops: Sequence[str] = (),
        visible: Mapping[int, bytes] | None = None,
    ) -> None:
        self._plain_bytes = token_bytes
        self._visible = visible or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stops)
        self._logprobs: list[ScoredToken] = []

    @property
    def stop(self) -> str | None:
        """The stop string that was hit, if any; nothing more may be fed then."""
        return self._matcher.stop

    def feed(self, token: int, logprob: TokenLogprob | None = None) -> TextDelta | None:
        """Take a token; returns the text that became certain, if any."""
        if logprob is not None:
            self._logprobs.append(self._scored(logprob))
        return self._delta(self._matcher.feed(self._decoder.decode(self._token_bytes(token))))

    def finish(self) -> TextDelta | None:
        """Return what was held back, once no token follows."""
        if self.stop is not None:
            return None
        text = self._matcher.feed(self._decoder.decode(b"", final=True))
        return self._delta(text + self._matcher.flush())

    def _delta(self, text: str) -> TextDelta | None:
        if not text:
            return None
        logprobs, self._logprobs = tuple(self._logprobs), []
        return TextDelta(text, logprobs)

    def _token_bytes(self, token: int) -> bytes:
        return self._visible.get(token) or self._plain_bytes(token)

    def _scored(self, logprob: TokenLogprob) -> ScoredToken:
        top = tuple((self._token_bytes(token), value) for token, value in logprob.top)
        return ScoredToken(self._token_bytes(logprob.token), logprob.logprob, top)


class EngineWatch:
    """Tells what steps and tokens took. On the engine's thread.

    Attributes:
        counts: What the engine did since the start.
    """

    def __init__(self, telemetry: TelemetryPort) -> None:
        self.counts = telemetry.counts.engine
        self._observe = telemetry.observe

    def note_step(self, seconds: float, num_rows: int, num_prompt_tokens: int) -> None:
        """Note that a step was collected."""
        self.counts.prompt_tokens += num_prompt_tokens
        self._observe(Measure.STEP, seconds)
        self._observe(Measure.BATCH, num_rows)

    def note_row(self, trace: RequestTrace, now: float, num_tokens: int) -> None:
        """Note the tokens that a reply's row brought, which came together."""
        self.counts.generated_tokens += num_tokens
        trace.num_generated += num_tokens
        before, trace.last_token = trace.last_token, now
        if before is None:
            trace.first_token = now
            return
        for _ in range(num_tokens):
            self._observe(Measure.TOKEN, (now - before) / num_tokens)

    def note_end(self, generation: "Generation") -> None:
        """Note what became of the guesses of a reply."""
        self.counts.drafted_tokens += generation.num_drafted
        self.counts.accepted_tokens += generation.num_accepted


@dataclass(slots=True, eq=False)
class Generation:
    """A job on its way. Owned by the engine's thread.

    The one invariant: computed tokens catch up with tokens. A prompt is many tokens behind, a
    decoding sequence is one behind; nothing else tells them apart.

    Attributes:
        seq: The backend's id while the sequence is open there; a new one each time.
        tokens: Prompt and reply, as far as the host knows them.
        num_launched: Positions whose state the device has been asked to compute.
        num_computed: Positions whose state is known to be computed.
        num_rows: Rows of this sequence in steps that are launched and not collected.
        num_draws: Of those, rows that will bring a token.
        block_tokens: Tokens of a full block.
        num_prompt: Tokens of the prompt.
        num_sealed: Positions whose full blocks are in the store.
        last_sealed: Where the last block that it sealed itself begins.
        chain: Name of the last of them.
        sealed_blocks: Names of the blocks this request has sealed.
        pointer: Name of the block its state ends in, once it was put away.
        plan: What can be restored of it; as of the store's version and its length in
            `plan_basis`.
        restore: Loads its beginning; until it is done nothing of it can run.
        num_failed_restores: How often what was found could not be loaded.
        prefetched_parts: Parts that were read for it while it waited.
        is_reuse_reported: Whether its reader knows how much was reused.
        is_sealing: False once a block could not be kept; what follows it is of no use then.
        final: Its last event, once it ended.
        retry_until: After a failed step: run alone until this position is computed.
        constraint: The job's, as far as the reply has come.
        draft_room: The most guesses that its next row may carry.
        num_reserved: Tokens that memory is reserved for.
        num_drafted: Guesses that were sent to be checked.
        num_accepted: Of these, the tokens of the reply.
        waiting_since: When it was last served, or arrived.
    """

    job: Job
    order: int
    assembler: TextAssembler
    waiting_since: float
    block_tokens: int
    num_prompt: int = field(init=False)
    seq: SequenceId = NO_SEQUENCE
    tokens: list[int] = field(default_factory=list)
    num_launched: int = 0
    num_computed: int = 0
    num_rows: int = 0
    num_draws: int = 0
    num_sealed: int = 0
    last_sealed: int = 0
    chain: BlockName = field(init=False)
    sealed_blocks: list[BlockName] = field(default_factory=list)
    pointer: BlockName | None = None
    plan: RestorePlan | None = None
    plan_basis: tuple[int, int] = (0, 0)
    restore: Restore | None = None
    num_failed_restores: int = 0
    prefetched_parts: set[PartKey] = field(default_factory=set)
    reuse: Reuse = field(default_factory=Reuse)
    is_sealing: bool = True
    is_reuse_reported: bool = False
    is_done: bool = False
    final: Finished | Failed | None = None
    retry_until: int | None = None
    constraint: TokenConstraint | None = field(init=False)
    draft_room: int = 0
    num_reserved: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    usage: Usage = field(init=False)
    _draft: Draft = NO_DRAFT
    _is_ended: bool = False
    _is_reuse_counted: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.job.tokens)
        self.num_prompt = len(self.tokens)
        self.constraint = self.job.constraint
        self.chain = self.job.root
        self.usage = Usage(prompt_tokens=len(self.tokens))

    def num_shared(self, root: BlockName, tokens: Sequence[int]) -> int:
        """Tokens of another's state that this one can start from; tenants share nothing."""
        if root != self.job.root:
            return 0
        return min(common_prefix(tokens, self.tokens), len(self.tokens) - 1)

    @property
    def num_generated(self) -> int:
        """Tokens of the reply so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_behind(self) -> int:
        """Tokens known or promised whose state is not launched yet."""
        return len(self.tokens) + self.num_draws - self.num_launched

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt tokens remain to be computed."""
        return self.num_computed < self.num_prompt

    @property
    def is_background(self) -> bool:
        """Whether interactive requests go first."""
        return self.job.service_class is ServiceClass.BACKGROUND

    @property
    def is_last_draw_launched(self) -> bool:
        """Whether the reply's last permitted token is already on its way."""
        return self.num_generated + self.num_draws >= self.job.max_tokens

    def is_late(self, now: float) -> bool:
        """Whether its deadline passed before it ended."""
        deadline = self.job.deadline
        return deadline is not None and now >= deadline and not self.is_done

    @property
    def final_usage(self) -> Usage:
        """What the reply took, once it ended."""
        return replace(
            self.usage,
            completion_tokens=self.num_generated,
            accepted_prediction_tokens=self.num_accepted,
            rejected_prediction_tokens=self.num_drafted - self.num_accepted,
        )

    def report_progress(self) -> PrefillProgress:
        """Say how much of the prompt is computed; whoever watches the request sees it too."""
        done = min(self.num_computed, self.num_prompt)
        self.job.trace.progress = PrefillProgress(done, self.num_prompt, self.reuse.reused)
        return self.job.trace.progress

    @property
    def reply_state(self) -> ReplyState:
        """What the reply leaves behind, once it was put away."""
        num_sealed = self.num_sealed if self.pointer else 0
        return ReplyState(
            tuple(self.tokens[self.num_prompt :]), self.pointer, num_sealed, self.reuse
        )

    def block_at(self, position: int) -> tuple[int, int]:
        """Where the block that holds `position`, which is not sealed yet, begins and ends."""
        start = end = self.num_sealed
        while end <= position:
            start, end = end, block_end(end, self.block_tokens, self.job.boundaries)
        return start, end

    def next_chunk(self, num_tokens: int, draft: Draft) -> Chunk:
        """Describe the next `num_tokens` tokens and guesses; does not count them as launched."""
        start = self.num_launched
        end = start + num_tokens
        draw = None
        if end == len(self.tokens) + self.num_draws:
            allowed = self.constraint.allowed() if self.constraint else None
            draw = Draw(self.job.sampling, self.num_prompt, allowed)
        if start >= len(self.tokens):
            return Chunk(self.seq, start, LAST_SAMPLED, draw)
        self._draft = draft
        known = tuple(self.tokens[start:end])
        return Chunk(self.seq, start, known, draw, draft.tokens, draft.masks)

    def count_launched(self, chunk: Chunk) -> None:
        """Note that a chunk is under way; its guesses count when they prove right."""
        self.num_launched += chunk.num_tokens
        self.num_rows += 1
        self.num_draws += chunk.draw is not None
        self.num_drafted += len(chunk.draft)

    def take(self, drawn: Sampled, guess: int | None, eos_ids: frozenset[int]) -> TextDelta | None:
        """Add a token to the reply; returns the text that became certain, if any.

        Args:
            drawn: The token.
            guess: Which of the draft's it was, if it was one.
            eos_ids: The model's tokens that end replies.
        """
        self.tokens.append(drawn.token)
        self.num_accepted += guess is not None
        if guess is not None and self._draft.states:
            self.constraint = self._draft.states[guess]
        elif self.constraint is not None:
            self.constraint.accept(drawn.token)
        self._is_ended = self.job.stop.is_end(drawn.token, eos_ids)
        return None if self._is_ended else self.assembler.feed(drawn.token, drawn.logprob)

    def ending(self, max_context: int) -> FinishReason | None:
        """Why the reply ends with its last token; None if it goes on."""
        if self._is_ended:
            return FinishReason.END_TURN
        if self.assembler.stop is not None:
            return FinishReason.STOP_SEQUENCE
        if len(self.tokens) >= max_context:
            return FinishReason.CONTEXT_FULL
        return FinishReason.MAX_TOKENS if self.num_generated >= self.job.max_tokens else None

    def rewind(self) -> None:
        """Forget the backend's state: it was closed or lost."""
        self.end_restore()
        self.seq = NO_SEQUENCE
        self.num_launched = self.num_computed = self.num_rows = self.num_draws = 0
        self.num_sealed = self.last_sealed = 0
        self.chain = self.job.root
        self.is_sealing = True

    @property
    def is_starved(self) -> bool:
        """Whether it is being restored and waits for nothing but memory."""
        return self.restore is not None and self.restore.is_starved

    def end_restore(self) -> None:
        """Let go of what was about to be loaded."""
        if self.restore is not None:
            self.restore.close()
            self.restore = None

    def resume(self, num_tokens: int, chain: BlockName, num_sealed: int) -> None:
        """Start from state that was found instead of computed."""
        self.num_launched = self.num_computed = num_tokens
        self.num_sealed, self.chain = num_sealed, chain
        self.last_sealed = num_tokens

    def count_reuse(self, reuse: Reuse) -> None:
        """Note what the first opening found; what is resumed later was paid for already."""
        if self._is_reuse_counted:
            return
        self._is_reuse_counted = True
        self.reuse = reuse
        self.usage = replace(
            self.usage, cache_read_tokens=reuse.reused, cache_creation_tokens=reuse.computed
        )


@dataclass(slots=True, eq=False)
class Flight:
    """A step that is launched and not collected.

    Attributes:
        num_drafted: Guesses of all rows.
    """

    rows: tuple[tuple[Generation, Chunk], ...]
    ticket: Ticket
    launched_at: float
    num_prompt_tokens: int
    num_drafted: int

    def is_awaited(self, num_requests: int) -> bool:
        """Whether the next step should wait for its tokens.

        What follows guesses is known when they are checked. And where all there are wait for their
        first token, nobody waits for the next step.
        """
        are_first = all(chunk.draw is not None and not g.num_generated for g, chunk in self.rows)
        return bool(self.num_drafted) or (are_first and len(self.rows) == num_requests)

    def follows(self, other: Optional["Flight"]) -> bool:
        """Whether the time since another step is this one's: the same rows decoded in both.

        The first without guesses after one with them is launched later than others are.
        """
        if other is None or self.num_prompt_tokens or other.num_prompt_tokens:
            return False
        if len(self.rows) != len(other.rows) or (other.num_drafted and not self.num_drafted):
            return False
        pairs = zip(self.rows, other.rows, strict=True)
        return all(mine is theirs for (mine, _), (theirs, _) in pairs)


def as_backend_error(error: Exception) -> SemanticError:
    """What a request that failed this way is answered with.

    Raises:
        DeviceLostError: that ends not one request but all, and is the thread's business.
    """
    if isinstance(error, DeviceLostError):
        raise error
    if isinstance(error, SemanticError):
        return error
    return BackendError(f"the device failed this request: {type(error).__name__}: {error}")
