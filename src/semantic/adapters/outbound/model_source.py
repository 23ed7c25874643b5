"""Finds a model's files: the starter model, a directory, or a GGUF file.

What has to be made (a GGUF turned into a directory) is made once, under the models directory.
"""

from collections.abc import Callable
from pathlib import Path

from semantic.adapters.outbound.gguf_import import import_gguf, progress_bar, starter_gguf
from semantic.domain.errors import ModelNotFoundError


class LocalModelSource:
    """`ModelSourcePort` over this machine's files."""

    def __init__(self, models_dir: Path, starter_model: str) -> None:
        self._models_dir = models_dir
        self._starter_model = starter_model

    def resolve(self, model: str, on_progress: Callable[[str], None]) -> Path:
        """Find a model's directory, making it if need be."""
        path = Path(model).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            return self._imported(path, path.stem, on_progress)
        for directory in (path, self._models_dir / model):
            if (directory / "config.json").is_file():
                return directory
        if model == self._starter_model:
            return self._imported(starter_gguf(), model, on_progress)
        raise ModelNotFoundError(
            f"there is no model {model!r}: give the path of a directory with a config.json, "
            f"the path of a .gguf file, the name of a directory in {self._models_dir}, "
            f"or {self._starter_model!r}."
        )

    def _imported(self, gguf: Path, name: str, on_progress: Callable[[str], None]) -> Path:
        on_progress(f"importing {gguf.name}")
        with progress_bar(f"importing {gguf.name}") as report:
            return import_gguf(gguf, self._models_dir / name, report)
