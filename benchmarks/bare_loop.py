"""Measures the backend's library alone: a prompt in steps and a few tokens, without a server.

Runs in a separate process, so that a server started afterwards has the device to itself.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STEPS = (512, 2048, 4096)
NUM_TOKENS = 32


def measure(backend: str, model: Path, device: str, lengths: Sequence[int]) -> dict[str, Any]:
    """Measure seconds per prompt by length, with the best step size, and ms per token after it."""
    command = [sys.executable, "-m", "benchmarks.bare_loop", backend, str(model), device]
    command += map(str, lengths)
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _mlx(model: Path, device: str) -> Callable[[list[list[int]]], tuple[float, float]]:
    from semantic.adapters.outbound.backends.mlx import runtime  # noqa: PLC0415 - of one backend, not the other

    runtime.prepare()
    import mlx.core as mx  # noqa: PLC0415 - of one backend, not the other

    from semantic.adapters.outbound.backends.mlx.loading import choose_device  # noqa: PLC0415 - of one backend, not the other

    choose_device("cpu" if device == "cpu" else "auto")
    cache = runtime.import_library("mlx_lm.models.cache")
    loaded, _ = runtime.import_library("mlx_lm.utils").load_model(model)

    def run(chunks: list[list[int]]) -> tuple[float, float]:
        caches = cache.make_prompt_cache(loaded)
        started = time.perf_counter()
        for chunk in chunks[:-1]:
            loaded(mx.array([chunk]), cache=caches)
            mx.eval([c.state for c in caches])
        token = mx.argmax(loaded(mx.array([chunks[-1]]), cache=caches)[:, -1], axis=-1)
        mx.eval(token)
        prompt_s = time.perf_counter() - started
        for _ in range(NUM_TOKENS):
            new = mx.argmax(loaded(token[:, None], cache=caches)[:, -1], axis=-1)
            mx.async_eval(new)
            token.item()
            token = new
        mx.eval(token)
        return prompt_s, (time.perf_counter() - started - prompt_s) / NUM_TOKENS

    return run


def _torch(model: Path, _: str) -> Callable[[list[list[int]]], tuple[float, float]]:
    import torch  # noqa: PLC0415 - of one backend, not the other
    from transformers import AutoModelForCausalLM, DynamicCache  # noqa: PLC0415 - of one backend, not the other

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True).eval()

    @torch.inference_mode()
    def run(chunks: list[list[int]]) -> tuple[float, float]:
        cache = DynamicCache()
        started = time.perf_counter()
        token = 0
        for chunk in chunks:
            ids = torch.tensor([chunk])
            token = int(loaded(ids, past_key_values=cache, logits_to_keep=1).logits.argmax())
        prompt_s = time.perf_counter() - started
        for _ in range(NUM_TOKENS):
            ids = torch.tensor([[token]])
            token = int(loaded(ids, past_key_values=cache).logits.argmax())
        return prompt_s, (time.perf_counter() - started - prompt_s) / NUM_TOKENS

    return run


def main(backend: str, model: str, device: str, *lengths: str) -> None:
    """Print the measurements of the second run of each."""
    run = {"mlx": _mlx, "torch": _torch}[backend](Path(model), device)
    found: dict[str, Any] = {}
    for length in map(int, lengths):
        tokens = [100 + position % 1000 for position in range(length)]
        best: dict[str, Any] = {}
        for step in STEPS:
            if step > length and best:
                continue
            chunks = [tokens[first : first + step] for first in range(0, length, step)]
            run(chunks)
            prompt_s, token_s = run(chunks)
            if not best or prompt_s < best["prompt_s"]:
                best = {"prompt_s": prompt_s, "step": step, "ms_per_token": 1000 * token_s}
        found[str(length)] = best
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
