"""Speculative decoding: which rows of the next step carry draft tokens, and how many.

There is no draft model: a draft is what followed the same tokens earlier (`drafts.py`).

A draft token costs the step the time of one more token, and saves a step if the model accepts it.
The planner learns acceptance rates from all drafts, sent to the device or not: it compares each
token of a reply with the token predicted for it. It learns the cost of steps from the durations of
steps with and without drafts. It sends drafts if the next step would yield more tokens per second
with them. It sends none otherwise, for example on a device that takes eight times as long for eight
tokens, or with many rows.

A row can carry draft tokens only once the host knows its last token. So the engine collects a step
with drafts before it launches the next one; the measured cost of such steps includes this wait.
"""

import contextlib
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from semantic.application.engine.generation import Generation
from semantic.application.engine.request import NO_DRAFT, Draft
from semantic.application.engine.speculative.drafts import (
    MAX_MATCH,
    DraftMemory,
    TenantMemory,
    TokenHistory,
)
from semantic.application.engine.steps import SIZES, StepCosts, interpolated
from semantic.ports.backend import Traits
from semantic.ports.text import TokenConstraint

_MIN_GAIN = 1.08  # a step carries drafts only if they raise tokens per second by this factor
_PIECE = 512  # tokens of a text to index per step
_MAX_UNREAD = 32  # texts waiting to be indexed; when full, the oldest is dropped
_WORTHLESS = 0.2
_MAX_ROWS = 16  # rows of a step with drafts; more rows already keep the device busy
_PATIENCE, _MAX_PAUSE = 4, 7
# Assumed acceptance rate before any measurement, by the length of the match.
_PRIOR = {0: 0.3, 4: 0.4, 5: 0.5, 6: 0.6, 8: 0.7, 12: 0.8, 16: 0.85, 24: 0.9, MAX_MATCH: 0.95}
_BOUNDS = tuple(_PRIOR)
_PRIOR_WEIGHT, _OWN_WEIGHT = 8.0, 6.0
_MAX_COUNT, _MAX_OWN_COUNT = 400.0, 32.0


class DraftPlanner(Protocol):
    """Decides which rows carry draft tokens. Used on the device thread only."""

    def plan(self, rows: Sequence[Generation], *, has_prompts: bool) -> dict[int, Draft]:
        """Return drafts for the next step's decoding rows, keyed by `Generation.order`.

        Set `has_prompts` if the step also contains prompt chunks.
        """

    def wants_tokens(self, rows: Sequence[Generation]) -> bool:
        """Whether the next step should wait for tokens being sampled, so that drafts can follow."""

    def observe(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Learn the duration of a step without prompts, measured from the previous step's end."""

    def forget(self, generation: Generation) -> None:
        """Release what is held for a request that ended."""


class HitRates:
    """Acceptance rates of draft tokens, by match length and whether all matches agreed."""

    def __init__(self) -> None:
        self._counts = {
            (bound, is_unanimous): [_PRIOR_WEIGHT * rate, _PRIOR_WEIGHT]
            for bound, rate in _PRIOR.items()
            for is_unanimous in (False, True)
        }

    def rate(self, length: int, *, is_unanimous: bool) -> float:
        hits, tries = self._counts[_bound(length), is_unanimous]
        return hits / tries

    def note(self, length: int, *, is_unanimous: bool, is_hit: bool) -> None:
        _count(self._counts[_bound(length), is_unanimous], is_hit, _MAX_COUNT)


def _bound(length: int) -> int:
    return _BOUNDS[bisect_left(_BOUNDS, length + 1) - 1]


def _count(counts: list[float], is_hit: bool, limit: float) -> None:
    if counts[1] >= limit:
        counts[:] = counts[0] / 2, counts[1] / 2
    counts[0] += is_hit
    counts[1] += 1


@dataclass(slots=True, eq=False)
class _ReplyDrafts:
    """The drafting state of one reply.

    Attributes:
        num_seen: Tokens of prompt and reply that were compared with the draft.
        draft: Draft tokens that may follow those; empty if a lookup found none.
        length: Tokens before the draft that match the place it was found at.
        counts: This reply's correct draft tokens, and all its draft tokens.
        is_stale: Whether there are new tokens to look up a draft for.
        num_misses: Wrong draft tokens and failed lookups since the last correct draft token.
        pause: Calls of `catch_up` with new tokens to skip before the next lookup.
    """

    memory: TenantMemory
    conversation: TokenHistory
    num_seen: int
    draft: list[int]
    length: int = 0
    is_unanimous: bool = True
    counts: list[float] = field(default_factory=lambda: [0.0, 0.0])
    is_stale: bool = True
    num_misses: int = 0
    pause: int = 0

    def catch_up(self, tokens: Sequence[int], rates: HitRates) -> None:
        """Compare new tokens with the draft; if none is left, index them and look up another."""
        for token in tokens[self.num_seen :]:
            if self.draft:
                is_hit = token == self.draft[0]
                self.num_misses = 0 if is_hit else self.num_misses + 1
                rates.note(self.length, is_unanimous=self.is_unanimous, is_hit=is_hit)
                _count(self.counts, is_hit, _MAX_OWN_COUNT)
                self.draft = self.draft[1:] if is_hit else []
                self.length += 1
            self.is_stale = True
        self.num_seen = len(tokens)
        if not self.draft and self.is_stale:
            self.pause -= 1
            if self.pause < 0:
                self._remember(tokens)
                self._look_up(tokens)
        self.is_stale = False

    def _look_up(self, tokens: Sequence[int]) -> None:
        match = self.memory.find_draft(tokens, self.conversation)
        if match is not None:
            self.draft, self.length = match.tokens, match.length
            self.is_unanimous = match.is_unanimous
        else:
            self.num_misses += 1
        # After repeated misses, look up less often.
        self.pause = min(self.num_misses // _PATIENCE, _MAX_PAUSE)

    def _remember(self, tokens: Sequence[int]) -> None:
        start = len(self.conversation.tokens)
        self.memory.extend(self.conversation, tokens[start : start + _PIECE])

    def chances(self, rates: HitRates, limit: int) -> Iterator[float]:
        """Yield the probability that the first draft token, the first two, ... are all correct."""
        chance, (hits, tries) = 1.0, self.counts
        for place in range(min(limit, len(self.draft))):
            rate = rates.rate(self.length + place, is_unanimous=self.is_unanimous)
            chance *= (_OWN_WEIGHT * rate + hits) / (_OWN_WEIGHT + tries)
            if chance < _WORTHLESS:
                return
            yield chance


class AdaptiveDraftPlanner:
    """A `DraftPlanner` that learns acceptance rates and step costs; see the module.

    Attributes:
        max_draft: The most draft tokens of a row; 0 disables drafting.
    """

    def __init__(self, traits: Traits, ends: frozenset[int]) -> None:
        """Create a planner without measurements; a draft stops at the first token in `ends`."""
        self.max_draft, self._draft_end = traits.max_draft, traits.draft_end
        self.memory = DraftMemory()
        self._ends = ends
        self._costs = StepCosts()
        self._rates = HitRates()
        self._reply_drafts: dict[int, _ReplyDrafts] = {}
        self._unread: deque[tuple[TenantMemory, TokenHistory, Sequence[int]]]
        self._unread = deque(maxlen=_MAX_UNREAD)

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    def plan(self, rows: Sequence[Generation], *, has_prompts: bool) -> dict[int, Draft]:
        if not self.max_draft:
            return {}
        self._remember_more()
        if len(rows) > _MAX_ROWS or not any(row.drafting.room > 0 for row in rows):
            return {}
        # Advancing a grammar costs host time: do it only if perfect drafts would pay off.
        is_hopeful = any(row.constraint is not None for row in rows) and any(
            self._chosen([[1.0] * self.max_draft, *([] for _ in rows[1:])], has_prompts=has_prompts)
        )
        offers = [self._offer(row, is_hopeful=is_hopeful) for row in rows]
        if not any(chances for _, chances in offers):
            return {}
        wanted = self._chosen([chances for _, chances in offers], has_prompts=has_prompts)
        drafts: dict[int, Draft] = {}
        for row, (draft, _), count in zip(rows, offers, wanted, strict=True):
            if count:
                drafts[row.order] = draft.cut(count)
        return drafts

    def wants_tokens(self, rows: Sequence[Generation]) -> bool:
        """Judge the draft after the token being sampled, which must match the draft, too."""
        if not self.max_draft or len(rows) > _MAX_ROWS:
            return False
        chances = []
        for row in rows:
            reply = self._drafts_of(row)
            reply.catch_up(row.tokens, self._rates)
            found = list(reply.chances(self._rates, self.max_draft + 1))
            chances.append(found[1 : 1 + self._room(row)])
        return any(self._chosen(chances, has_prompts=False))

    def observe(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        self._costs.observe(num_rows, num_drafted, seconds)

    def forget(self, generation: Generation) -> None:
        """Drop an ended request's state and queue the rest of its tokens for indexing."""
        reply = self._reply_drafts.pop(generation.order, None)
        if reply is None:
            return
        if generation.job.is_ephemeral:
            others = [unread for unread in self._unread if unread[0] is not reply.memory]
            self._unread = deque(others, _MAX_UNREAD)
        else:
            self._unread.append((reply.memory, reply.conversation, generation.tokens))

    def _remember_more(self) -> None:
        """Index one piece of the oldest waiting text; a whole long text would delay the step."""
        if not self._unread:
            return
        memory, conversation, tokens = self._unread[0]
        start = len(conversation.tokens)
        memory.extend(conversation, tokens[start : start + _PIECE])
        self.memory.shrink(memory, conversation)
        if len(conversation.tokens) >= len(tokens):
            self._unread.popleft()

    # -- one row --------------------------------------------------------------------------------

    def _drafts_of(self, row: Generation) -> _ReplyDrafts:
        if row.order not in self._reply_drafts:
            job = row.job
            memory = TenantMemory() if job.is_ephemeral else self.memory.of(job.root)
            for text in (job.prediction, *job.past):
                if text:
                    self._unread.append((memory, memory.begin("", text), text))
            conversation = memory.begin(job.agent, job.tokens)
            self.memory.shrink(memory, conversation)
            self._reply_drafts[row.order] = _ReplyDrafts(
                memory, conversation, row.num_prompt, list(job.prediction), MAX_MATCH // 2
            )
        return self._reply_drafts[row.order]

    def _room(self, row: Generation) -> int:
        room = min(
            row.drafting.room, self.max_draft, self._draft_end - row.progress.num_launched - 1
        )
        return max(room, 0)

    def _offer(self, row: Generation, *, is_hopeful: bool) -> tuple[Draft, list[float]]:
        reply, limit = self._drafts_of(row), self._room(row)
        reply.catch_up(row.tokens, self._rates)
        if limit < 1 or not (reply.draft or row.constraint):
            return NO_DRAFT, []
        if row.constraint is not None:
            offer: tuple[Draft, list[float]] = NO_DRAFT, []
            # A failing constraint fails again in `next_chunk`, which ends its request.
            with contextlib.suppress(Exception):
                offer = self._constrained(row.constraint, reply, limit if is_hopeful else 0)
            return offer
        draft = reply.draft[:limit]
        end = next((at + 1 for at, token in enumerate(draft) if token in self._ends), limit)
        return Draft(tuple(draft[:end])), list(reply.chances(self._rates, end))

    def _constrained(
        self, constraint: TokenConstraint, reply: _ReplyDrafts, limit: int
    ) -> tuple[Draft, list[float]]:
        """Draft the tokens that a grammar forces, and those of the draft that it allows."""
        if not limit:
            return NO_DRAFT, []
        masks, states = [constraint.allowed()], [constraint]
        tokens: list[int] = []
        chances: list[float] = []
        draft, rates, chance = reply.draft, list(reply.chances(self._rates, limit)), 1.0
        while len(tokens) < limit:
            at = len(tokens)
            token = forced_token(masks[-1])
            if token is None:
                if at >= len(rates) or not is_allowed(masks[-1], draft[at]):
                    break
                token, chance = draft[at], min(chance, rates[at])
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
        return Draft(tuple(tokens), tuple(masks[1:]), tuple(states[1:])), chances

    # -- all rows -------------------------------------------------------------------------------

    def _chosen(self, offers: Sequence[Sequence[float]], *, has_prompts: bool) -> list[int]:
        """Return the draft tokens to send per row that yield the most tokens per second."""
        counts = [0] * len(offers)
        ranked = sorted(
            ((chance, row) for row, chances in enumerate(offers) for chance in chances),
            key=lambda offer: -offer[0],
        )
        plain = self._costs.plain(len(offers)) if ranked else None
        if not plain:
            return counts
        num_rows, points = len(offers), self._costs.points(len(offers), plain)
        yields = list(accumulate((chance for chance, _ in ranked), initial=0.0))
        # Explore unknown sizes gradually: at most twice the drafts of the largest known size.
        limit = min(len(ranked), max(2, 2 * (points[-1][0] - num_rows)))
        best, best_rate = 0, _MIN_GAIN * num_rows / plain
        for size in [size for size in SIZES if num_rows < size < num_rows + limit] + [
            num_rows + limit
        ]:
            count = size - num_rows
            rate = (num_rows + yields[count]) / interpolated(points, size)
            if rate > best_rate:
                best, best_rate = count, rate
        if has_prompts:  # prompts dominate the step's time, so likely drafts are nearly free
            best = sum(chance >= 0.5 for chance, _ in ranked[:limit])
        for _, row in ranked[:best]:
            counts[row] += 1
        return counts


def is_allowed(mask: bytes | None, token: int) -> bool:
    """Whether a mask allows a token."""
    return mask is None or (token < 8 * len(mask) and bool(mask[token // 8] >> token % 8 & 1))


def forced_token(mask: bytes | None) -> int | None:
    """Return the only token that a mask allows; None if it does not allow exactly one."""
    if mask is None:
        return None
    bits = int.from_bytes(mask, "little")
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None
