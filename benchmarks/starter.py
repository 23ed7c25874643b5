"""The starter model for benchmarks: prompts, this project's backend, and `transformers`."""

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# As in the server.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import numpy as np
import torch

from semantic.adapters.config.settings import STARTER_MODEL
from semantic.adapters.config.sources import load_settings
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import (
    TorchOptions,
    choose_dtype,
)
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.adapters.outbound.backends.torch.reading import load_grouped
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
    """Return the starter model's directory, importing it if needed."""
    source = LocalModelSource(load_settings().home_dir / "models", STARTER_MODEL)
    return source.resolve(STARTER_MODEL, print)


def prompt_tokens(directory: Path, num_tokens: int) -> list[int]:
    """Return this many tokens of English text."""
    tokens = HFTokenizer(directory).encode(TEXT * (num_tokens // 80 + 1))
    return tokens[:num_tokens]


def random_tokens(num_tokens: int, seed: int) -> list[int]:
    """Return token ids with which no other conversation begins."""
    ids: list[int] = np.random.default_rng(seed).integers(1000, 48000, num_tokens).tolist()
    return ids


@functools.cache
def served_dtype() -> torch.dtype:
    """Return the dtype that a server chooses on this CPU."""
    return choose_dtype("auto")[0]


def library_model(directory: Path) -> Any:
    """Load the model with `transformers`, in the backend's dtype."""
    return load_grouped(directory, served_dtype(), is_kept=False).eval()


@contextlib.contextmanager
def backend(directory: Path) -> Iterator[TorchBackend]:
    """Load the backend as the server does."""
    spec = ModelCacheSpec.from_config(json.loads((directory / "config.json").read_text()))
    native = NativeBuild(load_settings().home_dir / "native")
    made = TorchBackend(directory, spec, TorchOptions(native=native))
    yield made
    made.shutdown()


def write_plain_model(target: Path) -> None:
    """Write the starter model with full weights, which other libraries can read."""
    directory = starter_directory()
    library_model(directory).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (directory / name).exists():
            shutil.copy(directory / name, target / name)
