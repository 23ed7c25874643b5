"""Selects the sequences, and the tokens of each, for the next step.

Every decoding sequence, which is one token behind, gets a row in every step; prompts get the rest
of the step's token budget. A step with a chunk of a long prompt takes many times as long as one
without, so a break for the other requests follows it: decoding sequences get several tokens, and
short prompts get their first. One order decides which waiting request is admitted and which prompt
gets tokens first:

    1. requests that have waited `ageing_s` without service, longest wait first;
    2. interactive before background;
    3. the agent that was served least: tokens over weight, on a virtual clock;
    4. arrival.

The bound on waiting: once a request has waited `ageing_s`, only requests that have waited longer
precede it, and no new request can join those. So only requests that were there before it can
overtake it, and it is served after `ageing_s` plus the time those take.

The scheduler keeps lists and counts. It does not use the backend or the memory budget: the engine
admits a candidate when it has memory for it.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from semantic.application.engine.generation import Generation
from semantic.application.engine.request import NO_DRAFT, Draft
from semantic.application.engine.speculative.planner import DraftPlanner
from semantic.application.engine.steps import ChunkBudget, PromptWork
from semantic.application.settings import EngineLimits
from semantic.domain.images.spans import whole_chunk_end


class VirtualClock:
    """Tokens served over weight, per agent. A new agent starts level with the least served."""

    _MAX_ABSENT = 1024

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._members: dict[str, int] = {}
        self._absent: OrderedDict[str, None] = OrderedDict()
        self._floor = 0.0

    def __len__(self) -> int:
        return len(self._served)

    def join(self, agent: str) -> None:
        """Count one more request of an agent; an agent earns no credit while absent."""
        self._served[agent] = max(self._served.get(agent, 0.0), self._floor)
        self._members[agent] = self._members.get(agent, 0) + 1
        self._absent.pop(agent, None)

    def leave(self, agent: str) -> None:
        """Undo one `join`; drops an absent agent that is not ahead of the agents present."""
        self._members[agent] -= 1
        if self._members[agent]:
            return
        del self._members[agent]
        self._absent[agent] = None
        if not self._members:
            self._floor = max(self._floor, *self._served.values())
        self._floor = max(self._floor, min(map(self._served.__getitem__, self._members), default=0))
        if self._served[agent] <= self._floor:
            self._forget(agent)
        while len(self._absent) > self._MAX_ABSENT or (self._absent and not self._members):
            self._forget(next(iter(self._absent)))

    def _forget(self, agent: str) -> None:
        del self._absent[agent]
        del self._served[agent]

    def charge(self, agent: str, num_tokens: int, weight: float) -> None:
        self._served[agent] += num_tokens / weight

    def time_of(self, agent: str) -> float:
        return self._served[agent]


@dataclass(slots=True)
class Portion:
    """One sequence's tokens in the next step, followed by draft tokens."""

    generation: Generation
    num_tokens: int
    draft: Draft = NO_DRAFT


class ConcurrentScheduler:
    """Waiting and running requests, and the order they run in. Used on the device thread only.

    Attributes:
        planner: Proposes draft tokens; None disables them.
        waiting: Requests that are not admitted yet, or were preempted.
        is_exclusive: Whether the last planned step is a long chunk of a prompt that takes much
            longer, and nothing else. It should end before the next one is launched: a request that
            arrives then waits for one such chunk, not for two.
    """

    BREAK_SHARE = 1 / 8  # length of the break, as a share of the step with the long prompt
    SHORT_SHARE = 4  # a prompt is short if it fits a step's token budget this many times
    SCORED_TOKENS = 256  # tokens per step whose logits are all computed, to bound their memory
    LONG_CHUNK_MS, LONG_PROMPT_MS = 100.0, 1000.0  # see `is_exclusive`
    PLAIN_TOKENS = 3  # first tokens of a reply without drafts, to measure steps without them

    def __init__(
        self,
        limits: EngineLimits,
        *,
        window: int = 0,
        has_state: bool = False,
        needs_whole_images: bool = False,
        max_step_tokens: int = sys.maxsize,
    ) -> None:
        """Create a scheduler without requests.

        Args:
            limits: Initial limits; the attribute may be replaced at any time.
            window: Tokens that sliding-window layers hold; 0 without such layers. A chunk does not
                push tokens out of the window before they are sealed.
            has_state: Whether the model has recurrent state. Chunks then end at the jobs'
                boundaries, since the state can be sealed only where a chunk ends.
            needs_whole_images: See `Traits`; a chunk is then longer than the budget if an image is.
            max_step_tokens: See `Traits`.
        """
        self.limits = limits
        self.budget = ChunkBudget(max_step_tokens)
        self.planner: DraftPlanner | None = None
        self._window = window
        self._has_state = has_state
        self._needs_whole_images = needs_whole_images
        self._clock = VirtualClock()
        self._break_ms = 0.0  # remaining break, before long prompts continue
        self.is_exclusive = False
        self.waiting: list[Generation] = []
        self.running: list[Generation] = []

    def enqueue(self, generation: Generation) -> None:
        self._clock.join(generation.job.agent)
        self.waiting.append(generation)

    def admit(self, generation: Generation) -> None:
        self.waiting.remove(generation)
        self.running.append(generation)
        generation.job.trace.note_admitted()

    def requeue(self, generation: Generation) -> None:
        """Move a request back to waiting; it keeps its arrival order."""
        self.running.remove(generation)
        self.waiting.append(generation)

    def remove(self, generation: Generation) -> None:
        queue = self.running if generation in self.running else self.waiting
        queue.remove(generation)
        self._clock.leave(generation.job.agent)

    def candidates(self, now: float) -> Iterator[Generation]:
        """Yield waiting requests, most urgent first, while the batch has room."""
        for generation in sorted(self.waiting, key=lambda g: self._urgency(g, now)):
            if len(self.running) >= self.limits.max_batch_size:
                return
            yield generation

    def plan_step(self, now: float) -> list[Portion]:
        """Choose the next step's rows and charge their agents; does not count them as launched."""
        ready = [g for g in self.running if self._can_run(g)]
        suspects = [g for g in self.running if g.progress.retry_until is not None]
        if suspects:
            first = min(suspects, key=lambda g: g.order)
            ready = [first] if first in ready else []
        decoding: list[Generation] = []
        behind: list[Generation] = []
        for generation in ready:
            (decoding if generation.num_behind == 1 else behind).append(generation)
        fits = self.budget.tokens if decoding else self.budget.tokens_alone
        sizes = {g.order: fits(self.limits, g.progress.num_launched) for g in behind}
        behind.sort(key=lambda g: self._urgency(g, now))
        prompts = self._prompts_of_step(decoding, behind, sizes) if behind else behind
        drafts = self._drafts_of(decoding, has_prompts=bool(prompts))
        portions = [Portion(g, 1, drafts.get(g.order, NO_DRAFT)) for g in decoding]
        num_drafted = sum(len(p.draft.tokens) for p in portions)
        portions += self._prompts(prompts, sizes, num_drafted)
        self._count_break(portions[len(decoding) :], sizes)
        self.is_exclusive = len(portions) == 1 and self._is_long(portions[0])
        for portion in portions:
            self._serve(portion, now)
        return portions

    def _prompts_of_step(
        self, decoding: Sequence[Generation], behind: list[Generation], sizes: Mapping[int, int]
    ) -> list[Generation]:
        """Return the prompts for this step: only short ones during a break that helps others."""
        if self._break_ms <= 0:
            return behind
        short = [g for g in behind if self._is_short(g, sizes)]
        is_for_background = behind[0].is_background
        others = (g for g in (*decoding, *short) if is_for_background or not g.is_background)
        return short if any(others) else behind

    def _is_long(self, portion: Portion) -> bool:
        generation, budget = portion.generation, self.budget
        start, num_behind = generation.progress.num_launched, generation.num_behind
        return (
            budget.expected_ms(PromptWork.of(start, portion.num_tokens)) > self.LONG_CHUNK_MS
            and budget.expected_ms(PromptWork.of(start, num_behind)) > self.LONG_PROMPT_MS
        )

    def _is_short(self, generation: Generation, sizes: Mapping[int, int]) -> bool:
        short = max(sizes[generation.order] // self.SHORT_SHARE, self.budget.MIN_TOKENS)
        return generation.num_behind <= short

    def _count_break(self, prompts: Sequence[Portion], sizes: Mapping[int, int]) -> None:
        """Start a break after a step with a long prompt; other steps use it up."""
        work = PromptWork()
        for portion in prompts:
            work += PromptWork.of(portion.generation.progress.num_launched, portion.num_tokens)
        expected_ms = self.budget.expected_ms(work)
        if any(not self._is_short(p.generation, sizes) for p in prompts):
            self._break_ms = self.BREAK_SHARE * expected_ms
        elif self._break_ms > 0:
            self._break_ms -= expected_ms or self._break_ms  # an unknown duration ends the break

    def _prompts(
        self, ordered: Sequence[Generation], sizes: Mapping[int, int], num_drafted: int
    ) -> Iterator[Portion]:
        """Yield chunks that fill a step; `sizes` has the tokens that fill it at each position."""
        share, to_score = 1.0, self.SCORED_TOKENS
        for generation in ordered:
            whole = sizes[generation.order] - num_drafted
            budget = round(share * whole)
            if budget <= 0:
                break
            left = self._distance_to_cut(generation)
            if generation.needs_scores:
                left = min(left, to_score)
            if not left:
                continue
            num_tokens = self.budget.chunk(generation.progress.num_launched, budget, left)
            num_tokens = self._with_whole_images(generation, num_tokens)
            if num_tokens < left and budget < whole / 2:
                continue  # too small a chunk to help this prompt; the next step offers a larger one
            yield Portion(generation, num_tokens)
            share -= num_tokens / whole
            to_score -= num_tokens if generation.needs_scores else 0

    def _with_whole_images(self, generation: Generation, num_tokens: int) -> int:
        if not self._needs_whole_images:
            return num_tokens
        start = generation.progress.num_launched
        return whole_chunk_end(start, start + num_tokens, generation.job.images) - start

    def wants_tokens(self) -> bool:
        """Whether to collect sampled tokens before the next step, so that drafts can follow."""
        if self.planner is None or not self.limits.draft_tokens:
            return False
        rows = [g for g in self.running if g.num_behind == 1 and self._can_run(g)]
        if not rows:
            return False
        self._limit_drafts(rows)
        return self.planner.wants_tokens(rows)

    def victim(self) -> Generation | None:
        """Return the request to preempt: the newest of the lowest class; None if only one runs."""
        if len(self.running) < 2:
            return None
        return max(self.running, key=lambda g: (g.is_background, g.order))

    def check_integrity(self) -> None:
        everyone = [*self.waiting, *self.running]
        problems = {
            "a request is listed twice": len({id(g) for g in everyone}) != len(everyone),
            "a request that ended is listed": any(g.is_done for g in everyone),
            "a waiting request has rows": any(g.progress.num_rows for g in self.waiting),
        }
        found = [what for what, is_so in problems.items() if is_so]
        if found:
            raise AssertionError("; ".join(found))

    # -- order ----------------------------------------------------------------------------------

    def _urgency(self, generation: Generation, now: float) -> tuple[float, ...]:
        is_suspect = generation.progress.retry_until is not None
        if is_suspect or now - generation.waiting_since >= self.limits.ageing_s:
            return (0, generation.waiting_since, 0, generation.order)
        served = self._clock.time_of(generation.job.agent)
        stretch = self.budget.tokens_at_a_stretch
        if generation.progress.is_started or generation.num_behind <= stretch / 8:
            served -= stretch  # prefer prompts that have started or are nearly done
        return (1, generation.is_background, served, generation.order)

    def _serve(self, portion: Portion, now: float) -> None:
        generation = portion.generation
        generation.waiting_since = now
        num_tokens = portion.num_tokens + len(portion.draft.tokens)
        self._clock.charge(generation.job.agent, num_tokens, generation.job.weight)

    # -- draft tokens ---------------------------------------------------------------------------

    def _drafts_of(self, rows: Sequence[Generation], *, has_prompts: bool) -> dict[int, Draft]:
        if not rows or self.planner is None or not self.limits.draft_tokens:
            return {}
        self._limit_drafts(rows)
        for generation in rows:
            if generation.progress.num_draws:  # the host does not know its last token yet
                generation.drafting.room = 0
        return self.planner.plan(rows, has_prompts=has_prompts)

    def _limit_drafts(self, rows: Sequence[Generation]) -> None:
        """Set how many draft tokens rows may carry: within reserved memory, before the next cut."""
        for generation in rows:
            progress = generation.progress
            start = progress.num_launched + 1
            room = min(
                progress.num_reserved - start,
                generation.job.max_tokens - generation.num_generated - progress.num_draws - 1,
                self.limits.draft_tokens,
            )
            if generation.sealing.is_active and self._window:
                room = min(room, self._next_cut(generation) - start)
            is_measured = generation.num_generated > self.PLAIN_TOKENS
            generation.drafting.room = room if is_measured and progress.retry_until is None else 0

    # -- eligibility ----------------------------------------------------------------------------

    def _can_run(self, generation: Generation) -> bool:
        if generation.num_behind < 1 or generation.is_last_draw_launched:
            return False
        if generation.prefix.restore is not None:
            return False
        # The next mask depends on the sampled token, which the host does not know yet.
        if generation.constraint is not None and generation.progress.num_draws:
            return False
        # State that the next chunk would overwrite must be sealed first.
        return not generation.progress.num_rows or self._distance_to_cut(generation) > 0

    def _distance_to_cut(self, generation: Generation) -> int:
        """Tokens that the next chunk may have; 0 if launched tokens must be sealed first."""
        start = generation.progress.num_launched
        ends = [start + generation.num_behind]
        if generation.sealing.is_active and (self._has_state or self._window):
            ends.append(self._next_cut(generation))
        return min(ends) - start

    def _next_cut(self, generation: Generation) -> int:
        """Position that a sequence may reach before its state must be sealed."""
        kept, cut = generation.progress.num_computed, sys.maxsize
        boundaries = generation.job.boundaries if self._has_state else ()
        for boundary in (*boundaries, generation.num_prompt):
            if boundary > kept:
                cut = min(cut, boundary)
        if self._window:
            # The window part of the next block reaches back no further than its first token.
            start, end = generation.sealing.block_at(kept)
            cut = min(cut, max(end, start + self._window))
        return cut
