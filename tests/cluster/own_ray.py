"""`semantic cluster` that starts its own Ray on this machine, with the starter model."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.rig import PORT, URL, answering, environment, last_words
from tests.waiting import eventually


class OwnRay:
    """The command, its Ray, and the replicas on it."""

    url = URL

    def __init__(self, home: Path, directory: Path, settings: dict[str, Any]) -> None:
        self._home = home
        self.config = directory / "own.toml"
        self.config.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in settings.items()))
        self._log = self.config.with_suffix(".log")
        env = {k: v for k, v in environment(home).items() if "REDIS" not in k and "_gcs_" not in k}
        command = [sys.executable, "-m", "semantic", "cluster", "--config", str(self.config)]
        with self._log.open("w") as sink:
            self.process = subprocess.Popen(  # noqa: S603 - our own command
                [*command, "--port", str(PORT)], stdout=sink, stderr=sink, env=env
            )

    @property
    def said(self) -> str:
        """By the command."""
        return self._log.read_text()

    @property
    def num_starts(self) -> int:
        return self.said.count("ready:")

    def await_start(self, number: int) -> None:
        """Wait until the command has been ready so many times."""
        is_over = eventually(
            lambda: self.num_starts >= number or self.process.poll() is not None, 600, every_s=0.2
        )
        assert is_over, self.logs()
        assert self.process.poll() is None, self.logs()

    def replicas(self) -> list[int]:
        found = []
        for path in self._home.glob("replicas/*/lock"):
            text = path.read_text()  # empty once it was let go
            pid = json.loads(text)["pid"] if text else 0
            found += [pid] if psutil.pid_exists(pid) else []
        return found

    def await_replicas(self, number: int, timeout_s: float = 300) -> None:
        """Wait until so many answer."""

        def all_answer() -> bool:
            pids = set(self.replicas())
            return len(pids) == number and answering(URL) == pids

        assert eventually(all_answer, timeout_s, every_s=0.5), f"{self.replicas()} {self.logs()}"

    def processes(self) -> list[psutil.Process]:
        """All that the command has started: its driver, Ray's processes, the replicas."""
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def named(self, name: str) -> psutil.Process:
        """Ray's process of this name."""
        return next(one for one in self.processes() if one.name() == name)

    def stop(self) -> int:
        """Send Ctrl-C and return the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(300)

    def logs(self) -> str:
        """The last words of the command and of every replica."""
        return last_words(self._log, "*.log")


@contextlib.contextmanager
def running(home: Path, directory: Path, settings: dict[str, Any]) -> Iterator[OwnRay]:
    """Run the command; at the end, everything that it started is killed."""
    made = OwnRay(home, directory, settings)
    try:
        made.await_start(1)
        yield made
    finally:
        left = made.processes() if made.process.poll() is None else []
        made.process.kill()
        made.process.wait()
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, 60)


def are_gone(processes: list[psutil.Process]) -> bool:
    """Wait until all have ended."""
    return not psutil.wait_procs(processes, 120)[1]
