"""What a step of a model's own head for draft tokens (MTP) costs, against a step of the model.

The models have Qwen3.5's architecture without experts: recurrent layers, and attention in every
fourth layer. Their weights are random, so that drafts are wrong: a step that verifies them includes
the return to the state before the draft and the second pass. Besides one draft token, four are
measured, where the head runs on its own output.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.report import Report, Rounds, seconds
from semantic.domain.sampling import SamplingParams
from semantic.ports.backend import Chunk, Draw, ModelBackendPort, Sampled, SequenceId, Step

_QWEN: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 128_256,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "full_attention_interval": 4,
    "tie_word_embeddings": False,
    "rope_theta": 10_000_000.0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
}


def _shape(*sizes: int) -> dict[str, Any]:
    hidden, layers, inner, heads, kv_heads, keys, values = sizes
    return {
        **_QWEN,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
    }


SHAPES = {
    "head-tiny": {**_shape(256, 4, 512, 4, 2, 2, 4), "vocab_size": 1000},
    "head-1b": _shape(2048, 16, 6144, 16, 4, 16, 16),
    "head-8b": _shape(4096, 32, 12_288, 32, 8, 16, 32),
}
NUM_PROMPT, NUM_DRAFT = 64, 4
SCALE = 0.02
_FIRST = 5  # a token that follows every prompt


def head_config(shape: str) -> dict[str, Any]:
    """Return the config of a shape, as of the published models."""
    return {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": SHAPES[shape]}


MODULES = {"mlx": "benchmarks.heads_mlx", "torch": "benchmarks.heads_torch"}


class _Rows:
    """Sequences that decode together, greedily."""

    def __init__(self, backend: ModelBackendPort, count: int) -> None:
        if backend.head is None:
            raise RuntimeError("the model has no head")
        self._backend, self._head = backend, backend.head
        size, draw = backend.spec.vocab_size, Draw(SamplingParams(temperature=0), NUM_PROMPT)
        self._chunks = []
        for number in range(count):
            tokens = tuple((7 * place + 31 * number) % size for place in range(NUM_PROMPT))
            seq = SequenceId(number)
            backend.open_sequence(seq, tokens)
            self._run([Chunk(seq, 0, tokens)])
            self._chunks.append(Chunk(seq, NUM_PROMPT, (_FIRST,), draw))

    def close(self) -> None:
        for chunk in self._chunks:
            self._backend.close_sequence(chunk.seq)

    def step(self, num_drafted: int = 0) -> float:
        """Measure a step; its draft tokens are wrong, if there are any."""
        wrong = [
            replace(c, draft=tuple((c.start + n) % 97 for n in range(num_drafted)))
            for c in self._chunks
        ]
        return seconds(lambda: self._advance(wrong))

    def draft(self, count: int) -> float:
        """Measure a draft after a step, which is not measured."""
        self._advance(self._chunks)
        return seconds(lambda: self._head.draft(self._chunks, count))

    def _advance(self, chunks: Sequence[Chunk]) -> None:
        rows = self._run(chunks)
        for place, (chunk, row) in enumerate(zip(chunks, rows, strict=True)):
            if not isinstance(row, Sampled):
                raise TypeError(f"a row failed: {row}")
            start = chunk.start + 1 + len(row.accepted)
            self._chunks[place] = replace(chunk, start=start, tokens=(row.token,), draft=())

    def _run(self, chunks: Sequence[Chunk]) -> tuple[Any, ...]:
        return self._backend.collect(self._backend.launch(Step(tuple(chunks)))).rows


def measure_head(report: Report, backend: ModelBackendPort, rounds: int) -> None:
    """Measure steps of the model and of its head, in turns."""
    for num_streams in report.options.streams:
        rows = _Rows(backend, num_streams)
        figures: dict[str, list[float]] = {}
        for index in range(rounds + 2):
            found = {
                "step": rows.step(),
                "draft of 1": rows.draft(1),
                f"draft of {NUM_DRAFT}": rows.draft(NUM_DRAFT),
                f"step with {NUM_DRAFT} rejected": rows.step(NUM_DRAFT),
            }
            for name, value in found.items() if index >= 2 else ():
                figures.setdefault(name, []).append(1000 * value)
        measured = Rounds(figures)
        label = f"{num_streams} stream{'s' * (num_streams > 1)}, "
        report.add_rounds(measured, "ms", label)
        for name in [name for name in figures if name != "step"]:
            report.add(f"{label}{name} / step", measured.ratios(name, "step"))
        rows.close()
