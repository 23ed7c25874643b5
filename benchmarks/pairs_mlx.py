"""Two models with random weights on MLX that agree after a share of the tokens.

Each prefers the number after the last token: its head's rows are those of its embedding, moved by
one, and its layers add little. In the draft model, the rows of some tokens are exchanged.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.bench_drafts import Pair
from benchmarks.bench_mlx_decode import llama_config
from benchmarks.report import Report, interleaved
from semantic.adapters.outbound.backends.mlx import runtime
from semantic.adapters.outbound.backends.pinned import shared_memory
from semantic.domain.spec import ModelCacheSpec

runtime.prepare()
import mlx.core as mx  # noqa: E402 - after the BLAS it is to use

from semantic.adapters.outbound.backends.mlx.backend import MlxBackend  # noqa: E402
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda  # noqa: E402
from semantic.adapters.outbound.backends.mlx.cuda import tuning  # noqa: E402
from semantic.adapters.outbound.backends.mlx.device_limits import device_room  # noqa: E402
from semantic.adapters.outbound.backends.mlx.loading import MlxModel, choose_device  # noqa: E402

# Hidden size, layers, inner size, heads, KV heads, vocabulary: the served model and its draft.
SHAPES = {
    "tiny": ((256, 8, 512, 8, 2, 16_000), (128, 2, 256, 4, 2, 16_000)),
    "llama-8b": ((4096, 32, 14_336, 32, 8, 128_256), (2048, 16, 8192, 32, 8, 128_256)),
}
DTYPES = {"tiny": mx.float32, "llama-8b": mx.bfloat16}
NUM_PROMPT = 64
PINNED_BYTES = 2**32
_FAINT, _CALM = 2.0**-12, 0.15


class NumberTokenizer:
    """Token ids without text."""

    eos_ids = frozenset[int]()

    def token_bytes(self, token: int) -> bytes:
        return f"{token} ".encode()


def number_prompt(shape: str, number: int) -> list[int]:
    """Numbers of a range that other prompts do not share."""
    half = SHAPES[shape][0][-1] // 2
    first = 1 + number * 997 % (half - 1000)
    return list(range(first, first + NUM_PROMPT))


def make_models(shape: str, agree: int) -> list[tuple[Any, dict[str, Any]]]:
    """The served model and its draft model, each with its config."""
    llama = runtime.import_library("mlx_lm.models.llama")
    tree_map = runtime.import_library("mlx.utils").tree_map_with_path
    random = np.random.default_rng(agree)
    made: list[tuple[Any, dict[str, Any]]] = []
    for sizes in SHAPES[shape]:
        config = llama_config(*sizes)
        model = llama.Model(llama.ModelArgs.from_dict(config))
        model.update(tree_map(partial(_weight, DTYPES[shape]), model.parameters()))
        vocab = config["vocab_size"]
        previous = np.arange(-1, vocab - 1) % vocab
        if made:
            half = vocab // 2
            wrong = 1 + np.flatnonzero(random.random(half - 1) >= agree / 100)
            previous[wrong], previous[wrong + half] = previous[wrong + half], previous[wrong]
        model.lm_head.weight = model.model.embed_tokens.weight[mx.array(previous)]
        mx.eval(model.parameters())
        made.append((model, config))
    return made


def _weight(dtype: Any, path: str, array: Any) -> Any:
    if array.ndim == 1:
        return array.astype(dtype) * (_CALM if path == "model.norm.weight" else 1)
    is_faint = path.endswith(("o_proj.weight", "down_proj.weight"))
    return mx.random.normal(array.shape, dtype, scale=0.02 * (_FAINT if is_faint else 1))


@contextlib.contextmanager
def open_pair(shape: str, agree: int) -> Iterator[Pair]:
    """Load both models as the server does."""
    choose_device("auto")
    cache = runtime.import_library("mlx_lm.models.cache")
    backends = []
    for model, config in reversed(make_models(shape, agree)):  # the draft model first
        tuning.tune(model, device_room(0).total)
        make_caches = partial(cache.make_prompt_cache, model)
        spec = ModelCacheSpec.from_config(config)
        memory = shared_memory(PINNED_BYTES) if cuda.is_in_use() else None
        backends.append(MlxBackend(MlxModel(model, spec, make_caches, memory=memory)))
    draft, served = backends
    yield Pair(served, draft, NumberTokenizer(), partial(number_prompt, shape))
    draft.shutdown()
    served.shutdown()


def measure_peer(report: Report, shape: str, agree: int, num_tokens: int) -> None:
    """Measure mlx-lm's own loops for one stream, with a draft model and without."""
    choose_device("auto")
    generate = runtime.import_library("mlx_lm.generate")
    (served, _), (draft, _) = make_models(shape, agree)

    def speed(make: Callable[..., Iterator[Any]], number: int) -> float:
        steps = make(prompt=mx.array(number_prompt(shape, number)), max_tokens=num_tokens)
        for _ in range(8):
            next(steps)
        started, count = time.perf_counter(), 0
        for _ in steps:
            count += 1
        return count / (time.perf_counter() - started)

    calls = {"plain": partial(speed, partial(generate.generate_step, model=served), 0)}
    for count in (3, 5):
        drafted = partial(
            generate.speculative_generate_step,
            model=served,
            draft_model=draft,
            num_draft_tokens=count,
        )
        calls[f"{count} draft tokens"] = partial(speed, drafted, count)
    speeds = interleaved(calls, 2)
    best = max((name for name in calls if name != "plain"), key=speeds.median)
    label = f"mlx-lm, agree {agree} %, "
    report.add(f"{label}plain", speeds.figures["plain"], "tokens/s")
    report.add(f"{label}{best}", speeds.figures[best], "tokens/s")
    report.add(f"{label}{best} / plain", speeds.ratios(best, "plain"))
    calls.clear()
    mx.clear_cache()
