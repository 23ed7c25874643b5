"""Prefill with the torch backend against `transformers`: one forward over a prompt."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.common import GREEDY, Target, interleaved, seconds, verdict
from benchmarks.starter import (
    backend,
    library_model,
    prompt_tokens,
    served_dtype,
    starter_directory,
)
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.ports.backend import Chunk, Draw, SequenceId, Step

NUM_PROMPT, ROUNDS = 2048, 5


def library_speed(model: Any, prompt: list[int]) -> float:
    """Tokens a second of the library: what `generate` does before its first token."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)

    def run() -> None:
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=0
            )

    return len(prompt) / seconds(run)


def backend_speed(made: TorchBackend, prompt: list[int], chunk_size: int) -> float:
    """Tokens a second of the backend, in chunks."""
    seq = SequenceId(0)
    made.open(seq, prompt)

    def run() -> None:
        for start in range(0, len(prompt), chunk_size):
            tokens = tuple(prompt[start : start + chunk_size])
            is_last = start + chunk_size >= len(prompt)
            draw = Draw(GREEDY, len(prompt)) if is_last else None
            made.collect(made.launch(Step((Chunk(seq, start, tokens, draw),))))

    elapsed = seconds(run)
    made.close(seq)
    return len(prompt) / elapsed


def main() -> int:
    """Print speeds and ratios; 1 if the target is missed."""
    directory = starter_directory()
    prompt = prompt_tokens(directory, NUM_PROMPT)
    library = library_model(directory)
    with backend(directory) as made:
        calls: dict[str, Callable[[], float]] = {
            "generate": partial(library_speed, library, prompt)
        }
        for size in (NUM_PROMPT, 512, 128):
            calls[f"chunks of {size}"] = partial(backend_speed, made, prompt, size)
        speeds = interleaved(calls, ROUNDS)
    print(f"prompt of {NUM_PROMPT}, {served_dtype()}, {torch.get_num_threads()} threads")
    speeds.print("tokens a second")
    ratio = speeds.ratio(f"chunks of {NUM_PROMPT}", "generate")
    return verdict([Target("prefill against generate", ratio, 0.95, is_least=True)])


if __name__ == "__main__":
    sys.exit(main())
