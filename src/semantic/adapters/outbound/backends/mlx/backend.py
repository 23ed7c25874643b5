"""Runs models with mlx-lm: on Apple Silicon, on CUDA, and on a Linux CPU.

The modelling code is the library's own. Many tokens of one sequence run through the library's own
caches; the last token of every chunk that asks for a sample runs together with those of the other
sequences, in groups of like length (`mlx.groups` says why). A step is only enqueued by `launch`:
tokens that the device draws feed the next step before anyone has seen them.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx import loading, payloads
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
from semantic.adapters.outbound.backends.mlx.groups import MlxSequence
from semantic.adapters.outbound.backends.mlx.layout import capacity_for, why_unlike
from semantic.adapters.outbound.backends.mlx.loading import LoadedMlx, MlxOptions
from semantic.adapters.outbound.backends.mlx.payloads import SnapshotTicket
from semantic.adapters.outbound.backends.mlx.runner import MlxRunner
from semantic.adapters.outbound.backends.mlx.sampling import PendingRow, check_draw
from semantic.adapters.outbound.backends.mlx.steps import run_rows
from semantic.adapters.outbound.backends.payload_parts import sort_parts
from semantic.adapters.outbound.backends.step_rows import (
    check_ids,
    check_tokens,
    make_rows,
    sequence_of,
)
from semantic.domain.errors import BackendError, CacheCorruptionError
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import (
    Chunk,
    DeviceMemory,
    KVPayload,
    Row,
    RowFailed,
    SequenceId,
    Step,
    StepOutput,
    Ticket,
    Traits,
)

_CLEAR_INTERVAL = 256  # steps between two returns of unused buffers
_DEVICE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, MemoryError)


@dataclass(frozen=True, slots=True)
class StepTicket:
    """A step under way."""

    rows: tuple[PendingRow | RowFailed, ...]


class MlxBackend:
    """`ModelBackendPort` over a directory that mlx-lm can load."""

    def __init__(self, loaded: LoadedMlx) -> None:
        """Find out how a model can be run.

        Raises:
            InvalidRequestError: this backend cannot run it.
        """
        self._spec = spec = loaded.spec
        try:
            self._runner = MlxRunner(loaded.model, loaded.make_caches)
        except _DEVICE_ERRORS as error:
            raise loading.refusal(spec, str(error)) from error
        layout = self._runner.layout
        if reason := why_unlike(layout.parts, self._spec.layers):
            raise loading.refusal(spec, reason)
        kept = next((p for p in layout.parts if p.kind is not LayerKind.STATE), layout.parts[0])
        dtype = str(kept.dtypes[0]).removeprefix("mlx.core.")
        self._traits = Traits(
            1,
            not cuda.is_in_use(),
            f"mlx.v1.{dtype}",
            kept.dtypes[0].size * 8,
            loading.describe(dtype, loaded.reason),
        )
        self._sequences: dict[SequenceId, MlxSequence] = {}
        self._num_steps = 0

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
    def spec(self) -> ModelCacheSpec:
        """Geometry of the attention state, as mlx-lm keeps it."""
        return self._spec

    @property
    def traits(self) -> Traits:
        """What the engine must know."""
        return self._traits

    def open(self, seq: SequenceId, tokens: Sequence[int]) -> None:
        """Begin a sequence."""
        check_ids(tokens, self._spec.vocab_size)
        self._add(seq, MlxSequence(list(tokens)))

    def load(self, seq: SequenceId, parts: Sequence[KVPayload], end: int) -> None:
        """Append state from payloads."""
        sequence, layout = self._sequences[seq], self._runner.layout
        found = sort_parts(parts, sequence.length, end, self._spec, self._traits.kv_abi)
        if end > len(sequence.known):
            raise CacheCorruptionError(f"only {len(sequence.known)} of {end} tokens are known")
        if not parts:
            return
        # All are found sound before anything is changed.
        full, window = ([payloads.read(layout, p) for p in k] for k in (found.full, found.window))
        state = payloads.read(layout, found.state) if found.state else None
        self._runner.groups.alone(sequence, capacity_for(len(sequence.known)))
        for part in full:
            payloads.put_full(layout, sequence, part, end)
        if end > sequence.length:
            sequence.length, sequence.last = end, None
            sequence.window_start = end if self._spec.window else 0
            sequence.has_state = False
        if window:
            payloads.put_window(layout, sequence, window, end)
            sequence.window_start = max(window[0].payload.start, end - self._spec.window)
        if state is not None:
            payloads.put_state(layout, sequence, state)
            sequence.has_state = True
        mx.eval(sequence.held()[0].arrays)

    def fork(self, src: SequenceId, dst: SequenceId, num_tokens: int) -> bool:
        """Open a sequence with another's first tokens."""
        source = self._sequences[src]
        if not 0 <= num_tokens <= source.length or not self._can_cut(source, num_tokens):
            return False
        target = MlxSequence(source.known[:num_tokens], num_tokens)
        self._add(dst, target)
        if num_tokens:
            target.window_start, target.has_state = source.window_start, source.has_state
            self._runner.groups.copy(source, target)
        return True

    def launch(self, step: Step) -> Ticket:
        """Enqueue a step."""
        try:
            rows = self._plan(step)
            outputs = run_rows(self._runner, [r for r in rows if isinstance(r, PendingRow)])
            mx.async_eval([*outputs, *self._runner.groups.unsettled()])
            self._num_steps += 1
            if self._num_steps % _CLEAR_INTERVAL == 0:
                mx.clear_cache()
        except _DEVICE_ERRORS as error:
            raise BackendError(f"the device failed: {error}") from error
        return StepTicket(tuple(rows))

    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for a step's tokens."""
        if not isinstance(ticket, StepTicket):
            raise TypeError("not the ticket of a step of this backend")
        try:
            return StepOutput(tuple(self._finish(row) for row in ticket.rows))
        except _DEVICE_ERRORS as error:
            raise BackendError(f"the device failed: {error}") from error

    def snapshot(self, seq: SequenceId, start: int, end: int, kind: LayerKind) -> Ticket:
        """Begin copying state."""
        sequence = self._sequences[seq]
        if kind is LayerKind.WINDOW:
            start = max(start, end - self._spec.window)
        is_held = kind in self._spec.kinds and 0 <= start < end <= sequence.length
        if kind is LayerKind.WINDOW:
            is_held = is_held and start >= self._first_kept(sequence)
        if kind is LayerKind.STATE:
            is_held = is_held and end == sequence.length and sequence.has_state
        if not is_held:
            raise ValueError(f"the {kind.value} layers do not hold [{start}, {end}), or it is gone")
        arrays = payloads.copy_out(self._runner.layout, sequence, start, end, kind)
        return SnapshotTicket(self._traits.kv_abi, kind, start, end, arrays)

    def payload(self, ticket: Ticket) -> KVPayload:
        """Wait for a snapshot."""
        if not isinstance(ticket, SnapshotTicket):
            raise TypeError("not the ticket of a snapshot of this backend")
        return ticket.payload()

    def truncate(self, seq: SequenceId, num_tokens: int) -> int:
        """Cut a sequence back; to nothing where rings or states do not reach back that far."""
        sequence = self._sequences[seq]
        if num_tokens < 0:
            raise ValueError(f"a sequence cannot have {num_tokens} tokens")
        if num_tokens < sequence.length:
            self._cut(sequence, num_tokens if self._can_cut(sequence, num_tokens) else 0)
            del sequence.known[num_tokens:]
        return sequence.length

    def close(self, seq: SequenceId) -> None:
        """Drop a sequence."""
        sequence = self._sequences.pop(seq, None)
        if sequence is not None:
            self._runner.groups.remove(sequence)

    def bytes_for(self, lengths: Sequence[int]) -> int:
        """Arrays come in sizes a quarter apart; padding is part of them."""
        layout = self._runner.layout
        return sum(layout.nbytes(capacity_for(length)) for length in lengths if length)

    def memory(self) -> DeviceMemory:
        """Add up the sequences' arrays."""
        info = mx.device_info()
        total = info.get("total_memory") or info.get("memory_size") or 0
        return DeviceMemory(int(total), self._runner.groups.nbytes([*self._sequences.values()]))

    def shutdown(self) -> None:
        """Drop everything, and what MLX keeps for this thread if it is a worker."""
        for sequence in self._sequences.values():
            sequence.group = None  # which refers to it in turn
        self._sequences.clear()
        self._runner.release()
        mx.synchronize()
        mx.clear_cache()
        if threading.current_thread() is not threading.main_thread():
            # Otherwise the process aborts if it ends soon after the thread.
            mx.clear_streams()

    # -- one step -------------------------------------------------------------------------------

    def _plan(self, step: Step) -> list[PendingRow | RowFailed]:
        return make_rows(step, self._pending)

    def _pending(self, chunk: Chunk) -> PendingRow:
        """Check a chunk; nothing after this may refuse the row."""
        sequence = sequence_of(chunk, self._sequences, self._is_whole)
        has_sampled = sequence.last is not None and not sequence.last.has_failed()
        check_tokens(chunk, self._spec.vocab_size, has_sampled=has_sampled)
        if chunk.draw is not None:
            check_draw(chunk.draw, self._spec.vocab_size)
        return PendingRow(chunk, sequence)

    def _finish(self, row: PendingRow | RowFailed) -> Row:
        if isinstance(row, RowFailed):
            return row
        answer = row.finish()
        if isinstance(answer, RowFailed) and self._can_cut(row.sequence, row.chunk.start):
            self._cut(row.sequence, min(row.sequence.length, row.chunk.start))
        return answer

    # -- lengths --------------------------------------------------------------------------------

    def _first_kept(self, sequence: MlxSequence) -> int:
        """The first position whose keys and values window layers still hold."""
        return max(sequence.window_start, sequence.length - self._spec.window)

    def _is_whole(self, sequence: MlxSequence) -> bool:
        """Whether window and state layers hold what a continuation looks at."""
        if self._spec.num_state and not sequence.has_state:
            return False
        return sequence.window_start <= max(0, sequence.length - self._spec.window)

    def _can_cut(self, sequence: MlxSequence, num_tokens: int) -> bool:
        if num_tokens in (0, sequence.length):
            return True
        window = self._spec.window
        has_window = not window or self._first_kept(sequence) <= max(0, num_tokens - window)
        return has_window and not self._spec.num_state

    def _cut(self, sequence: MlxSequence, num_tokens: int) -> None:
        sequence.length, sequence.last = num_tokens, None
        if num_tokens == 0:
            self._runner.groups.remove(sequence)
            sequence.window_start, sequence.has_state = 0, True

    def _add(self, seq: SequenceId, sequence: MlxSequence) -> None:
        if seq in self._sequences:
            raise ValueError(f"sequence {seq} is open")
        self._sequences[seq] = sequence
