"""What both experiments on swapping share: a server without HTTP, and two models that differ."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.starter import starter_directory
from semantic.adapters.config.settings import load_settings
from semantic.application.models.registry import SwapReport
from semantic.entrypoints.bootstrap import Server, bootstrap
from semantic.ports.inbound import ModelState

_WAIT_S = 600.0


def megabytes() -> float:
    """What this process takes of the machine's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def other_model(directory: Path, target: Path) -> Path:
    """A copy of a model that is another one: a little of its weights is changed."""
    shutil.copytree(directory, target, copy_function=shutil.copy)
    for path in target.glob("*.safetensors"):
        with path.open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-2, os.SEEK_END)
            file.write(bytes([last ^ 1]))  # the last bit of the last number
    return target


@contextlib.contextmanager
def serving(backend: str, model: Path | None) -> Iterator[tuple[Server, str, str]]:
    """A server with a model loaded, and the names of it and of the other one."""
    with tempfile.TemporaryDirectory() as home:
        first = model or starter_directory()
        second = other_model(first, Path(home) / "models" / "the-other")
        given = {"home": home, "backend": backend, "model": str(first), "log_level": "error"}
        server = bootstrap(load_settings(given, config_dir=Path(home) / "no-config"))
        server.start()
        while server.device.state is ModelState.LOADING:
            server.device.join(0.01)
        try:
            yield server, str(first), second.name
        finally:
            server.request_stop()
            server.device.join(60)
            server.memory.close(60)


def swap(server: Server, name: str) -> SwapReport:
    """Swap, and wait for it."""
    return server.models.swap(name).result(_WAIT_S)


def verdict(name: str, figure: str, *, is_passed: bool) -> bool:
    """Print one line of the answer."""
    print(f"{'PASS' if is_passed else 'FAIL'} {name}: {figure}")
    return is_passed
