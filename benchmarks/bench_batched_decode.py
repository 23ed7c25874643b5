"""Decoding with the torch backend against `transformers` `generate`: same weights, same dtype.

Also the price of quantised weights (`--weights int8|int4`): the Kullback-Leibler divergence of
their next-token distributions from the unquantised ones, over running text.
"""

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch.nn import functional

from benchmarks.common import GREEDY, Rounds, Target, interleaved, seconds, verdict
from benchmarks.starter import (
    backend,
    library_model,
    prompt_tokens,
    served_dtype,
    starter_directory,
)
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.cpu import Weights, speed_up
from semantic.ports.backend import LAST_SAMPLED, Chunk, Draw, SequenceId, Step

NUM_PROMPT, NUM_NEW, ROUNDS = 128, 24, 7


def generate_speed(model: Any, prompt: list[int]) -> float:
    """Tokens a second of the library's own loop, prefill not counted."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)

    def run(num_new: int) -> float:
        with torch.inference_mode():
            return seconds(
                lambda: model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=num_new,
                    min_new_tokens=num_new,
                    do_sample=False,
                    pad_token_id=0,
                )
            )

    return (NUM_NEW - 1) / (run(NUM_NEW) - run(1))


def backend_speed(made: TorchBackend, prompt: list[int], num_sequences: int) -> float:
    """Tokens a second of all sequences together."""
    draw = Draw(GREEDY, len(prompt))
    for seq in range(num_sequences):
        made.open(SequenceId(seq), prompt)
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
        made.close(SequenceId(seq))
    return num_sequences * NUM_NEW / elapsed


def divergence(directory: Path, weights: Weights, tokens: list[int]) -> float:
    """Mean KL of the quantised model's next-token distributions, four rows at a time."""
    full, quantised = library_model(directory), library_model(directory)
    speed_up(quantised, weights)
    total, caches = 0.0, [None, None]
    with torch.inference_mode():
        for start in range(0, len(tokens), 4):
            ids = torch.tensor([tokens[start : start + 4]])
            logits = []
            for i, model in enumerate((full, quantised)):
                output = model(ids, past_key_values=caches[i], use_cache=True)
                caches[i] = output.past_key_values
                logits.append(functional.log_softmax(output.logits[0].float(), dim=-1))
            total += float(
                functional.kl_div(logits[1], logits[0], reduction="sum", log_target=True)
            )
    return total / len(tokens)


def measure(directory: Path) -> Rounds:
    """Tokens a second of everything that is compared, in turns."""
    prompt = prompt_tokens(directory, NUM_PROMPT)
    calls: dict[str, Callable[[], float]] = {
        "generate": partial(generate_speed, library_model(directory), prompt)
    }
    with contextlib.ExitStack() as stack:
        for weights in get_args(Weights):
            made = stack.enter_context(backend(directory, weights))
            for count in (1, 4, 8):
                calls[f"{weights} {count}"] = partial(backend_speed, made, prompt, count)
        return interleaved(calls, ROUNDS)


def main() -> int:
    """Print speeds and ratios; 1 if a target is missed."""
    directory = starter_directory()
    speeds = measure(directory)
    print(f"prompt of {NUM_PROMPT}, {served_dtype()}, {torch.get_num_threads()} threads")
    speeds.print("tokens a second")
    ratios = {name: speeds.ratio(name, "generate") for name in speeds.figures}
    quantised = max(ratios["int8 1"], ratios["int4 1"])
    text = prompt_tokens(directory, 512)
    for weights in ("int8", "int4"):
        kl = divergence(directory, weights, text)
        print(f"  KL of {weights} weights from bfloat16: {kl:.2e} a token")
    print("against generate with one sequence")
    return verdict(
        [
            Target("1 sequence", ratios["full 1"], 1.4, is_least=True),
            Target("1 sequence, int8 or int4 weights", quantised, 2.0, is_least=True),
            Target("4 sequences", ratios["full 4"], 4.0, is_least=True),
            Target("8 sequences", ratios["full 8"], 6.0, is_least=True),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
