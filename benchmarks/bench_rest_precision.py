"""What 8 and 4 bits at rest cost: how far the next-token distributions move.

The first tokens of a text are computed, their attention state rests in each format and is restored
into a sequence of its own; then all sequences read on together, one token a step. Printed is the
Kullback-Leibler divergence from the sequence that never rested, over the whole vocabulary.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.starter import starter_directory
from semantic.adapters.outbound.backends.sampler import Logits
from semantic.adapters.outbound.backends.torch.attention import Span
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import DType, TorchOptions
from semantic.adapters.outbound.blocks.codec import FORMATS, KVCodec
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import Chunk, KVPayload, SequenceId, Step

NUM_RESTED, NUM_READ = 2048, 256
BLOCK_TOKENS = 256
SOURCE = SequenceId(0)


class ListeningBackend(TorchBackend):
    """Keeps the logits of the last step."""

    heard: Logits

    def _forward(self, spans: Sequence[Span]) -> Logits:
        self.heard = super()._forward(spans)
        return self.heard


@dataclass(frozen=True)
class Divergence:
    """How far distributions are from those of full precision, a token."""

    kls: list[float] = field(default_factory=list)
    is_same_choice: list[bool] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Of the divergence, in nats."""
        return fmean(self.kls)

    @property
    def agreement(self) -> float:
        """How often the likeliest token is the same."""
        return fmean(self.is_same_choice)

    def add(self, expected: Logits, found: Logits) -> None:
        """Compare two rows of logits."""
        p, q = (row - np.logaddexp.reduce(row) for row in (expected, found))
        self.kls.append(max(0.0, float(np.sum(np.exp(p) * (p - q)))))
        self.is_same_choice.append(int(p.argmax()) == int(q.argmax()))


def listening_backend(directory: Path, dtype: DType = "auto") -> ListeningBackend:
    """The model, by default in the precision the server runs it in."""
    spec = ModelCacheSpec.from_config(json.loads((directory / "config.json").read_text()))
    return ListeningBackend(directory, spec, TorchOptions(dtype=dtype))


def text_tokens(directory: Path, num_tokens: int) -> list[int]:
    """English that does not repeat itself: this project's own pages."""
    root = Path(__file__).parents[1]
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    tokens = HFTokenizer(directory).encode("\n".join(page.read_text() for page in pages))
    if len(tokens) < num_tokens:
        raise ValueError(f"the pages have {len(tokens)} tokens only")
    return tokens[:num_tokens]


def rest(codec: KVCodec, payload: KVPayload) -> KVPayload:
    """Quantise a payload and expand it again."""
    return replace(payload, buffers=tuple(codec.decode(b) for b in codec.encode(payload)))


def divergences(
    backend: ListeningBackend, tokens: Sequence[int], num_rested: int
) -> dict[str, Divergence]:
    """Let the first tokens rest in every format, and read the others after each of them."""
    backend.open(SOURCE, tokens)
    for start in range(0, num_rested, 512):
        chunk = Chunk(SOURCE, start, tuple(tokens[start : min(start + 512, num_rested)]))
        backend.collect(backend.launch(Step((chunk,))))
    starts = range(0, num_rested, BLOCK_TOKENS)
    ranges = [(start, min(start + BLOCK_TOKENS, num_rested)) for start in starts]
    blocks = [
        backend.payload(backend.snapshot(SOURCE, *positions, LayerKind.FULL))
        for positions in ranges
    ]
    sequences = {SequenceId(bits): KVCodec(kv_format) for bits, kv_format in FORMATS.items()}
    for sequence, codec in sequences.items():
        backend.open(sequence, tokens)
        backend.load(sequence, [rest(codec, block) for block in blocks], num_rested)
    found = {codec.kv_format: Divergence() for codec in sequences.values()}
    for position in range(num_rested, len(tokens)):
        rows = [Chunk(sequence, position, (tokens[position],)) for sequence in (SOURCE, *sequences)]
        backend.collect(backend.launch(Step(tuple(rows))))
        for row, divergence in zip(backend.heard[1:], found.values(), strict=True):
            divergence.add(backend.heard[0], row)
    for sequence in (SOURCE, *sequences):
        backend.close(sequence)
    return found


def main() -> int:
    """Print the figures; 1 if raw state changes anything."""
    directory = starter_directory()
    backend = listening_backend(directory)
    tokens = text_tokens(directory, NUM_RESTED + NUM_READ)
    found = divergences(backend, tokens, NUM_RESTED)
    print(f"{NUM_RESTED} tokens restored, {NUM_READ} read after them, bfloat16")
    for kv_format, divergence in found.items():
        print(
            f"  {kv_format:<6} KL {divergence.mean:.2e} a token (largest "
            f"{max(divergence.kls):.2e}), same likeliest token {divergence.agreement:.1%}"
        )
    backend.shutdown()
    return 0 if found["raw"].mean == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
