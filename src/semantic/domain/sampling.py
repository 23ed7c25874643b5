"""How the next token is chosen, and when a reply ends.

Nothing here computes with logits; backends do, by these parameters.
"""

import enum
import hashlib
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from semantic.domain.errors import InvalidRequestError

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 1024


class FinishReason(enum.Enum):
    """Why a reply ended. A failure is not a reason but a `Failed` event."""

    END_TURN = "end_turn"
    STOP_SEQUENCE = "stop_sequence"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    TOOL_USE = "tool_use"
    CANCELLED = "cancelled"


def _require(value: float, low: float, high: float, param: str) -> None:
    # Written so that NaN fails too.
    if not low <= value <= high:
        raise InvalidRequestError(
            f"{param} must be between {low} and {high}, got {value}.", param=param
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One sequence's way of choosing tokens.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p: Keep the smallest set of tokens with this much probability.
        top_k: Keep this many tokens; 0 keeps all.
        min_p: Drop tokens below this fraction of the most likely one's probability.
        repetition_penalty: Divides (or multiplies, if negative) logits of all tokens seen.
        presence_penalty: Taken once off tokens generated in this reply.
        frequency_penalty: Taken off per occurrence in this reply.
        logit_bias: Added to the logits of single tokens.
        seed: Same seed, same text, whatever else runs; None lets the server draw one.
        top_logprobs: None reports no log-probabilities; n reports the chosen one's and the n best.
        unset: Fields that the request left to the model; see `with_defaults`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    top_logprobs: int | None = None
    unset: frozenset[str] = frozenset()

    def with_defaults(self, defaults: "SamplingDefaults") -> "SamplingParams":
        """Take a model's defaults where the request says nothing."""
        chosen = {name: getattr(defaults, name) for name in self.unset}
        known = {name: value for name, value in chosen.items() if value is not None}
        return replace(self, **known, unset=frozenset())

    def __post_init__(self) -> None:
        _require(self.temperature, 0, 100, "temperature")
        _require(self.top_p, 0, 1, "top_p")
        _require(self.top_k, 0, 2**31, "top_k")
        _require(self.min_p, 0, 1, "min_p")
        _require(self.repetition_penalty, 0.01, 100, "repetition_penalty")
        _require(self.presence_penalty, -2, 2, "presence_penalty")
        _require(self.frequency_penalty, -2, 2, "frequency_penalty")
        for _, bias in self.logit_bias:
            _require(bias, -100, 100, "logit_bias")
        if self.seed is not None:
            _require(self.seed, -(2**63), 2**64 - 1, "seed")
        if self.top_logprobs is not None:
            _require(self.top_logprobs, 0, MAX_TOP_LOGPROBS, "top_logprobs")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens before it."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """How a model's authors advise to run it; None where they say nothing.

    Attributes:
        max_tokens: Length of a reply.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        # The ranges are the same.
        SamplingParams(unset=UNSET_SAMPLING).with_defaults(self)
        StopRules(max_tokens=self.max_tokens)


# What a request that says nothing of sampling leaves to the model.
UNSET_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with the logarithm of the probability the model gave it."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a reply ends.

    Attributes:
        max_tokens: The most tokens to generate; None takes the server's default.
        strings: Texts that end the reply; they are not part of it.
        token_ids: Tokens that end the reply, besides the model's own end tokens.
        ignore_eos: Go on past the model's end tokens.
    """

    max_tokens: int | None = None
    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError(
                f"max_tokens must be at least 1, got {self.max_tokens}.", param="max_tokens"
            )
        if len(self.strings) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"at most {MAX_STOP_STRINGS} stop strings are allowed.", param="stop"
            )
        if any(len(text) > MAX_STOP_CHARS for text in self.strings):
            raise InvalidRequestError(
                f"a stop string has at most {MAX_STOP_CHARS} characters.", param="stop"
            )
        if any(not text for text in self.strings):
            raise InvalidRequestError("a stop string must not be empty.", param="stop")

    def is_end(self, token: int, eos_ids: Collection[int]) -> bool:
        """Whether a token ends the reply; `eos_ids` are the model's end tokens."""
        return token in self.token_ids or (token in eos_ids and not self.ignore_eos)


def num_undecided(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a marker.

    Example:
        >>> num_undecided("see <to", ("<tool_call>",))
        3
    """
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if marker.startswith(text[-size:]):
                longest = size
                break
    return longest


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces.

    Text is held back only while it could still become a stop string, and a stop string is never
    shown. The match that ends first wins; of those that end together, the longest.

    Attributes:
        stop: The stop string that was hit, if any; nothing more may be fed then.

    Example:
        >>> matcher = StopMatcher(("END",))
        >>> matcher.feed("the E"), matcher.feed("ND of"), matcher.stop
        ('the ', '', 'END')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stop: str | None = None

    def feed(self, text: str) -> str:
        """Take more text; returns what may be shown."""
        if not self._stops:
            return text
        buffer = self._held + text
        shown = self._before_stop(buffer)
        self._held = "" if self.stop else buffer[shown:]
        return buffer[:shown]

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _before_stop(self, buffer: str) -> int:
        """How many characters come before a stop string, or what could become one."""
        found = [(buffer.find(stop), stop) for stop in self._stops if stop in buffer]
        if found:
            start, self.stop = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            return start
        return len(buffer) - num_undecided(buffer, self._stops)


def uniform(seed: int, position: int) -> float:
    """A number in ``[0, 1)`` that depends on nothing but its arguments.

    Every backend draws with it, so a seeded reply depends neither on its neighbours in a batch
    nor on when it was paused and resumed.
    """
    key = struct.pack("<Qq", seed % 2**64, position)
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 11) / 2**53
