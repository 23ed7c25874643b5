"""A job in progress: how far it is computed, sealed, restored and drafted."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from semantic.application.cache.restore_plan import RestorePlan
from semantic.application.engine.request import NO_DRAFT, NO_SEQUENCE, Draft, Job, ReplyState
from semantic.application.engine.restore import Restore
from semantic.application.parsing import TextAssembler
from semantic.domain.agents import Reuse
from semantic.domain.blocks import BlockName, PartKey, block_end, common_prefix
from semantic.domain.chat import ServiceClass
from semantic.domain.events import (
    DraftOrigin,
    Failed,
    Finished,
    PrefillProgress,
    PromptScored,
    TextDelta,
    Usage,
)
from semantic.domain.images.spans import cut_before_image, spans_within
from semantic.domain.sampling import FinishReason, TokenLogprob
from semantic.ports.backend import LAST_SAMPLED, Chunk, Computed, Draw, Sampled, SequenceId
from semantic.ports.text import TokenConstraint


@dataclass(slots=True, eq=False)
class Progress:
    """How far the device is with one sequence.

    Attributes:
        num_launched: Positions whose state is computed or launched for computing.
        num_computed: Positions whose state is known to be computed.
        num_rows: Rows of this sequence in steps that are launched and not collected.
        num_draws: How many of those rows sample a token.
        num_reserved: Tokens for which memory is reserved.
        retry_until: After a failed step: run alone until this position is computed.
    """

    num_launched: int = 0
    num_computed: int = 0
    num_rows: int = 0
    num_draws: int = 0
    num_reserved: int = 0
    is_started: bool = False
    retry_until: int | None = None

    def start_at(self, num_tokens: int) -> None:
        """Start after `num_tokens` tokens, whose state is there without computing it."""
        self.num_launched = self.num_computed = num_tokens
        self.num_rows = self.num_draws = 0

    def count_launched(self, chunk: Chunk) -> None:
        """Count a launched chunk; its draft tokens add positions only once they are accepted."""
        self.is_started = True
        self.num_launched += chunk.num_tokens
        self.num_rows += 1
        self.num_draws += chunk.draw is not None

    def count_collected(self, chunk: Chunk) -> None:
        """Count a row that the device has returned, whether it succeeded or not."""
        self.num_rows -= 1
        self.num_draws -= chunk.draw is not None

    def count_computed(self, end: int) -> None:
        """Count the positions before `end` as computed; ends a retry that reached its position."""
        self.num_computed = end
        if self.retry_until is not None and end >= self.retry_until:
            self.retry_until = None

    def count_accepted(self) -> None:
        """Count the position of an accepted draft token, which is computed already."""
        self.num_launched += 1
        self.num_computed += 1


@dataclass(slots=True, eq=False)
class Sealing:
    """The blocks that one request has sealed.

    Attributes:
        boundaries: Prompt positions where blocks end.
        chain: Name of the last sealed block.
        num_sealed: Positions whose blocks are sealed.
        last_start: Start of the last block that this request sealed itself.
        pointer: Name of the block where the state ends; set when the tail is sealed.
        is_wanted: Whether to seal blocks at all.
        is_sound: False once a step failed, because the state on the device may be corrupt.
        is_active: False once a block could not be sealed; later blocks are useless without it.
    """

    root: BlockName
    block_tokens: int
    boundaries: tuple[int, ...]
    chain: BlockName = field(init=False)
    num_sealed: int = 0
    last_start: int = 0
    names: list[BlockName] = field(default_factory=list)
    pointer: BlockName | None = None
    is_wanted: bool = True
    is_sound: bool = True
    is_active: bool = field(init=False)

    def __post_init__(self) -> None:
        self.chain, self.is_active = self.root, self.is_wanted

    def start_at(self, num_tokens: int, chain: BlockName, num_sealed: int) -> None:
        """Continue the blocks of a prefix of `num_tokens` tokens, `num_sealed` of them sealed."""
        self.chain, self.num_sealed, self.last_start = chain, num_sealed, num_tokens

    def restart(self) -> None:
        self.start_at(0, self.root, 0)
        self.is_sound, self.is_active = True, self.is_wanted

    def stop(self) -> None:
        """Seal nothing more until the sequence starts again: a step failed."""
        self.is_sound = self.is_active = False

    def try_again(self) -> None:
        """Seal on after a block that found no room: the writer may have made some since."""
        self.is_active = self.is_wanted and self.is_sound

    def block_at(self, position: int) -> tuple[int, int]:
        """Start and end of the block that holds `position`, which must not be sealed yet."""
        start = end = self.num_sealed
        while end <= position:
            start, end = end, block_end(end, self.block_tokens, self.boundaries)
        return start, end

    def count_sealed(self, name: BlockName | None, start: int, end: int) -> None:
        """Count the next full block; a `name` of None says that it could not be sealed."""
        self.is_active = name is not None
        if name is not None:
            self.chain, self.num_sealed, self.last_start = name, end, start


@dataclass(slots=True, eq=False)
class PrefixReuse:
    """The prefix of one request whose state is reused instead of computed.

    Attributes:
        plan: Restorable prefix; valid for the store version and number of tokens in `plan_basis`.
        prefetched_parts: Parts prefetched for this request while it waited.
        restore: Loads the prefix; the sequence cannot run until it is done.
        num_stored: Tokens whose blocks were stored at the first admission, worth reading or not.
    """

    plan: RestorePlan | None = None
    plan_basis: tuple[int, int] = (0, 0)
    prefetched_parts: set[PartKey] = field(default_factory=set)
    restore: Restore | None = None
    num_failed_restores: int = 0
    reuse: Reuse = field(default_factory=Reuse)
    num_stored: int = 0
    _is_counted: bool = False

    @property
    def is_starved(self) -> bool:
        return self.restore is not None and self.restore.is_starved

    def end_restore(self) -> None:
        if self.restore is not None:
            self.restore.close()
            self.restore = None

    def count_reuse(self, reuse: Reuse) -> None:
        """Record the first admission only: a preempted request resumes state counted before."""
        if not self._is_counted:
            self._is_counted, self.reuse = True, reuse
            self.num_stored = self.plan.end if self.plan else 0


@dataclass(slots=True, eq=False)
class Drafting:
    """The draft tokens of one request.

    Attributes:
        room: The most draft tokens that the next row may carry.
        accepted: Accepted draft tokens by where they came from.
    """

    room: int = 0
    num_sent: int = 0
    accepted: Counter[DraftOrigin] = field(default_factory=Counter)
    latest: Draft = NO_DRAFT

    @property
    def num_accepted(self) -> int:
        return self.accepted.total()

    def accept(self, index: int) -> TokenConstraint | None:
        """Count a token of the latest draft; returns the constraint's state after it, if any."""
        self.accepted[self.latest.origin] += 1
        return self.latest.states[index] if self.latest.states else None


@dataclass(slots=True, eq=False)
class Generation:
    """A job in progress. Owned by the device thread.

    Prefill and decode differ only in how many tokens are still to be computed: a prompt is many
    tokens behind, a decoding sequence is one token behind. No other field tells them apart.

    Attributes:
        order: Number of the request in order of arrival.
        waiting_since: Time of the last service, or of arrival.
        seq: The backend's id while the sequence is open there; a new one each time.
        tokens: Prompt and reply, as far as the host knows them.
        constraint: The job's constraint, advanced to the end of the reply so far.
        scores: Log-probabilities of the prompt's tokens from the second one on, if requested.
    """

    job: Job
    order: int
    assembler: TextAssembler
    waiting_since: float
    block_tokens: InitVar[int]
    seq: SequenceId = NO_SEQUENCE
    tokens: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    constraint: TokenConstraint | None = field(init=False)
    progress: Progress = field(default_factory=Progress)
    sealing: Sealing = field(init=False)
    prefix: PrefixReuse = field(default_factory=PrefixReuse)
    drafting: Drafting = field(default_factory=Drafting)
    scores: list[TokenLogprob] = field(default_factory=list)
    final: Finished | Failed | None = None
    _is_ended: bool = False
    _is_prompt_reported: bool = False

    def __post_init__(self, block_tokens: int) -> None:
        self.tokens = list(self.job.tokens)
        self.num_prompt = len(self.tokens)
        self.constraint = self.job.constraint
        is_kept = not self.job.is_ephemeral
        self.sealing = Sealing(self.job.root, block_tokens, self.job.boundaries, is_wanted=is_kept)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_behind(self) -> int:
        """Tokens, including those being sampled, whose state is not launched yet."""
        return len(self.tokens) + self.progress.num_draws - self.progress.num_launched

    @property
    def is_prefilling(self) -> bool:
        return self.progress.num_computed < self.num_prompt

    @property
    def is_background(self) -> bool:
        return self.job.service_class is ServiceClass.BACKGROUND

    @property
    def is_done(self) -> bool:
        """Whether the request ended; the device may still compute rows of it."""
        return self.final is not None

    @property
    def is_last_draw_launched(self) -> bool:
        return 0 < self.job.max_tokens <= self.num_generated + self.progress.num_draws

    @property
    def needs_scores(self) -> bool:
        return self.job.is_prompt_scored and len(self.scores) < self.num_prompt - 1

    @property
    def num_reusable(self) -> int:
        """Tokens, from the first, whose state need not be computed.

        The last token must be, to sample the next one; so must tokens before one without a score,
        because blocks hold no logits.
        """
        return len(self.scores) if self.needs_scores else len(self.tokens) - 1

    def is_late(self, now: float) -> bool:
        deadline = self.job.deadline
        return deadline is not None and now >= deadline and not self.is_done

    def num_shared(self, root: BlockName, tokens: Sequence[int]) -> int:
        """Tokens of another sequence's state that this one can reuse; 0 across tenants."""
        if root != self.job.root:
            return 0
        return self.without_cut_image(min(common_prefix(tokens, self.tokens), self.num_reusable))

    def without_cut_image(self, num_tokens: int) -> int:
        """Return the largest number of tokens, up to this one, that ends inside no image.

        Key ids identify an image only together: two images may share the first few by chance.
        """
        return cut_before_image(num_tokens, self.job.images)

    # -- position -------------------------------------------------------------------------------

    def resume(self, num_tokens: int, chain: BlockName, num_sealed: int) -> None:
        self.progress.start_at(num_tokens)
        self.sealing.start_at(num_tokens, chain, num_sealed)

    def rewind(self) -> None:
        """Reset the progress after the backend's sequence was closed or lost."""
        self.prefix.end_restore()
        self.seq = NO_SEQUENCE
        self.progress.start_at(0)
        self.sealing.restart()

    # -- rows -----------------------------------------------------------------------------------

    def next_chunk(self, num_tokens: int, draft: Draft) -> Chunk:
        """Build the chunk of the next `num_tokens` tokens and the draft; does not count it."""
        start = self.progress.num_launched
        end = start + num_tokens
        draw = None
        if self.job.max_tokens and end == len(self.tokens) + self.progress.num_draws:
            allowed = self.constraint.allowed() if self.constraint else None
            draw = Draw(self.job.sampling, self.num_prompt, allowed)
        if start >= len(self.tokens):
            return Chunk(self.seq, start, LAST_SAMPLED, draw)
        self.drafting.latest = draft
        known = tuple(self.tokens[start:end])
        if not self.needs_scores:
            images = spans_within(self.job.images, start, end)
            return Chunk(self.seq, start, known, draw, draft.tokens, draft.masks, images=images)
        targets = tuple(self.tokens[start + 1 : min(end + 1, self.num_prompt)])
        num_top = self.job.sampling.top_logprobs or 0
        return Chunk(self.seq, start, known, draw, targets=targets, num_top=num_top)

    def count_launched(self, chunk: Chunk) -> None:
        self.progress.count_launched(chunk)
        self.drafting.num_sent += len(chunk.draft)

    def append(
        self, drawn: Sampled, draft_index: int | None, eos_ids: frozenset[int]
    ) -> TextDelta | None:
        """Add a token to the reply; returns the text that is now safe to emit, if any.

        `draft_index` is its index in the draft; None if it is not a draft token.
        """
        self.tokens.append(drawn.token)
        state = None if draft_index is None else self.drafting.accept(draft_index)
        if state is not None:
            self.constraint = state
        elif self.constraint is not None:
            self.constraint.accept(drawn.token)
        self._is_ended = self.job.stop.is_end(drawn.token, eos_ids)
        if self._is_ended:
            self.assembler.end(drawn.logprob)
            return None
        return self.assembler.feed(drawn.token, drawn.logprob)

    def take_scores(self, chunk: Chunk, row: Computed | Sampled) -> PromptScored | None:
        """Add the scores of a chunk; returns those of the whole prompt once they are complete."""
        if not self.job.is_prompt_scored or self._is_prompt_reported:
            return None
        self.scores[chunk.start :] = row.scores
        self._is_prompt_reported = not self.needs_scores
        if not self._is_prompt_reported:
            return None
        return self.assembler.prompt_scored(self.tokens[0], self.scores)

    def finish_reason(self, max_context: int) -> FinishReason | None:
        if self._is_ended:
            return FinishReason.END_TURN
        if self.assembler.stop is not None:
            return FinishReason.STOP_SEQUENCE
        if len(self.tokens) >= max_context:
            return FinishReason.CONTEXT_FULL
        return FinishReason.MAX_TOKENS if self.num_generated >= self.job.max_tokens else None

    @property
    def is_prompt_done(self) -> bool:
        """Whether the prompt is computed and the request wants no reply."""
        return not self.job.max_tokens and not self.is_prefilling

    # -- events ---------------------------------------------------------------------------------

    def report_progress(self) -> PrefillProgress:
        """Return how much of the prompt is computed, and record it in the request's trace."""
        done = min(self.progress.num_computed, self.num_prompt)
        self.job.trace.progress = PrefillProgress(done, self.num_prompt, self.prefix.reuse.reused)
        return self.job.trace.progress

    @property
    def usage(self) -> Usage:
        drafting, reuse = self.drafting, self.prefix.reuse
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=self.num_generated,
            cache_read_tokens=reuse.reused,
            cache_creation_tokens=0 if self.job.is_ephemeral else reuse.computed,
            accepted_prediction_tokens=drafting.num_accepted,
            rejected_prediction_tokens=drafting.num_sent - drafting.num_accepted,
            accepted_by_source={str(origin): n for origin, n in drafting.accepted.items()},
        )

    @property
    def reply_state(self) -> ReplyState:
        """The reply's tokens and sealed state; valid after its tail was sealed."""
        pointer = self.sealing.pointer
        num_sealed = self.sealing.num_sealed if pointer else 0
        reply = tuple(self.tokens[self.num_prompt :])
        prefix = self.prefix
        is_damaged = prefix.num_failed_restores > 0
        return ReplyState(reply, pointer, num_sealed, prefix.reuse, prefix.num_stored, is_damaged)
