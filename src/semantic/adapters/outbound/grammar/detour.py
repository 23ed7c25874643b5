"""Keeping a plan while a reply does not follow it word for word.

Planning to the end of a long reply is slow. What a token changes is mostly near: it spells the plan
differently, adds to a text, or picks another value. So the way back to the plan is looked for.
"""

from collections.abc import Iterator

from llguidance import LLMatcher

from semantic.adapters.outbound.grammar.planner import Planner

_MAX_STEPS = 16  # before a detour counts as not leading back
_MAX_SKIPPED = 6  # tokens of the plan that a detour may save
_STEP_EFFORT = 250  # looking one step ahead takes as long as checking so many tokens


class Detours:
    """Finds ways back to a plan. They complete the reply, if not always in the shortest way.

    Attributes:
        effort: How much may still be looked at, in tokens. Searches take from it.
    """

    def __init__(self, planner: Planner) -> None:
        self._vocabulary = planner.vocabulary
        self._planner = planner
        self.effort = 0

    def rest(self, plan: list[int], token: int) -> list[int] | None:
        """What is left of a plan after a token that spells its beginning; else None."""
        if plan[:1] == [token]:
            return plan[1:]
        text = self._vocabulary.pieces[token]
        for index, planned in enumerate(plan if text else []):
            piece = self._vocabulary.pieces[planned]
            if len(text) < len(piece):
                return self._cut(plan, index, len(text)) if piece.startswith(text) else None
            if not piece or not text.startswith(piece):
                return None
            text = text[len(piece) :]
            if not text:
                return plan[index + 1 :]
        return None

    def rejoin(self, matcher: LLMatcher, plan: list[int], limit: int) -> list[int] | None:
        """At most `limit` tokens that lead back to the plan and along it; None if not found."""
        state = matcher.deep_copy()
        way: list[int] = []
        for _ in range(_MAX_STEPS):
            if self.effort <= 0 or len(way) > limit:
                return None
            if state.is_accepting():
                return way
            rest = self._rest_from(state, plan, len(way) + _MAX_SKIPPED, limit - len(way))
            if rest is not None:
                return way + rest
            self.effort -= _STEP_EFFORT
            step = self._planner.first_step(state)
            if step is None or not state.consume_tokens(step):
                return None
            way += step
        return None

    def _rest_from(
        self, state: LLMatcher, plan: list[int], num_skipped: int, limit: int
    ) -> list[int] | None:
        """The longest end of the plan that completes the reply from here."""
        for head, index in self._heads(plan[:num_skipped]):
            if state.validate_tokens(head) < len(head):
                continue
            rest = head + plan[index:]
            self.effort -= len(rest)
            if len(rest) <= limit and self._planner.completes(state, rest):
                return rest
            if self.effort <= 0:
                break
        return None

    def _heads(self, tokens: list[int]) -> Iterator[tuple[list[int], int]]:
        """Each token and its ends, as tokens, and the index after it."""
        for index, token in enumerate(tokens):
            yield [token], index + 1
            piece = self._vocabulary.pieces[token]
            for start in range(1, len(piece)):
                end = self._vocabulary.spell(piece[start:])
                if end:
                    yield end, index + 1

    def _cut(self, plan: list[int], index: int, start: int) -> list[int] | None:
        tokens = self._vocabulary.spell(self._vocabulary.pieces[plan[index]][start:])
        return None if tokens is None else tokens + plan[index + 1 :]
