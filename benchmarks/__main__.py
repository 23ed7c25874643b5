"""Runs the benchmarks one after another, each in a separate process, and stores the results.

    python -m benchmarks                      # all of them, 15 to 25 minutes on two cores
    python -m benchmarks --quick              # rough figures in under two minutes
    python -m benchmarks resume peer          # selected benchmarks, in full
    python -m benchmarks --keep               # stores the result as the new baseline, and draws it

Figures go to `build/bench/full.json` or `quick.json`, with the machine, versions and commit, and
are compared with `benchmarks/results`. A full comparison with llama.cpp (`make peer` builds it)
adds this machine to the tables of README.md and docs/benchmarks.md. The exit status is 1 if a
benchmark fails to run. A missed bound is only reported, because a busy machine misses some.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machines import add, load, record_of, write_pages
from benchmarks.plots import draw_all
from benchmarks.report import RESULTS, ROOT, earlier_result, environment

# In the order they run; the value says whether a quick run has it too.
SUITE = {
    "engine_overhead": True,
    "render": True,
    "memory": True,
    "resume": False,
    "workflow": True,
    "quality": False,
    "growth": False,
    "torch": False,
    "quantised": False,
    "answers": False,
    "peer": False,
    "keeping": False,
    "streams": False,
    "ahead": False,
    "tooltime": False,
    "compaction": False,
    "packs": False,
    "repairs": False,
    "grammar": False,
    "tenant_timing": True,
}
# What these say is of one part: among all others, a rough answer will do.
ROUGH = ("torch", "quantised", "keeping", "repairs", "grammar")
# Beside busy loops it would take twice as long.
ARGUMENTS = {"peer": ("--conditions", "quiet")}
BY_NAME = (
    "answers",
    "streams",
    "ahead",
    "tooltime",
    "compaction",
    "packs",
)  # minutes each, of one part
OUTPUT = ROOT / "build" / "bench"
_NO_PEER: Mapping[str, Any] = {"figures": {}, "environment": {}}


def run_one(name: str, *, is_quick: bool, against: Path) -> dict[str, Any]:
    """Run one benchmark in a separate process; returns its JSON, or its failure."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "found.json"
        command = [sys.executable, "-m", f"benchmarks.bench_{name}", "--json", str(path)]
        command += ["--quick"] if is_quick else ARGUMENTS.get(name, ())
        command += ["--against", str(against)]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode  # noqa: S603 - our own
        if not path.exists():
            return {"benchmark": name, "failed": f"exit status {status}", "figures": {}}
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return found


def file_name(*, is_quick: bool) -> str:
    """Return the file name of a result."""
    return "quick.json" if is_quick else "full.json"


def run_all(
    names: Sequence[str], rough: Collection[str], *, is_quick: bool, against: Path
) -> dict[str, Any]:
    """Run benchmarks in order and print the progress.

    Args:
        rough: Benchmarks that always run in quick mode.
    """
    found: dict[str, Any] = {}
    result: dict[str, Any] = {}
    started, file = time.monotonic(), file_name(is_quick=is_quick)
    for place, name in enumerate(names, 1):
        usual = earlier_result(name, against).get("seconds")
        about = f", about {usual:.0f} s" if usual else ""
        spent = (time.monotonic() - started) / 60
        print(f"\n[{place}/{len(names)}] {name}{about} ({spent:.1f} min so far)", flush=True)
        found[name] = run_one(name, is_quick=is_quick or name in rough, against=against)
        minutes = round((time.monotonic() - started) / 60, 2)
        result = {"environment": environment(), "minutes": minutes, "benchmarks": found}
        save(result, OUTPUT / file)  # what was found is kept if the next one is stopped
    return result


def missed(found: Mapping[str, Any]) -> list[str]:
    """Return the figures of a result that miss their bound."""
    return [
        f"{name}: {figure}"
        for name, result in found["benchmarks"].items()
        for figure, value in result["figures"].items()
        if (value["least"] is not None and value["median"] < value["least"])
        or (value["most"] is not None and value["median"] > value["most"])
    ]


def save(found: dict[str, Any], path: Path) -> None:
    """Write a result; benchmarks that did not run keep their earlier figures in the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        earlier = json.loads(path.read_text("utf-8"))
        found = {**found, "benchmarks": {**earlier["benchmarks"], **found["benchmarks"]}}
    path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected benchmarks and print a summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(SUITE))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--against", type=Path, help="an earlier result to compare with")
    parser.add_argument("--keep", action="store_true", help="store the result as the new baseline")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(SUITE):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    usual = [name for name in SUITE if name not in BY_NAME]
    names = options.names or [name for name in usual if SUITE[name] or not options.quick]
    file = file_name(is_quick=options.quick)
    rough = () if options.names else ROUGH
    against = options.against or RESULTS / file
    found = run_all(names, rough, is_quick=options.quick, against=against)
    if not options.quick and (machine := record_of(found["benchmarks"].get("peer", _NO_PEER))):
        add(machine)
        write_pages(load())
    if options.keep:
        save(found, RESULTS / file)
        if not options.quick:
            draw_all(json.loads((RESULTS / file).read_text("utf-8")))
    failed = [name for name, result in found["benchmarks"].items() if "failed" in result]
    print(f"\n{found['minutes']} minutes; figures are in {OUTPUT / file}")
    for line in missed(found):
        print(f"  MISSED {line}")
    for name in failed:
        print(f"  BROKEN {name}: {found['benchmarks'][name]['failed']}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
