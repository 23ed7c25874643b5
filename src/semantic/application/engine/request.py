"""One request inside the engine: its job, its progress, and the events it emits."""

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
    """A reply to generate.

    Attributes:
        id: Identifies the request in events and in `cancel`.
        agent: The agent that takes the turn; the scheduler shares the device between agents.
        root: Root of the tenant's block names; only sequences with the same root share state.
        tokens: The prompt.
        boundaries: Prompt positions where blocks end, so that later requests can resume there.
        sampling: Sampling parameters, with the seed set.
        stop: Strings and tokens that end the reply.
        max_tokens: The most tokens to generate; prompt and reply together fit the context.
        deadline: Time on the engine's clock after which the request fails; None for no deadline.
        constraint: Restricts the tokens of the reply; the engine advances it.
        visible: Special tokens that count as text; see `ReplyFormat.visible_ids`.
        max_kept: The most tokens of the conversation to seal; None for no limit.
        prediction: Token ids that the client expects as the reply; a source of draft tokens.
        past: The tenant's conversations from before the model was loaded; a source of draft tokens.
        trace: Timestamps and progress of the request, for telemetry.
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
    """Draft tokens: a prediction of a reply's next tokens, which the model verifies.

    Attributes:
        masks: The tokens that the constraint allows after each draft token; empty without one.
        states: The constraint's state after each draft token; empty without a constraint.
    """

    tokens: tuple[int, ...] = ()
    masks: tuple[bytes | None, ...] = ()
    states: tuple[TokenConstraint, ...] = ()

    def cut(self, size: int) -> "Draft":
        """Return the first `size` draft tokens."""
        return Draft(self.tokens[:size], self.masks[:size], self.states[:size])


NO_DRAFT: Final = Draft()


@dataclass(frozen=True, slots=True)
class ReplyState:
    """A reply's tokens and sealed state; emitted right before `Finished`, for the ledger.

    Attributes:
        tokens: The reply's token ids.
        block: The last sealed block; None if nothing was sealed.
        num_sealed: Tokens of prompt and reply whose state was sealed.
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
    """Turns sampled tokens into text that is safe to emit. Not thread-safe; one per request.

    Works on bytes: it holds back a character that is split over tokens until it is complete, and
    loses no spaces. The joined pieces equal the decoding of all tokens, without the stop string.

    Special tokens produce no text, except the `visible` ones, which the reply's parser needs.
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
        """The stop string that matched, if any; do not call `feed` after a match."""
        return self._matcher.stop

    def feed(self, token: int, logprob: TokenLogprob | None = None) -> TextDelta | None:
        """Add a token; returns the text that is now safe to emit, if any."""
        if logprob is not None:
            self._logprobs.append(self._scored(logprob))
        return self._delta(self._matcher.feed(self._decoder.decode(self._token_bytes(token))))

    def finish(self) -> TextDelta | None:
        """Return the text held back so far; call it after the last token."""
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
    """Reports durations of steps and tokens to telemetry. Used on the device thread only.

    Attributes:
        counts: The engine's counters since the start.
    """

    def __init__(self, telemetry: TelemetryPort) -> None:
        self.counts = telemetry.counts.engine
        self._observe = telemetry.observe

    def note_step(self, seconds: float, num_rows: int, num_prompt_tokens: int) -> None:
        """Record a collected step."""
        self.counts.prompt_tokens += num_prompt_tokens
        self._observe(Measure.STEP, seconds)
        self._observe(Measure.BATCH, num_rows)

    def note_row(self, trace: RequestTrace, now: float, num_tokens: int) -> None:
        """Record the tokens of one row; they arrive together, so they share the elapsed time."""
        self.counts.generated_tokens += num_tokens
        trace.num_generated += num_tokens
        before, trace.last_token = trace.last_token, now
        if before is None:
            trace.first_token = now
            return
        for _ in range(num_tokens):
            self._observe(Measure.TOKEN, (now - before) / num_tokens)

    def note_end(self, generation: "Generation") -> None:
        """Record how many draft tokens of a reply were sent and accepted."""
        self.counts.drafted_tokens += generation.num_drafted
        self.counts.accepted_tokens += generation.num_accepted


@dataclass(slots=True, eq=False)
class Generation:
    """A job in progress. Owned by the device thread.

    Prefill and decode differ only in how many tokens are still to be computed: a prompt is many
    tokens behind, a decoding sequence is one token behind. No other field tells them apart.

    Attributes:
        seq: The backend's id while the sequence is open there; a new one each time.
        tokens: Prompt and reply, as far as the host knows them.
        num_launched: Positions whose state is computed or launched for computing.
        num_computed: Positions whose state is known to be computed.
        num_rows: Rows of this sequence in steps that are launched and not collected.
        num_draws: How many of those rows sample a token.
        block_tokens: Tokens of a full block.
        num_prompt: Tokens of the prompt.
        num_sealed: Positions whose blocks are sealed.
        last_sealed: Start of the last block that this request sealed itself.
        chain: Name of the last sealed block.
        sealed_blocks: Names of the blocks this request has sealed.
        pointer: Name of the block where the state ends; set when the tail is sealed.
        plan: Restorable prefix; valid for the store version and sequence length in `plan_basis`.
        restore: Loads the prefix; the sequence cannot run until it is done.
        num_failed_restores: Number of restores that failed on corrupt or unreadable blocks.
        prefetched_parts: Parts prefetched for this request while it waited.
        is_reuse_reported: Whether the first `PrefillProgress`, with the reuse, was emitted.
        is_sealing: False once a block could not be sealed; later blocks are useless without it.
        final: The final event, once the request ended.
        retry_until: After a failed step: run alone until this position is computed.
        constraint: The job's constraint, advanced to the end of the reply so far.
        draft_room: The most draft tokens that the next row may carry.
        num_reserved: Tokens for which memory is reserved.
        num_drafted: Draft tokens sent to the device for verification.
        num_accepted: How many of those the model accepted.
        waiting_since: Time of the last service, or of arrival.
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
        """Tokens of another sequence's state that this one can reuse; 0 across tenants.

        The last token is never shared: it must be computed to sample the next one.
        """
        if root != self.job.root:
            return 0
        return min(common_prefix(tokens, self.tokens), len(self.tokens) - 1)

    @property
    def num_generated(self) -> int:
        """Tokens of the reply so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_behind(self) -> int:
        """Tokens, including those being sampled, whose state is not launched yet."""
        return len(self.tokens) + self.num_draws - self.num_launched

    @property
    def is_prefilling(self) -> bool:
        """Whether some prompt tokens are not computed yet."""
        return self.num_computed < self.num_prompt

    @property
    def is_background(self) -> bool:
        """Whether interactive requests take precedence over this one."""
        return self.job.service_class is ServiceClass.BACKGROUND

    @property
    def is_last_draw_launched(self) -> bool:
        """Whether the row that samples the reply's last permitted token is already launched."""
        return self.num_generated + self.num_draws >= self.job.max_tokens

    def is_late(self, now: float) -> bool:
        """Whether the deadline has passed and the request has not ended."""
        deadline = self.job.deadline
        return deadline is not None and now >= deadline and not self.is_done

    @property
    def final_usage(self) -> Usage:
        """Token counts of the ended reply."""
        return replace(
            self.usage,
            completion_tokens=self.num_generated,
            accepted_prediction_tokens=self.num_accepted,
            rejected_prediction_tokens=self.num_drafted - self.num_accepted,
        )

    def report_progress(self) -> PrefillProgress:
        """Return how much of the prompt is computed, and record it in the request's trace."""
        done = min(self.num_computed, self.num_prompt)
        self.job.trace.progress = PrefillProgress(done, self.num_prompt, self.reuse.reused)
        return self.job.trace.progress

    @property
    def reply_state(self) -> ReplyState:
        """The reply's tokens and sealed state; valid after its tail was sealed."""
        num_sealed = self.num_sealed if self.pointer else 0
        return ReplyState(
            tuple(self.tokens[self.num_prompt :]), self.pointer, num_sealed, self.reuse
        )

    def block_at(self, position: int) -> tuple[int, int]:
        """Start and end of the block that holds `position`, which must not be sealed yet."""
        start = end = self.num_sealed
        while end <= position:
            start, end = end, block_end(end, self.block_tokens, self.job.boundaries)
        return start, end

    def next_chunk(self, num_tokens: int, draft: Draft) -> Chunk:
        """Build the chunk of the next `num_tokens` tokens and the draft; does not count it."""
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
        """Count a launched chunk; its draft tokens add positions only once they are accepted."""
        self.num_launched += chunk.num_tokens
        self.num_rows += 1
        self.num_draws += chunk.draw is not None
        self.num_drafted += len(chunk.draft)

    def take(self, drawn: Sampled, guess: int | None, eos_ids: frozenset[int]) -> TextDelta | None:
        """Add a token to the reply; returns the text that is now safe to emit, if any.

        Args:
            drawn: The sampled token.
            guess: Its index in the draft; None if it is not a draft token.
            eos_ids: The model's end-of-sequence tokens.
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
        """Return why the reply ends at its last token; None if it continues."""
        if self._is_ended:
            return FinishReason.END_TURN
        if self.assembler.stop is not None:
            return FinishReason.STOP_SEQUENCE
        if len(self.tokens) >= max_context:
            return FinishReason.CONTEXT_FULL
        return FinishReason.MAX_TOKENS if self.num_generated >= self.job.max_tokens else None

    def rewind(self) -> None:
        """Reset the progress after the backend's sequence was closed or lost."""
        self.end_restore()
        self.seq = NO_SEQUENCE
        self.num_launched = self.num_computed = self.num_rows = self.num_draws = 0
        self.num_sealed = self.last_sealed = 0
        self.chain = self.job.root
        self.is_sealing = True

    @property
    def is_starved(self) -> bool:
        """Whether a restore is in progress and only lacks memory for its next part."""
        return self.restore is not None and self.restore.is_starved

    def end_restore(self) -> None:
        """Cancel the restore, if any, and release its parts."""
        if self.restore is not None:
            self.restore.close()
            self.restore = None

    def resume(self, num_tokens: int, chain: BlockName, num_sealed: int) -> None:
        """Start after `num_tokens` tokens whose state was reused instead of computed."""
        self.num_launched = self.num_computed = num_tokens
        self.num_sealed, self.chain = num_sealed, chain
        self.last_sealed = num_tokens

    def count_reuse(self, reuse: Reuse) -> None:
        """Record the reuse of the first admission; later calls do nothing.

        A request that is opened again after a preemption resumes state that was counted before.
        """
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
        num_drafted: Draft tokens of all rows.
    """

    rows: tuple[tuple[Generation, Chunk], ...]
    ticket: Ticket
    launched_at: float
    num_prompt_tokens: int
    num_drafted: int

    def is_awaited(self, num_requests: int) -> bool:
        """Whether to collect this step before launching the next one.

        True with draft tokens, since the next position depends on how many are accepted. Also true
        if every request gets its first token here: no request gains from launching ahead.
        """
        are_first = all(chunk.draw is not None and not g.num_generated for g, chunk in self.rows)
        return bool(self.num_drafted) or (are_first and len(self.rows) == num_requests)

    def follows(self, other: Optional["Flight"]) -> bool:
        """Whether the time since `other` measures this step: the same rows decoded in both.

        A step without draft tokens right after one with them is excluded: it was launched later
        than usual, so the time would include the delay.
        """
        if other is None or self.num_prompt_tokens or other.num_prompt_tokens:
            return False
        if len(self.rows) != len(other.rows) or (other.num_drafted and not self.num_drafted):
            return False
        pairs = zip(self.rows, other.rows, strict=True)
        return all(mine is theirs for (mine, _), (theirs, _) in pairs)


def as_backend_error(error: Exception) -> SemanticError:
    """Convert an exception into the error that the request fails with.

    Raises:
        DeviceLostError: raised again, since it ends all requests; the device thread handles it.
    """
    if isinstance(error, DeviceLostError):
        raise error
    if isinstance(error, SemanticError):
        return error
    return BackendError(f"the device failed this request: {type(error).__name__}: {error}")
