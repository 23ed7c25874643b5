"""Results of `bench_peer` on each kind of machine, side by side in README.md and the docs.

`make bench` adds the machine that it runs on. By hand:

    python -m benchmarks.bench_peer --conditions quiet --json peer.json
    python -m benchmarks.machines peer.json --title "Apple M4 Max, 14 cores"
    python -m benchmarks.machines                   # only writes the pages again
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, ROOT

FILE = RESULTS / "machines.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
RESTART = "first token after a restart"
# Figures of bench_peer on an idle machine, and the heads of their columns.
COLUMNS = {
    RESTART: "first token after a restart, s",
    "workflow": "five agents, three turns, s",
    "one stream": "one stream, tokens/s",
    "eight streams": "eight streams, tokens/s",
    "prefill of 512": "prompt of 512, tokens/s",
    "prefill of 4096": "prompt of 4,096, tokens/s",
}
_NUM_IN_README = 4
Record = Mapping[str, Any]


def record_of(peer: Record, title: str = "") -> dict[str, Any]:
    """Shorten a result of `bench_peer` to what the pages show; empty if llama.cpp was not run."""
    figures, where = peer["figures"], peer["environment"]
    found = {
        name: [figures[f"quiet, {name}, {one}"]["median"] for one in ("semantic", "llama.cpp")]
        for name in COLUMNS
        if f"quiet, {name}, semantic" in figures
    }
    if not found:
        return {}
    kernels = os.environ.get("SEMANTIC_NATIVE", "auto")
    named = {key: where[key] for key in ("machine", "load", "commit", "date")}
    return {"title": title or where["machine"], **named, "kernels": kernels, "figures": found}


def add(record: Record, file: Path = FILE) -> None:
    """Store a record, in the place of an earlier one of the same machine, whose title stays."""
    records = load(file)
    for place, old in enumerate(records):
        if (old["machine"], old["kernels"]) == (record["machine"], record["kernels"]):
            is_named = record["title"] != record["machine"]
            records[place] = {**record, "title": (record if is_named else old)["title"]}
            break
    else:
        records.append(dict(record))
    file.write_text(json.dumps(records, indent=1) + "\n", "utf-8")


def load(file: Path = FILE) -> list[dict[str, Any]]:
    """Read all records, in the order of the pages."""
    found: list[dict[str, Any]] = json.loads(file.read_text("utf-8")) if file.exists() else []
    return found


# -- the pages ------------------------------------------------------------------------------------


def headline(records: Sequence[Record]) -> str:
    """Make README's first line, with every machine on which both servers restarted."""
    usual = [record for record in records if record["kernels"] == "auto"]
    times = [(_ratio(record, RESTART), record["title"]) for record in usual]
    (most, where), *rest = sorted(((ratio, title) for ratio, title in times if ratio), reverse=True)
    others = "".join(f", {ratio:.0f} times on {title}" for ratio, title in rest)
    return (
        f"**After a restart, five agents answer {most:.0f} times sooner than with llama.cpp** on "
        f"{where}{others}."
    )


def table(records: Sequence[Record], columns: Sequence[str], benchmarks: str = "") -> str:
    """Make a row for each machine; `benchmarks` is the path of that page, if it is another."""
    lines = [f"| Semantic / llama.cpp | {' | '.join(COLUMNS[name] for name in columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for record in records:
        cells = [_cell(record, name) for name in columns]
        lines.append(f"| {record['title']} | {' | '.join(cells)} |")
    more = " |" * (len(columns) - 1)
    lines.append(f"| Apple Silicon | [send us yours]({benchmarks}#send-us-yours) |{more}")
    return "\n".join(lines)


def write_pages(records: Sequence[Record], pages: Sequence[Path] = PAGES) -> None:
    """Replace what stands between the marks of both pages."""
    readme, benchmarks = pages
    _replace(readme, "headline", headline(records))
    columns = list(COLUMNS)
    _replace(readme, "machines", table(records, columns[:_NUM_IN_README], "docs/benchmarks.md"))
    _replace(benchmarks, "machines", table(records, columns))


def _replace(page: Path, name: str, text: str) -> None:
    pattern = re.compile(rf"(<!-- {name}: [^>]*-->\n)(.*?)(<!-- end of {name} -->)", re.DOTALL)
    old = page.read_text("utf-8")
    new, count = pattern.subn(lambda found: f"{found[1]}\n{text}\n\n{found[3]}", old)
    if count != 1:
        raise ValueError(f"{page.name} has {count} places for {name}")
    page.write_text(new, "utf-8")


def _ratio(record: Record, name: str) -> float:
    """How many times as good this server is; 0 if one of the two was not measured."""
    ours, theirs = record["figures"].get(name, (None, None))
    if not ours or not theirs:
        return 0.0
    return float(theirs / ours if COLUMNS[name].endswith(" s") else ours / theirs)


def _cell(record: Record, name: str) -> str:
    ours, theirs = record["figures"].get(name, (None, None))
    if ours is None:
        return "not measured"
    if theirs is None:
        return f"{_figure(ours)} / not run"
    ratio = _ratio(record, name)
    return f"{_figure(ours)} / {_figure(theirs)} ({ratio:.{0 if ratio >= 10 else 1}f}x)"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Add a result, if one is given, and write the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", nargs="?", type=Path, help="JSON of bench_peer")
    parser.add_argument("--title", default="", help="name of the machine; default: its CPU")
    options = parser.parse_args(arguments)
    if options.result:
        found = record_of(json.loads(options.result.read_text("utf-8")), options.title)
        if not found:
            parser.error("llama.cpp was not run; build it with `make peer`")
        add(found)
    write_pages(load())
    return 0


if __name__ == "__main__":
    sys.exit(main())
