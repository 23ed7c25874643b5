"""A real server process: what a user starts, asks and stops."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from tests.native_cache import share_native
from tests.no_tls import NO_TLS
from tests.waiting import eventually


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

    def client(self, **options: Any) -> httpx.Client:
        usual = {"timeout": 300, "verify": NO_TLS}
        return httpx.Client(base_url=self.url, trust_env=False, **{**usual, **options})

    def await_listening(self) -> None:
        """Read the address off the banner.

        Raises:
            StartFailedError: it ended before, or never listened.
        """
        banner, ended = "listening", self.process.poll
        eventually(lambda: banner in self.output or ended() is not None, 120, every_s=0.05)
        lines = [line for line in self.output.splitlines() if banner in line]
        if not lines:
            raise StartFailedError(ended() or 0, self.output)
        self.url = lines[0].split()[1]

    def await_ready(self, **options: Any) -> None:
        """Wait until it serves a model; `options` are those of the client that asks."""
        with self.client(**options) as http:

            def is_ready() -> bool:
                assert self.process.poll() is None, self.output
                with contextlib.suppress(httpx.TransportError):  # it may close slow connections
                    return http.get("/health/ready").status_code == 200
                return False

            assert eventually(is_ready, 120, every_s=0.1), f"it never got ready: {self.output}"

    def await_line(self, words: str) -> None:
        """Wait until it has said something."""
        assert eventually(lambda: words in self.output), f"not {words!r}: {self.output}"

    def stop(self) -> int:
        """Send Ctrl-C and return the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@contextlib.contextmanager
def serve(
    home: Path,
    log: Path,
    *arguments: str,
    max_files: int | None = None,
    is_ready: bool = True,
    program: Sequence[str] = ("-m", "semantic"),
    **settings: Any,
) -> Iterator[ServerProcess]:
    """Start a server on a free port and wait until it is ready; kills it at the end.

    Args:
        home: Its `--home`.
        log: Where its output goes.
        arguments: More of its command line.
        max_files: How many files it may open.
        is_ready: Whether to wait for the model too, and not only until it listens.
        program: What the interpreter runs.
        settings: What its file of settings says.
    """
    command = [sys.executable, *program, *_arguments(home, log, arguments, settings)]
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
    with _running(process, log, is_ready=is_ready) as server:
        yield server


@contextlib.contextmanager
def serve_forked(
    home: Path, log: Path, *arguments: str, is_ready: bool = True, **settings: Any
) -> Iterator[ServerProcess]:
    """As `serve`, as a fork of an interpreter that has imported everything: it starts at once."""
    log.write_text("")
    process = ForkedProcess(_arguments(home, log, arguments, settings), log)
    with _running(process, log, is_ready=is_ready) as server:
        yield server


def _arguments(
    home: Path, log: Path, more: Sequence[str], settings: Mapping[str, Any]
) -> list[str]:
    if "torch" in more:
        share_native(home)
    made = ["serve", "--port", "0", "--home", str(home), *more]
    if settings:
        config = log.with_suffix(".toml")
        config.write_text("".join(f"{name} = {json.dumps(v)}\n" for name, v in settings.items()))
        made += ["--config", str(config)]
    return made


@contextlib.contextmanager
def _running(process: Process, log: Path, *, is_ready: bool) -> Iterator[ServerProcess]:
    server = ServerProcess(process, log)
    try:
        server.await_listening()
        if is_ready:
            server.await_ready()
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
