"""Servers for the workflow benchmark: this one with memory and without, and others.

All run on this machine with the same model. This server and llama.cpp read the same GGUF file;
`transformers` and mlx-lm cannot read it and get full weights, which `plain_model` writes. Each has
settings that suit agents: several slots, cached prefixes.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import serving
from benchmarks.report import ROOT

_START_S = 300.0
_PLAIN = ROOT / "build" / "bench" / "starter-in-full"
_MLX = (
    "import sys; from semantic.adapters.outbound.backends.mlx import runtime; runtime.prepare(); "
    "from mlx_lm.server import main; sys.exit(main())"
)


@dataclass(frozen=True)
class System:
    """A server that can be started repeatedly.

    Attributes:
        start: Starts it with a directory for its files; yields its base URL, including `/v1`.
        more: Additional fields of requests to it.
        is_salted: Whether every request begins with different words, so that nothing is reused.
    """

    name: str
    start: Callable[[Path], AbstractContextManager[str]]
    model: str = "any"
    more: Mapping[str, Any] = field(default_factory=dict)
    is_salted: bool = False
    can_restart: bool = True


# -- ours ------------------------------------------------------------------------------------------


def ours(num_agents: int, *, has_memory: bool) -> System:
    """Create this server; without memory it keeps nothing between requests.

    No setting disables all reuse. Without memory, nothing is kept on disk or open, and the pool is
    of no use because every prompt begins differently.
    """
    settings = {"model_aliases": "any", "max_batch_size": "16", "max_idle": str(num_agents)}
    if not has_memory:
        settings |= {"durability": "none", "max_idle": "0"}

    @contextlib.contextmanager
    def start(home: Path) -> Iterator[str]:
        with serving("--cache-dir", str(home / "cache"), settings=settings) as port:
            yield f"http://127.0.0.1:{port}/v1"

    name = "memory on" if has_memory else "memory off"
    return System(name, start, more={"ignore_eos": True}, is_salted=not has_memory)


# -- others ----------------------------------------------------------------------------------------


def llama_cpp(num_agents: int, num_tokens: int) -> System:
    """Create llama.cpp's server on the same file, with a slot per agent (`make peer` builds it)."""
    from benchmarks import peer  # noqa: PLC0415 - it may not be built
    from semantic.adapters.outbound.models.gguf.importing import starter_gguf  # noqa: PLC0415 - imports torch

    @contextlib.contextmanager
    def start(home: Path) -> Iterator[str]:
        del home
        context = 2 ** (num_tokens + 1024).bit_length()
        with peer.peer_serving(starter_gguf(), streams=num_agents, context=context) as port:
            yield f"http://127.0.0.1:{port}/v1"

    return System("llama.cpp", start, more={"ignore_eos": True, "cache_prompt": True})


def transformers_serve() -> System:
    """Create `transformers serve`, in the dtype that this project's server chooses on this CPU."""
    program = Path(sys.executable).with_name("transformers")

    def command(port: int) -> list[str]:
        model = str(plain_model())
        where = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
        return [str(program), "serve", model, *where, "--dtype", "auto", "--log-level", "error"]

    def start(home: Path) -> AbstractContextManager[str]:
        # It loads models by accelerate, which is nothing that we need.
        return _process(command, {"PYTHONPATH": str(_packages("accelerate", "psutil"))})(home)

    return System("transformers", start, model=str(_PLAIN))


def mlx_server() -> System:
    """Create `mlx_lm.server`, on MLX's default device."""

    def command(port: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "ERROR"]
        return [sys.executable, "-c", _MLX, "--model", str(plain_model()), *where]

    return System("mlx_lm.server", _process(command), model="default_model")


def other(url: str, model: str) -> System:
    """Create a running server with OpenAI's protocol, which is not restarted."""

    @contextlib.contextmanager
    def start(home: Path) -> Iterator[str]:
        del home
        yield url.rstrip("/")

    return System(url, start, model=model, can_restart=False)


def plain_model() -> Path:
    """Return the starter model's directory with full weights, written at first use."""
    if not (_PLAIN / "model.safetensors").exists():
        from benchmarks.starter import write_plain_model  # noqa: PLC0415 - imports torch

        write_plain_model(_PLAIN)
    return _PLAIN


def _packages(*names: str) -> Path:
    """Return a folder with packages that only other servers need, installed at first use."""
    target = ROOT / "build" / "bench" / "-".join(names)
    if not target.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(target), *names], check=True)  # noqa: S603 - ours
    return target


def _process(
    command: Callable[[int], list[str]], more: Mapping[str, str] | None = None
) -> Callable[[Path], AbstractContextManager[str]]:
    @contextlib.contextmanager
    def start(home: Path) -> Iterator[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(home)}
        environment |= more or {}
        log = home / "log"
        home.mkdir(parents=True, exist_ok=True)
        with (
            log.open("ab") as output,
            subprocess.Popen(  # noqa: S603 - commands of this module
                command(port), stdout=output, stderr=output, env=environment
            ) as process,
        ):
            try:
                _await(process, f"http://127.0.0.1:{port}/v1/models", log)
                yield f"http://127.0.0.1:{port}/v1"
            finally:
                process.terminate()

    return start


def _await(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(url, timeout=60)
            return
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-500:]}")


# -- memory ----------------------------------------------------------------------------------------


def children() -> set[int]:
    """Return the child processes of this process."""
    return {pid for pid, (parent, _) in _processes().items() if parent == os.getpid()}


def peak_mb(pids: set[int]) -> float:
    """Return the peak memory of processes and their children; the current one if unknown."""
    known = _processes()
    tree, size = set(pids), 0
    while len(tree) > size:
        size = len(tree)
        tree |= {pid for pid, (parent, _) in known.items() if parent in tree}
    return sum(_peak_kb(pid) or known[pid][1] for pid in tree if pid in known) / 1024


def _peak_kb(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0


def _processes() -> dict[int, tuple[int, int]]:
    """Return the parents and kilobytes of all processes."""
    output = subprocess.run(  # noqa: S603 - a constant command
        [shutil.which("ps") or "/bin/ps", "-A", "-o", "pid=,ppid=,rss="],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = (tuple(map(int, line.split())) for line in output.splitlines())
    return {pid: (parent, size) for pid, parent, size in rows}
