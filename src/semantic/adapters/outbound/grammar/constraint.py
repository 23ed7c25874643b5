"""One reply under a grammar: which tokens may follow and, near the end of the budget, must.

While there is room, every valid token is allowed. An occasional look-ahead estimates how many
tokens would complete the reply. When hardly more than those are left, only they are allowed, and
text that opens no new element as long as it fits. A reply is thus complete within the budget if
the search finds a short completion; otherwise the budget truncates it like any other reply.

The grammar tells which tokens may follow, but not how far the end is. The look-ahead therefore
advances a copy of its state by what usually closes a reply: forced text, then brackets and quotes,
then digits and letters. The search is bounded; its result is always valid but not always the
shortest.
"""

import copy
import heapq
import itertools
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llguidance import LLMatcher

from semantic.adapters.outbound.grammar.vocabulary import Bits, Vocabulary, ids_in
from semantic.domain.errors import BackendError, InvalidRequestError

_WATCHED_TOKENS = 512  # look-ahead starts when at most so many tokens of the budget are left
_GRACE_S = 1.0  # CPU time for all masks of a reply, on the engine's thread,
_TOKEN_S = 0.05  # plus this much per token

_MAX_STEPS = 128
_MAX_OPTIONS = 4
_MAX_FORCED = 1024  # bytes of forced text per step
_SWERVE_COST = 4  # cost of any option but the first, in levels of nesting
_TEXT_PROBE = b"zQ {:"  # all allowed only where text is free
_SPECIAL_TOKEN = b"\xff"  # llguidance's byte for a special token
_CLOSING = b'}])"' + string.digits.encode()
# A comma may require at most about this much more text.
_ADDED = b', {"name": "get_weather", "arguments": {"city": "", "days": 0}}'
_LAST = b", -\\<[{"  # characters that lead further in rather than out
_ORDER = _CLOSING + bytes(
    byte
    for byte in sorted(b"\n" + string.printable[:95].encode(), key=lambda b: chr(b).isalpha())
    if byte not in _CLOSING + _LAST
) + _LAST  # fmt: skip


class GrammarConstraint:
    """`TokenConstraint` for one reply. Not thread-safe."""

    def __init__(
        self,
        matcher: LLMatcher,
        closing: "Closing",
        max_tokens: int,
        recompile: Callable[[], LLMatcher],
    ) -> None:
        """Start before the first token.

        Args:
            matcher: A copy, which shares the states of its lexer with other copies.
            recompile: Creates a matcher that shares nothing.
        """
        self._matcher = matcher
        self._closing = closing
        self._vocabulary = closing.vocabulary
        self._recompile: Callable[[], LLMatcher] | None = recompile
        self._tokens: list[int] = []
        self._num_left = max_tokens
        self._margin = min(closing.num_added, max_tokens // 2)
        self._look_at = min(max_tokens, _WATCHED_TOKENS)
        self._way: list[int] | None = None
        self._mask: bytes | None = None
        self._spent_s = 0.0

    def allowed(self) -> bytes:
        """Raises `InvalidRequestError` if the grammar became too complex."""
        if self._mask is None:
            started = time.thread_time()
            self._mask = self._compute().tobytes()
            self._spent_s += time.thread_time() - started
            if self._spent_s > _GRACE_S + _TOKEN_S * len(self._tokens):
                raise _too_complex("checking every token of the reply takes too long")
        return self._mask

    def accept(self, token: int) -> None:
        """Raises what `allowed` raises, and `BackendError` if the token was not allowed."""
        is_on_way = self._way is not None and self._way[:1] == [token]
        self._way = self._way[1:] if self._way and is_on_way else None
        self._mask = None
        self._num_left -= 1
        if self._matcher.is_stopped() and token in self._vocabulary.eos_ids:
            return
        self._tokens.append(token)
        if not self._matcher.consume_token(token):
            self._renew()

    def copy(self) -> "GrammarConstraint":
        other = copy.copy(self)
        other._matcher, other._tokens = self._matcher.deep_copy(), list(self._tokens)
        return other

    def _compute(self) -> Bits:
        if self._matcher.is_stopped():
            return self._vocabulary.is_end
        mask = self._vocabulary.mask(self._matcher)
        if self._matcher.is_error():
            self._renew()
            mask = self._vocabulary.mask(self._matcher)
        if self._matcher.is_error():
            self._renew()  # raises: a second renewal is not possible
        return self._steered(mask)

    def _renew(self) -> None:
        """Replay the reply with a new lexer: replies of one grammar fill the one they share."""
        reason = self._matcher.get_error().split("\n")[0]
        if "satisfy the grammar" in reason:
            raise BackendError(f"the reply left its grammar: {reason}")
        if self._recompile is None:
            raise _too_complex(reason)
        self._matcher, self._recompile = self._recompile(), None
        if not self._matcher.consume_tokens(self._tokens):
            raise _too_complex(reason)

    def _steered(self, mask: Bits) -> Bits:
        """Near the end of the budget, allow only tokens that lead to the end."""
        if self._way is None and self._num_left > self._look_at:
            return mask
        way = self._way or self._closing.way(self._matcher, self._num_left)
        num_spare = -2 if way is None else self._num_left - len(way) - 1  # one for the end token
        if way is None or not -1 <= num_spare <= self._margin:
            # There is still room, or no completion was found; a later search may find one.
            num_free = max(self._num_left if num_spare < 0 else num_spare - self._margin, 0)
            self._look_at, self._way = self._num_left - 1 - num_free // 4, None
            return mask
        self._way = way
        # For forced text, the mask allows only one tokenisation, which may differ from this one.
        allowed_mask = (mask & self._vocabulary.is_end) | self._vocabulary.pack(way[:1])
        # One more token may require another, such as a digit after a decimal point.
        is_open = num_spare > 1 or (not way and self._closing.is_text(self._matcher))
        return allowed_mask | (mask & self._vocabulary.is_plain) if is_open else allowed_mask


def _too_complex(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the reply format became too complex to enforce: {reason}. Simplify its schema.",
        param="response_format",
    )


@dataclass(order=True, slots=True)
class _Path:
    """Tokens tried so far. The search extends the cheapest path, then the longest."""

    cost: int
    num_missing: int
    order: int
    state: LLMatcher = field(compare=False)
    tokens: list[int] = field(compare=False)


class Closing:
    """Finds short completions for one grammar.

    Attributes:
        num_added: Tokens by which one more token may lengthen the shortest completion.
    """

    def __init__(self, vocabulary: Vocabulary, exits: Sequence[Sequence[int]] = ()) -> None:
        """Compute `num_added`; `exits` are texts that end free text, as tokens: ``</think>``."""
        self.vocabulary = vocabulary
        self.num_added = len(vocabulary.spell(_ADDED) or _ADDED)
        self._exits = [list(tokens) for tokens in exits if tokens]

    def way(self, matcher: LLMatcher, limit: int) -> list[int] | None:
        """Find tokens that complete the reply, about `limit` at most; None if the search fails."""
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
        """Possible continuations as tokens, the most promising first."""
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
        text, *special = state.compute_ff_bytes().split(_SPECIAL_TOKEN, 1)
        if special and not text:
            return state.compute_ff_tokens()
        return self.vocabulary.spell(text[:_MAX_FORCED])

    def _way_out(self, state: LLMatcher) -> list[int] | None:
        for tokens in self._exits:
            # If it may occur twice in a row, it is ordinary text, as in a JSON string.
            if len(tokens) <= state.validate_tokens([*tokens, *tokens]) < 2 * len(tokens):
                return tokens
        return None
