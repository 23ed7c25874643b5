"""How a reply that is under way can be completed: a short look ahead along what closes.

The grammar says what may come next, not how far the end is. So a copy of its state is led on by
what usually closes: forced text, then brackets and quotes, then digits and letters. The search is
bounded; what it finds is always valid, and not always the shortest.
"""

import heapq
import itertools
import string
from collections.abc import Sequence
from dataclasses import dataclass, field

from llguidance import LLMatcher

from semantic.adapters.outbound.grammar.vocabulary import Vocabulary, ids_in

_MAX_STEPS = 128
_MAX_OPTIONS = 4
_MAX_FORCED = 1024  # bytes of forced text to take in one step
_SWERVE_COST = 4  # levels of nesting that make up for another choice than the first
_TEXT_PROBE = b"zQ {:"  # allowed together only where text is free
_SPECIAL_TOKEN = b"\xff"  # how llguidance writes one among bytes
_CLOSING = b'}])"' + string.digits.encode()
# A comma may commit a reply to as much as this.
_ADDED = b', {"name": "get_weather", "arguments": {"city": "", "days": 0}}'
_LAST = b", -\\<[{"  # what leads on rather than out
_ORDER = _CLOSING + bytes(
    byte
    for byte in sorted(b"\n" + string.printable[:95].encode(), key=lambda b: chr(b).isalpha())
    if byte not in _CLOSING + _LAST
) + _LAST  # fmt: skip


@dataclass(order=True, slots=True)
class _Path:
    """Tokens that were tried. The cheapest goes on; of those, the one that got farthest."""

    cost: int
    num_missing: int
    order: int
    state: LLMatcher = field(compare=False)
    tokens: list[int] = field(compare=False)


class Closing:
    """Finds short completions for one grammar.

    Attributes:
        num_added: Tokens that one more may well add to the shortest completion.
    """

    def __init__(self, vocabulary: Vocabulary, exits: Sequence[Sequence[int]] = ()) -> None:
        """Prepare.

        Args:
            vocabulary: Of the grammar.
            exits: Texts that lead out of free text, e.g. ``</think>``; as tokens.
        """
        self.vocabulary = vocabulary
        self.num_added = len(vocabulary.spell(_ADDED) or _ADDED)
        self._exits = [list(tokens) for tokens in exits if tokens]

    def way(self, matcher: LLMatcher, limit: int) -> list[int] | None:
        """Tokens that complete the reply, about `limit` at most; None if none are found."""
        orders = itertools.count()
        paths = [_Path(0, 0, next(orders), matcher.deep_copy(), [])]
        for _ in range(_MAX_STEPS):
            if not paths:
                break
            path = heapq.heappop(paths)
            if path.state.is_accepting():
                return self._shortened(matcher, path.tokens)
            if len(path.tokens) > 2 * limit:
                continue
            options = self.options(path.state)
            for rank, option in enumerate(options):
                state = path.state.deep_copy() if len(options) > 1 else path.state
                if state.consume_tokens(option):
                    cost = path.cost + self._nesting(option) + _SWERVE_COST * rank
                    tokens = path.tokens + option
                    heapq.heappush(paths, _Path(cost, -len(tokens), next(orders), state, tokens))
        return None

    def is_text(self, state: LLMatcher) -> bool:
        """Whether any text may come next."""
        return all(self._allows(state, byte) for byte in _TEXT_PROBE)

    def _shortened(self, matcher: LLMatcher, tokens: list[int]) -> list[int]:
        fewer = self.vocabulary.fewest(tokens)
        is_fine = len(fewer) < len(tokens) and matcher.validate_tokens(fewer) == len(fewer)
        return fewer if is_fine else tokens

    def _nesting(self, tokens: list[int]) -> int:
        text = b"".join(self.vocabulary.pieces[token] for token in tokens)
        return sum(text.count(char) for char in (b"{", b"[")) - sum(
            text.count(char) for char in (b"}", b"]")
        )

    def options(self, state: LLMatcher) -> list[list[int]]:
        """Ways on from here, as tokens, the most promising first."""
        known = self._forced(state) or self._way_out(state)
        if known:
            return [known]
        if self.is_text(state):
            allowed = [byte for byte in b'"a' if self._allows(state, byte)][:1]
        else:
            allowed = [byte for byte in _ORDER if self._allows(state, byte)]
        if not allowed:
            return [[token] for token in ids_in(self.vocabulary.mask(state))[:_MAX_OPTIONS]]
        num_options = 1 if allowed[0] in _CLOSING else _MAX_OPTIONS
        return [[self.vocabulary.byte_ids[byte]] for byte in allowed[:num_options]]

    def _allows(self, state: LLMatcher, byte: int) -> bool:
        token = self.vocabulary.byte_ids[byte]
        return token >= 0 and state.validate_tokens([token]) == 1

    def _forced(self, state: LLMatcher) -> list[int] | None:
        """Tokens for what can only be written in one way."""
        text, *special = state.compute_ff_bytes().split(_SPECIAL_TOKEN, 1)
        if special and not text:
            return state.compute_ff_tokens()
        return self.vocabulary.spell(text[:_MAX_FORCED])

    def _way_out(self, state: LLMatcher) -> list[int] | None:
        """A text that is known to lead on, if it does so here."""
        for tokens in self._exits:
            # Where it may stand twice it is mere text, as in a JSON string.
            if len(tokens) <= state.validate_tokens([*tokens, *tokens]) < 2 * len(tokens):
                return tokens
        return None
