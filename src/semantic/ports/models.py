"""Where models come from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

# Is told, for people, what is being done.
OnProgress: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be loaded.

    Attributes:
        id: The name requests use.
        source: What finds its files: a name, a path, or a Hugging Face id.
        family: The model type of its config; empty if it is not known yet.
        num_bytes: Of its weights on disk; 0 if that is not known yet.
        fits: Whether its weights fit this machine's memory; None if that is not known.
    """

    id: str
    source: str
    family: str = ""
    num_bytes: int = 0
    fits: bool | None = None


class ModelSourcePort(Protocol):
    """Finds models. Safe on any thread; may read a disk, and `fetch` a network."""

    def entries(self) -> Sequence[ModelEntry]:
        """The models on this machine; read anew now and then."""
        ...

    def find(self, source: str) -> ModelEntry:
        """A model on this machine, or one that can be fetched.

        Raises:
            ModelNotFoundError: there is none.
        """
        ...

    def fetch(self, entry: ModelEntry, on_progress: OnProgress) -> ModelEntry:
        """See that a model's files are here, whole as far as can be seen, and say what they are.

        Raises:
            ModelNotFoundError: it cannot be had.
            InvalidRequestError: it is there but cannot be used.
        """
        ...
