"""Completing a reply in time: a constraint that knows how many tokens are left.

The matcher says which tokens keep a reply valid so far; nothing in it knows how long the reply
would still have to be. So a *plan* is kept: tokens that complete the reply from here. While the
budget is larger than the plan plus what one token can add to it, every valid token is allowed; then
only tokens from which a plan still fits; and when the plan alone fills the budget, the plan.

A reply seldom follows its plan to the letter, and planning is slow. So after each token the way
back to the plan is looked for. If it is not found, the reply goes on without, until it could have
grown too long; only then is it planned anew.

What is promised: if a plan is known at the start, the reply is complete within its budget, as long
as one token never adds more to the shortest completion than the `growth` read off the schema. Not
promised: grammars for which no plan is found (patterns whose end lies behind text that may be
anything, values that take thousands of tokens); there the budget may cut the reply.
"""

import numpy as np
from llguidance import LLMatcher

from semantic.adapters.outbound.grammar.detour import Detours
from semantic.adapters.outbound.grammar.planner import Planner
from semantic.adapters.outbound.grammar.vocabulary import (
    Bits,
    has_token,
    ids_in,
    is_text,
)
from semantic.domain.errors import BackendError

_MAX_VERIFIED = 40
_MAX_QUOTES = 16
_MAX_EFFORT = 10_000  # tokens to check for one mask; other replies wait for it
_BLIND_TOKENS = 64
_UNBOUNDED = 2**31


class BudgetedConstraint:
    """`TokenConstraint` that completes the reply within its budget. One reply, one thread."""

    def __init__(self, matcher: LLMatcher, planner: Planner, max_tokens: int) -> None:
        self._matcher = matcher
        self._vocabulary = planner.vocabulary
        self._closing = planner.closing
        self._planner = planner
        self._detours = Detours(planner)
        plan = planner.plan(matcher)
        self._plan = plan or []
        self._is_on_plan = plan is not None
        self._bound = _UNBOUNDED if plan is None else len(plan)  # tokens that surely suffice
        self._num_blind = _BLIND_TOKENS if plan is None else 0
        self._num_left = max_tokens
        # The end token has its place in the budget, unless that alone would make it too small.
        self._num_reserved = int(plan is None or len(plan) < max_tokens)
        self._verified: dict[int, list[int]] = {}
        self._mask: bytes | None = None

    @property
    def shortest(self) -> int | None:
        """Tokens of a short completion from here; None if none is known."""
        return len(self._plan) if self._is_on_plan else None

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
        self._num_blind = max(0, self._num_blind - 1)
        self._follow(token)
        self._verified = {}

    def _follow(self, token: int) -> None:
        rest = self._verified.get(token)
        if rest is None and self._is_on_plan:
            rest = self._detours.rest(self._plan, token)
        if rest is None:
            self._is_on_plan = False
            self._bound += self._closing.growth
        else:
            self._take(rest)

    def _take(self, plan: list[int]) -> None:
        self._plan, self._bound, self._is_on_plan = plan, len(plan), True

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0]
            raise BackendError(f"the reply left its grammar: {reason}")

    def _compute(self) -> Bits:
        if self._matcher.is_stopped():
            return self._vocabulary.is_end
        mask = self._vocabulary.mask(self._matcher)
        self._check()
        return mask if self._num_blind else self._watched(mask)

    def _watched(self, mask: Bits) -> Bits:
        """Keep what leaves room to complete the reply."""
        room = self._num_left - self._num_reserved
        self._detours.effort = _MAX_EFFORT
        if not self._is_on_plan:
            self._update_plan(room)
        if self._num_blind or room > self._bound + self._closing.growth:
            return mask
        kept = mask & self._vocabulary.is_end
        if len(self._plan) < room:
            kept = kept | self._verify(mask, self._plan, room)
        return kept | self._vocabulary.pack(self._plan[:1])

    def _update_plan(self, room: int) -> None:
        """Find a way back to the plan or, only if room gets scarce, plan anew: that is slow."""
        growth = self._closing.growth
        plan = self._detours.rejoin(self._matcher, self._plan, room)
        if plan is None and room <= self._bound + growth:
            plan = self._planner.plan(self._matcher, room + growth)
            # Where no way to the end is known, none can be kept open for now.
            self._num_blind = _BLIND_TOKENS if plan is None else 0
        if plan is not None:
            self._take(plan)

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
        return self._vocabulary.pack([t for t in tokens if self._fits(t, room - 1)])

    def _fits(self, token: int, room: int) -> bool:
        plan = self._detours.rest(self._plan, token)
        if plan is None:
            copy = self._matcher.deep_copy()
            has_token = copy.consume_token(token)
            plan = self._detours.rejoin(copy, self._plan, room) if has_token else None
        if plan is None or len(plan) > room:
            return False
        self._verified[token] = plan
        return True
