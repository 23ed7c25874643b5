"""Completing a reply in time: a constraint that knows how many tokens are left.

The matcher says which tokens keep a reply valid so far; nothing in it knows how long the reply
would still have to be. So a *plan* is kept: tokens that complete the reply from here. While the
budget is larger than the plan plus what one token can add to it, every valid token is allowed; then
only tokens from which a plan still fits; and when the plan alone fills the budget, the plan.

What is promised: if a plan is known at the start, the reply is complete within its budget, as long
as one token never adds more to the shortest completion than the `growth` read off the schema. Not
promised: grammars for which no plan is found (patterns whose end lies behind text that may be
anything, values that take thousands of tokens); there the budget may cut the reply.
"""

import numpy as np
from llguidance import LLMatcher

from semantic.adapters.outbound.grammar_planner import Closing, Planner
from semantic.adapters.outbound.grammar_vocabulary import (
    Bits,
    Vocabulary,
    has_token,
    ids_in,
    is_text,
)
from semantic.domain.errors import BackendError

_MAX_VERIFIED = 40
_MAX_QUOTES = 16
_MAX_FRESH = 6
_BLIND_TOKENS = 64


class BudgetedConstraint:
    """`TokenConstraint` that completes the reply within its budget. One reply, one thread."""

    def __init__(
        self, matcher: LLMatcher, vocabulary: Vocabulary, closing: Closing, max_tokens: int
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._closing = closing
        self._planner = Planner(vocabulary, closing)
        self._plan = self._planner.plan(matcher)
        self._old_plan: list[int] = []
        self._num_left = max_tokens
        # The end token has its place in the budget, unless that alone would make it too small.
        self._num_reserved = int(self._plan is None or len(self._plan) < max_tokens)
        self._num_unwatched = 0
        self._verified: dict[int, list[int]] = {}
        self._num_fresh = 0
        self._mask: bytes | None = None

    @property
    def shortest(self) -> int | None:
        """Tokens of a short completion from here; None if none is known."""
        return None if self._plan is None else len(self._plan)

    def allowed(self) -> bytes:
        """The tokens that keep the reply valid and completable."""
        if self._mask is None:
            self._mask = self._compute().tobytes()
        return self._mask

    def accept(self, token: int) -> None:
        """Advance by a token.

        Raises:
            BackendError: the token was not allowed, or the grammar grew too complex.
        """
        if not (self._matcher.is_stopped() and token in self._vocabulary.eos_ids):
            self._matcher.consume_token(token)
        self._check()
        self._mask = None
        self._num_left -= 1
        self._num_unwatched -= 1
        if token in self._verified:
            self._plan = self._verified[token]
        elif self._plan and self._plan[0] == token:
            self._plan = self._plan[1:]
        else:
            self._old_plan, self._plan = self._plan or self._old_plan, None
        self._verified = {}

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0]
            raise BackendError(f"the reply left its grammar: {reason}")

    def _compute(self) -> Bits:
        if self._matcher.is_stopped():
            return self._vocabulary.is_end
        mask = self._vocabulary.mask(self._matcher)
        self._check()
        return mask if self._num_unwatched > 0 else self._watched(mask)

    def _watched(self, mask: Bits) -> Bits:
        """Keep what leaves room to complete the reply."""
        room = self._num_left - self._num_reserved
        self._num_fresh = 0
        if self._plan is None:
            self._plan = self._find_plan(self._matcher, self._old_plan, room)
        if self._plan is None:
            # No way to the end is known, so none can be kept open for now.
            self._num_unwatched = _BLIND_TOKENS
            return mask
        growth = self._closing.growth
        slack = room - len(self._plan) - growth
        if slack > 0:
            # Each token takes one off the room and adds at most `growth` to the plan.
            self._num_unwatched = max(1, slack // (growth + 1))
            return mask
        kept = mask & self._vocabulary.is_end
        if len(self._plan) < room:
            kept = kept | self._verify(mask, self._plan, room)
        return kept | self._vocabulary.pack(self._plan[:1])

    def _verify(self, mask: Bits, plan: list[int], room: int) -> Bits:
        """Of the allowed tokens, those from which a completion is known to fit."""
        vocabulary = self._vocabulary
        if int(np.bitwise_count(mask).sum()) <= _MAX_VERIFIED:
            return self._fitting(ids_in(mask), room)
        single = vocabulary.bytes_in(mask)
        if not self._closing.has_free_strings or not is_text(single):
            return np.zeros_like(mask)
        # More text does not move its end away, but for a key that must differ from others.
        has_room = len(plan) + 2 <= room
        if b"\n" in single:  # no JSON string may hold it: this is prose
            return mask & vocabulary.is_prose if has_room else np.zeros_like(mask)
        quoting = [token for token in vocabulary.quote_ids if has_token(mask, token)]
        kept = self._fitting(quoting[:_MAX_QUOTES], room)
        return kept | (mask & vocabulary.is_plain) if has_room else kept

    def _fitting(self, tokens: list[int], room: int) -> Bits:
        self._num_fresh = 0
        return self._vocabulary.pack([t for t in tokens if self._fits(t, room - 1)])

    def _find_plan(self, matcher: LLMatcher, old: list[int], room: int) -> list[int] | None:
        adapted = self._planner.adapt(matcher, old, room)
        if adapted is not None:
            return adapted
        # Planning anew is slow, and other replies wait for this one's mask.
        self._num_fresh += 1
        is_spent = self._num_fresh > _MAX_FRESH
        return None if is_spent else self._planner.plan(matcher, room + self._closing.growth)

    def _fits(self, token: int, room: int) -> bool:
        copy = self._matcher.deep_copy()
        if not copy.consume_token(token):
            return False
        plan = self._find_plan(copy, self._plan or [], room)
        if plan is None or len(plan) > room:
            return False
        self._verified[token] = plan
        return True
