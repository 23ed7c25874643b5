"""Speculative decoding: which rows of the next step carry draft tokens, and how many.

Draft tokens come from memory (`memory_source.py`), and from a draft model (`model_source.py`) or
the model's own head (`head_source.py`) if there is one. Memory is free, so its draft is taken where
it is at least as likely to be correct; the other, which takes time on the device, is asked for the
other rows.

A draft token costs the step the time of one more token, and saves a step if the model accepts it.
The sources learn how often they are right, and the planner learns the cost of steps from the
durations of steps with and without drafts. It sends drafts if the next step would yield more tokens
per second with them, and asks a source that takes time only if it would also with that time. It
sends none otherwise, for example on a device that takes eight times as long for eight tokens, or
with many rows. A source that does not pay is asked for two tokens now and then, in half a percent
of the time, to notice when it would.

A row can carry draft tokens only once the host knows its last token. So the engine collects a step
with drafts before it launches the next one; the measured cost of such steps includes this wait.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from semantic.application.engine.generation import Generation
from semantic.application.engine.request import NO_DRAFT, Draft
from semantic.application.engine.speculative.memory_source import MemoryDrafts
from semantic.application.engine.speculative.source import TimedSource
from semantic.application.engine.steps import SIZES, StepCosts, interpolated
from semantic.domain.events import DraftOrigin
from semantic.ports.backend import PendingTokens, Ticket, Traits
from semantic.ports.text import TokenConstraint

_MIN_GAIN = 1.08  # a step carries drafts only if they raise tokens per second by this factor
_MAX_ROWS = 16  # rows of a step with drafts; more rows already keep the device busy
_TRIAL_SHARE = 0.005  # of the time of steps, to try a source that does not pay
_TRIAL_TOKENS = 2


class DraftPlanner(Protocol):
    """Decides which rows carry draft tokens. Used on the device thread only."""

    def plan(self, rows: Sequence[Generation], *, has_prompts: bool) -> dict[int, Draft]:
        """Return drafts for the next step's decoding rows, keyed by `Generation.order`.

        Set `has_prompts` if the step also contains prompt chunks.
        """

    def draft_ahead(self, rows: Sequence[Generation], verifying: Ticket) -> None:
        """Begin the drafts after those that a launched step of these rows verifies."""

    def wants_tokens(self, rows: Sequence[Generation]) -> bool:
        """Whether the next step should wait for tokens being sampled, so that drafts can follow."""

    def observe(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Learn the duration of a step without prompts, measured from the previous step's end."""

    def forget(self, generation: Generation) -> None:
        """Release what is held for a request that ended."""


@dataclass(slots=True)
class _Offer:
    """Draft tokens of one row, and the chances that the first, the first two, ... are correct."""

    tokens: Sequence[int] = ()
    chances: list[float] = field(default_factory=list)
    origin: DraftOrigin = DraftOrigin.MEMORY


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the source which takes time was asked for; its duration is known after the step."""

    count: int
    is_trial: bool


class AdaptiveDraftPlanner:
    """A `DraftPlanner` that learns acceptance rates and step costs; see the module.

    Attributes:
        max_draft: The most draft tokens of a row; 0 disables drafting.
    """

    def __init__(
        self, traits: Traits, ends: frozenset[int], timed: TimedSource | None = None
    ) -> None:
        """Create a planner without measurements; a draft stops at the first token in `ends`.

        `timed` is asked where memory is not sure.
        """
        self.max_draft, self._draft_end = traits.max_draft, traits.draft_end
        self.memory = MemoryDrafts()
        self._timed = timed
        self._ends = ends
        self._costs = StepCosts()
        self._asked: _Asked | None = None  # for the step that was planned last
        self._trial_s = 0.0  # time that may be spent on trials

    def plan(self, rows: Sequence[Generation], *, has_prompts: bool) -> dict[int, Draft]:
        self._settle()
        if not self.max_draft:
            return {}
        self.memory.remember_more()
        if len(rows) > _MAX_ROWS or not any(row.drafting.room > 0 for row in rows):
            return {}
        rooms = [self._room(row) for row in rows]
        offers = [self._remembered(row, room) for row, room in zip(rows, rooms, strict=True)]
        self._ask(rows, rooms, offers)
        # Advancing a grammar costs host time: do it only if perfect drafts would pay off.
        is_hopeful = any(row.constraint is not None for row in rows) and any(
            self._chosen([[1.0] * self.max_draft, *([] for _ in rows[1:])], has_prompts=has_prompts)
        )
        found = [
            self._allowed(row, offer, room if is_hopeful or row.constraint is None else 0)
            for row, offer, room in zip(rows, offers, rooms, strict=True)
        ]
        if not any(chances for _, chances in found):
            return {}
        wanted = self._chosen([chances for _, chances in found], has_prompts=has_prompts)
        drafts: dict[int, Draft] = {}
        for row, (draft, _), count in zip(rows, found, wanted, strict=True):
            if count:
                drafts[row.order] = draft.cut(count)
        return drafts

    def draft_ahead(self, rows: Sequence[Generation], verifying: Ticket) -> None:
        asked = self._asked
        if self._timed is None or asked is None or asked.is_trial:
            return
        if all(isinstance(row.drafting.latest.tokens, PendingTokens) for row in rows):
            self._timed.draft_ahead(rows, asked.count, verifying)

    def wants_tokens(self, rows: Sequence[Generation]) -> bool:
        """Judge the drafts after the tokens being sampled."""
        if not self.max_draft or len(rows) > _MAX_ROWS:
            return False
        rooms = [self._room(row) for row in rows]
        sure = [self.memory.chances(row, room, 1) for row, room in zip(rows, rooms, strict=True)]
        if any(self._chosen(sure, has_prompts=False)):
            return True
        return self._question(rows, rooms, sure) is not None

    def observe(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Learn the duration of a step; the time of asking for its drafts is counted elsewhere."""
        self._trial_s += _TRIAL_SHARE * seconds
        self._costs.observe(num_rows, num_drafted, max(seconds - self._settle(), 0.0))

    def _settle(self) -> float:
        """Return the seconds that the last question took, once; 0.0 if none was asked."""
        asked, self._asked = self._asked, None
        if self._timed is None or asked is None:
            return 0.0
        seconds = self._timed.spent_s
        if asked.is_trial:
            self._trial_s -= seconds
        return seconds

    def forget(self, generation: Generation) -> None:
        self.memory.forget(generation)
        if self._timed is not None:
            self._timed.forget(generation)

    # -- one row --------------------------------------------------------------------------------

    def _room(self, row: Generation) -> int:
        room = min(
            row.drafting.room, self.max_draft, self._draft_end - row.progress.num_launched - 1
        )
        return max(room, 0)

    def _remembered(self, row: Generation, room: int) -> _Offer:
        chances = self.memory.chances(row, room)
        return _Offer(self.memory.draft([row], room)[0] if room else [], chances)

    def _allowed(self, row: Generation, offer: _Offer, limit: int) -> tuple[Draft, list[float]]:
        """Return an offer as a draft: up to an end token, and as far as a constraint allows it."""
        if limit < 1 or not (offer.tokens or row.constraint):
            return NO_DRAFT, []
        if row.constraint is not None:
            found: tuple[Draft, list[float]] = NO_DRAFT, []
            # A failing constraint fails again in `next_chunk`, which ends its request.
            with contextlib.suppress(Exception):
                found = self._constrained(row.constraint, offer, limit)
            return found
        tokens = offer.tokens[:limit]
        if isinstance(tokens, PendingTokens):  # verifying beyond an end token costs nothing
            return Draft(tokens, origin=offer.origin), offer.chances[:limit]
        end = next((at + 1 for at, token in enumerate(tokens) if token in self._ends), limit)
        return Draft(tuple(tokens[:end]), origin=offer.origin), offer.chances[:end]

    def _constrained(
        self, constraint: TokenConstraint, offer: _Offer, limit: int
    ) -> tuple[Draft, list[float]]:
        """Draft the tokens that a grammar forces, and those of the offer that it allows."""
        masks, states = [constraint.allowed()], [constraint]
        tokens: list[int] = []
        chances: list[float] = []
        draft: Sequence[int] = offer.tokens
        rates, chance = offer.chances, 1.0
        origin = DraftOrigin.GRAMMAR
        while len(tokens) < limit:
            at = len(tokens)
            token = forced_token(masks[-1])
            if token is None:
                if at >= len(rates) or not is_allowed(masks[-1], draft[at]):
                    break
                token, chance, origin = draft[at], min(chance, rates[at]), offer.origin
            elif at >= len(draft) or draft[at] != token:
                draft = []  # the forced token differs, so the rest of the draft does not apply
                rates = []
            if token in self._ends:
                break
            state = states[-1].copy()
            state.accept(token)
            tokens.append(token)
            chances.append(chance)
            states.append(state)
            masks.append(state.allowed())
        return Draft(tuple(tokens), tuple(masks[1:]), tuple(states[1:]), origin), chances

    # -- the source that takes time -------------------------------------------------------------

    def _ask(self, rows: Sequence[Generation], rooms: Sequence[int], offers: list[_Offer]) -> None:
        """Replace the offers of rows for which asking the source pays."""
        question = self._question(rows, rooms, [offer.chances for offer in offers])
        if self._timed is None or question is None:
            return
        asked, count, is_trial = question
        drafted = self._timed.draft([rows[at] for at in asked], count)
        self._asked = _Asked(count, is_trial)
        for (at, chances), tokens in zip(asked.items(), drafted, strict=True):
            if tokens:
                offers[at] = _Offer(tokens, chances[: len(tokens)], self._timed.origin)

    def _question(
        self, rows: Sequence[Generation], rooms: Sequence[int], sure: Sequence[list[float]]
    ) -> tuple[dict[int, list[float]], int, bool] | None:
        """Return what to ask the source that takes time, if anything.

        Args:
            sure: For each row, the chances of its draft from memory.

        Returns:
            The chances of the source's drafts by number of the row to ask for, the number of draft
            tokens, and whether this is a trial; None if asking does not pay.
        """
        plain, timed = self._costs.plain(len(rows)), self._timed
        if timed is None:
            return None
        found = [timed.chances(row, room) for row, room in zip(rows, rooms, strict=True)]
        asked = {
            at: chances
            for at, (chances, known) in enumerate(zip(found, sure, strict=True))
            if chances and (not known or known[0] < chances[0])
        }
        if not asked or not plain:
            return None
        points = self._costs.points(len(rows), plain)
        most = max(_explorable(points) // len(asked), 1)
        best, best_rate = 0, max(_MIN_GAIN * len(rows) / plain, self._best(sure)[1])
        for count in range(1, min(most, max(map(len, asked.values()))) + 1):
            chances = [asked[at][:count] if at in asked else sure[at] for at in range(len(rows))]
            seconds = interpolated(points, len(rows) + sum(map(len, chances)))
            seconds += timed.seconds([rows[at] for at in asked], count)
            rate = (len(rows) + sum(map(sum, chances))) / seconds
            if rate > best_rate:
                best, best_rate = count, rate
        if best:
            return asked, best, False
        return self._trial(rows, asked)

    def _trial(
        self, rows: Sequence[Generation], asked: dict[int, list[float]]
    ) -> tuple[dict[int, list[float]], int, bool] | None:
        """Ask for few tokens of the cheapest row, if there is time for it."""
        if (timed := self._timed) is None:
            return None
        at = min(asked, key=lambda at: timed.start_seconds(rows[at]))
        seconds = timed.start_seconds(rows[at]) + timed.seconds([rows[at]], _TRIAL_TOKENS)
        if seconds > self._trial_s:
            return None
        return {at: asked[at]}, _TRIAL_TOKENS, True

    # -- all rows -------------------------------------------------------------------------------

    def _chosen(self, offers: Sequence[Sequence[float]], *, has_prompts: bool) -> list[int]:
        """Return the draft tokens to send per row that yield the most tokens per second."""
        best, _ = self._best(offers)
        ranked = _ranked(offers)
        if has_prompts and (plain := self._costs.plain(len(offers))):
            # Prompts dominate the step's time, so likely drafts are nearly free.
            limit = _explorable(self._costs.points(len(offers), plain))
            best = sum(chance >= 0.5 for chance, _ in ranked[:limit])
        counts = [0] * len(offers)
        for _, row in ranked[:best]:
            counts[row] += 1
        return counts

    def _best(self, offers: Sequence[Sequence[float]]) -> tuple[int, float]:
        """Return how many of the likeliest draft tokens to send, and tokens per second then."""
        num_rows, ranked = len(offers), _ranked(offers)
        plain = self._costs.plain(num_rows)
        if not plain:
            return 0, 0.0
        best, best_rate = 0, _MIN_GAIN * num_rows / plain
        if not ranked:
            return best, best_rate
        points = self._costs.points(num_rows, plain)
        yields = list(accumulate((chance for chance, _ in ranked), initial=0.0))
        limit = min(len(ranked), _explorable(points))
        for size in [size for size in SIZES if num_rows < size < num_rows + limit] + [
            num_rows + limit
        ]:
            count = size - num_rows
            rate = (num_rows + yields[count]) / interpolated(points, size)
            if rate > best_rate:
                best, best_rate = count, rate
        return best, best_rate


def _ranked(offers: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
    """Return the chances of all draft tokens with the numbers of their rows, likeliest first."""
    every = ((chance, row) for row, chances in enumerate(offers) for chance in chances)
    return sorted(every, key=lambda offer: -offer[0])


def _explorable(points: Sequence[tuple[int, float]]) -> int:
    """Return how many draft tokens to try: at most twice those of the largest known size."""
    return max(2, 2 * (points[-1][0] - points[0][0]))


def is_allowed(mask: bytes | None, token: int) -> bool:
    """Whether a mask allows a token."""
    return mask is None or (token < 8 * len(mask) and bool(mask[token // 8] >> token % 8 & 1))


def forced_token(mask: bytes | None) -> int | None:
    """Return the only token that a mask allows; None if it does not allow exactly one."""
    if mask is None:
        return None
    bits = int.from_bytes(mask, "little")
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None
