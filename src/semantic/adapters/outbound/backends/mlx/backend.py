"""Runs models with mlx-lm: on Apple Silicon, on CUDA, and on a Linux CPU.

The modelling code is the library's own. Prompts run one sequence at a time through the library's
caches; the last token of every chunk that samples runs together with those of the other
sequences, in groups of similar length (see `mlx.groups` for the reasons). `launch` only enqueues a
step: tokens sampled on the device feed the next step before the host has read them.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import mlx.core as mx

from semantic.adapters.outbound import host_memory
from semantic.adapters.outbound.backends.common import make_rows
from semantic.adapters.outbound.backends.drafting import DEVICE_ERRORS, DraftingBackend
from semantic.adapters.outbound.backends.mlx import loading, payloads
from semantic.adapters.outbound.backends.mlx.caches import UnsupportedCacheError, capacity_for
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
from semantic.adapters.outbound.backends.mlx.cuda import kernels
from semantic.adapters.outbound.backends.mlx.cuda.quantised.linear import largest_expanded
from semantic.adapters.outbound.backends.mlx.cuda.transfer import Transfer
from semantic.adapters.outbound.backends.mlx.device_limits import (
    MemoryLimit,
    MemoryPlan,
    has_lost_device,
    is_out_of_memory,
    limit_device_memory,
    recover_memory,
)
from semantic.adapters.outbound.backends.mlx.groups import MlxSequence
from semantic.adapters.outbound.backends.mlx.loading import MlxModel, MlxOptions
from semantic.adapters.outbound.backends.mlx.loop.sequences import MlxLoop, VerifiedDraft, make_loop
from semantic.adapters.outbound.backends.mlx.payloads import DevicePart, SnapshotTicket
from semantic.adapters.outbound.backends.mlx.rows import PendingRow
from semantic.adapters.outbound.backends.mlx.runner import MlxRunner
from semantic.adapters.outbound.backends.mlx.sampling import LoopTokens
from semantic.adapters.outbound.backends.mlx.vision.tower import lag
from semantic.adapters.outbound.backends.mtp.state import head_bytes
from semantic.adapters.outbound.backends.sampler import check_draw
from semantic.domain.errors import (
    BackendError,
    DeviceLostError,
    PoolExhaustedError,
    SemanticError,
)
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import (
    Chunk,
    DeviceMemory,
    KVPayload,
    PendingTokens,
    Row,
    RowFailed,
    SequenceId,
    Step,
    StepOutput,
    Ticket,
    TokenLoop,
    Traits,
)

_LOG = logging.getLogger(__name__)
_CLEAR_INTERVAL = 256  # steps between two releases of unused buffers
_MAX_DRAFT = 16
_LEAST_CONTEXT = 1024  # a device without room for this many tokens is refused


@dataclass(frozen=True, slots=True)
class MlxStepTicket:
    """A launched step.

    Attributes:
        held: Objects that the device may use until the step is computed.
    """

    rows: tuple[PendingRow | RowFailed, ...]
    held: tuple[object, ...] = ()


class MlxBackend(DraftingBackend[MlxSequence]):
    """`ModelBackendPort` over a directory that mlx-lm can load."""

    def __init__(self, loaded: MlxModel) -> None:
        try:
            self._runner = MlxRunner(
                loaded.model,
                loaded.make_caches,
                loaded.inputs,
                has_head=loaded.head is not None,
            )
        except UnsupportedCacheError as error:
            raise loading.refusal(loaded.spec, str(error)) from error
        except loading.LIBRARY_ERRORS as error:
            raise loading.library_refusal(loaded.spec, error) from error
        self._tower = loaded.tower
        self._head = loaded.head if self._runner.keeps_hidden else None
        layout = self._runner.layout
        spec = loaded.spec.completed(layout.layers, self._runner.vocab_size)
        if loaded.spec.is_known and spec.layers != loaded.spec.layers:
            _LOG.info("mlx-lm keeps other layers of %s than its config tells", spec.model_type)
        held = [part for part in layout.parts if part.shapes]
        kept = next((part for part in held if part.kind is not LayerKind.STATE), held[0])
        dtype = str(kept.dtypes[0]).removeprefix("mlx.core.")
        sizes = loaded.num_bytes, loaded.kv_bytes, largest_expanded(loaded.model)
        self._plan = MemoryPlan.of(loaded.room, *sizes)
        traits = Traits(
            1,
            f"mlx.v1.{dtype}{'.full' * loaded.is_expanded}{spec.layout_tag(loaded.spec)}",
            kept.dtypes[0].size * 8,
            loading.describe(dtype, loaded.reason, loaded.slow),
            # In a ring, rejected draft tokens overwrite older tokens.
            max_draft=_MAX_DRAFT if self._runner.can_draft else 0,
            draft_end=spec.window or sys.maxsize,
            accepts_images=loaded.tower is not None,
            needs_whole_images=loaded.tower is not None and loaded.tower.is_bidirectional,
            kv_room=self._plan.kv_room,
            max_step_tokens=self._plan.step_tokens(loading.outputs_of_layer(loaded.model, spec)),
        )
        super().__init__(spec, traits, MlxSequence)
        self._device = mx.default_device()
        self._loop: MlxLoop | None = None
        self._has_loop = False
        self._checkpoint_bytes = layout.state_nbytes if self._runner.can_draft else 0
        self._require_room()
        self._num_steps = self._kv_bytes = 0
        self._held: list[object] = []
        self._num_running = 0
        memory = loaded.memory
        self._transfer = None if memory is None else Transfer(memory)
        if self._transfer is not None:
            counts = [len(places) for kind in LayerKind for places in layout.sections(kind)]
            self._transfer.prepare(counts, kept.dtypes[0])
        host_memory.use_device_memory(None if memory is None else memory.allocate)
        kernels.report_compiled()
        limit_device_memory(self._plan)
        self._limit = MemoryLimit(self._plan)

    def _require_room(self) -> None:
        """Refuse a model that leaves no room for sequences; log how long they may be."""
        plan, room, spec = self._plan, self._plan.kv_room, self._spec
        if room is None:
            return
        sizes = f"{plan.total >> 20:,} MB of device memory, weights {plan.weights >> 20:,} MB"
        least = min(_LEAST_CONTEXT, spec.max_context)
        if room < self.bytes_for([least]):
            reason = f"{sizes}: no room for {least} tokens of KV cache"
            raise loading.refusal(spec, reason, loading.SMALLER)
        if room < self.bytes_for([spec.max_context]):
            _LOG.warning("%s: KV cache of running requests is limited to %d MB", sizes, room >> 20)

    @classmethod
    def from_directory(
        cls, directory: Path, spec: ModelCacheSpec, options: MlxOptions | None = None
    ) -> Self:
        """Load a model.

        Raises:
            InvalidRequestError: this backend cannot run it.
        """
        return cls(loading.load(directory, spec, options or MlxOptions()))

    @property
    def loop(self) -> TokenLoop | None:
        if not self._has_loop:
            self._has_loop, self._loop = True, make_loop(self._runner)
        return self if self._loop is not None else None

    def sample(self, rows: Sequence[Chunk], count: int) -> Sequence[PendingTokens]:
        pending = [self._pending(chunk) for chunk in rows]
        if self._loop is None or not self._loop.can_sample(pending, count):
            return ()
        try:
            sampled = self._loop.sample(pending, count)
            self._kv_bytes = self.memory()
        except DEVICE_ERRORS as error:
            raise self._step_error(error) from error
        return sampled

    def sample_ahead(
        self, rows: Sequence[Chunk], verifying: Ticket, count: int
    ) -> Sequence[PendingTokens]:
        if self._loop is None or not isinstance(verifying, MlxStepTicket):
            return ()
        drafts = [
            VerifiedDraft.of(chunk, self._sequences[chunk.seq], row)
            for chunk, row in zip(rows, verifying.rows, strict=True)
        ]
        known = [draft for draft in drafts if draft is not None]
        if len(known) < len(drafts):
            return ()
        try:
            sampled = self._loop.sample_ahead(known, count)
            self._kv_bytes = self.memory()
        except DEVICE_ERRORS as error:
            raise self._step_error(error) from error
        return sampled

    def adopt(self, rows: Sequence[Chunk], ahead: Sequence[PendingTokens]) -> None:
        if self._loop is not None:
            sampled = [tokens for tokens in ahead if isinstance(tokens, LoopTokens)]
            self._loop.adopt([self._pending(chunk) for chunk in rows], sampled)

    def load(self, seq: SequenceId, parts: Sequence[KVPayload], end: int) -> None:
        sequence, layout = self._sequences[seq], self._runner.layout
        by_kind = self._sort_parts(seq, parts, end)
        if not parts:
            return
        # Validate all payloads before changing anything.
        kinds = (by_kind.full, by_kind.window, (by_kind.state,) if by_kind.state else ())
        full, window, state = (payloads.read(layout, kind, end, self._transfer) for kind in kinds)
        try:
            self._put(sequence, end, full, window, state)
        except DEVICE_ERRORS as error:
            raise self._step_error(error) from error

    def _put(
        self,
        sequence: MlxSequence,
        end: int,
        full: Sequence[DevicePart],
        window: Sequence[DevicePart],
        state: Sequence[DevicePart],
    ) -> None:
        layout = self._runner.layout
        sequence.checkpoint = None
        group = self._runner.groups.isolate(sequence, capacity_for(len(sequence.known)))
        if window or state:
            self._held.append([[*group.arrays[place]] for place in layout.not_full])
        for part in full:
            payloads.put_full(layout, sequence, part, self._transfer)
        if end > sequence.length:
            sequence.length, sequence.last_token = end, None
            sequence.window_start, sequence.has_state = end, False
        if window:
            payloads.put_window(layout, sequence, window, end)
            sequence.window_start = max(window[0].start, end - self._window)
        if state:
            payloads.put_state(layout, sequence, state[0])
            sequence.has_state = True
        if pieces := [part.pieces for part in (*full, *window, *state) if part.pieces]:
            self._held += pieces
            mx.async_eval(sequence.group_row()[0].arrays)
        else:
            mx.eval(sequence.group_row()[0].arrays)

    def launch(self, step: Step) -> Ticket:
        try:
            rows = make_rows(step, self._pending)
            outputs = self._runner.run([r for r in rows if isinstance(r, PendingRow)])
            self._kv_bytes = self.memory()  # other threads must not walk the sequences
            self._limit.follow(self._kv_bytes)
            mx.async_eval([*outputs, *self._runner.groups.moved_arrays()])
            self._num_steps += 1
            if self._num_steps % _CLEAR_INTERVAL == 0 and not cuda.is_in_use():
                mx.clear_cache()
        except DEVICE_ERRORS as error:
            raise self._step_error(error) from error
        held, self._held = tuple(self._held), []
        self._num_running += 1
        return MlxStepTicket(tuple(rows), held)

    def collect(self, ticket: Ticket) -> StepOutput:
        if not isinstance(ticket, MlxStepTicket):
            raise TypeError("not a step ticket of this backend")
        self._num_running = max(0, self._num_running - 1)
        try:
            output = StepOutput(tuple(self._finish(row) for row in ticket.rows))
        except DEVICE_ERRORS as error:
            raise self._step_error(error) from error
        if all(isinstance(row, RowFailed) for row in output.rows):
            self._held += ticket.held  # perhaps no row has waited for the step
        return output

    def embed(self, seq: SequenceId, start: int, tokens: Sequence[int]) -> tuple[float, ...]:
        row = self._pending(Chunk(seq, start, tuple(tokens)))
        sequence = row.sequence
        sequence.checkpoint = None
        try:
            hidden = self._runner.hidden(sequence, mx.array([*tokens], mx.int32))
            sums = mx.sum(hidden.astype(mx.float32), axis=0)
            mx.eval(sums, sequence.group_row()[0].arrays)
        except DEVICE_ERRORS as error:
            raise self._step_error(error) from error
        sequence.known[start : start + len(tokens)] = tokens
        values: list[float] = sums.tolist()
        return tuple(values)

    def snapshot(self, seq: SequenceId, start: int, end: int, kind: LayerKind) -> Ticket:
        sequence = self._sequences[seq]
        start = self._snapshot_start(sequence, start, end, kind)
        copies = payloads.copy_out(
            self._runner.layout,
            sequence,
            range(start, end),
            kind,
            self._transfer,
            self._runner.latest,
        )
        if self._transfer is not None:
            sequence.copying = self._transfer.asked
        return SnapshotTicket(self._traits.kv_abi, kind, start, end, copies)

    def payload(self, ticket: Ticket) -> KVPayload:
        if not isinstance(ticket, SnapshotTicket):
            raise TypeError("not a snapshot ticket of this backend")
        return ticket.payload()

    def flush(self) -> None:
        if self._transfer is not None:
            try:
                self._transfer.flush()
            except DEVICE_ERRORS as error:
                _LOG.warning("failed to copy KV cache to the host: %s", error)

    def close_sequence(self, seq: SequenceId) -> None:
        if (sequence := self._sequences.get(seq)) is not None:
            self._release(sequence)
        super().close_sequence(seq)

    def bytes_for(self, lengths: Sequence[int]) -> int:
        layout, saved = self._runner.layout, self._checkpoint_bytes
        return sum(
            layout.nbytes(capacity_for(n)) + saved + self._head_bytes(n) for n in lengths if n
        )

    def _head_bytes(self, length: int) -> int:
        if self._head is None:
            return 0
        layout = self._runner.layout
        entry_bytes = layout.parts[layout.of_kind(LayerKind.FULL)[-1]].nbytes(1)
        return head_bytes(length, entry_bytes, self._head.hidden_bytes)

    def memory(self) -> int:
        features = 0 if self._tower is None else self._tower.nbytes
        sequences = [*self._sequences.values()]
        ahead = sum(sequence.ahead.nbytes for sequence in sequences) if self._head else 0
        saved = sum(s.checkpoint is not None for s in sequences) * self._checkpoint_bytes
        return features + ahead + saved + self._runner.groups.nbytes(sequences)

    def device_memory(self) -> DeviceMemory | None:
        """Return MLX's figures; if it reports no free memory, `used` is this process's memory.

        None if the device does not answer: health checks must say so, and not fail.
        """
        total, cached = self._plan.total, mx.get_cache_memory()
        if not total:
            return None
        used = mx.get_active_memory() + cached
        if self._device.type == mx.gpu:
            try:
                info = mx.device_info(self._device)
            except RuntimeError:
                return None
            total = int(info.get("total_memory") or info.get("memory_size") or total)
            used = total - int(info["free_memory"]) if "free_memory" in info else used
        return DeviceMemory(used, total, self._plan.weights, self._kv_bytes, cached)

    def shutdown(self) -> None:
        """Free everything, and on a worker thread also MLX's streams of that thread."""
        while self._sequences:
            self._sequences.popitem()[1].group = None  # breaks the reference cycle
        self._runner.release()
        self._limit.release()
        self._tower = self._head = self._loop = None
        with contextlib.suppress(RuntimeError):  # a device that has failed
            if self._transfer is not None:
                self._transfer.finish()
        self._held.clear()
        with contextlib.suppress(RuntimeError):
            mx.synchronize()
        host_memory.collect_and_trim()  # free reference cycles, which hold arrays
        with contextlib.suppress(RuntimeError):
            mx.clear_cache()
        if threading.current_thread() is not threading.main_thread():
            # Otherwise the process aborts if it ends soon after the thread.
            mx.clear_streams()

    # -- one step -------------------------------------------------------------------------------

    def _pending(self, chunk: Chunk) -> PendingRow:
        """Check a chunk; after this, nothing may reject the row."""
        sequence = self._sequence_of(chunk)
        sequence.read_looped()
        has_sampled = sequence.last_token is not None and not sequence.last_token.has_failed()
        self._check_tokens(chunk, has_sampled=has_sampled)
        if chunk.draw is not None:
            for draw in chunk.draws:
                check_draw(draw, self._spec.vocab_size)
        row = PendingRow(chunk, sequence, draft=self._verifiable(chunk, sequence))
        if self._tower is not None:
            spans, end = self.images_of(chunk.seq), chunk.start + chunk.num_tokens
            row.images = self._tower.chunk_images(spans, chunk.start, end)
            sequence.lag = lag(spans, chunk.start) if self._tower.has_grid else 0
        return row

    def _check_draft_ids(self, draft: Sequence[int]) -> None:
        if not isinstance(draft, PendingTokens):  # those are in its model's vocabulary
            super()._check_draft_ids(draft)

    def _verifiable(self, chunk: Chunk, sequence: MlxSequence) -> Sequence[int]:
        """Return the draft tokens that fit the sequence's arrays; only decoded tokens have any."""
        if not chunk.draft or chunk.num_tokens > 1 or not sequence.length:
            return ()
        room = sequence.group_row()[0].capacity - sequence.length - 1
        return chunk.draft[: max(0, min(room, self._traits.draft_end - sequence.length - 1))]

    def _finish(self, row: PendingRow | RowFailed) -> Row:
        if isinstance(row, RowFailed):
            return row
        answer, sequence = row.finish(), row.sequence
        if isinstance(answer, RowFailed) and self._can_cut(sequence, row.chunk.start):
            self._cut(sequence, min(sequence.length, row.chunk.start))
        self._drop_rejected(sequence, answer, len(row.draft))
        return answer

    def _step_error(self, error: Exception) -> SemanticError:
        """Build the error of a step; after a failed allocation, release what MLX caches."""
        is_full = is_out_of_memory(error)
        if is_full:
            try:
                recover_memory()
            except DEVICE_ERRORS as worse:
                error = worse
            self._held.clear()
            self._num_running = 0
        if has_lost_device(error):
            advice = "if the model does not load again, restart the server."
            return DeviceLostError(f"the GPU has failed ({error}); {advice}")
        if is_full:
            return PoolExhaustedError(f"the device is out of memory: {error}", retry_after_s=5)
        return BackendError(f"device error: {error}")

    # -- lengths --------------------------------------------------------------------------------

    def _copy(self, source: MlxSequence, target: MlxSequence, num_tokens: int) -> None:
        target.length = num_tokens
        target.window_start, target.has_state = source.window_start, source.has_state
        target.lag = source.lag
        self._runner.groups.copy(source, target)
        self._copy_state(source, target, num_tokens)

    def _rewind(self, sequence: MlxSequence, end: int) -> None:
        self._runner.rewind(sequence, end)

    def _cut(self, sequence: MlxSequence, num_tokens: int) -> None:
        sequence.read_looped()
        if sequence.copying is not None:
            # The custom kernels will write where the copy still reads; MLX does not track this.
            sequence.copying.settle()
        self._cut_state(sequence, num_tokens)
        sequence.length, sequence.last_token = num_tokens, None
        if num_tokens == 0:
            self._release(sequence)
            sequence.window_start, sequence.has_state = 0, True

    def _release(self, sequence: MlxSequence) -> None:
        """Drop a sequence's arrays after the running steps are computed.

        MLX would reuse their memory for a copy on the other stream while this stream still writes
        it.
        """
        sequence.read_looped()
        if sequence.begun is not None:
            sequence.begun.values()
            sequence.begun = None
        if sequence.group is not None and (self._num_running or self._held):
            self._held.append(sequence.group.arrays)
        self._runner.groups.remove(sequence)
