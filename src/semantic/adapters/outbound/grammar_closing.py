"""Completing a reply in time: a constraint that knows how many tokens are left.

The matcher says which tokens keep a reply valid so far; nothing in it knows how long the reply
would still have to be. So a *plan* is kept: tokens that complete the reply from here, found by
following the grammar along closing brackets and quotes. While the budget is larger than the plan
plus what one token can add to it, every valid token is allowed; then only tokens from which a plan
still fits; and when the plan alone fills the budget, the plan.
"""

import string
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from semantic.domain.errors import BackendError

_MAX_VERIFIED = 40
_MAX_QUOTES = 16
_MAX_CHOICES = 16
_MAX_ROLLOUT = 40
_MAX_EXPLORED = 160
_MAX_OF_A_KIND = 5
_MAX_PLAN = 1024
_PREFERRED = b',]})"0123456789tfna -.:_'
_TEXT_PROBE = b"zQ {:"  # allowed together only where text is free

_STRING_SYNTAX = bytes(range(0x20)) + b'"\\\x7f'  # what means something in a JSON string
_MARKUP = b"<>[]|`"  # what markers of calls and thinking hold

Bits = NDArray[np.uint8]


class Vocabulary:
    """What the tokens of one model are made of, laid out for constraints."""

    def __init__(self, tokenizer: LLTokenizer, pieces: list[bytes], eos_ids: list[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self._pieces = pieces
        self.num_words = (len(pieces) + 31) // 32
        self.byte_ids = np.full(256, -1, np.int64)
        for token, piece in enumerate(pieces):
            if len(piece) == 1:
                self.byte_ids[piece[0]] = token
        self.is_special = self.pack(
            [t for t, piece in enumerate(pieces) if not piece and t not in eos_ids]
        )
        self.is_plain = self._pack_if(lambda piece: _is_free_of(piece, _STRING_SYNTAX))
        self.is_prose = self._pack_if(lambda piece: _is_free_of(piece, _MARKUP))
        self.is_end = self.pack(eos_ids)
        quoting = [t for t, piece in enumerate(pieces) if piece.startswith(b'"')]
        self.quote_ids = sorted(quoting, key=lambda token: len(pieces[token]))

    def pack(self, tokens: list[int]) -> Bits:
        """One bit a token id, little-endian within a byte."""
        flags = np.zeros(self.num_words * 32, bool)
        flags[tokens] = True
        return np.packbits(flags, bitorder="little")

    def _pack_if(self, is_kept: Callable[[bytes], bool]) -> Bits:
        return self.pack([t for t, piece in enumerate(self._pieces) if is_kept(piece)])

    def mask(self, matcher: LLMatcher) -> Bits:
        """The tokens a matcher allows next."""
        words = np.zeros((1, self.num_words), np.int32)
        fill_next_token_bitmask(matcher, words)
        mask: Bits = words.view(np.uint8)[0]
        return mask

    def bytes_in(self, mask: Bits) -> bytes:
        """The single bytes a mask allows."""
        ids = self.byte_ids
        has = (mask[ids >> 3] >> (ids & 7).astype(np.uint8)) & 1
        return np.flatnonzero((has == 1) & (ids >= 0)).astype(np.uint8).tobytes()

    def fewest(self, tokens: list[int]) -> list[int]:
        """The same bytes in fewer tokens, where longer ones exist."""
        shorter: list[int] = []
        run = b""
        for token in tokens:
            if self._pieces[token]:
                run += self._pieces[token]
                continue
            shorter += [*self._greedy(run), token]
            run = b""
        return shorter + self._greedy(run)

    def _greedy(self, run: bytes) -> list[int]:
        # Whole characters only: the tokenizer takes text.
        return self.tokenizer.greedy_tokenize(run.decode()) if run and _is_utf8(run) else []


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_free_of(piece: bytes, syntax: bytes) -> bool:
    """Whether a token is whole characters, none of which means anything."""
    return bool(piece) and _is_utf8(piece) and not any(byte in syntax for byte in piece)


@dataclass(frozen=True, slots=True)
class Closing:
    """What is known of a grammar's endings.

    Attributes:
        growth: The most tokens that one token can add to the shortest completion.
        exits: Texts that lead out of free text, e.g. ``</think>``; as tokens.
        endings: Texts that may complete the reply, the likeliest first; as tokens.
        is_json: Whether closing quotes and brackets lead towards the end.
        has_free_strings: Whether any text may stand where much is allowed.
    """

    growth: int
    exits: tuple[tuple[int, ...], ...] = ()
    endings: tuple[tuple[int, ...], ...] = ()
    is_json: bool = True
    has_free_strings: bool = True


class Planner:
    """Finds short completions. What it finds is always valid, if not always the shortest."""

    def __init__(self, vocabulary: Vocabulary, closing: Closing) -> None:
        self._vocabulary = vocabulary
        self._closing = closing
        self._num_explored = 0

    def plan(self, matcher: LLMatcher, limit: int = _MAX_PLAN) -> list[int] | None:
        """Tokens that complete the reply; None if none are found in `limit` steps."""
        state = matcher.deep_copy()
        tokens: list[int] = []
        self._num_explored = 0
        while not state.is_accepting():
            if state.is_error() or len(tokens) > limit:
                return None
            step = self._best_step(state, limit - len(tokens))
            if step is None or not state.consume_tokens(step):
                return None
            tokens += step
        return self._shortened(matcher, tokens)

    def _shortened(self, matcher: LLMatcher, tokens: list[int]) -> list[int]:
        fewer = self._vocabulary.fewest(tokens)
        return fewer if len(fewer) < len(tokens) and _completes(matcher, fewer) else tokens

    def _best_step(self, state: LLMatcher, limit: int) -> list[int] | None:
        """Of several ways on, the one whose plain completion is the shortest."""
        steps = self._steps(state)
        if len(steps) <= 1 or self._num_explored > _MAX_EXPLORED:
            return steps[0] if steps else None
        best, shortest = steps[0], limit + 1
        for step in steps:
            length = self._rollout(state, step, shortest)
            if length is not None and length < shortest:
                best, shortest = step, length
        return best

    def _rollout(self, state: LLMatcher, step: list[int], limit: int) -> int | None:
        """How long the reply gets if after `step` the first way on is always taken."""
        copy = state.deep_copy()
        length = 0
        following: list[int] = step
        for _ in range(_MAX_ROLLOUT):
            if not copy.consume_tokens(following):
                return None
            length += len(following)
            if copy.is_accepting():
                return length
            steps = self._steps(copy)
            self._num_explored += 1
            if length >= limit or not steps:
                return None
            following = steps[0]
        return None

    def _steps(self, state: LLMatcher) -> list[list[int]]:
        """Ways on from here, the most promising first."""
        forced = state.compute_ff_tokens()
        if forced:
            return [forced]
        ahead = state.compute_ff_bytes()
        if ahead and self._vocabulary.byte_ids[ahead[0]] >= 0:
            return [[int(self._vocabulary.byte_ids[ahead[0]])]]
        way_out = self._way_out(state)
        if way_out:
            return [way_out]
        mask = self._vocabulary.mask(state)
        ids = self._vocabulary.byte_ids
        special = mask & self._vocabulary.is_special
        steps = [[int(ids[byte])] for byte in self._bytes(self._vocabulary.bytes_in(mask))]
        return steps + ([[token] for token in _ids(special)] if special.any() else [])

    def _way_out(self, state: LLMatcher) -> list[int] | None:
        """A text that is known to lead on, if it does so here."""
        for tokens in map(list, self._closing.exits):
            # Where it may stand twice it is mere text, as in a JSON string.
            if len(tokens) <= state.validate_tokens([*tokens, *tokens]) < 2 * len(tokens):
                return tokens
        endings = map(list, self._closing.endings)
        return next((tokens for tokens in endings if _completes(state, tokens)), None)

    def _bytes(self, allowed: bytes) -> bytes:
        if self._closing.is_json:
            filler = b"a" if self._closing.has_free_strings else b""
            closers = b'"' + filler if _is_text(allowed) else b"]})"
            found = bytes(byte for byte in closers if byte in allowed)
            if found:
                return found[:1]
        few = _thinned(allowed)
        preferred = bytes(byte for byte in _PREFERRED if byte in few)
        return (preferred + bytes(byte for byte in few if byte not in preferred))[:_MAX_CHOICES]


def _thinned(allowed: bytes) -> bytes:
    """Of many digits or letters of a kind only the first and the last: they lead to the same."""
    for kind in (string.digits, string.ascii_lowercase, string.ascii_uppercase):
        members = bytes(byte for byte in kind.encode() if byte in allowed)
        if len(members) > _MAX_OF_A_KIND:
            allowed = bytes(b for b in allowed if b not in members[1:-1])
    return allowed


def _completes(matcher: LLMatcher, tokens: list[int]) -> bool:
    # Asked first, since running into an error is slow.
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    copy = matcher.deep_copy()
    return copy.consume_tokens(tokens) and copy.is_accepting()


def _is_text(allowed: bytes) -> bool:
    return all(byte in allowed for byte in _TEXT_PROBE)


def _ids(mask: Bits) -> list[int]:
    ids: list[int] = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
    return ids


def _has(mask: Bits, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


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
        self._num_left = max_tokens
        # The end token has its place in the budget, unless that alone would make it too small.
        self._num_reserved = int(self._plan is None or len(self._plan) < max_tokens)
        self._num_unwatched = 0
        self._verified: dict[int, list[int]] = {}
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
            self._plan = None
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
        if self._plan is None:
            self._plan = self._planner.plan(self._matcher)
        if self._plan is None:
            return mask  # no way to the end is known, so none can be kept open
        room = self._num_left - self._num_reserved
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
            return self._fitting(_ids(mask), room)
        single = vocabulary.bytes_in(mask)
        if not self._closing.has_free_strings or not _is_text(single):
            return np.zeros_like(mask)
        # More text does not move its end away, but for a key that must differ from others.
        has_room = len(plan) + 2 <= room
        if b"\n" in single:  # no JSON string may hold it: this is prose
            return mask & vocabulary.is_prose if has_room else np.zeros_like(mask)
        quoting = [token for token in vocabulary.quote_ids if _has(mask, token)]
        kept = self._fitting(quoting[:_MAX_QUOTES], room)
        return kept | (mask & vocabulary.is_plain) if has_room else kept

    def _fitting(self, tokens: list[int], room: int) -> Bits:
        return self._vocabulary.pack([t for t in tokens if self._fits(t, room - 1)])

    def _fits(self, token: int, room: int) -> bool:
        copy = self._matcher.deep_copy()
        if not copy.consume_token(token):
            return False
        plan = self._planner.plan(copy, room + self._closing.growth)
        if plan is None or len(plan) > room:
            return False
        self._verified[token] = plan
        return True
