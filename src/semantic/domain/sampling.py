"""Parameters that choose the next token, and rules that end a reply.

This module does not compute with logits; the backends apply the parameters.
"""

import enum
import hashlib
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from semantic.domain.errors import InvalidRequestError

MAX_TOP_LOGPROBS = 20
MAX_REPLY_TOKENS = 2**31  # some clients send it to mean "as many as possible"
# If neither the request nor the server's settings nor the model set a limit: a small model may
# repeat itself until its context is full.
DEFAULT_REPLY_TOKENS = 4096
MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 1024


class FinishReason(enum.Enum):
    """Why a reply ended. A failure is reported as a `Failed` event instead."""

    END_TURN = "end_turn"
    STOP_SEQUENCE = "stop_sequence"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    TOOL_USE = "tool_use"
    CANCELLED = "cancelled"


def _require(value: float, low: float, high: float, param: str) -> None:
    # `not low <= value` also rejects NaN.
    if not low <= value <= high:
        raise InvalidRequestError(
            f"{param} must be between {low} and {high}, got {value}.", param=param
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one sequence.

    Attributes:
        temperature: 0 always takes the most likely token.
        top_p: Keep the smallest set of tokens with this total probability.
        top_k: Keep this many tokens; 0 keeps all.
        min_p: Drop tokens below this fraction of the most likely token's probability.
        repetition_penalty: Divides positive and multiplies negative logits of all tokens seen.
        presence_penalty: Subtracted once from the logits of tokens generated in this reply.
        frequency_penalty: Subtracted for each occurrence of a token in this reply.
        logit_bias: Added to the logits of single tokens.
        seed: The same seed gives the same text, independent of other requests; None means random.
        top_logprobs: None reports no log-probabilities; n reports those of the chosen token and
            of the n most likely ones.
        unset: Fields that the request leaves to the model; see `with_defaults`.
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
        """Replace the fields in `unset` by a model's defaults."""
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
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters that a model's authors recommend; None where they recommend nothing.

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
        # Validate with the same ranges as requests.
        SamplingParams(unset=UNSET_SAMPLING).with_defaults(self)
        if self.max_tokens is not None:
            _require(self.max_tokens, 1, MAX_REPLY_TOKENS, "max_tokens")


# Fields left to the model by a request without sampling parameters.
UNSET_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability, and those of the most likely tokens at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StopRules:
    """Conditions that end a reply.

    Attributes:
        max_tokens: Maximum number of tokens, reduced to what fits; None means the server's default,
            and 0 computes only the prompt.
        strings: Texts that end the reply and are not part of it.
        token_ids: Tokens that end the reply, in addition to the model's end tokens.
        ignore_eos: Continue past the model's end tokens.
    """

    max_tokens: int | None = None
    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _require(self.max_tokens, 0, MAX_REPLY_TOKENS, "max_tokens")
        if len(self.strings) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"at most {MAX_STOP_STRINGS} stop strings are allowed.", param="stop"
            )
        if any(len(text) > MAX_STOP_CHARS for text in self.strings):
            raise InvalidRequestError(
                f"a stop string must have at most {MAX_STOP_CHARS} characters.", param="stop"
            )
        if any(not text for text in self.strings):
            raise InvalidRequestError("stop strings must not be empty.", param="stop")

    def is_end(self, token: int, eos_ids: Collection[int]) -> bool:
        return token in self.token_ids or (token in eos_ids and not self.ignore_eos)


def num_undecided(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a marker.

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
    """Finds stop strings in text that arrives in pieces.

    Text is held back only while it may still become a stop string, and a stop string is never
    returned. The match that ends first wins; of those that end together, the longest.

    Attributes:
        stop: The stop string that was found, if any; do not feed more text after that.

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
        """Add text; returns the text that can be shown."""
        if not self._stops:
            return text
        buffer = self._held + text
        shown = self._before_stop(buffer)
        self._held = "" if self.stop else buffer[shown:]
        return buffer[:shown]

    def flush(self) -> str:
        """Return the text that was held back, at the end of the input."""
        held, self._held = self._held, ""
        return held

    def _before_stop(self, buffer: str) -> int:
        found = [(buffer.find(stop), stop) for stop in self._stops if stop in buffer]
        if found:
            start, self.stop = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            return start
        return len(buffer) - num_undecided(buffer, self._stops)


def uniform(seed: int, position: int) -> float:
    """Return a number in ``[0, 1)`` that depends only on the arguments.

    All backends sample with it, so that a seeded reply depends neither on other sequences in its
    batch nor on when it was paused and resumed.
    """
    key = struct.pack("<Qq", seed % 2**64, position)
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 11) / 2**53
