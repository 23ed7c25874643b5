"""Names and aliases by which clients request models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from semantic.domain.errors import InvalidRequestError

# Clients made for Anthropic's models request them by name, also for background tasks.
_ANY = ("claude*", "anthropic/claude*")
# Short names: the model as published, and its 4-bit version for MLX.
SHORT_NAMES = {
    "llama-3.2-1b": ("unsloth/Llama-3.2-1B-Instruct", "mlx-community/Llama-3.2-1B-Instruct-4bit"),
    "llama-3.2-3b": ("unsloth/Llama-3.2-3B-Instruct", "mlx-community/Llama-3.2-3B-Instruct-4bit"),
    "llama-3.1-8b": (
        "unsloth/Meta-Llama-3.1-8B-Instruct",
        "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
    ),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B-Instruct", "mlx-community/Qwen2.5-0.5B-Instruct-4bit"),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", "mlx-community/Qwen2.5-7B-Instruct-4bit"),
    "qwen3-4b": ("Qwen/Qwen3-4B", "mlx-community/Qwen3-4B-4bit"),
    "gemma-3-1b": ("google/gemma-3-1b-it", "mlx-community/gemma-3-1b-it-4bit"),
    "gemma-3-12b": ("google/gemma-3-12b-it", "mlx-community/gemma-3-12b-it-4bit"),
    "mistral-7b": (
        "mistralai/Mistral-7B-Instruct-v0.3",
        "mlx-community/Mistral-7B-Instruct-v0.3-4bit",
    ),
    "gpt-oss-20b": ("openai/gpt-oss-20b", "mlx-community/gpt-oss-20b-MXFP4-Q8"),
}


def served_id(source: str) -> str:
    """Return the name under which the model at `source` is served.

    Example:
        >>> served_id("~/models/qwen.gguf"), served_id("Qwen/Qwen3-4B")
        ('qwen', 'Qwen3-4B')
    """
    return source.rstrip("/").rpartition("/")[2].removesuffix(".gguf")


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
        """Return the source of the model that a name refers to; the name itself if unknown."""
        return next((source for known, source in self.targets if _matches(name, known)), name)

    def is_any(self, name: str) -> bool:
        is_pattern = any(_matches(name, pattern) for pattern in self.patterns)
        return not name or (is_pattern and self.source(name) == name)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name.lower(), pattern.lower())
