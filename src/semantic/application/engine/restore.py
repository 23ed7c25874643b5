"""A sequence on its way back: parts are loaded as they come from memory or disk.

Bounded in bytes a call, so that a long restore does not stall those who decode meanwhile; and in
what is held at a time, so that it needs no more memory than the next few parts take. With room for
one it goes on one by one.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from semantic.application.cache.loader import HeldPart
from semantic.application.cache.restore_plan import RestorePlan, WantedPart
from semantic.domain.agents import Reuse
from semantic.domain.blocks import PartKey
from semantic.domain.errors import CacheCorruptionError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import KVPayload, ModelBackendPort, SequenceId

_AHEAD_BYTES = 2**29  # twice what is loaded in a step while others decode, at most
_STEP_BYTES = 2**25, 2**28  # loaded in a step while others decode: at least, at most
_STEP_SECONDS = 0.003  # that the engine spends on it
_SMOOTHING = 0.3
_AHEAD_PARTS = 2  # at least, if there is room: one is read while another is loaded


class LoadPace:
    """How much state can be loaded in a step without holding up those who decode."""

    def __init__(self) -> None:
        self._seconds_per_byte = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Learn from one call of the backend."""
        if num_bytes:
            known = self._seconds_per_byte or seconds / num_bytes
            self._seconds_per_byte = known + _SMOOTHING * (seconds / num_bytes - known)

    @property
    def bytes_per_step(self) -> int:
        """Little where loading takes the engine's time, much where the device does it."""
        least, most = _STEP_BYTES
        if not self._seconds_per_byte:
            return least
        return max(least, min(most, int(_STEP_SECONDS / self._seconds_per_byte)))


class PartSource(Protocol):
    """Where a restore gets its parts from; see `PartLoader`."""

    def hold(self, wanted: WantedPart) -> HeldPart | None:
        """Get a part, now or later; None if there is no room."""

    def let_go(self, held: HeldPart) -> None:
        """Undo `hold`."""

    def lease(self, parts: Sequence[WantedPart]) -> None:
        """See that parts are not deleted."""

    def end_lease(self, parts: Sequence[WantedPart]) -> None:
        """Undo `lease`."""


@dataclass(frozen=True, slots=True)
class _PendingPart:
    """A part that was asked for and is not loaded yet."""

    held: HeldPart
    was_in_memory: bool

    @property
    def is_full(self) -> bool:
        return self.held.wanted.kind is LayerKind.FULL

    @property
    def is_ready(self) -> bool:
        return self.held.future.done()


class Restore:
    """Loads the parts of a plan into one sequence, in order. On the engine's thread.

    Attributes:
        plan: What is loaded.
        suspect_parts: After a failure, the parts that may be to blame.
        num_bytes: How much was loaded.
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
        """Begin to ask for parts; `close` must follow in the end, whatever happens.

        Args:
            seq: An open sequence with no state.
            plan: What is to be loaded.
            source: Where its parts are.
            prefetched: Parts that are in memory because they were read for this sequence.
            on_ready: Called, on any thread, when something that was waited for has been read.
            pace: Learns how long loading takes.
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
        """Whether `advance` would load anything that was asked for."""
        return bool(self._batch(1))

    @property
    def is_starved(self) -> bool:
        """Whether it waits for nothing but room for its next part."""
        is_waiting = any(not pending.is_ready for pending in self._pending)
        return self._is_refused and not is_waiting and not self.is_ready

    @property
    def loaded_plan(self) -> RestorePlan | None:
        """What is loaded so far, as if no more had been planned; None if nothing is."""
        if not self._loaded:
            return None
        last = self._loaded[-1].node
        return RestorePlan(tuple(self._loaded), last.end, last.name, last.end)

    def reuse(self, num_prompt: int) -> Reuse:
        """Say where the tokens of a prompt came from, as far as they are loaded."""
        computed = max(0, num_prompt - self._num_pool - self._num_disk)
        return Reuse(pool=self._num_pool, disk=self._num_disk, computed=computed)

    def advance(self, backend: ModelBackendPort, max_bytes: int) -> bool:
        """Load what is there, at most about `max_bytes`; True once the sequence can go on.

        Raises:
            CacheCorruptionError: a part could not be read or loaded; the sequence is of no use.
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
        """Let go of everything; nothing more is loaded. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for pending in self._pending:
            self._source.let_go(pending.held)
        self._pending.clear()
        self._wanted.clear()
        self._source.end_lease(self.plan.parts)

    # -- inside ---------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        """Ask for the next parts, as long as there is room and they are not too many."""
        self._is_refused = False
        num_bytes = sum(pending.held.nbytes for pending in self._pending)
        while self._wanted:
            # Those that are not full are loaded together, however many they are.
            is_rest = self._wanted[0].kind is not LayerKind.FULL
            is_needed = is_rest and not any(pending.is_full for pending in self._pending)
            is_much = len(self._pending) >= _AHEAD_PARTS and num_bytes >= _AHEAD_BYTES
            if is_much and not is_needed:
                return
            held = self._source.hold(self._wanted[0])
            self._is_refused = held is None
            if held is None:
                return
            num_bytes += held.nbytes
            is_new = self._wanted.popleft().key in self._prefetched
            # What was there at once came from memory; the rest is being read.
            self._pending.append(_PendingPart(held, held.future.done() and not is_new))
            if not held.future.done():
                held.future.add_done_callback(lambda _: self._on_ready())

    def _batch(self, max_bytes: int) -> list[_PendingPart]:
        """What can be loaded now: full parts in order, and when they are through all others."""
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
        """Load parts and let go of them; returns their bytes."""
        payloads = [self._payload(pending.held) for pending in batch]
        self.suspect_parts = [pending.held.wanted for pending in batch]
        left = [pending.held.wanted for pending in self._pending][len(batch) :] or self._wanted
        is_full_loaded = not left or left[0].kind is not LayerKind.FULL
        if LayerKind.FULL in backend.spec.kinds or not left:
            # Models without full attention have empty full parts, for the sake of the chain.
            parts = [payload for payload in payloads if payload.buffers]
            num_bytes, started = sum(part.nbytes for part in parts), time.perf_counter()
            backend.load(self._seq, parts, self.plan.end if is_full_loaded else payloads[-1].end)
            self._pace.observe(num_bytes, time.perf_counter() - started)
        self.suspect_parts = []
        for pending in batch:
            self._pending.popleft()
            self._count(pending)
            self._source.let_go(pending.held)
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
        """Take a part that was read."""
        try:
            return held.future.result()
        except Exception as error:
            self.suspect_parts = [held.wanted]
            if isinstance(error, CacheCorruptionError):
                raise
            raise CacheCorruptionError(f"a block could not be read: {error}") from error
