"""Finds a model's files: the starter model, a directory, a GGUF file, or a Hugging Face id.

What has to be made or fetched (a GGUF turned into a directory, a download) is made once, under the
models directory. Models that other tools have left in Hugging Face's own cache are used in place.
"""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from semantic.adapters.outbound.models.gguf import (
    import_gguf,
    progress_bar,
    starter_gguf,
    write_starter_defaults,
)
from semantic.domain.errors import ModelNotFoundError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


class LocalModelSource:
    """Models from this machine's files and, for ids it does not know, the hub."""

    def __init__(self, models_dir: Path, starter_model: str, hub_cache: Path | None = None) -> None:
        """Prepare; nothing is read yet.

        Args:
            models_dir: Where models are made and fetched to.
            starter_model: The name of the model that comes along.
            hub_cache: Hugging Face's own cache, if not where its library looks for it.
        """
        self._models_dir = models_dir
        self._starter_model = starter_model
        self._hub_caches = (hub_cache, models_dir / "hub")

    def resolve(self, model: str, on_progress: Callable[[str], None]) -> Path:
        """Find a model's directory, making it if need be; `on_progress` gets steps for people.

        Raises:
            ModelNotFoundError: no such model.
            InvalidRequestError: the model is there but cannot be used.
        """
        path = Path(model).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            return self._imported(path, path.stem, on_progress)
        if model == self._starter_model and not (path / "config.json").is_file():
            return self._starter(on_progress)
        for directory in (path, self._models_dir / model):
            if (directory / "config.json").is_file():
                return directory
        if _HUB_ID.fullmatch(model) and not path.exists():
            return self._from_hub(model, on_progress)
        raise ModelNotFoundError(
            f"there is no model {model!r}: give the path of a directory with a config.json, "
            f"the path of a .gguf file, the name of a directory in {self._models_dir}, "
            f"a Hugging Face id, or {self._starter_model!r}."
        )

    def _starter(self, on_progress: Callable[[str], None]) -> Path:
        directory = self._models_dir / self._starter_model
        if not (directory / "config.json").is_file():
            directory = self._imported(starter_gguf(), self._starter_model, on_progress)
        # Earlier versions imported it without. A directory that cannot be written stays as it is.
        with contextlib.suppress(OSError, ValueError):
            write_starter_defaults(directory)
        return directory

    def _imported(self, gguf: Path, name: str, on_progress: Callable[[str], None]) -> Path:
        on_progress(f"importing {gguf.name}")
        with progress_bar(f"importing {gguf.name}") as report:
            return import_gguf(gguf, self._models_dir / name, report)

    def _from_hub(self, model: str, on_progress: Callable[[str], None]) -> Path:
        for cache in self._hub_caches:
            if (found := _cached(model, cache)) is not None:
                return found
        on_progress(f"downloading {model}")
        try:
            fetched = snapshot_download(
                model, cache_dir=self._hub_caches[-1], allow_patterns=_HUB_FILES
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ModelNotFoundError(
                f"there is no model {model!r} on this machine, and it could not be fetched from "
                f"Hugging Face: {reason}"
            ) from error
        return Path(fetched)


def _cached(model: str, cache: Path | None) -> Path | None:
    """A model's directory in a cache, if it is there with its weights."""
    try:
        directory = Path(snapshot_download(model, cache_dir=cache, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    is_whole = (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))
    return directory if is_whole else None
