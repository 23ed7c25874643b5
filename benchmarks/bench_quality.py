"""Effect of KV cache storage in 16, 8 and 4 bits on a model's output, over several restarts.

Computes the first tokens of a text. At each restart, writes the KV cache in each format and reads
it back, including parts that were stored before. A server writes a block once, so this is the worst
case. Then all sequences continue together, one token per step. Measures the Kullback-Leibler
divergence of next-token distributions from those of a sequence that is never stored, and the
perplexity of the text. Where the model computes in float32, also rounds the KV cache to 16 bits, as
a server that stored it in half the space would. Then asks the questions of one conversation, each
after a restart of the real engine over a directory in each format, and compares the answers with
those of an engine that never stopped.
"""

import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

import numpy as np

from benchmarks.common import persistent_engine
from benchmarks.report import Report, run
from benchmarks.starter import starter_directory
from semantic.adapters.config.sources import load_settings
from semantic.adapters.outbound.backends.sampler import Logits
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.kv.sequences import ChunkSpan
from semantic.adapters.outbound.backends.torch.loading import DType, TorchOptions
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.adapters.outbound.blocks.format import FORMATS, KVCodec
from semantic.adapters.outbound.blocks.quantisation import FLOATS
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.application.settings import EngineLimits
from semantic.domain.chat import JsonValue
from semantic.domain.events import Failed, TextDelta
from semantic.domain.sampling import StopRules
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import Chunk, HostBuffer, KVPayload, SequenceId, Step

BLOCK_TOKENS = 256
SOURCE = SequenceId(0)
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "And of Italy? Answer in one sentence.",
    "Which of the two is further north?",
    "Name three things that people eat there.",
    "Which was the first city I asked about?",
)
MAX_KL = {16: 0.0, 8: 0.02, 4: 0.5}
HALVES = ("float16", "bfloat16")  # what float32 can be rounded to
Rest: TypeAlias = Callable[[KVPayload], KVPayload]


class ListeningBackend(TorchBackend):
    """Keeps the logits of the last step."""

    heard: Logits

    @property
    def rests(self) -> dict[str, Rest]:
        """What storage does to a payload, by format; of float32 also rounding to 16 bits."""
        formats: dict[str, Rest] = {name: partial(rest, KVCodec(name)) for name in FORMATS.values()}
        is_single = self._dtype.itemsize == np.dtype(np.float32).itemsize
        return formats | {name: partial(narrow, name) for name in HALVES if is_single}

    def _forward(self, spans: Sequence[ChunkSpan]) -> Logits:
        self.heard = super()._forward(spans)
        return self.heard


@dataclass(frozen=True)
class Divergence:
    """How far next-token distributions are from those of full precision, per token."""

    kls: list[float] = field(default_factory=list)
    is_same_choice: list[bool] = field(default_factory=list)
    surprises: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Mean divergence, in nats."""
        return fmean(self.kls)

    @property
    def agreement(self) -> float:
        """Share of positions at which the most likely token is the same."""
        return fmean(self.is_same_choice)

    @property
    def perplexity(self) -> float:
        return math.exp(fmean(self.surprises))

    def add(self, expected: Logits, found: Logits, following: int = 0) -> None:
        """Compare two rows of logits; `following` is the text's next token."""
        p, q = (row - np.logaddexp.reduce(row) for row in (expected, found))
        self.surprises.append(-float(q[following]))
        self.kls.append(max(0.0, float(np.sum(np.exp(p) * (p - q)))))
        self.is_same_choice.append(int(p.argmax()) == int(q.argmax()))


def listening_backend(directory: Path, dtype: DType = "auto") -> ListeningBackend:
    """Load the model, by default in the dtype that the server uses."""
    spec = ModelCacheSpec.from_config(json.loads((directory / "config.json").read_text()))
    native = NativeBuild(load_settings().home_dir / "native")
    return ListeningBackend(directory, spec, TorchOptions(dtype=dtype, native=native))


def text_tokens(directory: Path, num_tokens: int) -> list[int]:
    """Return tokens of English text without repetitions: this project's documentation."""
    root = Path(__file__).parents[1]
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    tokens = HFTokenizer(directory).encode("\n".join(page.read_text() for page in pages))
    if len(tokens) < num_tokens:
        raise ValueError(f"the documentation has only {len(tokens)} tokens")
    return tokens[:num_tokens]


def rest(codec: KVCodec, payload: KVPayload) -> KVPayload:
    """Quantise a payload and expand it again."""
    return replace(payload, buffers=tuple(codec.decode(b) for b in codec.encode(payload)))


def narrow(dtype: str, payload: KVPayload) -> KVPayload:
    """Round a payload of float32 to a dtype of 16 bits and widen it again."""
    floats = FLOATS[dtype]

    def rounded(buffer: HostBuffer) -> HostBuffer:
        singles = np.frombuffer(buffer.data, np.float32).copy()
        halves = np.empty(singles.shape, floats.array)
        floats.narrow(singles, halves)
        return replace(buffer, source=floats.widened(halves).view(np.uint8).data)

    return replace(payload, buffers=tuple(map(rounded, payload.buffers)))


# -- restart after restart -------------------------------------------------------------------------


class Readers:
    """Sequences that read one text: one that is never stored, and one per storage format."""

    def __init__(self, backend: ListeningBackend, tokens: Sequence[int], num_first: int) -> None:
        self._backend, self._tokens, self._length = backend, tokens, num_first
        self._names = ("never", *backend.rests)
        self._rests = {SequenceId(i): each for i, each in enumerate(backend.rests.values(), 1)}
        backend.open_sequence(SOURCE, tokens)
        for start in range(0, num_first, 512):
            chunk = Chunk(SOURCE, start, tuple(tokens[start : min(start + 512, num_first)]))
            backend.collect(backend.launch(Step((chunk,))))
        self._origin = dict.fromkeys(self._rests, SOURCE)

    def restart(self) -> None:
        for sequence, store in self._rests.items():
            blocks = [store(block) for block in self._blocks(self._origin[sequence])]
            if self._origin[sequence] == sequence:
                self._backend.close_sequence(sequence)
            self._origin[sequence] = sequence
            self._backend.open_sequence(sequence, self._tokens)
            self._backend.load(sequence, blocks, self._length)

    def _blocks(self, sequence: SequenceId) -> list[KVPayload]:
        starts = range(0, self._length, BLOCK_TOKENS)
        ranges = [(start, min(start + BLOCK_TOKENS, self._length)) for start in starts]
        backend = self._backend
        return [backend.payload(backend.snapshot(sequence, *r, LayerKind.FULL)) for r in ranges]

    def read(self, num_tokens: int) -> dict[str, Divergence]:
        """Read further tokens together; the first result is that of the sequence never stored."""
        found = {name: Divergence() for name in self._names}
        for position in range(self._length, self._length + num_tokens):
            token, following = self._tokens[position : position + 2]
            rows = [Chunk(seq, position, (token,)) for seq in (SOURCE, *self._rests)]
            self._backend.collect(self._backend.launch(Step(tuple(rows))))
            heard = self._backend.heard
            for row, divergence in zip(heard, found.values(), strict=True):
                divergence.add(heard[0], row, following)
        self._length += num_tokens
        return found

    def close(self) -> None:
        for sequence in (SOURCE, *self._rests):
            self._backend.close_sequence(sequence)


def divergences(
    backend: ListeningBackend, tokens: Sequence[int], num_first: int, num_restarts: int = 1
) -> list[dict[str, Divergence]]:
    """Return by restart how far each format is from the sequence that is never stored."""
    readers = Readers(backend, tokens, num_first)
    num_each = (len(tokens) - 1 - num_first) // num_restarts
    found = []
    for _ in range(num_restarts):
        readers.restart()
        found.append(readers.read(num_each))
    readers.close()
    return found


# -- answers ---------------------------------------------------------------------------------------


def answers(backend: TorchBackend, directory: Path, bits: int, *, is_restarted: bool) -> list[str]:
    """Return the model's answers in one conversation; each question gets a new engine."""
    tokenizer = HFTokenizer(directory)
    messages: list[dict[str, JsonValue]] = []
    with tempfile.TemporaryDirectory() as cache:
        settings: dict[str, object] = {"cache_dir": cache, "kv_bits": bits, "durability": "sync"}
        questions = iter(QUESTIONS)
        while group := list(itertools.islice(questions, 1 if is_restarted else None)):
            # All engines have this backend: one that stops must not leave a sequence open there.
            limits = EngineLimits(max_idle=0)
            with persistent_engine(backend, directory, settings, limits) as made:
                for question in group:
                    messages.append({"role": "user", "content": question})
                    tokens = tokenizer.encode(tokenizer.render_chat(messages))
                    made.events.clear()
                    made.engine.submit(replace(made.job(tokens, 32), stop=StopRules()))
                    made.run()
                    if failed := [e.error for e in made.events if isinstance(e, Failed)]:
                        raise failed[0]
                    texts = (e.text for e in made.events if isinstance(e, TextDelta))
                    messages.append({"role": "assistant", "content": "".join(texts)})
    return [str(m["content"]) for m in messages if m["role"] == "assistant"]


def measure(report: Report) -> None:
    """Measure divergence, perplexity and answers."""
    directory = starter_directory()
    num_first, num_each, num_restarts = report.choose((256, 16, 2), (2048, 48, 5))
    report.settings.update(first=num_first, each=num_each, restarts=num_restarts)
    backend = listening_backend(directory)
    tokens = text_tokens(directory, num_first + num_each * num_restarts + 1)
    found = divergences(backend, tokens, num_first, num_restarts)
    for bits, name in FORMATS.items():
        for number, divergence in enumerate((each[name] for each in found), 1):
            title = f"{bits} bits, restart {number}: KL"
            report.add(title, divergence.mean, "nats a token", most=MAX_KL[bits])
        same = [100 * each[name].agreement for each in found]
        report.add(f"{bits} bits: likeliest token the same", same, "%")
    for half in found[0].keys() & HALVES:
        kls = [each[half].mean for each in found]
        report.add(f"float32 as {half}: KL", kls, "nats a token")
        same = [100 * each[half].agreement for each in found]
        report.add(f"float32 as {half}: likeliest token the same", same, "%")
    for form in found[0]:
        values = [each[form].perplexity for each in found]
        report.add(f"perplexity, {form}", values, "")
    expected = answers(backend, directory, 16, is_restarted=False)
    for bits in FORMATS:
        given = answers(backend, directory, bits, is_restarted=True)
        num_same = sum(a == b for a, b in zip(expected, given, strict=True))
        least = len(QUESTIONS) if bits == 16 else None
        title = f"{bits} bits: answers as without a restart, of {len(QUESTIONS)}"
        report.add(title, num_same, "answers", least=least)
        for question, plain, rested in zip(QUESTIONS, expected, given, strict=True):
            if plain != rested:
                report.note(f"{bits} bits, {question!r}: {rested!r} instead of {plain!r}")
    backend.shutdown()


if __name__ == "__main__":
    sys.exit(run("quality", measure))
