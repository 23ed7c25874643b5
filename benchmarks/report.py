"""What every benchmark shares: figures with bounds, one table, one JSON, one comparison.

A benchmark is a function that fills a `Report`; `run` is its command line. Figures are kept round
by round, so that a table shows the median and the spread. A figure that was also in an earlier
result is shown as a ratio to it: times above 1 are slower, rates above 1 are faster.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("torch", "transformers", "mlx", "mlx-lm", "numpy", "safetensors", "tokenizers")


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

    def ratios(self, name: str, base: str) -> list[float]:
        """A figure over another of the same round, round by round."""
        pairs = zip(self.figures[name], self.figures[base], strict=True)
        return [figure / other for figure, other in pairs]

    def ratio(self, name: str, base: str) -> float:
        """The median of a figure over another of the same round."""
        return median(self.ratios(name, base))


def interleaved(calls: Mapping[str, Callable[[], float]], rounds: int) -> Rounds:
    """Measure everything once a round, after one round that does not count."""
    figures: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        for name, call in calls.items():
            figure = call()
            if index:
                figures[name].append(figure)
    return Rounds(figures)


# -- figures -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing that was measured.

    Attributes:
        values: One for each round or request.
        least: What the median must at least be; None if anything will do.
        most: What it may at most be.
    """

    name: str
    values: tuple[float, ...]
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def median(self) -> float:
        """The middle one of its values."""
        return median(self.values)

    @property
    def is_met(self) -> bool:
        """Whether the median keeps its bounds."""
        return (self.least is None or self.median >= self.least) and (
            self.most is None or self.median <= self.most
        )

    @property
    def bound(self) -> str:
        """The bound and whether it is kept, in words."""
        if self.least is None and self.most is None:
            return ""
        sign, limit = (">=", self.least) if self.least is not None else ("<=", self.most)
        return f"{sign} {limit:.4g}: {'ok' if self.is_met else 'MISSED'}"

    @property
    def spread(self) -> str:
        """From the least value to the greatest."""
        if len(self.values) < 2:
            return ""
        return f"{min(self.values):.4g} to {max(self.values):.4g}"


@dataclass
class Report:
    """What one benchmark found.

    Attributes:
        name: Of the benchmark.
        is_quick: Whether a rough answer in seconds is wanted.
        options: Of its own command line.
        settings: What the figures depend on, to be kept with them.
    """

    name: str
    is_quick: bool = False
    options: argparse.Namespace = field(default_factory=argparse.Namespace)
    settings: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(
        self,
        name: str,
        values: float | Sequence[float],
        unit: str = "x",
        *,
        least: float | None = None,
        most: float | None = None,
    ) -> Figure:
        """Keep a figure; with a bound, it is judged by its median."""
        given = (values,) if isinstance(values, (int, float)) else tuple(values)
        figure = Figure(name, tuple(map(float, given)), unit, least, most)
        self.figures[name] = figure
        return figure

    def add_rounds(self, rounds: Rounds, unit: str, label: str = "") -> None:
        """Keep everything that was measured in turns."""
        for name, values in rounds.figures.items():
            self.add(label + name, values, unit)

    def note(self, text: str) -> None:
        """Say something that is no figure, now and in the JSON."""
        print(f"  {text}", flush=True)
        self.notes.append(text)

    def choose(self, quick: Any, full: Any) -> Any:
        """One of two sizes of the work."""
        return quick if self.is_quick else full

    @property
    def missed(self) -> list[Figure]:
        """Figures on the wrong side of their bound."""
        return [figure for figure in self.figures.values() if not figure.is_met]

    def table(self, earlier: Mapping[str, Any] | None = None) -> str:
        """All figures as a Markdown table.

        Args:
            earlier: What `as_json` of an earlier report gave.
        """
        before = (earlier or {}).get("figures", {})
        lines = [f"| {self.name} | median | unit | spread | bound | of earlier |"]
        lines.append("|---|---:|---|---|---|---:|")
        for figure in self.figures.values():
            ratio = _ratio(figure, before.get(figure.name))
            cells = (figure.name, f"{figure.median:.4g}", figure.unit, figure.spread, figure.bound)
            lines.append(f"| {' | '.join(cells)} | {ratio} |")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        figures = {
            figure.name: {
                "median": figure.median,
                "values": figure.values,
                "unit": figure.unit,
                "least": figure.least,
                "most": figure.most,
            }
            for figure in self.figures.values()
        }
        return {
            "benchmark": self.name,
            "is_quick": self.is_quick,
            "seconds": round(self.seconds, 1),
            "settings": self.settings,
            "figures": figures,
            "notes": self.notes,
            "environment": environment(),
        }


def _ratio(figure: Figure, earlier: Mapping[str, Any] | None) -> str:
    """A figure over the same one of an earlier result; empty where that says nothing."""
    if not earlier or earlier["unit"] != figure.unit or not earlier["median"]:
        return ""
    return f"{figure.median / earlier['median']:.2f}x"


# -- where it was measured -----------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """The machine, the versions and the commit that figures belong to."""
    return {
        "machine": f"{platform.machine()}, {cpu_name()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def cpu_name() -> str:
    """The CPU's model, or what the system calls it."""
    command = (
        ["sysctl", "-n", "machdep.cpu.brand_string"] if platform.system() == "Darwin" else ["lscpu"]
    )
    for line in _output(command).splitlines():
        name, _, value = line.rpartition(":")
        if name.strip() in ("", "Model name"):
            return value.strip()
    return platform.processor() or "unknown CPU"


def commit() -> str:
    """The commit that runs, marked if files differ from it; empty outside of a repository."""
    name = _output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]).strip()
    is_changed = bool(_output(["git", "-C", str(ROOT), "status", "--porcelain", "src"]).strip())
    return f"{name} and changes" if name and is_changed else name


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - constant commands
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


# -- the command line of one ---------------------------------------------------------------------


def earlier_result(name: str, path: Path) -> dict[str, Any]:
    """What one benchmark found earlier; empty if nothing is stored.

    Args:
        name: Of the benchmark.
        path: Of the result: of all of them, or of one.
    """
    if not path.exists():
        return {}
    stored = json.loads(path.read_text("utf-8"))
    found: dict[str, Any] = stored.get("benchmarks", {stored.get("benchmark"): stored}).get(
        name, {}
    )
    return found


def run(
    name: str,
    measure: Callable[[Report], None],
    arguments: Sequence[str] | None = None,
    add_options: Callable[[argparse.ArgumentParser], None] = lambda _: None,
) -> int:
    """Run a benchmark by its command line; returns the exit status, 1 if a bound is missed.

    Args:
        name: Of the benchmark: `resume` is that of `bench_resume`.
        measure: Fills the report.
        arguments: Of the command line; None are the process's.
        add_options: Adds options of this benchmark alone.
    """
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a rough answer, in seconds")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--against", type=Path, help="an earlier result to compare with")
    add_options(parser)
    options = parser.parse_args(arguments)
    report = Report(name, options.quick, options)
    # Whoever ends a benchmark ends the servers it has started too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    report.seconds = seconds(lambda: measure(report))
    against = options.against or RESULTS / f"{'quick' if options.quick else 'full'}.json"
    print(report.table(earlier_result(name, against)))
    if options.json:
        options.json.write_text(json.dumps(report.as_json(), indent=1), "utf-8")
    return int(bool(report.missed))
