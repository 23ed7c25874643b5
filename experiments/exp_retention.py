"""EXP-013: should a policy other than LRU choose the blocks to evict?"""

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from experiments.common import Experiment, Findings
from experiments.retention import replay
from experiments.retention.machine import Machine, Tally
from experiments.retention.policies import CANDIDATES, Oracle, Policy, Recorder
from experiments.retention.traces import WORKLOADS, TraceTurn, trace

_K = 1024
# Tokens in memory and on disk. At 32 KB a token, as Llama 3.2 1B has, 128k tokens take 4 GB.
SIZES = ((192 * _K, 0), (384 * _K, 0))
NUM_TURNS = 1200
ENOUGH, WORST, AGREEMENT = 0.85, 1.05, 0.05
_LEAST = 0.01  # share of the computed tokens; where LRU recomputes less, there is nothing to save
_REPLAYED_MB = 1  # 256k tokens of the fake model


@dataclass(frozen=True, slots=True)
class Cell:
    """What each policy computed in one workload with one size; `first` needed no eviction."""

    workload: str
    memory: int
    disk: int
    first: Tally
    tallies: dict[str, Tally]

    def tokens(self, policy: str) -> int:
        """Return the tokens that were computed again."""
        return self.tallies[policy].computed - self.first.computed

    def cost(self, policy: str) -> float:
        return self.tallies[policy].cost - self.first.cost

    def share(self, policy: str) -> float:
        return self.tokens(policy) / max(1, self.tokens("LRU"))

    def cost_share(self, policy: str) -> float:
        return self.cost(policy) / max(1.0, self.cost("LRU"))

    @property
    def is_tight(self) -> bool:
        return self.tokens("LRU") >= _LEAST * self.tallies["LRU"].computed

    def __str__(self) -> str:
        disk = f" and {self.disk // _K}k on disk" if self.disk else ""
        return f"{self.workload}, {self.memory // _K}k tokens in memory{disk}"


def simulate(task: tuple[str, int, int, int]) -> Cell:
    """Simulate a workload with one size and every policy."""
    workload, num_turns, memory, disk = task
    turns, recorder = trace(workload, 1, num_turns), Recorder()
    first = Machine(recorder, 2**60).run(turns)
    policies: dict[str, Policy] = {name: make() for name, make in CANDIDATES.items()}
    policies["oracle"] = Oracle(recorder.uses)
    tallies = {name: Machine(each, memory, disk).run(turns) for name, each in policies.items()}
    return Cell(workload, memory, disk, first, tallies)


def cells(*, is_quick: bool) -> Iterator[Cell]:
    """Simulate all workloads, each size in a process."""
    num_turns, sizes = (150, SIZES[:1]) if is_quick else (NUM_TURNS, SIZES)
    tasks = [(name, num_turns, *size) for name in WORKLOADS for size in sizes]
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1)) as processes:
        yield from processes.map(simulate, tasks)


def mean_share(found: Sequence[Cell], policy: str) -> float:
    """Return the geometric mean over the cells, each of which counts the same."""
    return math.exp(sum(math.log(max(cell.share(policy), 1e-3)) for cell in found) / len(found))


def compare(found: Findings) -> None:
    """Compare the candidates with LRU in the simulation."""
    tight: list[Cell] = []
    for cell in cells(is_quick=found.is_quick):
        shares = [
            f"{name} {cell.share(name):.2f} ({cell.cost_share(name):.2f})"
            for name in cell.tallies
            if name != "LRU"
        ]
        found.note(str(cell), f"LRU {cell.tokens('LRU') / 1000:,.0f}k; " + ", ".join(shares))
        tight += [cell] if cell.is_tight else []
    if not tight:
        found.skip("means", "nothing was evicted that was needed again")
        return
    better = []
    for name in (*CANDIDATES, "oracle"):
        mean, worst = mean_share(tight, name), max(cell.share(name) for cell in tight)
        figure = f"{mean:.2f} of LRU's tokens over {len(tight)} cells; {worst:.2f} in the worst"
        found.note(f"{name}, geometric mean", figure)
        if name != "oracle" and mean <= ENOUGH and worst <= WORST:
            better.append(name)
    if not found.is_quick:
        found.check("policies that would replace LRU", str(better or "none"), is_passed=not better)


def busiest(turns: Sequence[TraceTurn], num_turns: int) -> Sequence[TraceTurn]:
    """Return the turns in the middle of a trace."""
    start = max(0, (len(turns) - num_turns) // 2)
    return turns[start : start + num_turns]


def agree(found: Findings) -> None:
    """Compare the simulation with a server, on a ledger that a server recorded."""
    turns = busiest(trace("assistants and nightly jobs", 1), 8 if found.is_quick else 80)
    with tempfile.TemporaryDirectory() as directory:
        recorded = replay.record(turns, Path(directory))
    server = replay.measure(turns, _REPLAYED_MB)
    machines = {
        budget: Machine(Policy(), budget, grain=1, block_tokens=256).run(recorded).computed
        for budget in (_REPLAYED_MB * 2**20 // replay.BYTES_PER_TOKEN, 2**60)
    }
    simulated, first = machines.values()
    figure = f"{server.computed - first:,} tokens computed again by the server, "
    figure += f"{simulated - first:,} in the simulation"
    difference = abs(server.computed - simulated) / max(1, simulated - first)
    is_close = difference <= AGREEMENT or server.computed == simulated
    found.check(f"replay of {len(recorded)} turns over HTTP", figure, is_passed=is_close)


def retention(found: Findings) -> None:
    """Check the simulation against a server, then compare."""
    agree(found)
    compare(found)


EXPERIMENTS = (
    Experiment(
        id="EXP-013",
        question="Should a policy other than LRU choose the blocks to evict?",
        method="run traces of five workloads (seeded) through the real store with equal memory, in "
        "LRU order and in the order of each candidate, and count the tokens computed again (in "
        "brackets: their cost, which grows with the position), relative to LRU; replay one trace "
        "over HTTP on a server with the fake model, and compare with the simulation of its ledger",
        criterion="the server and the simulation differ by at most 5 % of the tokens computed "
        "again; LRU stays while no candidate needs at most 0.85 of its tokens (geometric mean over "
        "all cells in which LRU recomputes at least 1 %) and at most 1.05 in every cell",
        answer=retention,
    ),
)
