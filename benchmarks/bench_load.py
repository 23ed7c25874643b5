"""Load from a third-party generator: guidellm, in a separate environment.

guidellm generates conversations (a shared prefix, then several turns), sends them with one stream
per agent, and measures. It runs twice with the same conversations, with a restart of the server in
between. The report contains its figures of both runs, for each server.

    python -m benchmarks.bench_load                               # memory on, and nothing on disk
    python -m benchmarks.bench_load --systems on llama.cpp
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.bench_workflow import make_systems, starter_tokenizer_directory
from benchmarks.report import ROOT, Report, run

VERSION = "0.8.1"
PLACE = ROOT / "build" / "guidellm"
ROUNDS = ("first run", "again, after a restart")


def program() -> Path:
    """Return the path of guidellm; installs it at first use, with the installed version of PyTorch.

    The newest PyTorch would install gigabytes of CUDA libraries.
    """
    path = PLACE / "bin" / "guidellm"
    if not path.exists():
        print(f"installing guidellm {VERSION} into {PLACE}", flush=True)
        venv.create(PLACE, with_pip=True)
        packages = [f"guidellm=={VERSION}", f"torch=={version('torch').partition('+')[0]}"]
        command = [str(PLACE / "bin" / "pip"), "install", "--quiet", *packages]
        subprocess.run(command, check=True)  # noqa: S603 - our own command
    return path


def generate(url: str, model: str, options: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Run guidellm against a server; returns its metrics."""
    turns, prompt = options.turns, options.tokens * 3 // 4
    data = (
        f"kind=synthetic_text,prompt_tokens={prompt},output_tokens={options.reply},turns={turns},"
        f"prefix_tokens={options.tokens - prompt},prefix_count=1"
    )
    target = url.removesuffix("/v1")
    command = [str(program()), "run", "--data", data, "--disable-console-interactive"]
    backend = f"kind=openai_http,target={target},model={model}"
    command += ["--backend", f"{backend},request_format=/v1/chat/completions"]
    command += ["--profile", f"kind=concurrent,streams={options.agents}"]
    command += ["--constraint", f"kind=max_requests,count={options.agents * turns}"]
    command += ["--tokenizer", f"kind=hf_auto,model={starter_tokenizer_directory()}"]
    command += ["--output", f"kind=json,path={output}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(  # noqa: S603 - our own command
        command, env=environment, capture_output=True, text=True, check=False
    )
    if not output.exists():
        raise RuntimeError(f"guidellm failed: {done.stdout[-400:]} {done.stderr[-400:]}")
    metrics: dict[str, Any] = json.loads(output.read_text("utf-8"))["benchmarks"][0]["metrics"]
    return metrics


def add_metrics(report: Report, title: str, metrics: dict[str, Any]) -> None:
    """Add guidellm's figures of the successful requests."""
    first = metrics["time_to_first_token_ms"]["successful"]
    quartiles = [first["percentiles"][name] / 1000 for name in ("p25", "p50", "p75")]
    report.add(f"{title}: TTFT (quartiles)", quartiles, "s")
    speed = metrics["output_tokens_per_second"]["successful"]["mean"]
    report.add(f"{title}: tokens a second", speed, "tokens/s")
    report.add(f"{title}: requests answered", first["count"], "requests")


def measure(report: Report) -> None:
    """Run guidellm against each server, twice."""
    options = report.options
    names = ("agents", "tokens", "turns", "reply")
    report.settings.update({name: getattr(options, name) for name in names}, guidellm=VERSION)
    options.peer_url = []
    with tempfile.TemporaryDirectory() as directory:
        systems = make_systems(options, options.agents, options.tokens * options.turns)
        for place in ROUNDS:
            for system in systems:
                home = Path(directory) / system.name
                with system.start(home) as url:
                    # Its options are parted by commas.
                    output = Path(directory) / f"{len(report.figures)}.json"
                    metrics = generate(url, system.model, options, output)
                add_metrics(report, f"{system.name}, {place}", metrics)
    for system in systems:
        titles = (f"{system.name}, {place}: TTFT (quartiles)" for place in ROUNDS)
        first, again = (report.figures[title].median for title in titles)
        report.add(f"{system.name}: TTFT, first run / again", first / again)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--agents", type=int, default=5, help="number of streams")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the first turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--reply", type=int, default=16, help="tokens of a reply")
    parser.add_argument("--systems", nargs="*", default=["on", "off"], help="see bench_workflow")


if __name__ == "__main__":
    sys.exit(run("load", measure, add_options=add_options))
