"""Drafts from memory: what followed the same tokens in the past of the tenant's agents.

Finding them costs no time on the device. The source learns acceptance rates from all drafts, sent
to the device or not: it compares each token of a reply with the token predicted for it.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from semantic.application.engine.generation import Generation
from semantic.application.engine.speculative.drafts import (
    MAX_MATCH,
    DraftMemory,
    TenantMemory,
    TokenHistory,
)
from semantic.application.engine.speculative.source import WORTHLESS, ReplyDraft, count_hit
from semantic.domain.events import DraftOrigin

_PIECE = 512  # tokens of a text to index per step
_MAX_UNREAD = 32  # texts waiting to be indexed; when full, the oldest is dropped
_PATIENCE, _MAX_PAUSE = 4, 7
# Assumed acceptance rate before any measurement, by the length of the match.
_PRIOR = {0: 0.3, 4: 0.4, 5: 0.5, 6: 0.6, 8: 0.7, 12: 0.8, 16: 0.85, 24: 0.9, MAX_MATCH: 0.95}
_BOUNDS = tuple(_PRIOR)
_PRIOR_WEIGHT = 8.0
_MAX_COUNT = 400.0


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
        count_hit(self._counts[_bound(length), is_unanimous], is_hit, _MAX_COUNT)


def _bound(length: int) -> int:
    return _BOUNDS[bisect_left(_BOUNDS, length + 1) - 1]


@dataclass(slots=True, eq=False, kw_only=True)
class _RememberedDraft(ReplyDraft):
    """The draft of one reply, and where it was found.

    Attributes:
        length: Tokens before the draft that match the place it was found at.
        is_stale: Whether there are new tokens to look up a draft for.
        num_misses: Wrong draft tokens and failed lookups since the last correct draft token.
        pause: Calls of `catch_up` with new tokens to skip before the next lookup.
    """

    memory: TenantMemory
    conversation: TokenHistory
    length: int = MAX_MATCH // 2
    is_unanimous: bool = True
    is_stale: bool = True
    num_misses: int = 0
    pause: int = 0

    def catch_up(self, known: Sequence[int], rates: HitRates) -> None:
        """Compare new tokens with the draft; if none is left, index them and look up another."""
        self.is_stale = self.is_stale or len(known) > self.num_seen
        for is_hit in self.compare(known):
            self.num_misses = 0 if is_hit else self.num_misses + 1
            rates.note(self.length, is_unanimous=self.is_unanimous, is_hit=is_hit)
            self.length += 1
        if not self.tokens and self.is_stale:
            self.pause -= 1
            if self.pause < 0:
                start = len(self.conversation.tokens)
                self.memory.extend(self.conversation, known[start : start + _PIECE])
                self._look_up(known)
        self.is_stale = False

    def _look_up(self, known: Sequence[int]) -> None:
        match = self.memory.find_draft(known, self.conversation)
        if match is not None:
            self.tokens, self.length = match.tokens, match.length
            self.is_unanimous = match.is_unanimous
        else:
            self.num_misses += 1
        # After repeated misses, look up less often.
        self.pause = min(self.num_misses // _PATIENCE, _MAX_PAUSE)

    def chances(self, rates: HitRates, limit: int) -> Iterator[float]:
        chance = 1.0
        for place in range(min(limit, len(self.tokens))):
            chance *= self.rate(rates.rate(self.length + place, is_unanimous=self.is_unanimous))
            if chance < WORTHLESS:
                return
            yield chance


class MemoryDrafts:
    """A `DraftSource` over the memories of all tenants."""

    origin = DraftOrigin.MEMORY

    def __init__(self) -> None:
        self._memory = DraftMemory()
        self._rates = HitRates()
        self._replies: dict[int, _RememberedDraft] = {}
        self._unread: deque[tuple[TenantMemory, TokenHistory, Sequence[int]]]
        self._unread = deque(maxlen=_MAX_UNREAD)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    def chances(self, row: Generation, limit: int, num_unknown: int = 0) -> list[float]:
        """As of the interface: tokens still being sampled must match the draft, too."""
        reply = self._reply_of(row)
        reply.catch_up(row.tokens, self._rates)
        return list(reply.chances(self._rates, limit + num_unknown))[num_unknown:]

    def draft(self, rows: Sequence[Generation], count: int) -> Sequence[Sequence[int]]:
        return [self._reply_of(row).tokens[:count] for row in rows]

    def forget(self, generation: Generation) -> None:
        """Drop an ended request's state and queue the rest of its tokens for indexing."""
        reply = self._replies.pop(generation.order, None)
        if reply is None:
            return
        if generation.job.is_ephemeral:
            others = [unread for unread in self._unread if unread[0] is not reply.memory]
            self._unread = deque(others, _MAX_UNREAD)
        else:
            self._unread.append((reply.memory, reply.conversation, generation.tokens))

    def remember_more(self) -> None:
        """Index one piece of the oldest waiting text; a whole long text would delay the step."""
        if not self._unread:
            return
        memory, conversation, tokens = self._unread[0]
        start = len(conversation.tokens)
        memory.extend(conversation, tokens[start : start + _PIECE])
        self._memory.shrink(memory, conversation)
        if len(conversation.tokens) >= len(tokens):
            self._unread.popleft()

    def _reply_of(self, row: Generation) -> _RememberedDraft:
        if row.order not in self._replies:
            job = row.job
            memory = TenantMemory() if job.is_ephemeral else self._memory.of(job.root)
            for text in (job.prediction, *job.past):
                if text:
                    self._unread.append((memory, memory.begin("", text), text))
            conversation = memory.begin(job.agent, job.tokens)
            self._memory.shrink(memory, conversation)
            self._replies[row.order] = _RememberedDraft(
                num_seen=row.num_prompt,
                tokens=list(job.prediction),
                memory=memory,
                conversation=conversation,
            )
        return self._replies[row.order]
