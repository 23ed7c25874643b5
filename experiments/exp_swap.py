"""EXP-011 and EXP-012: is an unloaded model's memory returned, and how long does a swap take?"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.starter import starter_directory
from experiments.common import Experiment, Findings
from semantic.adapters.config.sources import load_settings
from semantic.application.engine.model import SwapReport
from semantic.entrypoints.bootstrap import Server, bootstrap
from semantic.ports.inbound import ModelState

_WAIT_S = 600.0
_MAX_MB, _MAX_GROWTH = 1024.0, 5.0
_MAX_S = 30.0


def megabytes() -> float:
    """Return the memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def other_model(directory: Path, target: Path) -> Path:
    """Copy a model and change some of its weights, so that it is another model."""
    shutil.copytree(directory, target, copy_function=shutil.copy)
    for path in target.glob("*.safetensors"):
        with path.open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-2, os.SEEK_END)
            file.write(bytes([last ^ 1]))  # the last bit of the last number
    return target


@contextlib.contextmanager
def serving(backend: str) -> Iterator[tuple[Server, str, str]]:
    """Run a server without HTTP; yields it with the names of the starter and the other model."""
    with tempfile.TemporaryDirectory() as home:
        first = starter_directory()
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
    """Swap models and wait for it."""
    return server.models.swap(name).result(_WAIT_S)


def memory(found: Findings) -> None:
    """Unload a model, and swap many times."""
    num_swaps = 2 if found.is_quick else 20
    with serving("torch") as (server, first, second):
        loaded = megabytes()
        server.models.unload().result(_WAIT_S)
        unloaded = megabytes()
        server.models.load(first).result(_WAIT_S)
        sizes = []
        for turn in range(num_swaps):
            swap(server, first if turn % 2 else second)
            sizes.append(megabytes())
    found.at_most(f"of {loaded:.0f} MB are left after unloading", unloaded, _MAX_MB, "MB")
    growth = 100 * (sizes[-1] / sizes[0] - 1)
    found.at_most(
        f"growth from the first of {num_swaps} swaps to the last", growth, _MAX_GROWTH, "%"
    )
    mlx_memory(found)


def mlx_memory(found: Findings) -> None:
    """Measure the same by MLX's own count, on its CPU device if there is no other."""
    with serving("mlx") as (server, _, _):
        import mlx.core as mx  # noqa: PLC0415 - after the server has chosen its BLAS

        loaded = mx.get_active_memory() / 2**20
        server.models.unload().result(_WAIT_S)
        active = mx.get_active_memory() / 2**20
        is_metal = mx.metal.is_available()
    found.at_most(f"MLX: active after unloading, of {loaded:.0f}", active, _MAX_MB, "MB")
    if not is_metal:
        found.skip("on Metal", "there is no Apple Silicon here; MLX counted this machine's memory")


def latency(found: Findings) -> None:
    """Compare a swap with a load."""
    swaps, loads = [], []
    with serving("torch") as (server, first, second):
        swap(server, second)  # both were read once
        for _ in range(1 if found.is_quick else 5):
            swaps.append(swap(server, first).seconds)
            server.models.unload().result(_WAIT_S)
            loads.append(server.models.load(second).result(_WAIT_S).seconds)
    ratios = [one / other for one, other in zip(swaps, loads, strict=True)]
    found.at_most(f"a swap, median of {len(swaps)}", median(swaps), _MAX_S, "s")
    more = 1000 * (median(swaps) - median(loads))
    told = f"{median(ratios):.2f} x: {more:.0f} ms to give back the memory of the one before"
    found.note("a swap over a load where none was loaded", told)


EXPERIMENTS = (
    Experiment(
        id="EXP-011",
        question="Is the memory of an unloaded model returned to the system?",
        method="unload the starter model and swap it 20 times with a copy that differs in one "
        "bit; measure the process's memory on torch, and MLX's count of active memory",
        criterion="less than 1 GB remains; memory after the last of 20 swaps is within 5 % of the "
        "first",
        adapted="the registry unloads the model and collects garbage; MLX runs on this machine's "
        "device",
        answer=memory,
    ),
    Experiment(
        id="EXP-012",
        question="How long does a swap take, from the first waiting request to the last?",
        method="swap the starter model with its copy, compared with loading it when none is "
        "loaded, interleaved; no requests run, so nothing has to drain",
        criterion="below 30 s",
        answer=latency,
    ),
)
