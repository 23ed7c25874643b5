"""The starter model's directory gives the same greedy text on MLX as on torch, both in float32."""

import importlib.util
import json
from pathlib import Path

import pytest

from semantic.adapters.outbound.backends.mlx import runtime
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.domain.sampling import SamplingParams
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.backend import Chunk, Draw, ModelBackendPort, Sampled, SequenceId, Step

pytestmark = pytest.mark.integration

QUESTIONS = ("Name a colour.", "Count to three.")
NUM_REPLY = 4


def test_the_same_text_as_on_torch(starter_model_dir: Path) -> None:
    if importlib.util.find_spec("mlx_lm") is None:
        pytest.skip("mlx-lm is not installed")
    runtime.prepare()
    from semantic.adapters.outbound.backends.mlx.backend import MlxBackend
    from semantic.adapters.outbound.backends.mlx.loading import MlxOptions

    spec = ModelCacheSpec.from_config(json.loads((starter_model_dir / "config.json").read_text()))
    torch_backend = TorchBackend(starter_model_dir, spec, TorchOptions(dtype="float32"))
    expected = _replies(torch_backend, starter_model_dir)
    torch_backend.shutdown()
    backend = MlxBackend.from_directory(starter_model_dir, spec, MlxOptions(dtype="float32"))
    assert _replies(backend, starter_model_dir) == expected
    backend.shutdown()


def _replies(backend: ModelBackendPort, directory: Path) -> list[str]:
    """Answer all questions side by side."""
    tokenizer = HFTokenizer(directory)
    texts = [b""] * len(QUESTIONS)
    chunks: list[Chunk] = []
    for seq, question in enumerate(QUESTIONS):
        tokens = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question}]))
        backend.open(SequenceId(seq), tokens)
        draw = Draw(SamplingParams(temperature=0, seed=0), len(tokens))
        chunks.append(Chunk(SequenceId(seq), 0, tuple(tokens), draw))
    for _ in range(NUM_REPLY):
        rows = backend.collect(backend.launch(Step(tuple(chunks)))).rows
        for i, (row, chunk) in enumerate(zip(rows, chunks, strict=True)):
            assert isinstance(row, Sampled)
            texts[i] += tokenizer.token_bytes(row.token)
            end = chunk.start + chunk.num_tokens
            chunks[i] = Chunk(chunk.seq, end, (row.token,), chunk.draw)
    assert all(texts)
    return [text.decode() for text in texts]
