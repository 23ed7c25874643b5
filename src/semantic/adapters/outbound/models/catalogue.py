"""Lists the models on this machine, and whether they fit into its memory."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants

from semantic.adapters.outbound.models.description import directory_facts, file_facts
from semantic.adapters.outbound.models.gguf.header import gguf_parts
from semantic.adapters.outbound.models.machine import suggestions
from semantic.adapters.outbound.models.source import LocalModelSource, starter_gguf_here
from semantic.adapters.outbound.models.tokenizer import have_same_tokens
from semantic.adapters.outbound.models.usage import ModelUsage
from semantic.domain.errors import ConflictError, InvalidRequestError, ModelNotFoundError
from semantic.domain.model_names import MIN_DRAFT_GAIN, Suggestion, draft_gain, served_id
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.models import FetchProgress, ModelEntry, ModelFacts, OnProgress

_FRESH_S = 2.0  # how long a listing of the directories is cached


class ModelCatalogue:
    """`ModelSourcePort` over the models directory, the user's, and Hugging Face's cache."""

    def __init__(
        self,
        local: LocalModelSource,
        directories: Sequence[Path] = (),
        *,
        starter_model: str,
        room: Callable[[], int],
        growth: Callable[[], int] = lambda: 1,
        is_on_gpu: bool = False,
    ) -> None:
        """Set the directories without reading them.

        Args:
            room: Returns the memory available for weights, in bytes.
            growth: Returns the factor by which 16-bit weights grow when loaded.
            is_on_gpu: Models run on an NVIDIA GPU.
        """
        self._local = local
        self._directories = directories
        self._starter_model = starter_model
        self._room = room
        self._growth = growth
        self._is_on_gpu = is_on_gpu
        self._seen: tuple[ModelEntry, ...] = ()
        self._seen_at = -_FRESH_S

    def entries(self) -> Sequence[ModelEntry]:
        if time.monotonic() - self._seen_at >= _FRESH_S:
            found: dict[str, ModelEntry] = {}
            for source, path in self._places():
                entry = self._entry(source, path)
                if entry is not None:
                    taken = found.get(entry.id)
                    if taken is not None and taken.source != source:
                        entry = replace(entry, id=source)
                    found.setdefault(entry.id, entry)
            self._seen, self._seen_at = tuple(found.values()), time.monotonic()
        return self._seen

    def find_model(self, source: str) -> ModelEntry:
        for entry in self.entries():
            if source in (entry.id, entry.source):
                return entry
        self._local.require_findable(source)
        return ModelEntry(served_id(source), source)

    def fetch(
        self, entry: ModelEntry, on_progress: OnProgress, transfer: FetchProgress | None = None
    ) -> ModelEntry:
        directory = self._local.resolve(entry.source, on_progress, transfer)
        found = self._entry(entry.source, directory)
        if found is None:
            raise InvalidRequestError(
                f"{directory} is not a model directory: it needs a config.json, a tokenizer.json "
                "and weights in safetensors files.",
                param="model",
            )
        ModelCacheSpec.from_config(json.loads((directory / "config.json").read_text("utf-8")))
        self._seen_at = -_FRESH_S
        return replace(found, id=entry.id)

    def draft_for(self, entry: ModelEntry) -> ModelEntry | None:
        paths = {source: path for source, path in self._places() if path.is_dir()}
        served = next((one for one in self.entries() if one.source == entry.source), None)
        if served is None or served.source not in paths:
            return None
        gains = {
            other.source: draft_gain(other.num_bytes, served.num_bytes)
            for other in self.entries()
            if other.source in paths
            and (other.num_bytes + served.num_bytes) * self._growth() <= self._room()
        }
        for source in sorted(gains, key=lambda source: -gains[source]):
            if gains[source] < MIN_DRAFT_GAIN:
                break
            if have_same_tokens(paths[source], paths[served.source]):
                return next(one for one in self.entries() if one.source == source)
        return None

    def suggestions(self) -> Sequence[Suggestion]:
        return suggestions(is_on_gpu=self._is_on_gpu)

    def remove(self, entry: ModelEntry) -> int:
        places = (path for source, path in self._places() if source == entry.source)
        found = next(filter(Path.exists, places), None)
        if found is None:
            raise ModelNotFoundError(f"the model {entry.id!r} is not on this machine.")
        owned = self._owned(found)
        with ModelUsage() as lock:
            if owned.is_dir() and not lock.take(found):
                raise ConflictError(
                    f"a server uses {entry.id}; serve another model or stop the server first.",
                    param="model",
                )
            num_bytes = sum(map(disk_bytes, gguf_parts(owned)))
            if owned.is_dir():
                shutil.rmtree(owned)
            else:
                for part in gguf_parts(owned):
                    part.unlink(missing_ok=True)
        self._seen_at = -_FRESH_S
        return num_bytes

    def facts(self, entry: ModelEntry) -> ModelFacts:
        found = [path for source, path in self._places() if source == entry.source]
        paths = [*found, Path(entry.source).expanduser(), self._local.models_dir / entry.id]
        for path in paths:
            if (path / "config.json").is_file():
                return directory_facts(path)
        return next((file_facts(path) for path in paths if path.is_file()), ModelFacts())

    # -- inside ---------------------------------------------------------------------------------

    def _places(self) -> Iterator[tuple[str, Path]]:
        models_dir = self._local.models_dir
        yield self._starter_model, models_dir / self._starter_model
        if (starter := starter_gguf_here(models_dir)) is not None:  # otherwise it can be downloaded
            yield self._starter_model, starter
        for directory in (models_dir, *self._directories):
            for path in _listed(directory):
                is_gguf = path.suffix == ".gguf" and path == gguf_parts(path)[0]
                is_model = is_gguf or (path / "config.json").is_file()
                if is_model and path != starter:
                    yield (path.name if directory == models_dir else str(path)), path
        for cache in self._local.hub_caches:
            yield from _cached_models(cache or Path(constants.HF_HUB_CACHE))

    def _owned(self, path: Path) -> Path:
        """The file or directory to delete for a model: in Hugging Face's layout its repository."""
        models_dir = self._local.models_dir.resolve()
        if path.parent.resolve() == models_dir:
            return path
        hub = self._local.models_dir / "hub"
        if path.is_relative_to(hub):
            return hub / path.relative_to(hub).parts[0]
        raise InvalidRequestError(
            f"{path} was not put there by this server, so it does not delete it; delete it by "
            "hand, or with the program that downloaded it.",
            param="model",
        )

    def _entry(self, source: str, path: Path) -> ModelEntry | None:
        if path.suffix == ".gguf" and path.is_file():
            return self._sized(ModelEntry(served_id(source), source, "gguf"), gguf_parts(path), 1)
        try:
            config = json.loads((path / "config.json").read_text("utf-8"))
            weights = [*path.glob("*.safetensors")]
        except (OSError, ValueError):
            return None
        if not isinstance(config, dict) or not weights or not (path / "tokenizer.json").is_file():
            return None
        family = str(config.get("model_type", ""))
        is_16_bit = config.get("torch_dtype", config.get("dtype")) in ("bfloat16", "float16")
        is_quantised = not config.keys().isdisjoint(("quantization", "quantization_config"))
        growth = self._growth() if is_16_bit and not is_quantised else 1
        return self._sized(ModelEntry(served_id(source), source, family), weights, growth)

    def _sized(self, entry: ModelEntry, weights: Sequence[Path], growth: int) -> ModelEntry:
        num_bytes = sum(path.stat().st_size for path in weights if path.exists())
        fits = num_bytes * growth <= self._room()
        return replace(entry, num_bytes=num_bytes, fits=fits)


def disk_bytes(path: Path) -> int:
    """Size of a file, or of all files below a directory; links are not followed."""
    files = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
    return sum(one.lstat().st_size for one in files if one.exists())


def _listed(directory: Path) -> list[Path]:
    try:
        return sorted(directory.expanduser().iterdir())
    except OSError:
        return []


def _cached_models(cache: Path) -> Iterator[tuple[str, Path]]:
    """Models in Hugging Face's cache layout: id, and the snapshot of revision `main`."""
    for repository in _listed(cache):
        kind, _, name = repository.name.partition("--")
        revision = repository / "refs" / "main"
        if kind == "models" and revision.is_file():
            path = repository / "snapshots" / revision.read_text("utf-8").strip()
            yield name.replace("--", "/", 1), path
