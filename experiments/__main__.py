"""Runs experiments, each in a separate process, and writes their results.

    python -m experiments                     # all; writes docs/experiments.md
    python -m experiments EXP-006 EXP-008     # some of them; writes nothing
    python -m experiments EXP-006 --page x.md # … writes them to this file

The exit status is 1 if one failed.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import ROOT, environment
from experiments.common import Answer, Experiment, Line, answer

# Where each one is; modules are imported by the process that runs one, for some are heavy.
MODULES = {
    "EXP-001": "exp_geometry",
    "EXP-002": "exp_blocks",
    "EXP-003": "exp_caches",
    "EXP-004": "exp_caches",
    "EXP-005": "exp_decode",
    "EXP-006": "exp_blocks",
    "EXP-007": "exp_caches",
    "EXP-007a": "exp_disk",
    "EXP-008": "exp_disk",
    "EXP-009": "exp_wire",
    "EXP-010": "exp_wire",
    "EXP-011": "exp_swap",
    "EXP-012": "exp_swap",
    "EXP-013": "exp_retention",
    "EXP-latency": "exp_decode",
}
PAGE = ROOT / "docs" / "experiments.md"


def find(name: str) -> Experiment:
    """Return the experiment with this name."""
    module = importlib.import_module(f"experiments.{MODULES[name]}")
    found: Experiment = next(each for each in module.EXPERIMENTS if each.id == name)
    return found


def run_apart(name: str, *, is_quick: bool) -> Answer:
    """Run an experiment in a separate process, which prints its lines."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "answer.json"
        command = [sys.executable, "-m", "experiments", name, "--json", str(path)]
        command += ["--quick"] if is_quick else []
        status = subprocess.run(command, cwd=ROOT, check=False).returncode  # noqa: S603 - our own
        if not path.exists():
            return Answer(name, lines=(Line("FAIL", "run", f"exit status {status}"),))
        return Answer.from_json(json.loads(path.read_text("utf-8")))


def page(answers: Sequence[Answer]) -> str:
    """Format all answers as a document."""
    place = environment()
    versions = ", ".join(f"{name} {version}" for name, version in place["versions"].items())
    rows = [
        f"| [{each.id}](#{each.anchor}) | {each.question} | {each.verdict} | {each.seconds:.0f} s |"
        for each in answers
    ]
    head = f"""# Experiments

Each experiment answers a question that came up before something was built.
`make experiments` runs them all and writes this page; `python -m experiments EXP-006` runs one.
SKIP marks a part that this machine cannot run, with the reason; the rest of the experiment runs.

Machine: {place["machine"]}, {place["memory_gb"]} GB, {place["system"]}, load {place["load"][0]} at
the end. Python {place["python"]}, {versions}. Commit {place["commit"]}, {place["date"]}.

| | question | | took |
|---|---|---|---|
"""
    return head + "\n".join(rows) + "\n\n" + "\n\n".join(map(str, answers)) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected experiments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", nargs="*", metavar="EXP", help=", ".join(MODULES))
    parser.add_argument("--quick", action="store_true", help="run smaller versions")
    parser.add_argument("--page", type=Path, help="file for all answers")
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.ids or list(MODULES)
    if unknown := set(names) - set(MODULES):
        parser.error(f"there is no experiment {', '.join(sorted(unknown))}")
    answers = []
    for place, name in enumerate(names, 1):
        if options.json:
            answers.append(answer(find(name), is_quick=options.quick))
            options.json.write_text(json.dumps(answers[-1].as_json()), "utf-8")
        else:
            print(f"[{place}/{len(names)}]", end=" ", flush=True)
            answers.append(run_apart(name, is_quick=options.quick))
    if options.page or not options.ids:
        path = options.page or PAGE
        path.write_text(page(answers), "utf-8")
        print(f"wrote {path}")
    return int(any(each.verdict == "FAIL" for each in answers))


if __name__ == "__main__":
    sys.exit(main())
