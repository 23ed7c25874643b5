"""The torch backend compared with `transformers`: same weights, same dtype, interleaved.

Prefill is one forward pass over a prompt, compared with `generate` up to its first token; decoding
is one, four and eight sequences, compared with `generate` with one.
"""

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import GREEDY
from benchmarks.report import Report, Rounds, interleaved, run, seconds
from benchmarks.starter import (
    backend,
    library_model,
    prompt_tokens,
    served_dtype,
    starter_directory,
)
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.ports.backend import LAST_SAMPLED, Chunk, Draw, SequenceId, Step

NUM_PROMPT, NUM_NEW, PREFILL = 128, 24, 2048


def generate(model: Any, prompt: list[int], num_new: int) -> float:
    """Return the seconds of the library's own loop."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        return seconds(
            lambda: model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                pad_token_id=0,
            )
        )


def generate_speed(model: Any, prompt: list[int]) -> float:
    """Return the library's tokens per second, without prefill."""
    return (NUM_NEW - 1) / (generate(model, prompt, NUM_NEW) - generate(model, prompt, 1))


def prefill_speed(made: TorchBackend, prompt: list[int], chunk_size: int) -> float:
    """Return the backend's tokens per second, in chunks."""
    seq = SequenceId(0)
    made.open_sequence(seq, prompt)

    def compute() -> None:
        for start in range(0, len(prompt), chunk_size):
            tokens = tuple(prompt[start : start + chunk_size])
            is_last = start + chunk_size >= len(prompt)
            draw = Draw(GREEDY, len(prompt)) if is_last else None
            made.collect(made.launch(Step((Chunk(seq, start, tokens, draw),))))

    elapsed = seconds(compute)
    made.close_sequence(seq)
    return len(prompt) / elapsed


def decode_speed(made: TorchBackend, prompt: list[int], num_sequences: int) -> float:
    """Return the tokens per second of all sequences together."""
    draw = Draw(GREEDY, len(prompt))
    for seq in range(num_sequences):
        made.open_sequence(SequenceId(seq), prompt)
        first = Chunk(SequenceId(seq), 0, (*prompt[:-1], seq + 100), draw)
        made.collect(made.launch(Step((first,))))

    def decode() -> None:
        for i in range(NUM_NEW):
            rows = (
                Chunk(SequenceId(s), len(prompt) + i, LAST_SAMPLED, draw)
                for s in range(num_sequences)
            )
            made.collect(made.launch(Step(tuple(rows))))

    elapsed = seconds(decode)
    for seq in range(num_sequences):
        made.close_sequence(SequenceId(seq))
    return num_sequences * NUM_NEW / elapsed


def speeds(directory: Path, num_prefill: int, rounds: int) -> tuple[Rounds, Rounds]:
    """Return the tokens per second of prefill and decoding, backend and library interleaved."""
    library = library_model(directory)
    short, long = prompt_tokens(directory, NUM_PROMPT), prompt_tokens(directory, num_prefill)
    decoding: dict[str, Callable[[], float]] = {"generate": partial(generate_speed, library, short)}
    prefill: dict[str, Callable[[], float]] = {
        "generate": lambda: num_prefill / generate(library, long, 1)
    }
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(backend(directory))
        for count in (1, 4, 8):
            decoding[str(count)] = partial(decode_speed, made, short, count)
        for size in (num_prefill, 512, 128):
            prefill[f"chunks of {size}"] = partial(prefill_speed, made, long, size)
        return interleaved(prefill, rounds), interleaved(decoding, rounds)


def measure(report: Report) -> None:
    """Measure speeds."""
    directory = starter_directory()
    num_prefill, rounds = report.choose((256, 1), (PREFILL, 3))
    report.settings.update(
        dtype=str(served_dtype()), threads=torch.get_num_threads(), prefill=num_prefill
    )
    prefill, decoding = speeds(directory, num_prefill, rounds)
    report.add_rounds(prefill, "tokens/s", "prefill, ")
    report.add_rounds(decoding, "tokens/s", "decode, ")
    ratios = prefill.ratios(f"chunks of {num_prefill}", "generate")
    report.add("prefill / generate", ratios, least=0.95)
    for count, least in ((1, 1.4), (4, 4.0), (8, 6.0)):
        ratios = decoding.ratios(str(count), "generate")
        report.add(f"decode {count} / generate with one", ratios, least=least)


if __name__ == "__main__":
    sys.exit(run("torch", measure))
