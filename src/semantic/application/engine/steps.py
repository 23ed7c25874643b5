"""Launched steps, and what the engine learns from their durations."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from semantic.application.engine.generation import Generation
from semantic.ports.backend import Chunk, Ticket
from semantic.ports.telemetry import Measure, RequestTrace, TelemetryPort

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256)
_SMOOTHING = 0.2
_FORGETTING = 0.998  # decay of the extra cost of drafts, per step without them
_SETTLED = 2  # measurements before the cost of a step size is known
_FIRST_SLOPE = 0.02  # share of a step's time per further token, before any measurement


@dataclass(slots=True, eq=False)
class LaunchedStep:
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

    def follows(self, other: Optional["LaunchedStep"]) -> bool:
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

    def note_end(self, generation: Generation) -> None:
        """Record how many draft tokens of a reply were sent and accepted."""
        self.counts.drafted_tokens += generation.drafting.num_sent
        self.counts.accepted_tokens += generation.drafting.num_accepted


class StepCosts:
    """Seconds per step: by number of rows without drafts, by number of tokens with drafts."""

    def __init__(self) -> None:
        self._plain: dict[int, tuple[float, int]] = {}
        self._drafted: dict[int, tuple[float, int]] = {}

    def observe(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Learn from the duration of a step."""
        if num_drafted:
            size = _size(num_rows + num_drafted)
            self._drafted[size] = _blended(self._drafted.get(size), seconds)
            return
        self._plain[num_rows] = known = _blended(self._plain.get(num_rows), seconds)
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


def _blended(known: tuple[float, int] | None, seconds: float) -> tuple[float, int]:
    if known is None:
        return seconds, 1
    cost, count = known
    if count < _SETTLED:  # the first step of a size may include one-time setup
        return min(cost, seconds), count + 1
    # An outlier was delayed by something else; cap its influence.
    return cost + _SMOOTHING * (min(seconds, 2 * cost) - cost), count + 1


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
