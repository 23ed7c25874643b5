"""EXP-003, EXP-004, EXP-007: KV cache from a sequence to a file and into another sequence."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common import GREEDY
from benchmarks.random_models import SHAPES, make_model
from benchmarks.starter import starter_directory
from experiments.common import Experiment, Findings
from semantic.adapters.outbound.backends.mlx import runtime
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.domain.blocks import BlockNamespace, BlockPart, block_name, pack_tokens
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import (
    LAST_SAMPLED,
    Chunk,
    Draw,
    KVPayload,
    ModelBackendPort,
    Sampled,
    SequenceId,
    Step,
)

NUM_NEW = 12
WINDOWED = {
    **SHAPES["gemma3-12b"],
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 1000,
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
}
PROMPTS = tuple(tuple(5 + (7 * i + n) % 900 for i in range(n)) for n in (150, 31, 90))


# -- backends --------------------------------------------------------------------------------------


@contextmanager
def torch_backend() -> Iterator[ModelBackendPort]:
    """Create a tiny Llama with random weights, in float32."""
    with tempfile.TemporaryDirectory() as directory:
        path = make_model("tiny", Path(directory), starter_directory())
        spec = ModelCacheSpec.from_config(SHAPES["tiny"])
        backend = TorchBackend(path, spec, TorchOptions(dtype="float32", weights="full"))
        yield backend
        backend.shutdown()


@contextmanager
def mlx_backend(config: dict[str, object]) -> Iterator[ModelBackendPort]:
    """Create a tiny mlx-lm model with random weights."""
    runtime.prepare(1)
    from semantic.adapters.outbound.backends.mlx.backend import MlxBackend  # noqa: PLC0415 - after it
    from semantic.adapters.outbound.backends.mlx.loading import MlxModel, choose_device  # noqa: PLC0415 - after it

    choose_device("auto")
    module = runtime.import_library(f"mlx_lm.models.{config['model_type']}")
    caches = runtime.import_library("mlx_lm.models.cache")
    model = module.Model(module.ModelArgs.from_dict(config))
    spec = ModelCacheSpec.from_config(config)
    backend = MlxBackend(MlxModel(model, spec, lambda: list(caches.make_prompt_cache(model))))
    yield backend
    backend.shutdown()


# -- sequences -------------------------------------------------------------------------------------


def run_step(backend: ModelBackendPort, chunks: Sequence[Chunk]) -> list[int]:
    """Compute rows; returns the sampled tokens."""
    rows = backend.collect(backend.launch(Step(tuple(chunks)))).rows
    return [row.token for row in rows if isinstance(row, Sampled)]


def begin(
    backend: ModelBackendPort, prompts: Sequence[Sequence[int]], first: int
) -> list[list[int]]:
    """Open sequences and compute their prompts and some tokens, in one batch."""
    for place, prompt in enumerate(prompts):
        backend.open_sequence(SequenceId(first + place), list(prompt))
    draws = [Draw(GREEDY, len(prompt)) for prompt in prompts]
    chunks = [Chunk(SequenceId(first + i), 0, tuple(p), draws[i]) for i, p in enumerate(prompts)]
    texts = [[token] for token in run_step(backend, chunks)]
    for _ in range(NUM_NEW - 1):
        held = [len(p) + len(texts[i]) - 1 for i, p in enumerate(prompts)]
        rows = [Chunk(SequenceId(first + i), n, LAST_SAMPLED, draws[i]) for i, n in enumerate(held)]
        for text, token in zip(texts, run_step(backend, rows), strict=True):
            text.append(token)
    return texts


def go_on(
    backend: ModelBackendPort, seq: SequenceId, tokens: Sequence[int], prompt: int
) -> list[int]:
    """Continue a sequence that holds all tokens but the last."""
    text, draw = list(tokens[-1:]), Draw(GREEDY, prompt)
    length = len(tokens) - 1
    for _ in range(NUM_NEW):
        text += run_step(backend, [Chunk(seq, length, (text[-1],), draw)])
        length += 1
    return text[1:]


def extract(backend: ModelBackendPort, seq: SequenceId, length: int) -> list[KVPayload]:
    """Return a sequence's payloads, one per kind of layers."""
    return [backend.payload(backend.snapshot(seq, 0, length, kind)) for kind in backend.spec.kinds]


def through_files(payloads: Sequence[KVPayload], tokens: Sequence[int]) -> list[KVPayload]:
    """Write payloads to files and read them back."""
    root = BlockNamespace("experiment", "raw").root()
    packed, name = pack_tokens(tokens), block_name(root, tokens)
    read = []
    with tempfile.TemporaryDirectory() as directory:
        for payload in payloads:
            part = BlockPart(root, name, root, payload.kind, 0, packed)
            written = SafetensorsCache(Path(directory)).write(part, payload, is_synced=False)
            read.append(SafetensorsCache(Path(directory)).read(written))
    return read


def resumed_as_alone(
    backend: ModelBackendPort, prompts: Sequence[Sequence[int]], *, has_files: bool
) -> list[bool]:
    """Return by prompt whether its restored sequence continues as a fresh one does alone."""
    texts = begin(backend, prompts, first=0)
    results = []
    for place, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        tokens = [*prompt, *text]
        payloads = extract(backend, SequenceId(place), len(tokens) - 1)
        backend.close_sequence(SequenceId(place))
        if has_files:
            payloads = through_files(payloads, tokens[:-1])
        restored, alone = SequenceId(100 + place), SequenceId(200 + place)
        backend.open_sequence(restored, tokens)
        backend.load(restored, payloads, len(tokens) - 1)
        (alone_text,) = begin(backend, [prompt], first=200 + place)
        expected = go_on(backend, alone, [*prompt, *alone_text], len(prompt))
        found = go_on(backend, restored, tokens, len(prompt))
        results.append((text, found) == (alone_text, expected))
        backend.close_sequence(restored)
        backend.close_sequence(alone)
    return results


# -- answers ---------------------------------------------------------------------------------------


def injection(found: Findings) -> None:
    """Load payloads into a fresh sequence, without files."""
    for name, opened in (("torch", torch_backend()), ("mlx", mlx_backend(SHAPES["tiny"]))):
        with opened as backend:
            (is_same,) = resumed_as_alone(backend, PROMPTS[:1], has_files=False)
        found.check(name, f"{NUM_NEW} greedy tokens as computed fresh", is_passed=is_same)


def extraction(found: Findings) -> None:
    """Extract payloads from a batch of three, through files."""
    for name, opened in (("torch", torch_backend()), ("mlx", mlx_backend(SHAPES["tiny"]))):
        with opened as backend:
            results = resumed_as_alone(backend, PROMPTS, has_files=True)
        text = f"{sum(results)} of {len(results)} sequences go on as alone"
        found.check(name, text, is_passed=all(results))


def rotation(found: Findings) -> None:
    """Restore a window that has wrapped."""
    with mlx_backend(WINDOWED) as backend:
        results = resumed_as_alone(backend, PROMPTS, has_files=True)
        kept = window_tokens(backend)
    text = f"{sum(results)} of {len(results)} sequences go on as alone, two of them past the window"
    found.check("mlx, windows of 64", text, is_passed=all(results))
    found.at_most("tokens a window layer keeps of 150", kept, 64, "tokens")
    found.skip("on Metal", "there is no Apple Silicon here; MLX computed on this machine's device")


def window_tokens(backend: ModelBackendPort) -> int:
    """Return the number of tokens in the window payload of the longest prompt."""
    begin(backend, PROMPTS[:1], first=300)
    seq, length = SequenceId(300), len(PROMPTS[0]) + NUM_NEW - 1
    payload = extract(backend, seq, length)[backend.spec.kinds.index(LayerKind.WINDOW)]
    backend.close_sequence(seq)
    return payload.end - payload.start


EXPERIMENTS = (
    Experiment(
        id="EXP-003",
        question="Can KV cache be loaded into a fresh sequence?",
        method="compute a prompt and some tokens, copy the KV cache out, load it into another "
        "sequence, and compare the next greedy tokens with those of a sequence computed "
        "fresh",
        criterion="the same tokens",
        adapted="uses `snapshot` and `load` of the backends instead of BatchGenerator's `caches`; "
        "also on torch",
        answer=injection,
    ),
    Experiment(
        id="EXP-004",
        question="Can the KV cache of one sequence be extracted from a batch?",
        method="three prompts of different lengths run in one batch; the KV cache of each is "
        "written to a file, read and loaded, and the sequence continues; compared with "
        "each sequence computed alone",
        criterion="the same tokens",
        adapted="`snapshot` instead of `Response.prompt_cache`; our files instead of "
        "`save_prompt_cache`",
        answer=extraction,
    ),
    Experiment(
        id="EXP-007",
        question="Can a rotating cache be written to a file and restored?",
        method="a small Gemma 3 (five of six layers with windows of 64) on mlx-lm; prompts of "
        "150, 31 and 90 tokens in one batch, stored in files, restored and continued",
        criterion="the same tokens; a window layer stores only its window",
        adapted="our file format instead of `save_prompt_cache`",
        answer=rotation,
    ),
)
