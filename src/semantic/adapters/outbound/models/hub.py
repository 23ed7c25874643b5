"""Downloads models from Hugging Face: checks the disk first, resumes, and verifies every file."""

import contextlib
import fnmatch
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from tqdm.auto import tqdm

from semantic.domain.errors import InvalidRequestError, ModelNotFoundError
from semantic.ports.models import FetchProgress, OnProgress

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
# Its base class belongs to the HTTP library that the hub's package uses, which has changed.
_NETWORK_ERRORS: tuple[type[Exception], ...] = (
    cast("type[Exception]", HfHubHTTPError.__bases__[0]),
    LocalEntryNotFoundError,
    OSError,
)
_SPARE_BYTES = 2**29  # left free on the disk


def cached_model(model: str, cache: Path | None) -> Path | None:
    """Find a completely downloaded model in a cache of Hugging Face's layout."""
    try:
        directory = Path(snapshot_download(model, cache_dir=cache, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return directory if _is_whole(directory) else None


def _is_whole(directory: Path) -> bool:
    """Whether all files with weights are there; an interrupted download leaves some out."""
    if not (directory / "config.json").is_file():
        return False
    index = directory / "model.safetensors.index.json"
    try:
        weights = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError):
        return any(directory.glob("*.safetensors"))
    return all((directory / name).is_file() for name in weights)


def download_model(
    model: str, cache: Path, endpoint: str | None, on_progress: OnProgress, transfer: FetchProgress
) -> Path:
    """Download a model, or the rest of it if an earlier download was interrupted.

    Raises:
        ModelNotFoundError: the hub does not have it or does not answer, or `transfer` was stopped.
        InvalidRequestError: the disk has too little room, or a file arrived damaged.
    """
    on_progress(f"looking for {model} on Hugging Face")
    try:
        info = HfApi(endpoint).model_info(model, files_metadata=True)
        needed = sum(one.size or 0 for one in _wanted(info))
        _require_room(model, cache, needed)
        on_progress(f"downloading {model}: {needed / 10**9:,.2f} GB")
        directory = Path(
            snapshot_download(
                model,
                revision=info.sha,
                cache_dir=cache,
                allow_patterns=list(_FILES),
                endpoint=endpoint,
                tqdm_class=_progress_bar(
                    transfer, lambda share: on_progress(f"downloading {model}: {share}")
                ),
            )
        )
    except _StoppedError as error:
        raise ModelNotFoundError(
            f"the download of {model} was stopped; the files that arrived are kept."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"Hugging Face has no model {model!r}. Check its name; a private or gated one needs a "
            "token in HF_TOKEN."
        ) from error
    except _NETWORK_ERRORS as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ModelNotFoundError(
            f"downloading {model} from Hugging Face failed: {reason}. Try again: what has arrived "
            "is kept. Without a network, copy the model's directory to this machine and serve it "
            "by its path."
        ) from error
    _verify(model, directory, info, on_progress)
    _note_revision(cache, model, str(info.sha))
    return directory


def _wanted(info: ModelInfo) -> list[RepoSibling]:
    return [
        one
        for one in info.siblings or ()
        if any(fnmatch.fnmatch(one.rfilename, pattern) for pattern in _FILES)
    ]


def _require_room(model: str, cache: Path, needed: int) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    repository = cache / f"models--{model.replace('/', '--')}" / "blobs"
    there = sum(path.stat().st_size for path in repository.glob("*"))
    free = shutil.disk_usage(cache).free
    if needed - there > free - _SPARE_BYTES:
        raise InvalidRequestError(
            f"{model} takes {needed / 10**9:,.1f} GB, and the disk of {cache} has "
            f"{free / 10**9:,.1f} GB free. Delete something (semantic models rm), or set home to "
            "another disk.",
            param="model",
        )


def _verify(model: str, directory: Path, info: ModelInfo, on_progress: OnProgress) -> None:
    """Compare files with the checksums that the hub states, and delete those that differ."""
    for one in _wanted(info):
        if one.lfs is None:
            continue
        on_progress(f"verifying {model}: {one.rfilename}")
        path = directory / one.rfilename
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != one.lfs.sha256:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise InvalidRequestError(
                f"{one.rfilename} of {model} arrived damaged and was deleted; download the model "
                "again to fetch this file anew.",
                param="model",
            )


def _note_revision(cache: Path, model: str, sha: str) -> None:
    """Record the revision as `main`, by which downloads are found again without a network."""
    reference = cache / f"models--{model.replace('/', '--')}" / "refs" / "main"
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(sha, "ascii")


class _StoppedError(Exception):
    pass


def _abort_xet() -> None:
    """End downloads over Xet, which ignore errors of their progress bars."""
    with contextlib.suppress(ImportError, AttributeError):
        from huggingface_hub.utils import _xet  # noqa: PLC0415 - since 2.0

        abort: Callable[[], None] = _xet.abort_xet_session
        abort()


def _progress_bar(transfer: FetchProgress, report: Callable[[str], None]) -> "type[tqdm[Any]]":
    """A progress bar that draws nothing, counts the bytes received, and stops the download.

    The hub's package shows several of them for the same bytes: received, and written to a file.
    """

    class ProgressBar(tqdm):  # type: ignore[type-arg]  # it is generic to type checkers alone
        def __init__(self, *args: Any, **options: Any) -> None:
            self._is_bytes = options.get("unit") == "B"
            self._num_done = 0.0
            self._reported = ""
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self._num_done += n or 0
            if transfer.is_stopped:
                _abort_xet()
                raise _StoppedError
            total = int(self.total or 0)
            if self._is_bytes and total:
                transfer.num_total = max(transfer.num_total, total)
                transfer.num_done = max(transfer.num_done, int(self._num_done))
                share = f"{100 * self._num_done / total:.0f} % of {total / 2**20:,.0f} MB"
                if share != self._reported:
                    self._reported = share
                    report(share)
            return None

    return ProgressBar
