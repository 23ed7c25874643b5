"""What benchmarks share: clock, rounds, verdicts, engines and servers. It knows no torch."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from semantic.adapters.config.settings import load_settings
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.model import LoadedModel
from semantic.application.engine.request import EventBatch, Job
from semantic.application.engine.scheduler import EngineLimits
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


# -- measuring -----------------------------------------------------------------------------------


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@dataclass(frozen=True)
class Rounds:
    """Figures of several rounds, each measured in turns so that a noisy machine is fair to all."""

    figures: dict[str, list[float]]

    def median(self, name: str) -> float:
        """The median of one figure."""
        return median(self.figures[name])

    def ratio(self, name: str, base: str) -> float:
        """The median of a figure over another of the same round."""
        pairs = zip(self.figures[name], self.figures[base], strict=True)
        return median(figure / other for figure, other in pairs)

    def print(self, unit: str) -> None:
        """Print the medians, one a line."""
        width = max(map(len, self.figures))
        for name in self.figures:
            print(f"  {name:<{width}} {self.median(name):10.2f} {unit}")


def interleaved(calls: dict[str, Callable[[], float]], rounds: int) -> Rounds:
    """Measure everything once a round, after one round that does not count."""
    figures: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        for name, call in calls.items():
            figure = call()
            if index:
                figures[name].append(figure)
    return Rounds(figures)


@dataclass(frozen=True)
class Target:
    """A figure that has a target.

    Attributes:
        is_least: The target is the least the figure may be; otherwise the most.
    """

    title: str
    figure: float
    target: float
    unit: str = "x"
    is_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the figure is on the right side."""
        return self.figure >= self.target if self.is_least else self.figure <= self.target


def verdict(targets: Sequence[Target]) -> int:
    """Print figures beside their targets; returns the exit status, 1 if one is missed."""
    for target in targets:
        bound = "at least" if target.is_least else "at most"
        print(
            f"  {target.title:<44} {target.figure:9.4g} {target.unit}  "
            f"({bound} {target.target:.4g})  {'ok' if target.is_met else 'MISSED'}"
        )
    return int(not all(target.is_met for target in targets))


# -- engines -------------------------------------------------------------------------------------


def make_engine(
    backend: ModelBackendPort,
    tokenizer: TokenizerPort,
    limits: EngineLimits | None = None,
    emit: Callable[[EventBatch], None] = lambda _: None,
    telemetry: TelemetryPort | None = None,
) -> BlockPoolBatchEngine:
    """An engine that keeps its blocks in memory."""
    store = AgentCacheStore(BlockPool(backend.spec, 2**31), telemetry=telemetry)
    return BlockPoolBatchEngine(backend, tokenizer, store, limits or EngineLimits(), emit)


def make_job(name: str, tokens: Sequence[int], max_tokens: int, **more: Any) -> Job:
    """A greedy request that does not end before its budget; `more` are other fields of the job."""
    usual = {"agent": name, "root": ROOT, "sampling": GREEDY, "stop": StopRules(ignore_eos=True)}
    return Job(id=name, tokens=tuple(tokens), max_tokens=max_tokens, **{**usual, **more})


@dataclass
class PersistentEngine:
    """An engine over a cache directory, as the server makes it, and the events of its requests."""

    memory: AgentMemory
    engine: BlockPoolBatchEngine
    model: LoadedModel
    events: list[object]
    ready: threading.Event

    def job(self, tokens: Sequence[int], max_tokens: int) -> Job:
        """A request of one agent."""
        root = self.model.root(Principal())
        name = f"job{time.monotonic_ns()}"
        return make_job(name, tokens, max_tokens, agent="bench", root=root)

    def run(self) -> None:
        """Run all requests to their end."""
        while self.engine.has_work:
            self.engine.step()


@contextlib.contextmanager
def persistent_engine(
    backend: ModelBackendPort, directory: Path, settings: dict[str, object], limits: EngineLimits
) -> Iterator[PersistentEngine]:
    """Open an engine; what it holds is written when the block ends."""
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
    """A server process on a free port, ready; yields its port.

    Args:
        arguments: More of its command line.
        settings: Others than the command line has, by name.
    """
    command = [sys.executable, "-m", "semantic", "serve", "--port", "0", "--log-level", "warning"]
    given = {f"SEMANTIC_{name.upper()}": value for name, value in (settings or {}).items()}
    with subprocess.Popen(  # noqa: S603 - our own server
        [*command, *arguments], stdout=subprocess.PIPE, text=True, env={**os.environ, **given}
    ) as process:
        port = 0
        for line in process.stdout or ():
            if "listening" in line:
                port = int(line.split()[1].rsplit(":", 1)[1])
            if "ready:" in line:
                break
        try:
            yield port
        finally:
            process.send_signal(signal.SIGINT)
