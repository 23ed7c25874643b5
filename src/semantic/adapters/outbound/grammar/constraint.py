"""One reply under a grammar: what may come next and, near the end of its budget, what closes it.

While there is room every valid token is allowed. A look ahead now and then says how many tokens
would complete the reply; when hardly more than those are left, only they are allowed, and text
that opens nothing as long as it fits. So a reply is complete in time where a short way to its end
is found; where none is, it is cut like any other reply.
"""

import time
from collections.abc import Callable

from llguidance import LLMatcher

from semantic.adapters.outbound.grammar.closing import Closing
from semantic.adapters.outbound.grammar.vocabulary import Bits
from semantic.domain.errors import BackendError, InvalidRequestError

_WATCHED_TOKENS = 512  # of a longer budget the beginning is not watched
_GRACE_S = 1.0  # masks may take so long in all, on the engine's thread,
_TOKEN_S = 0.05  # and so much longer with each token


class GrammarConstraint:
    """`TokenConstraint` for one reply. Used on one thread."""

    def __init__(
        self,
        matcher: LLMatcher,
        closing: Closing,
        max_tokens: int,
        recompile: Callable[[], LLMatcher],
    ) -> None:
        """Begin before the first token.

        Args:
            matcher: A copy; what its lexer has learnt it shares with other copies.
            closing: Looks for ways to the end.
            max_tokens: The budget.
            recompile: Makes a matcher that shares nothing.
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
        """The tokens that keep the reply valid.

        Raises:
            InvalidRequestError: the grammar grew too complex.
        """
        if self._mask is None:
            started = time.thread_time()
            self._mask = self._compute().tobytes()
            self._spent_s += time.thread_time() - started
            if self._spent_s > _GRACE_S + _TOKEN_S * len(self._tokens):
                raise _too_complex("checking every token of the reply takes too long")
        return self._mask

    def accept(self, token: int) -> None:
        """Advance by a token.

        Raises:
            BackendError: the token was not allowed.
            InvalidRequestError: the grammar grew too complex.
        """
        is_on_way = self._way is not None and self._way[:1] == [token]
        self._way = self._way[1:] if self._way and is_on_way else None
        self._mask = None
        self._num_left -= 1
        if self._matcher.is_stopped() and token in self._vocabulary.eos_ids:
            return
        self._tokens.append(token)
        if not self._matcher.consume_token(token):
            self._renew()

    def _compute(self) -> Bits:
        if self._matcher.is_stopped():
            return self._vocabulary.is_end
        mask = self._vocabulary.mask(self._matcher)
        if self._matcher.is_error():
            self._renew()
            mask = self._vocabulary.mask(self._matcher)
        if self._matcher.is_error():
            self._renew()  # a second time there is nothing to try
        return self._steered(mask)

    def _renew(self) -> None:
        """Start over with a lexer of its own: replies of one grammar fill the one they share."""
        reason = self._matcher.get_error().split("\n")[0]
        if "satisfy the grammar" in reason:
            raise BackendError(f"the reply left its grammar: {reason}")
        if self._recompile is None:
            raise _too_complex(reason)
        self._matcher, self._recompile = self._recompile(), None
        if not self._matcher.consume_tokens(self._tokens):
            raise _too_complex(reason)

    def _steered(self, mask: Bits) -> Bits:
        """Near the end of the budget, keep only what closes."""
        if self._way is None and self._num_left > self._look_at:
            return mask
        way = self._way or self._closing.way(self._matcher, self._num_left)
        num_spare = -2 if way is None else self._num_left - len(way) - 1  # one for the end token
        if way is None or not -1 <= num_spare <= self._margin:
            # There is room yet, or no way out; a way may be found later.
            num_free = max(self._num_left if num_spare < 0 else num_spare - self._margin, 0)
            self._look_at, self._way = self._num_left - 1 - num_free // 4, None
            return mask
        self._way = way
        # Where text is forced the mask holds one way to write it, which need not be this one.
        kept = (mask & self._vocabulary.is_end) | self._vocabulary.pack(way[:1])
        # A digit after a point, say: one more token may call for another.
        is_open = num_spare > 1 or (not way and self._closing.is_text(self._matcher))
        return kept | (mask & self._vocabulary.is_plain) if is_open else kept


def _too_complex(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the reply's form became too complex to enforce: {reason}. Simplify its schema.",
        param="response_format",
    )
