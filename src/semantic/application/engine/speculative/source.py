"""The interface of a source of draft tokens, and how sources learn how often they are right."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from semantic.application.engine.generation import Generation
from semantic.application.engine.steps import blended
from semantic.domain.events import DraftOrigin
from semantic.ports.backend import Ticket

NUM_FIRST = 4  # measurements before a duration is known: the first ones include one-time setup
WORTHLESS = 0.2  # a draft ends where the chance that all its tokens are correct falls below this
_PRIOR_RATE, _PRIOR_WEIGHT, _MAX_COUNT = 0.7, 8.0, 400.0
_OWN_WEIGHT = 6.0
_MAX_OWN_COUNT = 32.0


class DraftSource(Protocol):
    """Predicts the next tokens of replies. Used on the device thread only."""

    @property
    def origin(self) -> DraftOrigin:
        """What the source is, for the usage of replies."""

    def chances(self, row: Generation, limit: int, num_unknown: int = 0) -> list[float]:
        """Return the probabilities that its first draft token, the first two, ... are correct.

        Learns from the tokens that the row got since the last call, so it is called for every row
        of a step. Empty if the source has no draft for the row.

        Args:
            limit: The most draft tokens of the row.
            num_unknown: Tokens that the device still samples, and that the draft comes after.
        """

    def draft(self, rows: Sequence[Generation], count: int) -> Sequence[Sequence[int]]:
        """Return about `count` draft tokens for each row; fewer, or none, if it has no more.

        They may be `PendingTokens`: then the step that verifies them need not wait for them.
        """

    def forget(self, generation: Generation) -> None:
        """Release what is held for a request that ended."""


class TimedSource(DraftSource, Protocol):
    """A source that takes time on the device, so that asking it must pay."""

    def draft_ahead(self, rows: Sequence[Generation], count: int, verifying: Ticket) -> None:
        """Begin drafts that follow the drafts of a running step, before its tokens are known.

        The next `draft` of the same rows then takes less time. Does nothing if the source cannot.

        Args:
            rows: Of that step, with the drafts that it verifies in `Drafting.latest`.
        """

    @property
    def spent_s(self) -> float:
        """Duration of the last draft; waits for its tokens."""

    def seconds(self, rows: Sequence[Generation], count: int) -> float:
        """Return the expected duration of `draft`, with a share of the time to prepare the rows.

        That share is spread over the tokens that the replies are expected to have.
        """

    def start_seconds(self, row: Generation) -> float:
        """Return the expected time to prepare a row for its next draft."""


@dataclass(slots=True, eq=False, kw_only=True)
class ReplyDraft:
    """A reply's draft, which is compared with the tokens that the reply gets.

    Attributes:
        num_seen: Tokens of prompt and reply that were compared with the draft.
        tokens: Draft tokens that may follow those.
        counts: This reply's correct draft tokens, and all its draft tokens.
    """

    num_seen: int
    tokens: Sequence[int] = ()
    counts: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def compare(self, known: Sequence[int]) -> list[bool]:
        """Compare new tokens with the draft; returns for each draft token whether it was correct.

        The first wrong one ends the draft.
        """
        hits: list[bool] = []
        for token in known[self.num_seen :]:
            if self.tokens:
                hits.append(token == self.tokens[0])
                count_hit(self.counts, hits[-1], _MAX_OWN_COUNT)
                self.tokens = self.tokens[1:] if hits[-1] else ()
        self.num_seen = len(known)
        return hits

    def rate(self, expected: float) -> float:
        """Return this reply's acceptance rate; `expected` counts until there are measurements."""
        hits, tries = self.counts
        return (_OWN_WEIGHT * expected + hits) / (_OWN_WEIGHT + tries)


class SourceMeasures:
    """Acceptance rate of a source that takes time, and the duration of its passes by rows."""

    def __init__(self) -> None:
        self._counts = [_PRIOR_RATE * _PRIOR_WEIGHT, _PRIOR_WEIGHT]
        self._pass_s: dict[int, tuple[float, int]] = {}

    @property
    def acceptance(self) -> float:
        """Share of correct draft tokens among those that follow correct ones."""
        return self._counts[0] / self._counts[1]

    def compare(self, reply: ReplyDraft, known: Sequence[int]) -> None:
        for is_hit in reply.compare(known):
            count_hit(self._counts, is_hit, _MAX_COUNT)

    def chances(self, reply: ReplyDraft, limit: int) -> list[float]:
        rate = reply.rate(self.acceptance)
        chances = itertools.accumulate(itertools.repeat(rate, limit), lambda a, b: a * b)
        return list(itertools.takewhile(lambda chance: chance >= WORTHLESS, chances))

    def note_pass(self, num_rows: int, seconds: float) -> None:
        self._pass_s[num_rows] = blended(self._pass_s.get(num_rows), seconds, NUM_FIRST)

    def pass_seconds(self, num_rows: int) -> float:
        """Return the duration of a pass; 0.0 before there are measurements."""
        known = [number for number, (_, n) in self._pass_s.items() if n >= NUM_FIRST]
        near = min(known, key=lambda number: abs(number - num_rows), default=0)
        return self._pass_s[near][0] if near else 0.0


def count_hit(counts: list[float], is_hit: bool, limit: float) -> None:
    """Count a draft token in a pair of hits and tries; `limit` bounds what past tries weigh."""
    if counts[1] >= limit:
        counts[:] = counts[0] / 2, counts[1] / 2
    counts[0] += is_hit
    counts[1] += 1
