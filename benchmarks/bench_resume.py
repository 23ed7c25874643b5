"""Time to resume an agent: cold, hot, from the pool, and from disk in a new process.

Measures the time to the first token of a turn that adds a few tokens to a conversation. The lower
bound is a forward pass over the new tokens alone, measured in the same process.

    python -m benchmarks.bench_resume [--quick] [--lengths 1024 2048 4096 7900] [--rounds 3]

Bounds are for 4,096 tokens, which take some minutes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.common import GREEDY, PersistentEngine, persistent_engine
from benchmarks.report import Report, Rounds, run, seconds
from benchmarks.starter import backend as torch_backend
from benchmarks.starter import random_tokens, starter_directory
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.application.settings import EngineLimits
from semantic.domain.events import Finished, TextDelta
from semantic.ports.backend import Chunk, Draw, SequenceId, Step

NUM_NEW = 16
_SLACK_S = 0.02


@dataclass
class Bench:
    """An engine and its backend."""

    made: PersistentEngine
    backend: TorchBackend

    def ttft(self, tokens: Sequence[int]) -> float:
        """Return the seconds from the request to its first token; runs the request to its end."""
        made = self.made
        made.events.clear()
        job = made.job(tokens, max_tokens=2)
        started = time.perf_counter()
        made.engine.submit(job)
        while not any(isinstance(event, TextDelta | Finished) for event in made.events):
            made.ready.clear()
            if not made.engine.step():
                made.ready.wait(1)
        elapsed = time.perf_counter() - started
        made.run()
        return elapsed

    def forward(self, num_held: int) -> float:
        """Return the seconds of one step over the new tokens of a sequence of this length."""
        seq = SequenceId(10**6)
        tokens = (np.arange(num_held) * 7 % 40000 + 1000).tolist()
        self.backend.open_sequence(seq, tokens)
        for start in range(0, num_held, 512):
            chunk = Chunk(seq, start, tuple(tokens[start : start + 512]))
            self.backend.collect(self.backend.launch(Step((chunk,))))
        chunk = Chunk(seq, num_held, tuple(tokens[:NUM_NEW]), Draw(GREEDY, num_held))
        elapsed = seconds(lambda: self.backend.collect(self.backend.launch(Step((chunk,)))))
        self.backend.close_sequence(seq)
        return elapsed


@contextmanager
def bench(cache: Path, max_idle: int) -> Iterator[Bench]:
    """Create an engine as the server does."""
    directory = starter_directory()
    settings: dict[str, object] = {"cache_dir": str(cache), "memory_budget_mb": 3000}
    limits = EngineLimits(max_idle=max_idle)
    with (
        torch_backend(directory) as backend,
        persistent_engine(backend, directory, settings, limits) as made,
    ):
        yield Bench(made, backend)


def in_this_process(cache: Path, lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measure cold, hot and pool; leaves the conversations on disk."""
    figures: dict[str, Any] = {}
    with bench(cache, max_idle=4) as made:
        made.ttft(random_tokens(600, 1))  # warms up
        for length in lengths:
            cold, hot, pool, floor = [], [], [], []
            for index in range(rounds):
                base = random_tokens(length, 1000 * length + index)
                cold.append(made.ttft(base))
                floor.append(made.forward(length))
                hot.append(made.ttft([*base, *random_tokens(NUM_NEW, index)]))
                made.made.engine.reconfigure(EngineLimits(max_idle=0))
                made.ttft(random_tokens(20, index + 50))  # its end closes what is idle
                pool.append(made.ttft([*base, *random_tokens(NUM_NEW, index + 7)]))
                made.made.engine.reconfigure(EngineLimits(max_idle=4))
            figures[str(length)] = {"cold": cold, "hot": hot, "pool": pool, "forward": floor}
        disk = made.made.memory.disk
        if disk is not None:
            disk.flush(60)
    return figures


def in_a_new_process(cache: Path, lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measure the same conversations, from disk."""
    figures: dict[str, Any] = {}
    with bench(cache, max_idle=0) as made:
        made.ttft(random_tokens(600, 2))
        for length in lengths:
            disk, floor, bound = [], [], []
            for index in range(rounds):
                base = random_tokens(length, 1000 * length + index)
                floor.append(made.forward(length))
                nbytes = made.backend.spec.bytes_per_context(length)
                bound.append(nbytes / bandwidth(cache))
                disk.append(made.ttft([*base, *random_tokens(NUM_NEW, index + 9)]))
            figures[str(length)] = {"disk": disk, "forward": floor, "transfer": bound}
    return figures


def bandwidth(cache: Path) -> float:
    """Return the bytes per second of the slowest of reading, checking and copying block files."""
    files = sorted(cache.glob("blocks/*/*/*.safetensors"), key=lambda f: f.stat().st_size)[-8:]
    contents: list[bytes] = []
    nbytes = sum(file.stat().st_size for file in files)
    read = seconds(lambda: contents.extend(file.read_bytes() for file in files))
    check = seconds(lambda: [xxhash.xxh3_128_digest(content) for content in contents])
    arrays = [np.frombuffer(content, np.uint8) for content in contents]
    copy = seconds(lambda: [array.copy() for array in arrays])
    return nbytes / max(read, check, copy)


def tell(report: Report, here: dict[str, Any], there: dict[str, Any]) -> None:
    """Add the figures and the bounded ratios to the report, by round."""
    for length, figures in here.items():
        disk = there[length]
        bounds = [
            forward + transfer + _SLACK_S
            for forward, transfer in zip(disk["forward"], disk["transfer"], strict=True)
        ]
        rounds = Rounds({**figures, "disk": disk["disk"], "bound": bounds})
        for name in ("cold", "hot", "pool", "disk"):
            report.add(f"{length} tokens, {name}", rounds.figures[name], "s")
        is_judged = length == "4096"
        for name, base, least, most in (
            ("cold", "disk", 15.0, None),
            ("hot", "forward", None, 1.3),
            ("disk", "bound", None, 1.5),
        ):
            limits = (least, most) if is_judged else (None, None)
            title, ratios = f"{length} tokens, {name} / {base}", rounds.ratios(name, base)
            report.add(title, ratios, least=limits[0], most=limits[1])


def measure(report: Report) -> None:
    """Run both processes."""
    options = report.options
    lengths = options.lengths or report.choose([256], [1024])
    rounds = options.rounds or report.choose(1, 2)
    if options.child is not None:
        print(json.dumps(in_a_new_process(options.child, lengths, rounds)))
        return
    report.settings.update(lengths=lengths, rounds=rounds, new_tokens=NUM_NEW)
    with tempfile.TemporaryDirectory() as name:
        here = in_this_process(Path(name), lengths, rounds)
        command = [sys.executable, "-m", "benchmarks.bench_resume", "--child", name]
        command += ["--rounds", str(rounds), "--lengths", *map(str, lengths)]
        child = subprocess.run(  # noqa: S603 - our own command
            command, check=True, capture_output=True, text=True
        )
        lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
        tell(report, here, json.loads(lines[-1]))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of the conversations")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)


if __name__ == "__main__":
    sys.exit(run("resume", measure, add_options=add_options))
