"""A program on a terminal of its own, for clients that continue a session nowhere else."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.waiting import eventually

_ROWS, _COLUMNS = 400, 120  # a conversation is never longer than the screen
_CONTROL = re.compile(rb"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[\[?][0-9;?<>=]*[ -/]*[@-~]|\x1b.")


class Terminal:
    """A running program, which is killed at the end; all that it prints is read at once."""

    def __init__(
        self, command: Sequence[str], directory: Path, environment: Mapping[str, str]
    ) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            command,
            cwd=directory,
            env={"TERM": "xterm-256color", **environment},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._printed = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        os.close(self._ours)

    @property
    def text(self) -> str:
        """All that it printed so far, without the positions and colours."""
        return _CONTROL.sub(b"", self._printed).decode("utf-8", "replace")

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def await_text(self, words: str, after: int = 0) -> None:
        """Wait until it prints words, behind the first `after` characters of `text`."""
        assert eventually(lambda: words in self.text[after:], 120, every_s=0.1), self.text

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._ours, 2**16)
            except OSError:  # the program has ended
                return
            if not piece:
                return
            self._printed += piece
