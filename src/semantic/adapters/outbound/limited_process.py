"""Processes untrusted input (schemas, chat templates) in subprocesses with time and memory limits.

Memory is limited per process and CPU time per request. The operating system kills a process that
exceeds a limit, and the next request starts a new one. Processes start on first use. They exit
when their pipe closes, and so end with the server even if it crashes.

This module imports neither a backend nor a web framework, so that a subprocess starts quickly and
stays small.
"""

import contextlib
import logging
import os
import queue
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from semantic.domain.errors import OverloadedError

_NUM_PROCESSES = 2
_START_S = 60.0
_ANSWER_S = 30.0  # wall-clock time; exceeds the CPU limit since the machine may be busy
_QUEUE_S = 30.0
_RETRY_S = 5.0

_MAX_ANSWER = 2**28  # bytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of one process: CPU seconds per request, and bytes of its data segment."""

    cpu_s: float = 2.0
    memory: int = 512 * 2**20

    def __str__(self) -> str:
        return f"{self.cpu_s:g} s or {self.memory >> 20} MB"


class LimitExceededError(Exception):
    """The process was killed because it exceeded its time or memory limit."""


class LimitedProcesses:
    """A pool of processes that run the same module. Thread-safe."""

    def __init__(self, module: str, setup: object, task: str, limits: ProcessLimits) -> None:
        """Create the pool without starting a process.

        Args:
            module: Module to run; it calls `serve`.
            setup: Object that each process receives before its first request.
            task: What the processes do, for error messages: "compiling a schema".
        """
        self._module = module
        self._setup = limits, setup
        self._task = task
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(_NUM_PROCESSES):
            self._idle.put(None)
        # Runs when the pool is collected and also at interpreter exit.
        weakref.finalize(self, _end_idle, self._idle)

    @contextlib.contextmanager
    def reserve(self) -> Iterator[Callable[[bytes], bytes]]:
        """Wait for a free process and yield a function that sends it a request.

        The function returns the answer. It raises `LimitExceededError` if the process exceeds a
        limit, and `OverloadedError` if the process cannot start or does not answer in time.

        Raises:
            OverloadedError: no process became free in time.
        """
        try:
            process = self._idle.get(timeout=_QUEUE_S)
        except queue.Empty:
            raise self._overloaded("too many requests are waiting") from None

        def ask(request: bytes) -> bytes:
            nonlocal process
            if process is not None and not process.is_running:  # the system killed an idle process
                process.end()
                process = None
            process = process or self._started()
            try:
                answer = process.ask(request)
            except (EOFError, OSError) as error:
                process.end()
                raise LimitExceededError from error
            if answer is None:
                process.end()
                raise self._overloaded("it timed out")
            return answer

        try:
            yield ask
        finally:
            self._idle.put(process if process and process.is_running else None)

    def _started(self) -> "_Process":
        try:
            return _Process(self._module, self._setup)
        except (EOFError, OSError) as error:
            reason = str(error) or "it exited or timed out"
            _log.error("cannot start the process for %s: %s", self._task, reason)
            raise self._overloaded("its process does not start") from error

    def _overloaded(self, reason: str) -> OverloadedError:
        return OverloadedError(f"{self._task} failed: {reason}; try again.", retry_after_s=_RETRY_S)


class _Process:
    """One subprocess. Not thread-safe."""

    def __init__(self, module: str, setup: object) -> None:
        """Start the process and wait for it; `EOFError` or `OSError` if it cannot be started."""
        ours, theirs = Pipe()
        self._pipe = ours
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OPENBLAS_NUM_THREADS": "1",
        }
        try:
            # A new session keeps Ctrl-C, which is meant for the server, from the subprocess.
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environment,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            ours.send(setup)
            if not ours.poll(_START_S):
                raise EOFError
            ours.recv_bytes()
        except (EOFError, OSError):
            self.end()
            raise

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes) -> bytes | None:
        """Send a request; None after `_ANSWER_S`, `EOFError` or `OSError` if the process ended."""
        self._pipe.send_bytes(request)
        return self._pipe.recv_bytes(_MAX_ANSWER) if self._pipe.poll(_ANSWER_S) else None

    def end(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def _end_idle(idle: "queue.LifoQueue[_Process | None]") -> None:
    while not idle.empty():
        process = idle.get_nowait()
        if process is not None:
            process.end()


# -- inside the subprocess ----------------------------------------------------------------------


def serve(prepare: Callable[[Any], Callable[[bytes], bytes]]) -> None:
    """Answer requests until the parent closes its end of the pipe.

    `prepare` takes the setup object and returns the function that answers a request.
    """
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):
        limits, setup = connection.recv()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(ValueError):  # not every system supports this limit
            resource.setrlimit(resource.RLIMIT_DATA, (limits.memory, limits.memory))
        answer = prepare(setup)
        connection.send_bytes(b"ready")
        while True:
            request = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)  # SIGPROF kills the process
            answered = answer(request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(answered)
