"""Interface of model sources, which find and fetch models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from semantic.domain.errors import InvalidRequestError
from semantic.domain.model_names import Suggestion

# Receives a human-readable description of the current step.
OnProgress: TypeAlias = Callable[[str], None]


@dataclass(slots=True)
class FetchProgress:
    """A download that another thread watches: the source counts its bytes, and obeys `is_stopped`.

    Attributes:
        num_done: Bytes that have arrived.
        num_total: Bytes to download; 0 while unknown.
        is_stopped: Set by the watcher to end the download; the source then raises.
    """

    num_done: int = 0
    num_total: int = 0
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be loaded.

    Attributes:
        id: The name requests use.
        source: Where its files are: a name, a path, or a Hugging Face id.
        family: The model type in its config; empty if unknown.
        num_bytes: Size of its weights on disk; 0 if unknown.
        fits: Whether its weights fit this machine's memory; None if unknown.
    """

    id: str
    source: str
    family: str = ""
    num_bytes: int = 0
    fits: bool | None = None

    def require_fitting(self) -> None:
        """Raise InvalidRequestError if the model is known not to fit."""
        if self.fits is False:
            raise InvalidRequestError(
                f"{self.id} does not fit: its weights take {self.num_bytes / 2**20:,.0f} MB on "
                "disk, more than the memory left beside memory_budget_mb. Use a smaller or a "
                "quantised model, or change model_budget_mb.",
                param="model",
            )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's files say about it; 0 or empty where they do not say.

    Attributes:
        file_format: `gguf`, also after its import, or `safetensors`.
        precision: Number format of the weights, such as `BF16` or `Q4`.
        template: Source of its chat template.
        special_tokens: Texts of its special tokens.
        modified_at: In seconds since the epoch.
        digest: 64 hexadecimal digits that change with the files.
        accepts_images: Whether this server can give it images.
    """

    architecture: str = ""
    file_format: str = ""
    precision: str = ""
    num_parameters: int = 0
    max_context: int = 0
    hidden_size: int = 0
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    vocab_size: int = 0
    template: str = ""
    special_tokens: tuple[str, ...] = ()
    modified_at: float = 0.0
    digest: str = "0" * 64
    accepts_images: bool = False


class ModelSourcePort(Protocol):
    """Finds and fetches models. Thread-safe; reads the disk, and `fetch` may use the network."""

    def entries(self) -> Sequence[ModelEntry]:
        """Return the models on this machine; the result may be cached for a short time."""

    def find_model(self, source: str) -> ModelEntry:
        """Return a model that is on this machine or can be fetched.

        Raises:
            ModelNotFoundError: no such model exists.
        """

    def fetch(
        self, entry: ModelEntry, on_progress: OnProgress, transfer: FetchProgress | None = None
    ) -> ModelEntry:
        """Download a model's files if needed and check that they appear complete.

        Counts a download in `transfer`, by which the caller can stop it.

        Returns:
            The entry, completed with what the files tell: family, size, and whether it fits.

        Raises:
            ModelNotFoundError: the model cannot be found or downloaded.
            InvalidRequestError: the model's files cannot be used.
        """

    def draft_for(self, entry: ModelEntry) -> ModelEntry | None:
        """Return the model on this machine that should draft for another; None if none should.

        It has the same tokenizer, fits beside the other model, and is so much smaller that it is
        expected to pay.
        """

    def suggestions(self) -> Sequence[Suggestion]:
        """Judge the known published models for this machine; the first call measures it."""

    def remove(self, entry: ModelEntry) -> int:
        """Delete a model's files and return how many bytes this freed.

        Raises:
            ModelNotFoundError: the model is not on this machine.
            ConflictError: a server on this machine uses the model.
            InvalidRequestError: the files belong to another program, or the model has none.
        """

    def facts(self, entry: ModelEntry) -> ModelFacts:
        """Read what the files of a model on this machine say about it."""
