"""Grammars are tried in processes that can be ended, before the server compiles them itself.

Compiling is bounded by nothing but the process it happens in. A worker, which runs this module, may
use so much memory and so much time, and is ended by the system when it exceeds them; the server
starts another. A verdict is kept, so that a grammar is tried once. Workers start on first use, and
end with the server however it ends: their pipe closes.

Imports neither a backend nor a web framework, so that a worker starts quickly and stays small.
"""

import contextlib
import hashlib
import json
import logging
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from semantic.adapters.outbound.grammar.constraint import Closing
from semantic.adapters.outbound.grammar.vocabulary import Layout, Vocabulary
from semantic.domain.errors import OverloadedError

_NUM_WORKERS = 2
_MAX_VERDICTS = 256
_START_S = 60.0
_TRIAL_S = 30.0  # by the clock, if the machine is busy with other things
_QUEUE_S = 30.0

_MAX_CPU_S = 2.0  # for one grammar
_MAX_MEMORY = 512 * 2**20  # for everything
_NUM_STEPS = 8

EXCEEDED = f"compiling it takes more than {_MAX_CPU_S:.0f} s or {_MAX_MEMORY >> 20} MB"

_log = logging.getLogger(__name__)


class GrammarTrials:
    """A few workers, and what they found. Safe on any thread; `fault` may take seconds."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._faults: OrderedDict[bytes, str] = OrderedDict()
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(_NUM_WORKERS):
            self._idle.put(None)
        # Also when the interpreter ends.
        weakref.finalize(self, _end_idle, self._idle)

    def fault(self, grammar: str) -> str:
        """What is wrong with a grammar, maybe `EXCEEDED`; empty if it can be compiled here.

        Raises:
            OverloadedError: no worker became free in time, or none can be started.
        """
        key = hashlib.sha256(grammar.encode()).digest()
        fault = self._known(key)
        if fault is not None:
            return fault
        worker = self._take()
        try:
            fault = self._known(key)  # it may have been tried meanwhile
            if fault is None:
                worker = worker or _Worker(self._layout)
                fault = worker.fault(grammar)
                self._keep(key, fault)
        finally:
            self._idle.put(worker if worker and worker.is_running else None)
        return fault

    def _take(self) -> "_Worker | None":
        try:
            return self._idle.get(timeout=_QUEUE_S)
        except queue.Empty:
            raise OverloadedError(
                "too many schemas are being compiled; try again.", retry_after_s=5
            ) from None

    def _known(self, key: bytes) -> str | None:
        with self._lock:
            fault = self._faults.get(key)
            if fault is not None:
                self._faults.move_to_end(key)
            return fault

    def _keep(self, key: bytes, fault: str) -> None:
        with self._lock:
            self._faults[key] = fault
            while len(self._faults) > _MAX_VERDICTS:
                self._faults.popitem(last=False)


class _Worker:
    """One process. Used by one thread at a time."""

    def __init__(self, layout: Layout) -> None:
        """Start it and wait until it is ready.

        Raises:
            OverloadedError: it cannot be started.
        """
        ours, theirs = Pipe()
        self._pipe = ours
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OPENBLAS_NUM_THREADS": "1",
        }
        try:
            # A session of its own: Ctrl-C is for the server.
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            ours.close()
            raise _unavailable(str(error)) from error
        finally:
            theirs.close()
        try:
            ours.send(layout)
            if not ours.poll(_START_S):
                raise EOFError
            ours.recv_bytes()
        except (EOFError, OSError) as error:
            self.end()
            raise _unavailable("it ended, or took too long to start") from error

    @property
    def is_running(self) -> bool:
        """Whether it can be asked again."""
        return self._process.returncode is None

    def fault(self, grammar: str) -> str:
        """Try a grammar; the process is ended if that takes too much."""
        try:
            self._pipe.send_bytes(grammar.encode())
            if not self._pipe.poll(_TRIAL_S):
                self.end()
                raise OverloadedError("compiling a schema took too long.", retry_after_s=5)
            fault, warnings = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self.end()
            _log.warning("a grammar is refused: %s", EXCEEDED)
            return EXCEEDED
        for warning in warnings:
            _log.debug("not enforced: %s", warning)
        return str(fault)

    def end(self) -> None:
        """Kill it and wait for that."""
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def _end_idle(idle: "queue.LifoQueue[_Worker | None]") -> None:
    while not idle.empty():
        worker = idle.get_nowait()
        if worker is not None:
            worker.end()


def _unavailable(reason: str) -> OverloadedError:
    _log.error("the process that compiles grammars cannot be started: %s", reason)
    return OverloadedError("schemas cannot be compiled now; try again.", retry_after_s=5)


# -- the worker's side -------------------------------------------------------------------------


def _answer() -> None:
    """Try grammars until the parent closes its end."""
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):
        layout = connection.recv()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(ValueError):  # some systems know no such limit
            resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY, _MAX_MEMORY))
        vocabulary = Vocabulary(layout)
        connection.send_bytes(b"ready")
        while True:
            text = connection.recv_bytes().decode()
            signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_S)  # its signal ends the process
            verdict = _try(text, vocabulary)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(json.dumps(verdict).encode())


def _try(text: str, vocabulary: Vocabulary) -> tuple[str, list[str]]:
    """Compile a grammar and begin a reply with it.

    Returns:
        What is wrong with it, if anything, and what of it is not enforced.
    """
    matcher = vocabulary.compile(text)
    warnings = matcher.get_grammar_warnings()
    closing = Closing(vocabulary)
    for _ in range(_NUM_STEPS):
        if matcher.is_stopped():
            break
        vocabulary.mask(matcher)
        options = closing.options(matcher)
        if not options or not matcher.consume_tokens(options[0][:_NUM_STEPS]):
            break
    return matcher.get_error(), warnings


if __name__ == "__main__":
    _answer()
