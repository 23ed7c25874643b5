"""A backend without weights, for tests and for developers of clients.

Its KV cache is the token ids themselves, stored per layer kind of the spec: all of them (full), the
last W (window), a running hash (state). Each next token is a function of the whole KV cache, so a
misplaced, stale or foreign block shows as a wrong token. The backend is deterministic, and writes
lower-case gibberish.
"""

import hashlib
import re
import string
import struct
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import ClassVar, Final, Literal

import numpy as np

from semantic.adapters.outbound.backends.common import (
    EagerBackend,
    PayloadTicket,
    StepTicket,
    make_rows,
    verify,
)
from semantic.adapters.outbound.backends.fake_vision import VisionKind, embedded
from semantic.adapters.outbound.backends.sampler import Logits, sample, score
from semantic.domain.chat import JsonObject
from semantic.domain.errors import CacheCorruptionError, InvalidRequestError, ModelNotFoundError
from semantic.domain.images.spans import ImageSpan
from semantic.domain.model_names import KnownModel, Suggestion, suggest
from semantic.domain.sampling import TokenLogprob
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec
from semantic.ports.backend import (
    Chunk,
    Computed,
    Draw,
    HostBuffer,
    KVPayload,
    Row,
    Sampled,
    SequenceId,
    Step,
    StepOutput,
    Ticket,
    Traits,
)
from semantic.ports.models import FetchProgress, ModelEntry, ModelFacts, OnProgress
from semantic.ports.text import SpecialToken

END_TOKEN = 256
START_TOKEN = 257
VOCAB_SIZE = 258
IMAGE_TOKEN = 258  # of models that accept images
_PRIME = 2**61 - 1
_HIDDEN_SIZE = 16
_MAX_DRAFT = 16
_DOWNLOAD_STEPS, _DOWNLOAD_STEP_S = 250, 0.02
_SLOW_TOKEN_S = 0.001
_REST: Final = (1, 8192, "MIT", True)  # KV bytes, context, licence, tools


def fake_spec(
    *,
    block_tokens: int = 16,
    window: int = 0,
    has_state: bool = False,
    vocab_size: int = VOCAB_SIZE,
) -> ModelCacheSpec:
    """Return the geometry of a fake model: full attention, optionally window and state layers."""
    layers = [LayerSpec(LayerKind.FULL, num_kv_heads=1, key_dim=1, value_dim=1)]
    if window:
        layers.append(
            LayerSpec(LayerKind.WINDOW, num_kv_heads=1, key_dim=1, value_dim=1, window=window)
        )
    if has_state:
        layers.append(LayerSpec(LayerKind.STATE, state_elements=4))
    return ModelCacheSpec(
        "fake", tuple(layers), vocab_size, max_context=131_072, block_tokens=block_tokens
    )


def _mix(value: int, token: int) -> int:
    return (value * 1_000_003 + token + 1) % _PRIME


def _disguise(entry: int) -> int:
    """Return a window layer's entry for a full layer's `entry`, so that mix-ups show."""
    return _mix(entry, 7) % 2**32


@dataclass(slots=True)
class _Sequence:
    """The KV cache of a fake model.

    Attributes:
        full: One entry per token; as in a model, each depends on everything before it.
        window: The entries of the last tokens, encoded by `_disguise`.
        state: Hash of all tokens; None if it was not restored yet.
    """

    known: list[int]
    full: list[int] = field(default_factory=list)
    full_hash: int = 1
    window: list[int] = field(default_factory=list)
    state: int | None = 1
    last_sampled: int | None = None

    @property
    def length(self) -> int:
        return len(self.full)

    @property
    def window_start(self) -> int:
        return self.length - len(self.window)

    @property
    def has_state(self) -> bool:
        return self.state is not None

    def append(
        self, tokens: Sequence[int], window_size: int, images: Sequence[ImageSpan] = ()
    ) -> None:
        start = self.length
        self.known[start : start + len(tokens)] = tokens
        tokens = embedded(tokens, start, images)
        entry, state = self.full[-1] if self.full else 1, self.state or 0
        entries: list[int] = []
        for token in tokens:
            entry = _mix(entry, token) % 2**32
            entries.append(entry)
            state = _mix(state, token)
        self.keep(entries)
        self.state = state
        if window_size:
            added = [_disguise(entry) for entry in entries]
            self.window = [*self.window, *added][-window_size:]

    def keep(self, entries: Sequence[int]) -> None:
        self.full.extend(entries)
        for entry in entries:
            self.full_hash = _mix(self.full_hash, entry)
        self.last_sampled = None

    def buffer(self, start: int, end: int, kind: LayerKind) -> HostBuffer:
        if kind is LayerKind.FULL:
            return _ids_buffer("full", self.full[start:end])
        if kind is LayerKind.WINDOW:
            first = self.window_start
            return _ids_buffer("window", self.window[start - first : end - first])
        return HostBuffer("state", (1,), "u64", struct.pack("<Q", self.state))

    def copy(self) -> "_Sequence":
        return replace(self, known=list(self.known), full=list(self.full))


class FakeBackend(EagerBackend[_Sequence]):
    """`ModelBackendPort` over token ids; see the module docstring."""

    def __init__(
        self,
        spec: ModelCacheSpec | None = None,
        *,
        pipeline_depth: Literal[0, 1] = 0,
        weights: int = 0,
        vision: VisionKind | None = None,
        kv_room: int | None = None,
        is_slow: bool = False,
    ) -> None:
        """Different `weights` generate different text; `vision` None accepts no images.

        If it `is_slow`, a token of a prompt takes a millisecond, so that reading blocks pays.
        """
        spec = spec or fake_spec()
        self._weights = weights
        self._prompt_token_s = _SLOW_TOKEN_S if is_slow else 0.0
        abi = f"fake.v2.{spec.window}.{int(spec.num_state > 0)}"
        # State is not stored per token: a model with state cannot be truncated after a wrong draft.
        max_draft = 0 if spec.num_state else _MAX_DRAFT
        traits = Traits(
            pipeline_depth,
            abi,
            max_draft=max_draft,
            accepts_images=vision is not None,
            needs_whole_images=vision is VisionKind.BIDIRECTIONAL,
            kv_room=kv_room,
        )
        super().__init__(spec, traits, _Sequence)

    @property
    def num_open(self) -> int:
        return len(self._sequences)

    def load(self, seq: SequenceId, parts: Sequence[KVPayload], end: int) -> None:
        sequence, by_kind = self._sequences[seq], self._sort_parts(seq, parts, end)
        full = [entry for part in by_kind.full for entry in _entries(part)]
        window = [entry for part in by_kind.window for entry in _entries(part)]
        state = _state_of(by_kind.state) if by_kind.state else None
        if end > sequence.length:
            sequence.keep(full[: end - sequence.length])
            sequence.window, sequence.state = [], None
        if by_kind.window:
            sequence.window = window[: end - by_kind.window[0].start][-self._window :]
        if state is not None:
            sequence.state = state

    def launch(self, step: Step) -> Ticket:
        if self._prompt_token_s:
            lengths = (chunk.num_tokens for chunk in step.chunks)
            time.sleep(self._prompt_token_s * sum(length for length in lengths if length > 1))
        return StepTicket(StepOutput(tuple(make_rows(step, self._run))))

    def embed(self, seq: SequenceId, start: int, tokens: Sequence[int]) -> tuple[float, ...]:
        chunk = Chunk(seq, start, tuple(tokens))
        sequence = self._sequence_of(chunk)
        sequence.append(self._tokens_of(chunk, None), self._window)
        rows = [np.random.Generator(np.random.Philox(key=e)) for e in sequence.full[start:]]
        sums: list[float] = np.sum([row.normal(size=_HIDDEN_SIZE) for row in rows], axis=0).tolist()
        return tuple(sums)

    def snapshot(self, seq: SequenceId, start: int, end: int, kind: LayerKind) -> Ticket:
        sequence = self._sequences[seq]
        start = self._snapshot_start(sequence, start, end, kind)
        return PayloadTicket(
            KVPayload(self._traits.kv_abi, kind, start, end, (sequence.buffer(start, end, kind),))
        )

    def bytes_for(self, lengths: Sequence[int]) -> int:
        return sum(self._spec.bytes_per_context(length) for length in lengths)

    def memory(self) -> int:
        return self.bytes_for([s.length for s in self._sequences.values()])

    def shutdown(self) -> None:
        self._sequences.clear()
        self._images.clear()

    # -- one row --------------------------------------------------------------------------------

    def _run(self, chunk: Chunk) -> Row:
        """Compute on a copy, so that a row that fails changes nothing."""
        sequence = self._sequence_of(chunk).copy()
        tokens = self._tokens_of(chunk, sequence.last_sampled)
        scores = self._scores(sequence, chunk, tokens)
        sequence.append(tokens[len(scores) :], self._window, self.images_of(chunk.seq))
        row: Row = Computed(chunk.seq, scores)
        if chunk.draw is not None:
            row = replace(self._verified(sequence, chunk), scores=scores)
        self._sequences[chunk.seq] = sequence
        return row

    def _scores(
        self, sequence: _Sequence, chunk: Chunk, tokens: Sequence[int]
    ) -> tuple[TokenLogprob, ...]:
        rows: list[Logits] = []
        for token, _ in zip(tokens, chunk.targets, strict=False):
            sequence.append((token,), self._window)
            rows.append(self._logits(sequence))
        return score(np.array(rows), chunk.targets, chunk.num_top)

    def _verified(self, sequence: _Sequence, chunk: Chunk) -> Sampled:
        def draw_at(index: int, draw: Draw) -> tuple[int, TokenLogprob | None]:
            draft = chunk.draft[max(index - 1, 0) : index]
            sequence.append(draft, self._window, self.images_of(chunk.seq))
            return sample(self._logits(sequence), draw, sequence.known, sequence.length)

        drawn = verify(chunk, draw_at)
        sequence.last_sampled = drawn.token
        return drawn

    def _logits(self, sequence: _Sequence) -> Logits:
        key = (sequence.full_hash + self._weights) % _PRIME
        for entry in sequence.window:
            key = _mix(key, entry)
        if self._has_state:
            key = _mix(key, sequence.state or 0)
        logits = np.random.Generator(np.random.Philox(key=key)).random(
            self._spec.vocab_size, np.float32
        )
        logits *= 4
        logits[_LETTERS] += 4
        logits[START_TOKEN:] = -10
        return logits

    # -- lengths --------------------------------------------------------------------------------

    def _copy(self, source: _Sequence, target: _Sequence, num_tokens: int) -> None:
        target.keep(source.full[:num_tokens])
        target.window = source.window[: max(0, num_tokens - source.window_start)]
        target.state = source.state

    def _cut(self, sequence: _Sequence, num_tokens: int) -> None:
        kept = sequence.copy()
        sequence.full, sequence.full_hash, sequence.window, sequence.state = [], 1, [], 1
        if num_tokens:
            self._copy(kept, sequence, num_tokens)
        sequence.last_sampled = None


_LETTERS = np.frombuffer((string.ascii_lowercase + "  ").encode(), np.uint8)


def _ids_buffer(name: str, ids: Sequence[int]) -> HostBuffer:
    return HostBuffer(name, (len(ids),), "u32", array("I", ids).tobytes())


def _entries(part: KVPayload) -> "array[int]":
    (buffer,) = part.buffers or (None,)
    if buffer is None or memoryview(buffer.data).nbytes != 4 * (part.end - part.start):
        raise CacheCorruptionError("payload has the wrong size")
    return array("I", bytes(buffer.data))


def _state_of(part: KVPayload) -> int:
    data = b"".join(bytes(buffer.data) for buffer in part.buffers)
    if len(data) != 8:
        raise CacheCorruptionError("payload has the wrong size")
    (state,) = struct.unpack("<Q", data)
    return int(state)


def _entry(name: str) -> ModelEntry:
    return ModelEntry(name, name, "fake", fits=True)


class FakeModels:
    """`ModelSourcePort` of models without files: two of them, so that tests can swap models.

    A third one can be downloaded, in about five seconds, and deleted. Two more are found by their
    names only: one accepts images, and one writes the text of the first but reads prompts slowly.
    """

    NAMES = ("fake", "fake-2")
    VISION, SLOW = "fake-vision", "fake-slow"
    REMOTE: ClassVar = ModelEntry("small-4bit", "org/small-4bit", "fake", 10**9, fits=True)

    _num_arrived = 0  # bytes of it

    def entries(self) -> list[ModelEntry]:
        here = [*map(_entry, self.NAMES)]
        return [*here, self.REMOTE] if self._num_arrived == self.REMOTE.num_bytes else here

    def find_model(self, source: str) -> ModelEntry:
        for entry in (*self.entries(), self.REMOTE, *map(_entry, (self.VISION, self.SLOW))):
            if source in (entry.id, entry.source):
                return entry
        raise ModelNotFoundError(
            f"there is no model {source!r}; the fake backend has {', '.join(self.NAMES)}, "
            f"{self.VISION} and {self.SLOW}."
        )

    def fetch(
        self, entry: ModelEntry, on_progress: OnProgress, transfer: FetchProgress | None = None
    ) -> ModelEntry:
        found = self.find_model(entry.source)
        if found == self.REMOTE:
            self._download(on_progress, transfer or FetchProgress())
        return found

    def _download(self, on_progress: OnProgress, transfer: FetchProgress) -> None:
        source, transfer.num_total = self.REMOTE.source, self.REMOTE.num_bytes
        while self._num_arrived < transfer.num_total:
            if transfer.is_stopped:
                raise ModelNotFoundError(f"the download of {source} was stopped.")
            on_progress(f"downloading {source}")
            time.sleep(_DOWNLOAD_STEP_S)
            self._num_arrived += transfer.num_total // _DOWNLOAD_STEPS
            transfer.num_done = self._num_arrived

    def draft_for(self, entry: ModelEntry) -> ModelEntry | None:  # noqa: ARG002
        return None  # equally large models do not pay

    def suggestions(self) -> Sequence[Suggestion]:
        models = [
            KnownModel(name, f"org/{name}", f"org/{name}-4bit", size, size, size * 10**9, *_REST)
            for name, size in (("small", 1), ("large", 9))
        ]
        return suggest(models, memory_bytes=2**32, bandwidth=4e10)

    def remove(self, entry: ModelEntry) -> int:
        if entry == self.REMOTE:
            self._num_arrived = 0
            return entry.num_bytes
        raise InvalidRequestError(f"{entry.id} has no files to delete.", param="model")

    def facts(self, entry: ModelEntry) -> ModelFacts:
        spec = fake_spec()
        return ModelFacts(
            architecture=spec.model_type,
            file_format="safetensors",
            max_context=spec.max_context,
            hidden_size=_HIDDEN_SIZE,
            num_layers=spec.num_layers,
            num_heads=1,
            num_kv_heads=1,
            vocab_size=spec.vocab_size,
            digest=hashlib.sha256(entry.id.encode()).hexdigest(),
        )


class FakeTokenizer:
    """One token per byte, and two special tokens around each message."""

    vocab_size = VOCAB_SIZE
    eos_ids = frozenset({END_TOKEN})
    special_tokens: tuple[SpecialToken, ...] = (
        SpecialToken(START_TOKEN, "<|start|>"),
        SpecialToken(END_TOKEN, "<|end|>"),
    )
    special_ids: Mapping[str, int] = {token.text: token.id for token in special_tokens}
    chat_template: str | None = None

    def encode(self, text: str) -> list[int]:
        """Tokenise; special tokens are recognised by their text in the chat template."""
        ids: list[int] = []
        for piece in re.split(r"(<\|\w+\|>)", text):
            ids += [self.special_ids[piece]] if piece in self.special_ids else piece.encode()
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_plain(self, text: str, *, is_start: bool = False) -> list[int]:  # noqa: ARG002
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,)) if 0 <= token < END_TOKEN else b""

    def render_chat(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] = (),  # noqa: ARG002
        *,
        add_generation_prompt: bool = True,
        today: date | None = None,  # noqa: ARG002
        is_thinking: bool | None = None,  # noqa: ARG002
    ) -> str:
        """Write each message as role, newline, content between the special tokens."""
        messages_text = [f"<|start|>{m['role']}\n{m['content']}<|end|>" for m in messages]
        return "".join(messages_text) + ("<|start|>assistant\n" if add_generation_prompt else "")


class FakeVisionTokenizer(FakeTokenizer):
    """Has one more special token, which stands for an image."""

    vocab_size = VOCAB_SIZE + 1
    special_tokens = (*FakeTokenizer.special_tokens, SpecialToken(IMAGE_TOKEN, "<|image|>"))
    special_ids: Mapping[str, int] = {token.text: token.id for token in special_tokens}
