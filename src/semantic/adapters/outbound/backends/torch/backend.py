"""Runs Hugging Face causal language models with PyTorch.

The modelling code is that of transformers, or of `plain` for model families that run in C. Where
the model allows it, all chunks of a step are packed into one row without padding; see `forward`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from semantic.adapters.outbound import host_memory
from semantic.adapters.outbound.backends.common import (
    EagerBackend,
    PayloadTicket,
    StepTicket,
    make_rows,
    verify,
)
from semantic.adapters.outbound.backends.drafting import (
    DEVICE_ERRORS,
    Checkpoint,
    DraftingBackend,
)
from semantic.adapters.outbound.backends.images import grid_positions
from semantic.adapters.outbound.backends.mtp.state import head_bytes
from semantic.adapters.outbound.backends.sampler import NOT_FINITE, Logits, check_draw, sample
from semantic.adapters.outbound.backends.torch import loading as torch_loading
from semantic.adapters.outbound.backends.torch.decoding import Decoder
from semantic.adapters.outbound.backends.torch.forward import LibraryForward, draft_span
from semantic.adapters.outbound.backends.torch.kv.payloads import Payloads, write_piece
from semantic.adapters.outbound.backends.torch.kv.sequences import (
    ChunkSpan,
    KVLayout,
    TorchSequence,
    capacity_for,
)
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.backends.torch.threads import ThreadCount
from semantic.adapters.outbound.backends.torch.vision.tower import VisionTower
from semantic.domain.errors import BackendError, InvalidRequestError
from semantic.domain.images.spans import spans_within
from semantic.domain.sampling import TokenLogprob
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import (
    Chunk,
    Computed,
    KVPayload,
    Row,
    RowFailed,
    SequenceId,
    Step,
    StepOutput,
    Ticket,
    Traits,
)

_PURGE_S, _PURGE_BYTES = 0.15, 32 * 2**20
_MAX_DRAFT = 16
_COLLECTED_AFTER, _COLLECTED_BYTES = 12_000, 4096
_MAX_DIFFERENCE = 2e-3  # largest relative difference between decoder and model

_log = structlog.get_logger()


class TorchBackend(DraftingBackend[TorchSequence], EagerBackend[TorchSequence]):
    """`ModelBackendPort` over a Hugging Face model directory."""

    def __init__(
        self, directory: Path, spec: ModelCacheSpec, options: TorchOptions | None = None
    ) -> None:
        """Load a model.

        Raises:
            InvalidRequestError: this backend cannot run it.
        """
        options = options or TorchOptions()
        num_threads = torch_loading.choose_threads(options.num_threads)
        torch.set_num_threads(num_threads)
        plan = torch_loading.make_plan(directory, options)
        self._dtype = plan.dtype
        loaded = torch_loading.load_model(directory, spec, plan)
        self._model: Any = loaded.model
        self._runner = loaded.forward
        self._caches = self._runner.caches if isinstance(self._runner, LibraryForward) else None
        self._tower = loaded.tower
        self._head = loaded.head if _can_draft(loaded) else None
        self._layout = KVLayout(loaded.spec.layers)
        self._state_bytes = sum(array.nbytes for array in loaded.states)
        self._payloads = Payloads(self._layout, loaded.states, self._dtype)
        traits = Traits(
            0,
            f"torch.v1.{plan.number_format}{loaded.spec.layout_tag(spec)}",
            self._dtype.itemsize * 8,
            torch_loading.describe(plan),
            _MAX_DRAFT if _can_draft(loaded) else 0,
            accepts_images=self._tower is not None,
            needs_whole_images=self._tower is not None and self._tower.is_bidirectional,
        )
        super().__init__(loaded.spec, traits, TorchSequence)
        is_native = loaded.decoder is not None and self._agrees(loaded.decoder)
        self._decoder: Decoder | None = loaded.decoder if is_native else None
        # The decoder's threads share the work of those without a core; PyTorch's do not.
        self._threads = None if is_native else ThreadCount(num_threads)

    def load(self, seq: SequenceId, parts: Sequence[KVPayload], end: int) -> None:
        sequence, by_kind = self._sequences[seq], self._sort_parts(seq, parts, end)
        parts_read = [self._payloads.read(part) for part in (*by_kind.full, *by_kind.window)]
        states = None
        if by_kind.state is not None:
            states = self._payloads.read_states(by_kind.state)
        self._grow(sequence, end)
        for piece in (piece for pieces in parts_read for piece in pieces):
            write_piece(sequence, piece, end)
        if end > sequence.length:
            sequence.length, sequence.last_sampled = end, None
            sequence.window_start, sequence.has_state = end, not self._has_state
        if by_kind.window:
            sequence.window_start = by_kind.window[0].start
        if states is not None and self._caches is not None:
            self._caches.set_states(sequence, states)
            sequence.has_state = True
        if parts:
            sequence.checkpoint = None

    def launch(self, step: Step) -> Ticket:
        if self._threads is not None and self._threads.adapt():
            torch.set_num_threads(self._threads.number)
        try:
            plan = self._plan(step)
            spans = [span for span in plan if isinstance(span, ChunkSpan)]
            self._keep_checkpoints(spans)
            logits = self._forward(spans)
        except DEVICE_ERRORS as error:
            raise self._step_error(error) from error
        rows: list[Row] = []
        for entry in plan:
            if isinstance(entry, ChunkSpan):
                num_rows = _num_logits(entry.chunk)
                rows.append(self._settled(entry, _finish(entry, logits[:num_rows])))
                logits = logits[num_rows:]
            else:
                rows.append(entry)
        return StepTicket(StepOutput(tuple(rows)))

    def embed(self, seq: SequenceId, start: int, tokens: Sequence[int]) -> tuple[float, ...]:
        (span,) = self._plan(Step((Chunk(seq, start, tuple(tokens)),)))
        if isinstance(span, RowFailed):
            raise InvalidRequestError(span.reason, param="input")
        span.sequence.checkpoint = None
        try:
            with torch.inference_mode():
                sums: list[float] = self._runner.hidden(span).float().sum(dim=0).tolist()
        except DEVICE_ERRORS as error:
            raise self._step_error(error) from error
        _finish(span, np.empty((0, 0), np.float32))
        return tuple(sums)

    def snapshot(self, seq: SequenceId, start: int, end: int, kind: LayerKind) -> Ticket:
        sequence = self._sequences[seq]
        start = self._snapshot_start(sequence, start, end, kind)
        if kind is LayerKind.STATE and self._caches is not None:
            buffers = self._payloads.copy_states(self._caches.states(sequence))
        else:
            buffers = self._payloads.copy_out(sequence, start, end, kind)
        return PayloadTicket(KVPayload(self._traits.kv_abi, kind, start, end, buffers))

    def bytes_for(self, lengths: Sequence[int]) -> int:
        # Buffers grow in steps, and window layers keep every token, too.
        per_token = self._layout.elements_per_token * self._dtype.itemsize
        states = self._state_bytes * (2 if self._traits.max_draft else 1)  # with a checkpoint
        ahead = self._head_bytes
        return sum(capacity_for(n) * per_token + states + ahead(n) for n in lengths if n)

    def _head_bytes(self, length: int) -> int:
        if self._head is None:
            return 0
        per_entry = self._layout.elements_per_token // len(self._layout.order)
        return head_bytes(length, per_entry * self._dtype.itemsize, self._head.hidden_bytes)

    def memory(self) -> int:
        sequences = self._sequences.values()
        features = 0 if self._tower is None else self._tower.nbytes
        return features + sum(
            s.nbytes
            + s.ahead.nbytes
            + self._state_bytes * ((s.cache is not None) + (s.checkpoint is not None))
            for s in sequences
        )

    def shutdown(self) -> None:
        self._sequences.clear()
        self._model = self._decoder = self._tower = self._head = None
        del self._runner, self._caches
        host_memory.collect_and_trim()
        # On ARM, PyTorch's allocator (mimalloc) returns large blocks at the first allocation
        # after a delay, and looks for others every 10,000 allocations of a thread.
        time.sleep(_PURGE_S)
        for _ in range(_COLLECTED_AFTER):
            torch.empty(_COLLECTED_BYTES, dtype=torch.uint8)
        torch.empty(_PURGE_BYTES, dtype=torch.uint8)

    # -- one step -------------------------------------------------------------------------------

    def _plan(self, step: Step) -> list[ChunkSpan | RowFailed]:
        """Assign each chunk a place in the packed row and room in its sequence's buffers."""
        offset = 0

        def place(chunk: Chunk) -> ChunkSpan:
            nonlocal offset
            sequence = self._sequence_of(chunk)
            given = self._tokens_of(chunk, sequence.last_sampled)
            if self._has_state:
                for draw in chunk.draws:  # without a checkpoint, the state cannot be taken back
                    check_draw(draw, self._spec.vocab_size)
                if not sequence.length or len(given) > 1:  # only decoded tokens have drafts
                    chunk = replace(chunk, draft=(), masks=())
            tokens = (*given, *chunk.draft)
            self._grow(sequence, sequence.length + len(tokens))
            span = ChunkSpan(chunk, sequence, tokens, offset)
            if self._tower is not None:
                self._add_images(span, self._tower)
            offset += len(tokens)
            return span

        return make_rows(step, place)

    def _add_images(self, span: ChunkSpan, tower: VisionTower) -> None:
        """Compute the features in a chunk, and the positions that follow from the images."""
        images, start, end = self.images_of(span.chunk.seq), span.sequence.length, span.end
        span.features = tower.chunk_features(spans_within(images, start, end), start, end)
        if tower.has_grid and images and images[0].start < end:
            span.positions = grid_positions(images, start, end)

    def _forward(self, spans: Sequence[ChunkSpan]) -> Logits:
        """Run the model over the packed row; returns the logits after each span.

        A span with draft tokens has several rows of logits: one before each draft token, and the
        last. A span with targets has a row for each token.
        """
        if not spans:
            return np.empty((0, 0), np.float32)
        last = [
            place
            for span in spans
            for place in range(span.place.stop - _num_logits(span.chunk), span.place.stop)
        ]
        is_native = self._decoder is not None and not any(map(_needs_modules, spans))
        forward = self._decoder.step if is_native and self._decoder else self._runner.step
        return forward(spans, last)

    def _keep_checkpoints(self, spans: Sequence[ChunkSpan]) -> None:
        """Copy the recurrent states before drafts: the library changes its arrays in place."""
        for span in spans:
            sequence = span.sequence
            sequence.checkpoint = None
            if self._caches is not None and self._has_state and span.chunk.draft:
                states = [array.clone() for array in self._caches.states(sequence)]
                sequence.checkpoint = Checkpoint(sequence.length, states)

    def _settled(self, span: ChunkSpan, row: Row) -> Row:
        """Let the recurrent state be that after the row's tokens."""
        sequence = span.sequence
        self._drop_rejected(sequence, row, len(span.chunk.draft))
        if self._has_state and isinstance(row, RowFailed):
            if sequence.checkpoint is None:
                sequence.has_state = False  # the state is that after the chunk
            else:
                self._rewind(sequence, sequence.length)
        return row

    def _rewind(self, sequence: TorchSequence, end: int) -> None:
        point = sequence.checkpoint
        if point is None or self._caches is None:
            raise ValueError("the sequence has no checkpoint")
        self._caches.set_states(sequence, [array.clone() for array in point.arrays])
        sequence.length = point.length
        if end > point.length:
            tokens = tuple(sequence.known[point.length : end])
            with torch.inference_mode():
                self._runner.hidden(draft_span(sequence, tokens))
        sequence.length = end

    def _step_error(self, error: Exception) -> BackendError:
        return BackendError(f"the device failed: {error}")

    def _grow(self, sequence: TorchSequence, length: int) -> None:
        """Make room for `length` tokens, and for all known tokens of the sequence."""
        if length <= sequence.capacity or not self._layout.shapes:
            return
        num_tokens = max(length, len(sequence.known))
        buffers = self._layout.allocate(num_tokens, self._dtype)
        roomier = TorchSequence(sequence.known, buffers=buffers)
        if sequence.capacity:
            roomier.copy_buffers(sequence, sequence.length)
        sequence.buffers = roomier.buffers

    # -- lengths --------------------------------------------------------------------------------

    def _first_kept(self, sequence: TorchSequence) -> int:
        # Window layers keep all tokens that were computed here, not only the last window.
        return sequence.window_start

    def _copy(self, source: TorchSequence, target: TorchSequence, num_tokens: int) -> None:
        self._grow(target, num_tokens)
        target.copy_buffers(source, num_tokens)
        target.length, target.window_start = num_tokens, source.window_start
        target.has_state = source.has_state
        if self._has_state and source.has_state and self._caches is not None:
            states = [array.clone() for array in self._caches.states(source)]
            self._caches.set_states(target, states)
        self._copy_state(source, target, num_tokens)

    def _cut(self, sequence: TorchSequence, num_tokens: int) -> None:
        self._cut_state(sequence, num_tokens)
        sequence.length, sequence.last_sampled = num_tokens, None
        if num_tokens == 0:
            sequence.window_start, sequence.has_state, sequence.cache = 0, True, None

    # -- checks ---------------------------------------------------------------------------------

    def _agrees(self, decoder: Decoder) -> bool:
        """Whether a decoder computes what the model does."""
        spans, random = [], torch.Generator().manual_seed(0)
        for offset, (length, tokens) in enumerate(((5, (1,)), (37, (2, 3, 0)))):
            sequence = TorchSequence([0] * length)
            self._grow(sequence, length + len(tokens))
            for state in sequence.buffers[0]:
                state[:, :, :length].normal_(generator=random)
            sequence.length = length
            spans.append(ChunkSpan(Chunk(SequenceId(0), length, tokens), sequence, tokens, offset))
        found = self._computed(spans, decoder.step)
        expected = self._computed(spans, self._runner.step)
        off = float((found - expected).norm() / expected.norm())
        if off >= _MAX_DIFFERENCE:
            _log.warning(
                "native decode step disagrees with PyTorch; disabled", off_by=round(off, 4)
            )
        return off < _MAX_DIFFERENCE

    def _computed(
        self,
        spans: Sequence[ChunkSpan],
        forward: Callable[[Sequence[ChunkSpan], Sequence[int]], Logits],
    ) -> torch.Tensor:
        """Run a step and return log-probabilities and new KV cache as one flat tensor."""
        last = range(spans[-1].place.stop)
        logits = torch.from_numpy(forward(spans, last)).log_softmax(dim=-1)
        states = [
            state[:, :, span.sequence.length : span.end].flatten()
            for span in spans
            for state in span.sequence.buffers[0]
        ]
        return torch.cat([logits.flatten(), *states])


def _can_draft(loaded: torch_loading.TorchModel) -> bool:
    """Whether draft tokens can follow a token in one pass, and be dropped afterwards."""
    if isinstance(loaded.forward, LibraryForward):
        return LayerKind.WINDOW not in loaded.spec.kinds and loaded.forward.can_draft
    return True


def _needs_modules(span: ChunkSpan) -> bool:
    """Whether the C library cannot run a span: it neither adds to layers nor attends forward."""
    return span.features is not None and bool(span.features.deep or span.features.blocks)


def _num_logits(chunk: Chunk) -> int:
    return chunk.num_tokens if chunk.targets else 1 + len(chunk.draft)


def _scores(logits: Logits, chunk: Chunk) -> tuple[TokenLogprob, ...]:
    """Score a chunk's targets; PyTorch's threads take the rows of large vocabularies."""
    if not chunk.targets:
        return ()
    logprobs = torch.from_numpy(logits[: len(chunk.targets)]).log_softmax(dim=-1)
    if not logprobs.amax(dim=-1).isfinite().all():
        raise BackendError(NOT_FINITE)
    chosen = logprobs.gather(1, torch.tensor(chunk.targets)[:, None])[:, 0]
    values, ids = logprobs.topk(min(chunk.num_top, logprobs.shape[1]))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    tops = (tuple(zip(*pair, strict=True)) for pair in pairs)
    return tuple(map(TokenLogprob, chunk.targets, chosen.tolist(), tops))


def _finish(span: ChunkSpan, logits: Logits) -> Row:
    """Sample if requested, then add the chunk to the sequence; a row that fails changes nothing.

    Keys and values of rejected draft tokens remain in the buffers after the sequence's end.
    """
    chunk, sequence = span.chunk, span.sequence
    try:
        scores = _scores(logits, chunk)
    except BackendError as error:
        return RowFailed(chunk.seq, error.message)
    row: Row = Computed(chunk.seq, scores)
    token, num_wrong = None, 0
    known, start = sequence.known, sequence.length
    replaced = known[start : span.end]
    known[start : span.end] = span.tokens
    if chunk.draw is not None:
        first, drawn = span.end - len(chunk.draft), logits[-1 - len(chunk.draft) :]
        try:
            row = verify(chunk, lambda i, draw: sample(drawn[i], draw, known, first + i))
            row = replace(row, scores=scores)
        except BackendError as error:
            known[start : span.end] = replaced
            return RowFailed(chunk.seq, error.message)
        token, num_wrong = row.token, len(chunk.draft) - len(row.accepted)
    end = span.end - num_wrong
    known[end : span.end] = replaced[end - start :]
    sequence.length, sequence.last_sampled = end, token
    if span.hidden is not None:
        sequence.ahead.add(start, span.hidden[: end - start])
    return row
