"""Restores a sequence: loads its parts into the backend as they arrive from memory or disk.

Each call loads a bounded number of bytes, so that a long restore does not stall decoding sequences.
A restore acquires only the next few parts at a time to bound its memory; with room for a single
part it proceeds one part at a time.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from semantic.application.cache.restore_plan import HeldPart, RestorePlan, WantedPart
from semantic.domain.agents import Reuse
from semantic.domain.blocks import PartKey
from semantic.domain.errors import CacheCorruptionError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import KVPayload, ModelBackendPort, SequenceId

_AHEAD_BYTES = 2**29  # read-ahead: twice the most that one step loads while others decode
_STEP_BYTES = 2**25, 2**28  # minimum and maximum to load in a step while others decode
_STEP_SECONDS = 0.003  # target time of the device thread for loading in a step
_SMOOTHING = 0.3
_AHEAD_PARTS = 2  # minimum read-ahead, if memory allows: read one part while loading another


class LoadPace:
    """How much state a step can load without delaying decoding sequences."""

    def __init__(self) -> None:
        self._seconds_per_byte = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes:
            known = self._seconds_per_byte or seconds / num_bytes
            self._seconds_per_byte = known + _SMOOTHING * (seconds / num_bytes - known)

    @property
    def bytes_per_step(self) -> int:
        """Bytes to load in a step: more where `load` returns early and the device copies."""
        least, most = _STEP_BYTES
        if not self._seconds_per_byte:
            return least
        return max(least, min(most, int(_STEP_SECONDS / self._seconds_per_byte)))


class PartSource(Protocol):
    """Supplies the parts of a restore; see `BlockTiers`."""

    def acquire(self, wanted: WantedPart) -> HeldPart | None:
        """Acquire a part, which stays in memory until `release`; None if memory is short.

        The part's future resolves once it is read.
        """

    def release(self, held: HeldPart) -> None: ...

    def lease(self, parts: Sequence[WantedPart]) -> None:
        """Protect the files of parts from deletion until `end_lease`."""

    def end_lease(self, parts: Sequence[WantedPart]) -> None: ...


@dataclass(frozen=True, slots=True)
class _PendingPart:
    held: HeldPart
    was_in_memory: bool

    @property
    def is_full(self) -> bool:
        return self.held.wanted.kind is LayerKind.FULL

    @property
    def is_ready(self) -> bool:
        return self.held.future.done()


class Restore:
    """Loads the parts of a plan into one sequence, in order. Used on the device thread only.

    Attributes:
        suspect_parts: After a failure, the parts that may be corrupt.
    """

    def __init__(
        self,
        seq: SequenceId,
        plan: RestorePlan,
        source: PartSource,
        prefetched: Collection[PartKey] = (),
        on_ready: Callable[[], None] = lambda: None,
        pace: LoadPace | None = None,
    ) -> None:
        """Lease all parts and acquire the first ones; the caller must call `close` in any case.

        Args:
            seq: An open sequence with no state.
            prefetched: Parts in memory only because they were prefetched for this sequence; they
                count as read from disk.
            on_ready: Called on any thread when a pending read completes.
        """
        self.plan = plan
        self.suspect_parts: list[WantedPart] = []
        self.num_bytes = 0
        self._seq = seq
        self._source = source
        self._pace = pace or LoadPace()
        self._prefetched = prefetched
        self._on_ready = on_ready
        self._wanted = deque(plan.parts)
        self._pending: deque[_PendingPart] = deque()
        self._is_refused = False
        self._is_closed = False
        self._loaded: list[WantedPart] = []
        self._num_pool = self._num_disk = 0
        source.lease(plan.parts)
        self._read_ahead()

    @property
    def is_ready(self) -> bool:
        return bool(self._batch(1))

    @property
    def is_starved(self) -> bool:
        """Whether the restore only lacks memory for its next part."""
        is_waiting = any(not pending.is_ready for pending in self._pending)
        return self._is_refused and not is_waiting and not self.is_ready

    @property
    def loaded_plan(self) -> RestorePlan | None:
        """A plan of only the parts loaded so far; None if there are none."""
        if not self._loaded:
            return None
        last = self._loaded[-1].node
        return RestorePlan(tuple(self._loaded), last.end, last.name, last.end)

    def reuse(self, num_prompt: int) -> Reuse:
        """Return how many prompt tokens came from memory and from disk; the rest is computed."""
        computed = max(0, num_prompt - self._num_pool - self._num_disk)
        return Reuse(pool=self._num_pool, disk=self._num_disk, computed=computed)

    def advance(self, backend: ModelBackendPort, max_bytes: int) -> bool:
        """Load the parts that are ready, about `max_bytes` at most; returns True once complete.

        Raises:
            CacheCorruptionError: a part could not be read or loaded; the sequence is unusable.
        """
        while self._wanted or self._pending:
            self._read_ahead()
            batch = self._batch(max_bytes)
            if not batch:
                return False
            max_bytes -= self._load(backend, batch)
        self.close()
        return True

    def close(self) -> None:
        """Release all parts and leases and stop loading. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for pending in self._pending:
            self._source.release(pending.held)
        self._pending.clear()
        self._wanted.clear()
        self._source.end_lease(self.plan.parts)

    # -- inside ---------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        self._is_refused = False
        num_bytes = sum(pending.held.nbytes for pending in self._pending)
        while self._wanted:
            # Window and state parts load in one call, so all of them must be acquired for it.
            is_rest = self._wanted[0].kind is not LayerKind.FULL
            is_needed = is_rest and not any(pending.is_full for pending in self._pending)
            is_much = len(self._pending) >= _AHEAD_PARTS and num_bytes >= _AHEAD_BYTES
            if is_much and not is_needed:
                return
            held = self._source.acquire(self._wanted[0])
            self._is_refused = held is None
            if held is None:
                return
            num_bytes += held.nbytes
            is_new = self._wanted.popleft().key in self._prefetched
            self._pending.append(_PendingPart(held, held.was_in_memory and not is_new))
            if not held.future.done():
                held.future.add_done_callback(lambda _: self._on_ready())

    def _batch(self, max_bytes: int) -> list[_PendingPart]:
        """Return the parts to load now: full parts in order, then all other parts together."""
        batch: list[_PendingPart] = []
        for pending in self._pending:
            if not pending.is_full:
                break
            if max_bytes <= 0 or not pending.is_ready:
                return batch
            batch.append(pending)
            max_bytes -= pending.held.nbytes
        rest = list(self._pending)[len(batch) :]
        if not self._wanted and all(pending.is_ready for pending in rest):
            batch += rest
        return batch

    def _load(self, backend: ModelBackendPort, batch: Sequence[_PendingPart]) -> int:
        payloads = [self._payload(pending.held) for pending in batch]
        self.suspect_parts = [pending.held.wanted for pending in batch]
        left = [pending.held.wanted for pending in self._pending][len(batch) :] or self._wanted
        is_full_loaded = not left or left[0].kind is not LayerKind.FULL
        if LayerKind.FULL in backend.spec.kinds or not left:
            # Models without full attention have empty full parts, which only link the chain.
            parts = [payload for payload in payloads if payload.buffers]
            num_bytes, started = sum(part.nbytes for part in parts), time.perf_counter()
            backend.load(self._seq, parts, self.plan.end if is_full_loaded else payloads[-1].end)
            self._pace.observe(num_bytes, time.perf_counter() - started)
        self.suspect_parts = []
        for pending in batch:
            self._pending.popleft()
            self._count(pending)
            self._source.release(pending.held)
        num_bytes = sum(payload.nbytes for payload in payloads)
        self.num_bytes += num_bytes
        return num_bytes

    def _count(self, pending: _PendingPart) -> None:
        wanted = pending.held.wanted
        if not pending.is_full:
            return
        self._loaded.append(wanted)
        num_tokens = min(wanted.node.end, self.plan.end) - wanted.node.start
        if pending.was_in_memory:
            self._num_pool += num_tokens
        else:
            self._num_disk += num_tokens

    def _payload(self, held: HeldPart) -> KVPayload:
        try:
            return held.future.result()
        except Exception as error:
            self.suspect_parts = [held.wanted]
            if isinstance(error, CacheCorruptionError):
                raise
            raise CacheCorruptionError(f"cannot read a block: {error}") from error
