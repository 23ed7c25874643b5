"""A real server process: what a user starts, asks and stops."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx


class StartFailedError(AssertionError):
    """A server that ended before it listened."""

    def __init__(self, status: int, output: str) -> None:
        super().__init__(f"status {status}: {output}")
        self.status = status
        self.output = output


class Process(Protocol):
    """What is asked of a process; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


@dataclass
class ServerProcess:
    """A started `semantic serve`."""

    process: Process
    log: Path
    url: str = ""

    @property
    def output(self) -> str:
        return self.log.read_text()

    def await_listening(self) -> None:
        """Read the address off the banner."""
        for _ in range(2400):
            for line in self.output.splitlines():
                if "listening" in line:
                    self.url = line.split()[1]
                    return
            if self.process.poll() is not None:
                raise StartFailedError(self.process.returncode, self.output)
            time.sleep(0.05)
        raise AssertionError(f"it never listened: {self.output}")

    def await_ready(self) -> None:
        with httpx.Client(trust_env=False, timeout=60) as http:
            self.await_ready_by(http)

    def await_ready_by(self, http: httpx.Client) -> None:
        """Ask with a client that may know a certificate."""
        for _ in range(1200):
            if http.get(f"{self.url}/health/ready").status_code == 200:
                return
            assert self.process.poll() is None, self.output
            time.sleep(0.1)
        raise AssertionError(f"it never got ready: {self.output}")

    def await_line(self, words: str) -> None:
        """Wait until it has said something."""
        for _ in range(600):
            if words in self.output:
                return
            time.sleep(0.05)
        raise AssertionError(f"it never said {words!r}: {self.output}")

    def stop(self) -> int:
        """Send Ctrl-C and return the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@contextlib.contextmanager
def serve(
    home: Path, log: Path, *arguments: str, max_files: int | None = None
) -> Iterator[ServerProcess]:
    """Start a server on a free port and wait until it listens; kills it at the end.

    Args:
        home: Its `--home`.
        log: Where its output goes.
        arguments: More of its command line.
        max_files: How many files it may open.
    """
    fixed = ["--port", "0", "--home", str(home)]
    command = [sys.executable, "-m", "semantic", "serve", *fixed, *arguments]
    if max_files is not None:
        command = ["/bin/sh", "-c", f'ulimit -n {max_files}; exec "$@"', "sh", *command]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SEMANTIC_")}
    environment["HF_HUB_OFFLINE"] = "1"
    with log.open("w") as sink:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
    with _listening(process, log) as server:
        yield server


@contextlib.contextmanager
def serve_forked(home: Path, log: Path, *arguments: str) -> Iterator[ServerProcess]:
    """As `serve`, as a fork of an interpreter that has imported everything: it starts at once."""
    log.write_text("")
    process = ForkedProcess(["serve", "--port", "0", "--home", str(home), *arguments], log)
    with _listening(process, log) as server:
        yield server


@contextlib.contextmanager
def _listening(process: Process, log: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(process, log)
    try:
        server.await_listening()
        yield server
    finally:
        process.kill()
        process.wait()


# -- starts that import nothing ----------------------------------------------------------------

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["semantic.entrypoints.cli.app", "semantic.entrypoints.server"])


class ForkedProcess:
    """A process that runs our own command."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._process = _FORKS.Process(target=_run, args=(list(arguments), str(log)))
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def returncode(self) -> int:
        return self._process.exitcode or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("semantic", timeout or 0)
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], log: str) -> None:
    from semantic.entrypoints.cli.app import main

    sink = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    for name in [name for name in os.environ if name.startswith("SEMANTIC_")]:
        del os.environ[name]
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(main(arguments))
