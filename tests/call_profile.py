"""Records which source files run, on all threads, to compare the documents with what happens."""

import gc
import inspect
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType, TracebackType

ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = f"{ROOT}/src/semantic/"


class CallProfile:
    """Records the files of the package whose functions are called within a ``with`` block.

    Only threads that start inside the block are recorded, besides the thread that enters it.
    Importing a module does not count. The garbage collector rests meanwhile: it would run
    finalisers of earlier tests.
    """

    def __init__(self, under: Sequence[str] = ()) -> None:
        """Record nothing yet.

        Args:
            under: Beginnings of paths, relative to the package: count only functions of these files
                and what they call, directly or not. Empty counts everything.
        """
        self._under = tuple(_PACKAGE + path for path in under)
        self._files: dict[str, None] = {}
        self._ignored: set[CodeType] = set()

    @property
    def files(self) -> list[str]:
        """Paths relative to the package, in the order of their first call."""
        return [path.removeprefix(_PACKAGE) for path in tuple(self._files)]

    def clear(self) -> None:
        """Forget the calls so far, e.g. those of the preparation."""
        self._files.clear()

    def __enter__(self) -> "CallProfile":
        gc.collect()
        gc.disable()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        threading.setprofile(None)
        sys.setprofile(None)
        gc.enable()

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_filename in self._files or code in self._ignored:
            return
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)  # not the body of a module
        if not is_function or not code.co_filename.startswith(_PACKAGE):
            self._ignored.add(code)
        elif self._is_under(frame):
            self._files[code.co_filename] = None

    def _is_under(self, frame: FrameType | None) -> bool:
        while frame is not None and self._under:
            if frame.f_code.co_filename.startswith(self._under):
                return True
            frame = frame.f_back
        return not self._under


def listed_files(heading: str) -> list[str]:
    """The source files that a section of ``docs/architecture.md`` lists in its table."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {re.escape(heading)}$(.*?)(?=^## )", text, re.M | re.S)
    rows = [row for row in section.splitlines() if row.startswith("|")]
    return re.findall(r"`([\w/]+\.py)`", "\n".join(rows))
