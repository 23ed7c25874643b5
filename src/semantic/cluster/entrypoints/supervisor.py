"""The command `semantic cluster`: runs Ray's driver in a process of its own, and restarts it.

Ray ends a driver whose head has died, so the process that outlives the head must not be one. The
driver gets a process group, in which a Ray that it starts runs too. When the driver ends without
being asked to, the supervisor kills the rest of its group and starts it again, after a delay that
doubles up to `_MAX_DELAY_S`. A first start that fails is not repeated: its settings may be wrong.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from semantic.adapters.config.settings import Settings
from semantic.adapters.extras import missing_extra
from semantic.domain.errors import InvalidRequestError

_DRIVER = "semantic.cluster.entrypoints.ray_driver"
_FIRST_DELAY_S, _MAX_DELAY_S = 1.0, 30.0
_TICK_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENT_SIGNALS = 2  # the driver handles these; the next one kills it and its Ray


def run_cluster(settings: Settings) -> int:
    """Run servers on Ray until a signal arrives; returns the process's exit status.

    Raises:
        InvalidRequestError: the store is not shared, or Ray is not installed.
    """
    require_shared_store(settings)
    if importlib.util.find_spec("ray") is None:
        raise InvalidRequestError(missing_extra("semantic cluster", "ray", "cluster"))
    options = settings.model_dump(mode="json", exclude_unset=True)
    return Supervisor([sys.executable, "-m", _DRIVER], options).run()


def require_shared_store(settings: Settings) -> None:
    """Raise InvalidRequestError unless servers with these settings share their agents."""
    if settings.store != "shared":
        raise InvalidRequestError(
            "replicas share their agents: semantic cluster needs store = shared, database_url and "
            "objects_url",
            param="store",
        )


class Supervisor:
    """Runs a command until it ends by itself or by a signal; restarts it when it dies.

    The command gets the number of a file descriptor as its last argument: a connection from which
    it receives `(options, is_restart)`, to which it sends one message when it is ready, and which
    closes if the supervisor dies. The command keeps its end open until it exits.
    """

    def __init__(self, command: Sequence[str], options: object) -> None:
        self._command = command
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._num_signals = 0

    def run(self) -> int:
        """Run the command; returns its exit status. Forwards SIGINT and SIGTERM to it."""
        before = {sig: signal.signal(sig, self._on_signal) for sig in _SIGNALS}
        try:
            return self._run()
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def _run(self) -> int:
        delay_s, num_restarts = _FIRST_DELAY_S, 0
        is_restart = False
        while True:
            was_ready, status = self._run_once(is_restart=is_restart)
            if status == 0 or self._num_signals or not (was_ready or is_restart):
                return status if status >= 0 else 128 - status
            is_restart = True
            if was_ready:
                delay_s, num_restarts = _FIRST_DELAY_S, 0
            num_restarts += 1
            _say(f"restarting: in {delay_s:g} s, attempt {num_restarts} (exit status {status})")
            if not self._pause(delay_s):
                return 0
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    def _run_once(self, *, is_restart: bool) -> tuple[bool, int]:
        """Start the command and wait for its end: whether it was ready, and its status."""
        process, link = self._start()
        was_ready = False
        with contextlib.closing(link), contextlib.suppress(EOFError, OSError):
            link.send((self._options, is_restart))
            while True:
                link.recv_bytes()
                was_ready = True
        # The process has ended, but keeps its group's number until `wait`.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        return was_ready, process.wait()

    def _start(self) -> tuple["subprocess.Popen[bytes]", Connection]:
        ours, theirs = Pipe()
        try:
            # A terminal's Ctrl-C does not reach another session: the supervisor forwards it once.
            process = subprocess.Popen(  # noqa: S603 - our own module
                [*self._command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._process = process
        if self._num_signals:  # one that arrived during the start
            process.terminate()
        return process, ours

    def _pause(self, delay_s: float) -> bool:
        """Wait; returns False as soon as a signal arrives."""
        until = time.monotonic() + delay_s
        while not self._num_signals and time.monotonic() < until:
            time.sleep(_TICK_S)
        return not self._num_signals

    def _on_signal(self, sig: int, _frame: object) -> None:
        self._num_signals += 1
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._num_signals <= _PATIENT_SIGNALS:
                process.send_signal(sig)
            else:
                os.killpg(process.pid, signal.SIGKILL)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
