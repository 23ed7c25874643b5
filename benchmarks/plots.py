"""Plots of a result, as SVG files for the documents: `python -m benchmarks.plots RESULT.json`.

Skips plots for which a result has no figures. Needs matplotlib, from the `bench` extra.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT

IMAGES = ROOT / "docs" / "img"
_COLOURS = ("#2a6f97", "#d1495b", "#66a182", "#edae49", "#7a5195", "#8d99ae")
Groups = dict[str, dict[str, float]]  # a bar's height, by series and group


def group(figures: Mapping[str, Any], pattern: str) -> Groups:
    """Return the medians of figures whose name matches, by its groups `series` and `group`.

    >>> group({"a: x": {"median": 1}, "b: x": {"median": 2}}, r"(?P<group>.): (?P<series>.)")
    {'x': {'a': 1, 'b': 2}}
    """
    found: Groups = {}
    for name, figure in figures.items():
        if match := re.fullmatch(pattern, name):
            found.setdefault(match["series"], {})[match["group"]] = figure["median"]
    return found


# What is drawn: file, benchmark, pattern of its figures, title, axis, whether it is logarithmic.
PLOTS: tuple[tuple[str, str, str, str, str, bool], ...] = (
    (
        "bench-first-token",
        "workflow",
        r"5 agents x (?P<tokens>1024), (?P<series>[^:]+): TTFT, (?P<group>.+)",
        "5 agents, prompts of 1,024 tokens: time to the first token",
        "seconds, median",
        True,
    ),
    (
        "bench-first-token-4k",
        "workflow",
        r"5 agents x (?P<tokens>4096), (?P<series>[^:]+): TTFT, (?P<group>.+)",
        "5 agents, prompts of 4,096 tokens: time to the first token",
        "seconds, median",
        True,
    ),
    (
        "bench-memory",
        "memory",
        r"(?P<group>[^,]+), 10 agents: (?P<series>blocks|padded batch)",
        "10 agents of 1,200 to 16,000 tokens, 1,024 of them shared",
        "GB in 16 bits",
        False,
    ),
    (
        "bench-fit",
        "memory",
        r"(?P<series>[^,]+), 4 bits, (?P<group>\d+k): agents in 10.2 GB",
        "Agents whose state fits 10.2 GB at 4 bits, by tokens of each",
        "agents",
        True,
    ),
    (
        "bench-growth",
        "growth",
        r"(?P<group>[\d,]+) agents: (?P<series>later turn|first turn after a restart)",
        "A turn against agents on disk (fake backend)",
        "ms to the first token, median",
        False,
    ),
    (
        "bench-quality",
        "quality",
        r"(?P<series>8 bits|4 bits), restart (?P<group>\d+): KL",
        "Divergence from state that never rested, restart after restart",
        "KL, nats a token",
        True,
    ),
)


def draw(groups: Groups, path: Path, title: str, axis: str, *, is_log: bool) -> None:
    """Draw grouped bars, labelled with their heights."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "semantic"  # the same figures give the same file
    from matplotlib import pyplot  # noqa: PLC0415 - after the choice above

    names = list(dict.fromkeys(name for series in groups.values() for name in series))
    width = 0.8 / len(groups)
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    for place, (series, values) in enumerate(groups.items()):
        at = [index + (place - (len(groups) - 1) / 2) * width for index in range(len(names))]
        heights = [values.get(name, float("nan")) for name in names]
        bars = axes.bar(at, heights, width, label=series, color=_COLOURS[place % len(_COLOURS)])
        axes.bar_label(bars, fmt="%.3g", fontsize=7)
    axes.set_xticks(range(len(names)), names)
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(axis, fontsize=9)
    if is_log:
        axes.set_yscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw_all(
    result: Mapping[str, Any], images: Path = IMAGES, drawing: Callable[..., None] = draw
) -> list[Path]:
    """Draw all plots for which a result has figures; returns the files."""
    written = []
    for name, benchmark, pattern, title, axis, is_log in PLOTS:
        figures = result["benchmarks"].get(benchmark, {}).get("figures", {})
        if groups := group(figures, pattern):
            drawing(groups, images / f"{name}.svg", title, axis, is_log=is_log)
            written.append(images / f"{name}.svg")
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw a result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, help="result file of `python -m benchmarks`")
    parser.add_argument("--images", type=Path, default=IMAGES, help="output directory")
    options = parser.parse_args(arguments)
    for path in draw_all(json.loads(options.result.read_text("utf-8")), options.images):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
