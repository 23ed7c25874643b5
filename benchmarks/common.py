"""Engines and servers for benchmarks. Does not import torch."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.random_models import SHAPES, make_model
from semantic.adapters.config.settings import STARTER_MODEL
from semantic.adapters.config.sources import load_settings
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.model import LoadedModel
from semantic.application.engine.request import EventBatch, Job
from semantic.application.settings import EngineLimits
from semantic.domain.agents import Principal
from semantic.domain.blocks import BlockNamespace
from semantic.domain.pool import BlockPool
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.entrypoints.persistence import AgentMemory
from semantic.ports.backend import ModelBackendPort
from semantic.ports.telemetry import TelemetryPort
from semantic.ports.text import TokenizerPort

GREEDY = SamplingParams(temperature=0, seed=0)
ROOT = BlockNamespace("bench", str(time.time())).root()


# -- engines -------------------------------------------------------------------------------------


def make_engine(
    backend: ModelBackendPort,
    tokenizer: TokenizerPort,
    limits: EngineLimits | None = None,
    emit: Callable[[EventBatch], None] = lambda _: None,
    telemetry: TelemetryPort | None = None,
) -> BlockPoolBatchEngine:
    """Make an engine that keeps its blocks in memory only (2 GiB)."""
    store = AgentCacheStore(BlockPool(backend.spec, 2**31), telemetry=telemetry)
    return BlockPoolBatchEngine(backend, tokenizer, store, limits or EngineLimits(), emit)


def make_job(name: str, tokens: Sequence[int], max_tokens: int, **more: Any) -> Job:
    """Make a greedy request of exactly `max_tokens` tokens; `more` sets other fields of the job."""
    usual = {"agent": name, "root": ROOT, "sampling": GREEDY, "stop": StopRules(ignore_eos=True)}
    return Job(id=name, tokens=tuple(tokens), max_tokens=max_tokens, **{**usual, **more})


@dataclass
class PersistentEngine:
    """An engine over a cache directory, built as in the server, with its requests' events."""

    memory: AgentMemory
    engine: BlockPoolBatchEngine
    model: LoadedModel
    events: list[object]
    ready: threading.Event

    def job(self, tokens: Sequence[int], max_tokens: int) -> Job:
        root = self.model.root(Principal())
        name = f"job{time.monotonic_ns()}"
        return make_job(name, tokens, max_tokens, agent="bench", root=root)

    def run(self) -> None:
        while self.engine.has_work:
            self.engine.step()


@contextlib.contextmanager
def persistent_engine(
    backend: ModelBackendPort, directory: Path, settings: dict[str, object], limits: EngineLimits
) -> Iterator[PersistentEngine]:
    """Open an engine over a cache directory; leaving the context flushes its blocks to disk."""
    memory = AgentMemory(load_settings(settings))
    model = LoadedModel("starter", backend, HFTokenizer(directory), "bench", memory.codec.kv_format)
    events: list[object] = []
    ready = threading.Event()

    def emit(batch: EventBatch) -> None:
        events.extend(event for _, event in batch)

    engine = memory.make_engine(model, limits, emit, ready.set)
    yield PersistentEngine(memory, engine, model, events, ready)
    memory.close(60)


@contextlib.contextmanager
def serving(*arguments: str, settings: Mapping[str, str] | None = None) -> Iterator[int]:
    """Run a server process on a free port; yields the port once the model is ready.

    `settings` have no flag: environment variables pass them.

    Raises:
        RuntimeError: the server exited before it was ready.
    """
    command = [sys.executable, "-m", "semantic", "serve", "--port", "0", "--log-level", "warning"]
    # Benchmarks may name any model in their requests.
    wanted = {"model_aliases": "any", **(settings or {})}
    given = {f"SEMANTIC_{name.upper()}": value for name, value in wanted.items()}
    with subprocess.Popen(  # noqa: S603 - this project's server
        [*command, *arguments], stdout=subprocess.PIPE, text=True, env={**os.environ, **given}
    ) as process:
        port = 0
        try:
            for line in process.stdout or ():
                if "listening" in line:
                    port = int(line.split()[1].rsplit(":", 1)[1])
                if "ready:" in line:
                    break
            else:
                message = "the server ended before it was ready; see what it printed above"
                raise RuntimeError(message)
            yield port
        finally:
            process.send_signal(signal.SIGINT)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `serving_chosen`."""
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="random weights; default: the starter"
    )
    parser.add_argument("--backend", choices=("auto", "mlx", "torch"), default="auto")
    parser.add_argument("--memory-mb", type=int, default=2048)
    parser.add_argument("--set", nargs="*", default=[], help="other settings, as name=value")
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("~/.semantic/models/smollm2-135m-instruct")
    )
    parser.add_argument("--directory", type=Path, help="directory for models")


@contextlib.contextmanager
def serving_chosen(options: argparse.Namespace) -> Iterator[int]:
    """Run a server on the model of the options, with an empty cache; yields the port."""
    with tempfile.TemporaryDirectory() as temporary:
        home, model = Path(temporary) / "home", STARTER_MODEL
        arguments = ["--memory-budget-mb", str(options.memory_mb), "--backend", options.backend]
        if options.shape:
            models = options.directory or Path(temporary) / "models"
            tokenizer = options.tokenizer.expanduser()
            model = str(make_model(options.shape, models, tokenizer, is_sure=True))
            arguments += ["--home", str(home)]
        settings = {"model_aliases": "any", "cache_dir": str(home / "cache")}
        settings |= dict(pair.split("=", 1) for pair in options.set)
        with serving("--model", model, *arguments, settings=settings) as port:
            yield port
