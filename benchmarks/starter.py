"""What the benchmarks of the torch backend share: the starter model, and runs to compare."""

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

# As in the server.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import torch
from transformers import AutoModelForCausalLM

from semantic.adapters.config.settings import STARTER_MODEL, load_settings
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.cpu import Weights
from semantic.adapters.outbound.backends.torch.loading import TorchOptions, choose_dtype
from semantic.adapters.outbound.models.source import LocalModelSource
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.domain.spec import ModelCacheSpec

TEXT = (
    "The city lay where two rivers met, and its people had always traded: salt from the coast, "
    "wool from the hills, and later paper, clocks and printed books. When the first railway came "
    "in 1846, the old gates were pulled down, and within thirty years the number of its citizens "
    "had grown from nine thousand to more than sixty thousand. A visitor of that time wrote that "
    "nobody there seemed to walk who could run, nor to run who could shout. "
)


def starter_directory() -> Path:
    """The starter model's directory, imported if need be."""
    source = LocalModelSource(load_settings().home_dir / "models", STARTER_MODEL)
    return source.resolve(STARTER_MODEL, print)


def prompt_tokens(directory: Path, num_tokens: int) -> list[int]:
    """So many tokens of English."""
    tokenizer = HFTokenizer(directory)
    tokens = tokenizer.encode(TEXT * (num_tokens // 80 + 1))
    return tokens[:num_tokens]


@functools.cache
def served_dtype() -> torch.dtype:
    """The number format a server chooses on this CPU."""
    return choose_dtype("auto", torch.device("cpu"))[0]


def library_model(directory: Path) -> Any:
    """The model as `transformers` runs it, in the dtype the backend uses."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=served_dtype(), attn_implementation="sdpa", local_files_only=True
    ).eval()


@contextlib.contextmanager
def backend(directory: Path, weights: Weights = "full") -> Iterator[TorchBackend]:
    """The backend, as the server loads it."""
    config = json.loads((directory / "config.json").read_text())
    spec = ModelCacheSpec.from_config(config)
    made = TorchBackend(directory, spec, TorchOptions(weights=weights))
    yield made
    made.shutdown()


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


def interleaved(calls: dict[str, Callable[[], float]], rounds: int) -> Rounds:
    """Measure everything once a round, after one round that does not count."""
    figures: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        for name, call in calls.items():
            figure = call()
            if index:
                figures[name].append(figure)
    return Rounds(figures)


def report(title: str, ratio: float, target: float) -> bool:
    """Print a ratio against its target; returns whether it is reached."""
    is_reached = ratio >= target
    print(
        f"  {title:<44} {ratio:5.2f}x  (target {target:.2f}x)  {'ok' if is_reached else 'MISSED'}"
    )
    return is_reached
