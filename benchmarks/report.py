"""Reports of benchmarks: figures with bounds, as a table and as JSON, compared with earlier ones.

A benchmark is a function that fills a `Report`; `run` is its command line. A figure keeps the value
of every round, so that the table can show the median and the spread. If an earlier result has the
same figure, the table shows the ratio to it: above 1, times are slower and rates are faster.
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
    """Measure how long a call takes, in seconds."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@dataclass(frozen=True)
class Rounds:
    """Figures of several rounds, interleaved so that noise of the machine affects all alike."""

    figures: dict[str, list[float]]

    def median(self, name: str) -> float:
        return median(self.figures[name])

    def ratios(self, name: str, base: str) -> list[float]:
        """Divide a figure by another of the same round, for every round."""
        pairs = zip(self.figures[name], self.figures[base], strict=True)
        return [figure / other for figure, other in pairs]

    def ratio(self, name: str, base: str) -> float:
        return median(self.ratios(name, base))


def interleaved(calls: Mapping[str, Callable[[], float]], rounds: int) -> Rounds:
    """Measure every call once per round, after a warm-up round that is discarded."""
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
    """One measured figure: a value per round or request, and bounds of the median."""

    name: str
    values: tuple[float, ...]
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def is_met(self) -> bool:
        return (self.least is None or self.median >= self.least) and (
            self.most is None or self.median <= self.most
        )

    @property
    def bound(self) -> str:
        if self.least is None and self.most is None:
            return ""
        sign, limit = (">=", self.least) if self.least is not None else ("<=", self.most)
        return f"{sign} {limit:.4g}: {'ok' if self.is_met else 'MISSED'}"

    @property
    def spread(self) -> str:
        """The range of the values, as text; empty for a single value."""
        if len(self.values) < 2:
            return ""
        return f"{min(self.values):.4g} to {max(self.values):.4g}"


@dataclass
class Report:
    """The results of one benchmark.

    Attributes:
        is_quick: Whether to take seconds only and measure roughly.
        settings: Parameters that the figures depend on; stored with the figures.
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
        """Add a figure; bounds apply to the median of its values."""
        given = (values,) if isinstance(values, (int, float)) else tuple(values)
        figure = Figure(name, tuple(map(float, given)), unit, least, most)
        self.figures[name] = figure
        return figure

    def add_rounds(self, rounds: Rounds, unit: str, label: str = "") -> None:
        """Add every figure of interleaved rounds; `label` is put before its name."""
        for name, values in rounds.figures.items():
            self.add(label + name, values, unit)

    def note(self, text: str) -> None:
        """Print a remark and store it in the JSON."""
        print(f"  {text}", flush=True)
        self.notes.append(text)

    def choose(self, quick: Any, full: Any) -> Any:
        return quick if self.is_quick else full

    @property
    def missed(self) -> list[Figure]:
        return [figure for figure in self.figures.values() if not figure.is_met]

    def table(self, earlier: Mapping[str, Any] | None = None) -> str:
        """Format all figures as a Markdown table; `earlier` is an earlier report's `as_json`."""
        before = (earlier or {}).get("figures", {})
        lines = [f"| {self.name} | median | unit | spread | bound | of earlier |"]
        lines.append("|---|---:|---|---|---|---:|")
        for figure in self.figures.values():
            ratio = _ratio(figure, before.get(figure.name))
            cells = (figure.name, f"{figure.median:.4g}", figure.unit, figure.spread, figure.bound)
            lines.append(f"| {' | '.join(cells)} | {ratio} |")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
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
    """The ratio to the same figure of an earlier result; empty if they are not comparable."""
    if not earlier or earlier["unit"] != figure.unit or not earlier["median"]:
        return ""
    return f"{figure.median / earlier['median']:.2f}x"


# -- where it was measured -----------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Describe the machine, the package versions and the commit, to store with figures."""
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
    """Return the CPU's model name, or the system's name for it."""
    command = (
        ["sysctl", "-n", "machdep.cpu.brand_string"] if platform.system() == "Darwin" else ["lscpu"]
    )
    for line in _output(command).splitlines():
        name, _, value = line.rpartition(":")
        if name.strip() in ("", "Model name"):
            return value.strip()
    return platform.processor() or "unknown CPU"


def commit() -> str:
    """Return the current commit, marked if `src` has changes; empty outside a repository."""
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
    """Read an earlier result of a benchmark from a file of one or all; empty if there is none."""
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
    """Run a benchmark from its command line; returns the exit status, 1 if a bound is missed."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="measure roughly, in seconds")
    parser.add_argument("--json", type=Path, help="output file for all figures")
    parser.add_argument("--against", type=Path, help="an earlier result to compare with")
    add_options(parser)
    options = parser.parse_args(arguments)
    report = Report(name, options.quick, options)
    # Exit by an exception on SIGTERM, so that the benchmark stops the servers it has started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    report.seconds = seconds(lambda: measure(report))
    against = options.against or RESULTS / f"{'quick' if options.quick else 'full'}.json"
    print(report.table(earlier_result(name, against)))
    if options.json:
        options.json.write_text(json.dumps(report.as_json(), indent=1), "utf-8")
    return int(bool(report.missed))
