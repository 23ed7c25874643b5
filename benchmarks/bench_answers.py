"""Quality of 4-bit weights of the starter model, compared with full weights and llama.cpp.

Measures the Kullback-Leibler divergence of next-token distributions over English text, computed as
in the server. Then compares answers to fixed questions over HTTP: this server with the file's
weights, this server with full weights, and llama.cpp on the same file (`make peer`).
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.client import Client, said
from benchmarks.common import serving
from benchmarks.peer import peer_path, peer_serving
from benchmarks.report import Report, run
from benchmarks.starter import prompt_tokens
from semantic.adapters.config.settings import STARTER_MODEL
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.kv.sequences import ChunkSpan, TorchSequence
from semantic.adapters.outbound.backends.torch.loading import TorchOptions, WeightsOption
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.adapters.outbound.models.gguf.importing import starter_gguf
from semantic.adapters.outbound.models.source import LocalModelSource
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.backend import Chunk, SequenceId

NUM_TOKENS, NUM_REPLY = 256, 24
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue?",
    "What is two plus two?",
    "Who wrote Hamlet?",
    "What do bees make?",
    "Translate 'good morning' into Spanish.",
    "Which planet is closest to the sun?",
    "Write one sentence about the sea.",
    "What is water made of?",
)


def logprobs(home: Path, tokens: list[int], weights: WeightsOption) -> torch.Tensor:
    """Return log-probabilities after every token of one chunk, as the backend computes them."""
    directory = LocalModelSource(home / "models", STARTER_MODEL).resolve(STARTER_MODEL, print)
    spec = ModelCacheSpec.from_config(json.loads((directory / "config.json").read_text()))
    options = TorchOptions(
        "auto" if weights == "auto" else "float32", weights, native=NativeBuild(home)
    )
    backend = TorchBackend(directory, spec, options)
    sequence = TorchSequence(tokens)
    backend._grow(sequence, len(tokens))
    span = ChunkSpan(Chunk(SequenceId(0), 0, tuple(tokens)), sequence, tuple(tokens), 0)
    decoder = backend._decoder
    forward = backend._runner.step if decoder is None else decoder.step
    return functional.log_softmax(torch.from_numpy(forward([span], range(len(tokens)))), dim=-1)


def answers(port: int) -> list[str]:
    """Return a server's answers to the questions, asked one after another."""
    client = Client(f"http://127.0.0.1:{port}/v1")
    return [asyncio.run(client.ask(said(question), NUM_REPLY)).text for question in QUESTIONS]


@contextlib.contextmanager
def ours(home: Path, weights: str) -> Iterator[int]:
    """Run this server on the starter model."""
    arguments = ("--home", str(home), "--weights", weights)
    with serving(*arguments, settings={"model_aliases": "any"}) as port:
        yield port


def measure(report: Report) -> None:
    """Measure divergence, then compare answers."""
    with tempfile.TemporaryDirectory() as temporary:
        home = report.options.home or Path(temporary)
        directory = LocalModelSource(home / "models", STARTER_MODEL).resolve(STARTER_MODEL, print)
        tokens = prompt_tokens(directory, NUM_TOKENS)
        kept, full = (logprobs(home, tokens, weights) for weights in ("auto", "full"))
        kl = functional.kl_div(kept, full, reduction="none", log_target=True).sum(dim=-1)
        same = (kept.argmax(dim=-1) == full.argmax(dim=-1)).float().mean()
        report.add("KL from float32, mean", float(kl.mean()), "nats a token", most=1e-3)
        report.add("KL from float32, greatest", float(kl.max()), "nats a token")
        report.add("likeliest token the same", 100 * float(same), "%")
        said_by: dict[str, list[str]] = {}
        for weights in ("auto", "full"):
            with ours(home, weights) as port:
                said_by[weights] = answers(port)
        if peer_path().exists():
            with peer_serving(starter_gguf(), streams=1) as port:
                said_by["llama.cpp"] = answers(port)
    for name, texts in said_by.items():
        pairs = zip(texts, said_by["full"], strict=True)
        num_same = sum(text == expected for text, expected in pairs)
        about = {"auto": "as in the file", "full": "in full"}.get(name, name)
        report.add(f"answers as of full weights: {about}", num_same, f"of {len(QUESTIONS)}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--home", type=Path, help="home of this server; default: a new one")


if __name__ == "__main__":
    sys.exit(run("answers", measure, add_options=add_options))
