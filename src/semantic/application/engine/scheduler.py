"""Who runs in the next step.

Every running sequence that is one token behind gets its row in every step; what remains of the
step's token budget goes to prompts. A step with a piece of a long prompt takes many times as long
as one without, so it is followed by a break for the others: those who decode get several tokens,
and short prompts their first. Which waiting request is admitted, and which prompt gets tokens
first, is decided by one order:

    1. those that have waited `ageing_s` without being served, longest first;
    2. interactive before background;
    3. the agent that was served least: tokens over weight, on a virtual clock;
    4. arrival.

The bound on waiting: once a request has waited `ageing_s`, only those that have waited longer
go before it, and nobody can join them ahead of it. So it is overtaken by at most the requests
that were there before it; it is served after `ageing_s` plus the time those take.

The scheduler keeps lists and counts. It knows neither the backend nor memory: the engine
admits a candidate when it has room for it.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from semantic.application.engine.request import NO_DRAFT, Draft, Generation
from semantic.application.engine.speculation import DraftPlanner

_LEAST_SPREAD = 0.01  # of sizes, over their mean, squared: with less there is no line
_SMOOTHING = 0.3
_SECONDS_TO_MS = 1000.0


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Settings of the engine that may change while it runs.

    Attributes:
        max_batch_size: Sequences that run at once.
        prefill_step_size: The most prompt tokens in a step; a device that needs long for them gets
            fewer.
        target_step_ms: While someone decodes, prompts get about as many tokens as fit this time.
            None is twelve times what a step without prompts takes: the prompt then takes little
            longer than alone, whatever the device.
        batch_window_ms: How long an idle engine waits at most for others that are being prepared.
        max_queue: Requests that may wait.
        default_max_tokens: Length of a reply when a request does not say; None is all that fits.
        ageing_s: See the module.
        max_idle: Working copies that stay open after their turn, within a share of the memory.
        draft_tokens: The most tokens of a reply that are guessed and checked at once; 0 is none.
    """

    max_batch_size: int = 16
    prefill_step_size: int = 4096
    target_step_ms: float | None = None
    batch_window_ms: float = 5.0
    max_queue: int = 256
    default_max_tokens: int | None = None
    ageing_s: float = 10.0
    max_idle: int = 8
    draft_tokens: int = 16


class _Line:
    """How long prompts of some sizes took, the last ones most, and how long others would take.

    A step takes a while however few tokens it has, and that while is much where the device is fast.
    """

    def __init__(self) -> None:
        self._weights = self._tokens = self._squares = self._ms = self._products = 0.0

    def add(self, num_tokens: int, elapsed_ms: float, weight: float) -> None:
        """Learn from one step."""
        kept = 1 - _SMOOTHING * weight
        self._weights = self._weights * kept + weight
        self._tokens = self._tokens * kept + weight * num_tokens
        self._squares = self._squares * kept + weight * num_tokens**2
        self._ms = self._ms * kept + weight * elapsed_ms
        self._products = self._products * kept + weight * num_tokens * elapsed_ms

    @property
    def mean_slope(self) -> float:
        """Milliseconds a token, all in all; 0 before the first."""
        return self._ms / self._tokens if self._tokens else 0.0

    def longest(self, elapsed_ms: float) -> float:
        """How many tokens take so long: those seen say little of more than three times as many."""
        by_mean = elapsed_ms / self.mean_slope
        spread = self._weights * self._squares - self._tokens**2
        slope = self._weights * self._products - self._tokens * self._ms
        if spread <= _LEAST_SPREAD * self._tokens**2 or slope <= 0:
            return by_mean
        first_ms = (self._ms - slope / spread * self._tokens) / self._weights
        by_line = (elapsed_ms - first_ms) * spread / slope
        return max(by_mean, min(by_line, 3 * self._tokens / self._weights))


class ChunkBudget:
    """How many prompt tokens fit a step, learnt from how long steps took.

    Sizes are multiples of the rows that kernels take at once: others cost as much as the next
    multiple, and a device that prepares itself for each size it meets does so for few of them. None
    is so small that a prompt would cost twice as much as in large ones: sixteen tokens take two
    thirds of the time of sixty-four on a CPU, whatever else decodes.
    Large ones are powers of two, and end at multiples of their size.
    """

    BLOCK = 32
    MIN_TOKENS = 64
    PATIENCE = 12
    NUM_TRIALS = 3  # steps without prompts, before what they take is known
    FIRST = 128  # before anything is known: a device may be so slow that more look like a hang
    USUAL = 512
    ALONE_MS = 250.0  # what whoever comes next may wait while nobody decodes
    LONGEST_MS = 500.0  # the same where that is fewer than the usual ones
    SLOWEST_MS = 10_000.0  # even for the first few
    MAX_ALIGNED = 2048

    def __init__(self) -> None:
        self._seen = _Line()
        self._decode_ms = 0.0
        self._trials_ms: list[float] = []

    def observe(self, num_prompt_tokens: int, elapsed_s: float) -> None:
        """Learn from one step."""
        elapsed_ms = elapsed_s * _SECONDS_TO_MS
        if num_prompt_tokens == 0:
            if len(self._trials_ms) < self.NUM_TRIALS:
                self._trials_ms.append(elapsed_ms)
                # One of them may have had to prepare something.
                self._decode_ms = mean(sorted(self._trials_ms)[: self.NUM_TRIALS - 1])
            else:
                known_ms = self._decode_ms or elapsed_ms
                self._decode_ms = known_ms + _SMOOTHING * (elapsed_ms - known_ms)
            return
        # A whole step is no shorter than its decoding part.
        self._decode_ms = min(self._decode_ms, elapsed_ms / 2)
        # A few tokens take as long as many where weights are read anyway: they teach little.
        weight = min(1.0, num_prompt_tokens / self.USUAL)
        self._seen.add(num_prompt_tokens, elapsed_ms - self._decode_ms, weight)

    @property
    def _ms_per_token(self) -> float:
        return self._seen.mean_slope

    @property
    def seconds_per_token(self) -> float:
        """What a prompt token costs; 0 before the first step."""
        return self._ms_per_token / _SECONDS_TO_MS

    @property
    def tokens_at_a_stretch(self) -> float:
        """What is computed of one prompt before another begins: most are answered sooner then."""
        return self.ALONE_MS / self._ms_per_token if self._ms_per_token else 0.0

    def tokens(self, limits: EngineLimits) -> int:
        """The budget while others decode: at least a few, at most `prefill_step_size`.

        At first those go alone, for a few steps, to see what that takes.
        """
        target_ms = limits.target_step_ms
        if target_ms is None:
            if len(self._trials_ms) < self.NUM_TRIALS:
                return 0
            target_ms = self.PATIENCE * self._decode_ms
        fitting = min(self.USUAL, limits.prefill_step_size) / 4
        if self._ms_per_token:
            room_ms = target_ms - self._decode_ms
            fitting = min(self._seen.longest(room_ms), limits.prefill_step_size)
        return max(self._rounded(fitting), self.MIN_TOKENS)

    def tokens_alone(self, limits: EngineLimits) -> int:
        """The budget while nobody decodes."""
        usual = min(self.USUAL, limits.prefill_step_size)
        if not self._ms_per_token:
            return min(self.FIRST, usual)
        fitting = min(self._seen.longest(self.ALONE_MS), limits.prefill_step_size)
        slowest = max(self._rounded(self.SLOWEST_MS / self._ms_per_token), self.MIN_TOKENS)
        least = max(self._rounded(self.LONGEST_MS / self._ms_per_token), self.FIRST)
        return max(self._rounded(fitting), min(usual, slowest, least))

    def expected_ms(self, num_prompt_tokens: int) -> float:
        """What a step may take."""
        return self._decode_ms + num_prompt_tokens * self._ms_per_token

    def _rounded(self, num_tokens: float) -> int:
        if num_tokens < self.USUAL:
            return int(num_tokens // self.BLOCK) * self.BLOCK
        return self.USUAL << (int(num_tokens / self.USUAL).bit_length() - 1)

    def chunk(self, start: int, size: int, left: int) -> int:
        """Tokens of a chunk of about `size` from `start`, so that chunks come to end alike.

        What would be `left` of a prompt after it comes along if it is little: it would cost a step.
        """
        if size >= self.USUAL:
            step = min(size, self.MAX_ALIGNED)
            size = (start + size + step // 4) // step * step - start
        return left if left <= size + size // 8 else size


class VirtualClock:
    """Tokens served over weight, per agent. Newcomers start level with the least served."""

    _MAX_ABSENT = 1024

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._members: dict[str, int] = {}
        self._absent: OrderedDict[str, None] = OrderedDict()
        self._floor = 0.0

    def __len__(self) -> int:
        """Agents that are remembered."""
        return len(self._served)

    def join(self, agent: str) -> None:
        """Count one more request of an agent; absence earns no credit."""
        self._served[agent] = max(self._served.get(agent, 0.0), self._floor)
        self._members[agent] = self._members.get(agent, 0) + 1
        self._absent.pop(agent, None)

    def leave(self, agent: str) -> None:
        """Undo one `join`; an agent that is not ahead of those present is forgotten."""
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
        """Count tokens served to an agent."""
        self._served[agent] += num_tokens / weight

    def time_of(self, agent: str) -> float:
        """How much an agent was served."""
        return self._served[agent]


@dataclass(slots=True)
class Portion:
    """So many tokens of one sequence in the next step, and guesses after them."""

    generation: Generation
    num_tokens: int
    draft: Draft = NO_DRAFT


class ConcurrentScheduler:
    """Waiting and running requests, and whose turn it is. Used on the engine's thread only.

    Attributes:
        planner: Guesses what rows will say; None guesses nothing.
        running: Sequences that are open in the backend.
        waiting: Requests that are not.
    """

    BREAK_SHARE = 1 / 12  # of what a step with long prompts takes
    SHORT_SHARE = 4  # prompts of this part of a step's tokens, or less, are short
    PLAIN_TOKENS = 3  # that a reply begins with: what steps take without guesses is seen there

    def __init__(self, limits: EngineLimits, *, window: int = 0, has_state: bool = False) -> None:
        """Start empty.

        Args:
            limits: May be replaced at any time through the attribute.
            window: Tokens that window layers hold, 0 without such layers: a chunk does not push
                out of them what is yet to be kept.
            has_state: Chunks end at the jobs' boundaries, for state can be kept only where a
                chunk ended.
        """
        self.limits = limits
        self.budget = ChunkBudget()
        self.planner: DraftPlanner | None = None
        self._window = window
        self._has_state = has_state
        self._clock = VirtualClock()
        self._break_ms = 0.0  # until long prompts go on
        self.waiting: list[Generation] = []
        self.running: list[Generation] = []

    def add(self, generation: Generation) -> None:
        """Put a new request in the queue."""
        self._clock.join(generation.job.agent)
        self.waiting.append(generation)

    def admit(self, generation: Generation) -> None:
        """Move a request from waiting to running."""
        self.waiting.remove(generation)
        self.running.append(generation)
        generation.job.trace.note_admitted()

    def requeue(self, generation: Generation) -> None:
        """Move a request back to waiting; it keeps its place by arrival."""
        self.running.remove(generation)
        self.waiting.append(generation)

    def remove(self, generation: Generation) -> None:
        """Drop a request that ended."""
        queue = self.running if generation in self.running else self.waiting
        queue.remove(generation)
        self._clock.leave(generation.job.agent)

    def candidates(self, now: float) -> Iterator[Generation]:
        """Waiting requests that may be admitted, the most urgent first, while there is room."""
        for generation in sorted(self.waiting, key=lambda g: self._urgency(g, now)):
            if len(self.running) >= self.limits.max_batch_size:
                return
            yield generation

    def plan(self, now: float) -> list[Portion]:
        """Choose the next step's rows and count them as served; mutates fairness only."""
        ready = [g for g in self.running if self._can_run(g)]
        suspects = [g for g in self.running if g.retry_until is not None]
        if suspects:
            first = min(suspects, key=lambda g: g.order)
            ready = [first] if first in ready else []
        decoding: list[Generation] = []
        behind: list[Generation] = []
        for generation in ready:
            (decoding if generation.num_behind == 1 else behind).append(generation)
        fits = self.budget.tokens if decoding else self.budget.tokens_alone
        size = fits(self.limits) if behind else 0
        short_size = max(size // self.SHORT_SHARE, self.budget.MIN_TOKENS)
        behind.sort(key=lambda g: self._urgency(g, now))
        prompts = self._whose_turn(decoding, behind, short_size) if behind else behind
        drafts = self._drafts_of(decoding, has_prompts=bool(prompts))
        portions = [Portion(g, 1, drafts.get(g.order, NO_DRAFT)) for g in decoding]
        portions += self._prompts(prompts, size - sum(len(p.draft.tokens) for p in portions))
        self._count_break(portions[len(decoding) :], short_size)
        for portion in portions:
            self._serve(portion, now)
        return portions

    def _whose_turn(
        self, decoding: Sequence[Generation], behind: list[Generation], short_size: int
    ) -> list[Generation]:
        """The prompts for this step: short ones alone while there is a break for somebody."""
        if self._break_ms <= 0:
            return behind
        short = [g for g in behind if g.num_behind <= short_size]
        is_for_background = behind[0].is_background
        others = (g for g in (*decoding, *short) if is_for_background or not g.is_background)
        return short if any(others) else behind

    def _count_break(self, prompts: Sequence[Portion], short_size: int) -> None:
        """A step with a long prompt earns a break; one without takes of it."""
        expected_ms = self.budget.expected_ms(sum(p.num_tokens for p in prompts))
        if any(p.generation.num_behind > short_size for p in prompts):
            self._break_ms = self.BREAK_SHARE * expected_ms
        elif self._break_ms > 0:
            self._break_ms -= expected_ms or self._break_ms  # what is not known yet ends it

    def _prompts(self, ordered: Sequence[Generation], budget: int) -> Iterator[Portion]:
        """What of prompts fits the step beside those that decode."""
        whole = budget
        for generation in ordered:
            if budget <= 0:
                break
            left = self._distance_to_cut(generation)
            num_tokens = self.budget.chunk(generation.num_launched, budget, left)
            if num_tokens < left and budget < whole / 2:
                continue  # a small piece of it would not make it shorter: the next step has more
            yield Portion(generation, num_tokens)
            budget -= num_tokens

    def wants_tokens(self) -> bool:
        """Whether tokens that are under way should be waited for before the next step.

        Then rows may carry guesses of what follows those tokens.
        """
        if self.planner is None or not self.limits.draft_tokens:
            return False
        rows = [g for g in self.running if g.num_behind == 1 and self._can_run(g)]
        if not rows:
            return False
        self._limit_drafts(rows)
        return self.planner.wants_tokens(rows)

    def victim(self) -> Generation | None:
        """Whom to preempt: the youngest of the lowest class, never the only one."""
        if len(self.running) < 2:
            return None
        return max(self.running, key=lambda g: (g.is_background, g.order))

    def check_integrity(self) -> None:
        """Check the lists and the clock.

        Raises:
            AssertionError: they contradict each other.
        """
        everyone = [*self.waiting, *self.running]
        problems = {
            "a request is listed twice": len({id(g) for g in everyone}) != len(everyone),
            "a request that ended is listed": any(g.is_done for g in everyone),
            "a waiting request has rows": any(g.num_rows for g in self.waiting),
        }
        found = [what for what, is_so in problems.items() if is_so]
        if found:
            raise AssertionError("; ".join(found))

    # -- order ----------------------------------------------------------------------------------

    def _urgency(self, generation: Generation, now: float) -> tuple[float, ...]:
        is_suspect = generation.retry_until is not None
        if is_suspect or now - generation.waiting_since >= self.limits.ageing_s:
            return (0, generation.waiting_since, 0, generation.order)
        served = self._clock.time_of(generation.job.agent)
        stretch = self.budget.tokens_at_a_stretch
        if generation.is_reuse_reported or generation.num_behind <= stretch / 8:
            served -= stretch  # it has begun, or will soon be done
        return (1, generation.is_background, served, generation.order)

    def _serve(self, portion: Portion, now: float) -> None:
        generation = portion.generation
        generation.waiting_since = now
        num_tokens = portion.num_tokens + len(portion.draft.tokens)
        self._clock.charge(generation.job.agent, num_tokens, generation.job.weight)

    # -- guesses --------------------------------------------------------------------------------

    def _drafts_of(self, rows: Sequence[Generation], *, has_prompts: bool) -> dict[int, Draft]:
        if not rows or self.planner is None or not self.limits.draft_tokens:
            return {}
        self._limit_drafts(rows)
        for generation in rows:
            if generation.num_draws:  # its last token is on the device
                generation.draft_room = 0
        return self.planner.plan(rows, has_prompts=has_prompts)

    def _limit_drafts(self, rows: Sequence[Generation]) -> None:
        """See how many guesses rows may carry: within what is reserved, and before the next cut."""
        for generation in rows:
            start = generation.num_launched + 1
            room = min(
                generation.num_reserved - start,
                generation.job.max_tokens - generation.num_generated - generation.num_draws - 1,
                self.limits.draft_tokens,
            )
            if generation.is_sealing and self._window:
                room = min(room, self._next_cut(generation) - start)
            is_measured = generation.num_generated > self.PLAIN_TOKENS
            generation.draft_room = room if is_measured and generation.retry_until is None else 0

    # -- eligibility ----------------------------------------------------------------------------

    def _can_run(self, generation: Generation) -> bool:
        if generation.num_behind < 1 or generation.is_last_draw_launched:
            return False
        if generation.restore is not None:
            return False
        # The next mask depends on a token that only the host can tell it.
        if generation.constraint is not None and generation.num_draws:
            return False
        # What cannot be had later must be kept before the next chunk begins.
        return not generation.num_rows or self._distance_to_cut(generation) > 0

    def _distance_to_cut(self, generation: Generation) -> int:
        """How many tokens the next chunk may have; 0 if what is on its way must be kept first."""
        start = generation.num_launched
        ends = [start + generation.num_behind]
        if generation.is_sealing and (self._has_state or self._window):
            ends.append(self._next_cut(generation))
        return min(ends) - start

    def _next_cut(self, generation: Generation) -> int:
        """How far a sequence may run before more of it is kept."""
        kept, cut = generation.num_computed, sys.maxsize
        boundaries = generation.job.boundaries if self._has_state else ()
        for boundary in (*boundaries, generation.num_prompt):
            if boundary > kept:
                cut = min(cut, boundary)
        if self._window:
            # The window part of the next block reaches back to its first token at most.
            start, end = generation.block_at(kept)
            cut = min(cut, max(end, start + self._window))
        return cut
