"""Names of models: the aliases by which clients request them, and known models with short names.

The table of known models is data (`adapters/outbound/models/known_models.toml`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from semantic.domain.errors import InvalidRequestError

# llama.cpp's names of the parts of a split file.
_PART = re.compile(r"-\d{5}-of-\d{5}$")
# Clients made for Anthropic's models request them by name, also for background tasks.
_ANY = ("claude*", "anthropic/claude*")
_LATEST = ":latest"
# Weights need scratch memory beside them, and agents need room for at least one conversation.
_SCRATCH = 1.1
_MIN_CONVERSATION = 16_384
# Share of the memory bandwidth that decoding reaches; see docs/benchmarks.md.
_DECODE_SHARE = 0.7
_COMFORTABLE_TOKENS_PER_S = 8
# Expected acceptance rate of a draft model that nobody has measured, and the most tokens to draft.
_DRAFT_RATE, _MAX_DRAFT = 0.7, 8
# The least expected speed-up for which `draft_model = "auto"` loads a second model.
MIN_DRAFT_GAIN = 1.4


def served_id(source: str) -> str:
    """Return the name under which the model at `source` is served.

    Example:
        >>> served_id("~/models/qwen.gguf"), served_id("Qwen/Qwen3-4B")
        ('qwen', 'Qwen3-4B')
        >>> served_id("glm-00001-of-00003.gguf")
        'glm'
    """
    name = source.rstrip("/").rpartition("/")[2]
    if not name.endswith(".gguf"):
        return name
    return _PART.sub("", name.removesuffix(".gguf"))


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Aliases of models: shell patterns, not case-sensitive.

    Attributes:
        patterns: Aliases of whichever model is served.
        targets: Aliases of one model each, as pairs of pattern and source; the first match wins.
    """

    patterns: tuple[str, ...] = _ANY
    targets: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, aliases: Sequence[str], short_names: Mapping[str, str]) -> "ModelNames":
        """Parse the setting `model_aliases`, whose entries are `pattern` or `pattern=source`.

        Raises:
            InvalidRequestError: an entry has an empty pattern or an empty source.
        """
        patterns, targets = list(_ANY), list[tuple[str, str]]()
        for alias in aliases:
            pattern, sign, source = (part.strip() for part in alias.partition("="))
            if not pattern or (sign and not source):
                raise InvalidRequestError(
                    f"setting model_aliases: {alias!r} is neither a name nor name=model",
                    param="model_aliases",
                )
            if sign:
                targets.append((pattern, source))
            else:
                patterns.append(pattern)
        return cls(tuple(patterns), (*targets, *short_names.items()))

    def source(self, name: str) -> str:
        """Return the source of the model that a name refers to; the name itself if unknown.

        Clients of Ollama's API add the tag `:latest` to names without one.
        """
        name = name.removesuffix(_LATEST)
        return next((source for known, source in self.targets if _matches(name, known)), name)

    def is_any(self, name: str) -> bool:
        name = name.removesuffix(_LATEST)
        is_pattern = any(_matches(name, pattern) for pattern in self.patterns)
        return not name or (is_pattern and self.source(name) == name)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name.lower(), pattern.lower())


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A published model.

    Attributes:
        name: The short name that commands and requests accept.
        published: Hugging Face id of the original weights.
        four_bit: Hugging Face id of a version with four-bit weights.
        parameters: In billions.
        active: Parameters that one token uses, in billions; fewer for a mixture of experts.
        num_bytes: Size of the four-bit version.
        kv_bytes: KV cache of one token in 16 bits, in layers that keep every token.
        has_tools: Whether its chat template knows tools.
    """

    name: str
    published: str
    four_bit: str
    parameters: float
    active: float
    num_bytes: int
    kv_bytes: int
    max_context: int
    licence: str
    has_tools: bool

    @property
    def memory_bytes(self) -> int:
        """Memory for the weights and one conversation of 16,384 tokens."""
        tokens = min(self.max_context, _MIN_CONVERSATION)
        return int(self.num_bytes * _SCRATCH) + tokens * self.kv_bytes


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A known model on one machine.

    Attributes:
        tokens_per_s: Estimated speed of one reply; None if it is not measured.
        fits: Whether the machine has enough memory for it.
        is_best: The largest model that fits, is fast enough to work with, and knows tools.
    """

    model: KnownModel
    tokens_per_s: float | None
    fits: bool
    is_best: bool = False


def suggest(
    models: Iterable[KnownModel], memory_bytes: int, bandwidth: float | None
) -> tuple[Suggestion, ...]:
    """Judge models for a machine, in the given order.

    Args:
        memory_bytes: Memory for weights and KV cache.
        bandwidth: Bytes that the machine reads from its memory in a second. A decode step reads all
            active weights once, so this decides its speed. None if it is unknown.
    """
    found = [_judge(model, memory_bytes, bandwidth) for model in models]
    usable = [
        one
        for one in found
        if one.fits
        and one.model.has_tools
        and (one.tokens_per_s is None or one.tokens_per_s >= _COMFORTABLE_TOKENS_PER_S)
    ]
    best = max(usable, key=lambda one: one.model.parameters, default=None)
    return tuple(replace(one, is_best=one is best) for one in found)


def _judge(model: KnownModel, memory_bytes: int, bandwidth: float | None) -> Suggestion:
    read = model.num_bytes * model.active / model.parameters
    speed = _DECODE_SHARE * bandwidth / read if bandwidth else None
    return Suggestion(model, speed, model.memory_bytes <= memory_bytes)


def draft_gain(draft_bytes: int, served_bytes: int) -> float:
    """Return the expected speed-up of a reply by a draft model, from the sizes of both models.

    A decode step reads all weights once, so the sizes decide what a step of each model costs.

    Example:
        >>> round(draft_gain(1, 12), 2), round(draft_gain(1, 1), 2)
        (2.08, 0.85)
    """
    share = draft_bytes / served_bytes
    gains = []
    for count in range(1, _MAX_DRAFT + 1):
        num_tokens = sum(_DRAFT_RATE**place for place in range(count + 1))
        gains.append(num_tokens / (1 + count * share))
    return max(gains)
