"""Short ways to complete a reply, found by following its grammar along what closes it."""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from llguidance import LLMatcher

from semantic.adapters.outbound.grammar.vocabulary import Vocabulary, ids_in, is_text

_MAX_CHOICES = 16
_MAX_ROLLOUT = 40
_MAX_EXPLORED = 160
_MAX_OF_A_KIND = 5
_MAX_CACHED = 1024
_MAX_PLAN = 8192
_MAX_STEPS = 1500
_SPECIAL_TOKEN = b"\xff"  # how llguidance writes one among bytes
_KINDS = (string.digits, string.ascii_lowercase, string.ascii_uppercase)
_PREFERRED = b',]})"0123456789tfna -.:_'


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
        self.vocabulary = vocabulary
        self.closing = closing
        self._num_explored = 0

    def plan(self, matcher: LLMatcher, limit: int = _MAX_PLAN) -> list[int] | None:
        """Tokens that complete the reply; None if none are found in `limit` steps."""
        state = matcher.deep_copy()
        tokens: list[int] = []
        self._num_explored = num_steps = 0
        while not state.is_accepting():
            num_steps += 1
            if state.is_error() or len(tokens) > limit or num_steps > _MAX_STEPS:
                return None
            step = self._best_step(state, limit - len(tokens))
            if step is None or not state.consume_tokens(step):
                return None
            tokens += step
        return self._shortened(matcher, tokens)

    def first_step(self, state: LLMatcher) -> list[int] | None:
        """The most promising way on, without a look at where it leads."""
        steps = self._steps(state)
        return steps[0] if steps else None

    def completes(self, matcher: LLMatcher, tokens: list[int]) -> bool:
        """Whether the tokens complete the reply."""
        if not tokens:
            return matcher.is_accepting()
        ended = [*tokens, self.vocabulary.eos_ids[0]]
        return matcher.validate_tokens(ended) == len(ended)

    def _shortened(self, matcher: LLMatcher, tokens: list[int]) -> list[int]:
        fewer = self.vocabulary.fewest(tokens)
        return fewer if len(fewer) < len(tokens) and self.completes(matcher, fewer) else tokens

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
        forced = self._forced(state)
        if forced:
            return [forced]
        way_out = self._way_out(state)
        if way_out:
            return [way_out]
        mask = self.vocabulary.mask(state)
        ids = self.vocabulary.byte_ids
        special = mask & self.vocabulary.is_special
        choices = _choices(self.vocabulary.bytes_in(mask), self.closing)
        steps = [[int(ids[byte])] for byte in choices]
        return steps + ([[token] for token in ids_in(special)] if special.any() else [])

    def _forced(self, state: LLMatcher) -> list[int] | None:
        """Tokens for what can only be written in one way."""
        ahead = state.compute_ff_bytes()
        text, *special = ahead.split(_SPECIAL_TOKEN, 1)
        if special and not text:
            return state.compute_ff_tokens()
        return self.vocabulary.spell(text)

    def _way_out(self, state: LLMatcher) -> list[int] | None:
        """A text that is known to lead on, if it does so here."""
        for tokens in map(list, self.closing.exits):
            # Where it may stand twice it is mere text, as in a JSON string.
            if len(tokens) <= state.validate_tokens([*tokens, *tokens]) < 2 * len(tokens):
                return tokens
        endings = map(list, self.closing.endings)
        return next((tokens for tokens in endings if self.completes(state, tokens)), None)


@lru_cache(_MAX_CACHED)
def _choices(allowed: bytes, closing: Closing) -> bytes:
    """The bytes to try, of those allowed, the most promising first."""
    if closing.is_json:
        filler = b"a" if closing.has_free_strings else b""
        closers = b'"' + filler if is_text(allowed) else b"]})"
        found = bytes(byte for byte in closers if byte in allowed)
        if found:
            return found[:1]
    # Letters may begin different keys; in a pattern those of a range lead to the same.
    few = _thinned(allowed, _KINDS[:1] if closing.is_json else _KINDS)
    preferred = bytes(byte for byte in _PREFERRED if byte in few)
    return (preferred + bytes(byte for byte in few if byte not in preferred))[:_MAX_CHOICES]


def _thinned(allowed: bytes, kinds: Sequence[str]) -> bytes:
    """Of many characters of a kind only the first and the last."""
    for kind in kinds:
        members = bytes(byte for byte in kind.encode() if byte in allowed)
        if len(members) > _MAX_OF_A_KIND:
            allowed = bytes(b for b in allowed if b not in members[1:-1])
    return allowed
