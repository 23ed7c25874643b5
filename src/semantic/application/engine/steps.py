"""Launched steps, and what the engine learns from their durations.

`ChunkBudget` learns how many prompt tokens fit a step, `StepCosts` what draft tokens cost.
"""

import math
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from statistics import mean
from typing import Optional

from semantic.application.engine.generation import Generation
from semantic.application.settings import EngineLimits
from semantic.ports.backend import Chunk, Ticket
from semantic.ports.telemetry import Measure, RequestTrace, TelemetryPort

_BUDGET_SMOOTHING = 0.2
_SECONDS_TO_MS = 1000.0
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256)
_COST_SMOOTHING = 0.2
_FORGETTING = 0.998  # decay of the extra cost of drafts, per step without them
_SETTLED = 2  # measurements before the cost of a step size is known
_FIRST_SLOPE = 0.02  # share of a step's time per further token, before any measurement


@dataclass(frozen=True, slots=True)
class PromptWork:
    """What a step computes of prompts.

    Attributes:
        num_keys: Tokens that each chunk attends to, summed over chunks.
        num_pairs: Pairs of a token and a token that it attends to.
    """

    num_tokens: int = 0
    num_keys: int = 0
    num_pairs: float = 0.0

    @classmethod
    def of(cls, start: int, num_tokens: int) -> "PromptWork":
        """Describe a chunk of `num_tokens` after `start` tokens."""
        end = start + num_tokens
        return cls(num_tokens, end, num_tokens * (start + end) / 2)

    def __add__(self, other: "PromptWork") -> "PromptWork":
        return PromptWork(
            self.num_tokens + other.num_tokens,
            self.num_keys + other.num_keys,
            self.num_pairs + other.num_pairs,
        )


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step that is launched and not collected."""

    rows: tuple[tuple[Generation, Chunk], ...]
    ticket: Ticket
    launched_at: float
    prompts: PromptWork = field(default=PromptWork(), init=False)
    num_drafted: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for generation, chunk in self.rows:
            self.num_drafted += len(chunk.draft)
            if chunk.start + 1 < generation.num_prompt:
                self.prompts += PromptWork.of(chunk.start, chunk.num_tokens)

    def is_awaited(self, num_requests: int) -> bool:
        """Whether to collect this step before launching the next one.

        True with draft tokens, since the next position depends on how many are accepted. Also true
        if every request gets its first token here: no request gains from launching ahead.
        """
        are_first = all(chunk.draw is not None and not g.num_generated for g, chunk in self.rows)
        return bool(self.num_drafted) or (are_first and len(self.rows) == num_requests)

    def follows(self, other: Optional["LaunchedStep"]) -> bool:
        """Whether the time since `other` measures this step: the same rows decoded in both.

        A step without draft tokens right after one with them is excluded: it was launched later
        than usual, so the time would include the delay.
        """
        if other is None or self.prompts.num_tokens or other.prompts.num_tokens:
            return False
        if len(self.rows) != len(other.rows) or (other.num_drafted and not self.num_drafted):
            return False
        pairs = zip(self.rows, other.rows, strict=True)
        return all(mine is theirs for (mine, _), (theirs, _) in pairs)


class EngineWatch:
    """Reports durations of steps and tokens to telemetry. Used on the device thread only."""

    def __init__(self, telemetry: TelemetryPort) -> None:
        self.counts = telemetry.counts.engine
        self._observe = telemetry.observe

    def note_step(self, seconds: float, num_rows: int, num_prompt_tokens: int) -> None:
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

    def note_end(self, generation: Generation) -> None:
        self.counts.drafted_tokens += generation.drafting.num_sent
        self.counts.accepted_tokens += generation.drafting.num_accepted


class _PrefillCost:
    """Predicts prefill time from tokens and their positions; recent steps weigh most.

    The time is linear in four terms, none of them negative: each step, each token, each token that
    a chunk attends to, and each pair of them. The first is large on a fast device; the last two
    make a chunk slower the later it is in a prompt: at 100,000 tokens about four times.
    """

    _SWEEPS = 12

    def __init__(self) -> None:
        self._squares = [[0.0] * 4 for _ in range(4)]
        self._products = [0.0] * 4
        self._costs = [0.0] * 4

    def add(self, work: PromptWork, elapsed_ms: float, weight: float) -> None:
        terms, kept = _terms(work), 1 - _BUDGET_SMOOTHING * weight
        if not self.is_known:
            self._costs[1] = elapsed_ms / work.num_tokens
        for row, mine in enumerate(terms):
            self._products[row] = self._products[row] * kept + weight * mine * elapsed_ms
            self._squares[row] = [
                known * kept + weight * mine * other
                for known, other in zip(self._squares[row], terms, strict=True)
            ]
        for _ in range(self._SWEEPS):
            self._improve()

    def _improve(self) -> None:
        """Set each cost to its best value for the others.

        From the costs before, so that terms which the steps do not tell apart keep their shares.
        """
        for row, squares in enumerate(self._squares):
            known = sum(map(mul, squares, self._costs)) - squares[row] * self._costs[row]
            self._costs[row] = max((self._products[row] - known) / squares[row], 0.0)

    @property
    def is_known(self) -> bool:
        return self._squares[0][0] > 0

    @property
    def mean_slope(self) -> float:
        """Milliseconds per token, everything included; 0 before the first step."""
        return self._products[0] / self._squares[0][1] if self.is_known else 0.0

    def of(self, work: PromptWork) -> float:
        return sum(cost * term for cost, term in zip(self._costs, _terms(work), strict=True))

    def fixed_ms(self, start: int) -> float:
        """Milliseconds of a chunk after `start` tokens, however small it is."""
        return self._costs[0] + self._costs[2] * start

    def longest(self, elapsed_ms: float, start: int) -> float:
        """Tokens after `start` that fit `elapsed_ms`.

        Beyond three times the mean size, a token counts as much as in a chunk of the mean size.
        """
        mean_size = self._squares[0][1] / self._squares[0][0]
        of_mean = self.of(PromptWork.of(start, round(mean_size)))
        by_mean = elapsed_ms * mean_size / of_mean
        room_ms = elapsed_ms - self.fixed_ms(start)
        # token + key + pair * start, times n, plus half a pair times n squared
        slope, pair = self._costs[1] + self._costs[2] + self._costs[3] * start, self._costs[3]
        if room_ms <= 0 or slope <= 0:
            return by_mean
        by_cost = 2 * room_ms / (slope + math.sqrt(slope**2 + 2 * pair * room_ms))
        return max(by_mean, min(by_cost, 3 * mean_size))


def _terms(work: PromptWork) -> tuple[float, float, float, float]:
    return 1.0, float(work.num_tokens), float(work.num_keys), work.num_pairs


class ChunkBudget:
    """How many prompt tokens fit a step, learnt from the durations of past steps.

    Sizes are multiples of the rows that kernels process at once: other sizes cost as much as the
    next multiple, and few distinct sizes spare devices that compile or tune for each size. A
    minimum keeps prefill in small chunks from costing twice as much as in large ones: on a CPU,
    sixteen tokens take two thirds of the time of sixty-four, with or without decoding rows.
    Large sizes are powers of two, and their chunks end at multiples of the size.
    """

    BLOCK = 32
    MIN_TOKENS = 64
    PATIENCE = 12
    FIXED_SHARE = 6  # a chunk should take this many times its fixed cost
    BESIDE_MS = 200.0  # limit of a step that is longer than PATIENCE for that reason
    NUM_TRIALS = 3  # steps without prompts to measure before their duration is known
    FIRST = 128  # tokens before any measurement: on a slow device more would look like a hang
    USUAL = 512
    ALONE_MS = 250.0  # target step time without decoding rows: bounds a new request's wait
    LONGEST_MS = 500.0  # the same on devices where fewer than USUAL tokens fit ALONE_MS
    AHEAD_MS = 25.0  # the same if no request waits: one that arrives waits for the step's end
    SLOWEST_MS = 10_000.0  # limit of a step, even with FIRST tokens
    MAX_ALIGNED = 2048

    def __init__(self, max_step_tokens: int = sys.maxsize) -> None:
        """`max_step_tokens` is the device's; see `Traits`."""
        self._max_step_tokens = max_step_tokens
        self._seen = _PrefillCost()
        self._decode_ms = 0.0
        self._trials_ms: list[float] = []

    def observe(self, work: PromptWork, elapsed_s: float) -> None:
        elapsed_ms = elapsed_s * _SECONDS_TO_MS
        if work.num_tokens == 0:
            if len(self._trials_ms) < self.NUM_TRIALS:
                self._trials_ms.append(elapsed_ms)
                # Leave out the slowest: it may include one-time setup.
                self._decode_ms = mean(sorted(self._trials_ms)[: self.NUM_TRIALS - 1])
            else:
                known_ms = self._decode_ms or elapsed_ms
                self._decode_ms = known_ms + _BUDGET_SMOOTHING * (elapsed_ms - known_ms)
            return
        # A step with prompts takes longer than its decoding part, so it bounds the estimate.
        self._decode_ms = min(self._decode_ms, elapsed_ms / 2)
        # Reading the weights dominates small steps, so their time says little about a token.
        weight = min(1.0, work.num_tokens / self.USUAL)
        self._seen.add(work, elapsed_ms - self._decode_ms, weight)

    @property
    def _ms_per_token(self) -> float:
        return self._seen.mean_slope

    @property
    def seconds_per_token(self) -> float:
        """Seconds of prefill per prompt token; 0 before the first measurement."""
        return self._ms_per_token / _SECONDS_TO_MS

    @property
    def tokens_at_a_stretch(self) -> float:
        """Tokens to prefill of one prompt before the next one starts.

        Interleaving prompts at a finer grain would delay most of their first tokens.
        """
        return self.ALONE_MS / self._ms_per_token if self._ms_per_token else 0.0

    def tokens(self, limits: EngineLimits, start: int = 0) -> int:
        """Tokens after `start` per step while sequences decode: `MIN_TOKENS` to the setting's.

        Without `target_step_ms`, 0 in the first steps, to measure how long decoding alone takes.
        """
        target_ms = limits.target_step_ms
        if target_ms is None:
            if len(self._trials_ms) < self.NUM_TRIALS:
                return 0
            # Breaks follow long steps, so streams gain nothing from chunks of mostly fixed cost.
            worthwhile_ms = self.FIXED_SHARE * self._seen.fixed_ms(start)
            target_ms = max(self.PATIENCE * self._decode_ms, min(worthwhile_ms, self.BESIDE_MS))
        fitting = min(self.USUAL, self._most(limits)) / 4
        if self._ms_per_token:
            room_ms = target_ms - self._decode_ms
            fitting = min(self._seen.longest(room_ms, start), self._most(limits))
        return max(self._rounded(fitting), self.MIN_TOKENS)

    def tokens_alone(self, limits: EngineLimits, start: int = 0) -> int:
        usual = min(self.USUAL, self._most(limits))
        if not self._ms_per_token:
            return min(self.FIRST, usual)
        fitting = min(self._seen.longest(self.ALONE_MS, start), self._most(limits))
        ms_per_token = self._seen.of(PromptWork.of(start, usual)) / usual
        slowest = max(self._rounded(self.SLOWEST_MS / ms_per_token), self.MIN_TOKENS)
        least = max(self._rounded(self.LONGEST_MS / ms_per_token), self.FIRST)
        return max(self._rounded(fitting), min(usual, slowest, least))

    def tokens_ahead(self, limits: EngineLimits, start: int = 0) -> int:
        """Tokens of a step that no request waits for."""
        if not self._ms_per_token:
            return self.MIN_TOKENS
        fitting = min(self._seen.longest(self.AHEAD_MS, start), self._most(limits))
        return max(self._rounded(fitting), self.BLOCK)

    def _most(self, limits: EngineLimits) -> int:
        return min(limits.prefill_step_size, self._max_step_tokens)

    def expected_ms(self, work: PromptWork) -> float:
        return self._decode_ms + (self._seen.of(work) if work.num_tokens else 0.0)

    def _rounded(self, num_tokens: float) -> int:
        if num_tokens < self.USUAL:
            return int(num_tokens // self.BLOCK) * self.BLOCK
        return self.USUAL << (int(num_tokens / self.USUAL).bit_length() - 1)

    def chunk(self, start: int, size: int, left: int) -> int:
        """Tokens of a chunk of about `size` from `start`; large chunks end at aligned positions.

        Returns `left`, all that remains, if it is at most an eighth larger: a small remainder would
        cost a step of its own.
        """
        if size >= self.USUAL:
            step = min(size, self.MAX_ALIGNED)
            size = (start + size + step // 4) // step * step - start
        return min(left if left <= size + size // 8 else size, self._max_step_tokens)


class StepCosts:
    """Seconds per step: by number of rows without drafts, by number of tokens with drafts."""

    def __init__(self) -> None:
        self._plain: dict[int, tuple[float, int]] = {}
        self._drafted: dict[int, tuple[float, int]] = {}

    def observe(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        if num_drafted:
            size = _size(num_rows + num_drafted)
            self._drafted[size] = blended(self._drafted.get(size), seconds)
            return
        self._plain[num_rows] = known = blended(self._plain.get(num_rows), seconds)
        for size, (cost, count) in self._drafted.items():
            if cost > known[0]:
                self._drafted[size] = known[0] + _FORGETTING * (cost - known[0]), count

    def plain(self, num_rows: int) -> float | None:
        """Return the seconds of a step of `num_rows` rows without drafts; None if unknown."""
        cost, count = self._plain.get(num_rows, (0.0, 0))
        return cost if count >= _SETTLED else None

    def points(self, num_rows: int, plain: float) -> list[tuple[int, float]]:
        """Return (tokens, seconds) of known steps, sorted: `plain` first, then larger ones."""
        known = sorted(
            (size, cost)
            for size, (cost, count) in self._drafted.items()
            if size > num_rows and count >= _SETTLED
        )
        return [(num_rows, plain), *known]


def _size(num_tokens: int) -> int:
    return SIZES[min(bisect_left(SIZES, num_tokens), len(SIZES) - 1)]


def blended(
    known: tuple[float, int] | None, seconds: float, num_first: int = _SETTLED
) -> tuple[float, int]:
    """Add a measurement to a mean of durations, of which recent ones weigh most, and its count.

    Of the first `num_first`, the shortest counts.
    """
    if known is None:
        return seconds, 1
    cost, count = known
    if count < num_first:  # the first step of a size may include one-time setup
        return min(cost, seconds), count + 1
    # An outlier was delayed by something else; cap its influence.
    return cost + _COST_SMOOTHING * (min(seconds, 2 * cost) - cost), count + 1


def interpolated(points: Sequence[tuple[int, float]], num_tokens: int) -> float:
    """Interpolate the seconds of a step between known sizes; extrapolate with the last slope.

    The cost never decreases with the size.
    """
    (left, low), *rest = points
    slope = _FIRST_SLOPE * low
    for right, high in rest:
        slope = max((high - low) / (right - left), 0.0)
        if num_tokens <= right:
            break
        left, low = right, max(low, high)
    return low + slope * (num_tokens - left)
