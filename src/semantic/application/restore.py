"""A sequence on its way back: parts are loaded as they come from memory or disk.

Bounded in bytes a call, so that a long restore does not stall those who decode meanwhile.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Future

from semantic.application.recall import RestorePlan, WantedPart
from semantic.domain.agents import Reuse
from semantic.domain.blocks import PartKey
from semantic.domain.errors import CacheCorruptionError
from semantic.domain.spec import LayerKind
from semantic.ports.outbound import KVPayload, ModelBackendPort, SequenceId


class Restore:
    """Loads the parts of a plan into one sequence, in order. On the engine's thread.

    Attributes:
        plan: What is loaded.
        suspects: After a failure, the parts that may be to blame.
    """

    def __init__(
        self,
        seq: SequenceId,
        plan: RestorePlan,
        futures: Sequence[Future[KVPayload]],
        prefetched: Collection[PartKey] = (),
    ) -> None:
        """Prepare.

        Args:
            seq: An open sequence with no state.
            plan: What is to be loaded.
            futures: The plan's parts.
            prefetched: Parts that are in memory because they were read for this sequence.
        """
        self.plan = plan
        self.suspects: list[WantedPart] = []
        self._seq = seq
        pairs = list(zip(plan.parts, futures, strict=True))
        self._full = [(part, f) for part, f in pairs if part.kind is LayerKind.FULL]
        self._rest = [(part, f) for part, f in pairs if part.kind is not LayerKind.FULL]
        # What was there at once came from memory; the rest is being read.
        self._was_in_memory = [
            future.done() and part.key not in prefetched for part, future in self._full
        ]
        self._next = 0

    def reuse(self, num_prompt: int) -> Reuse:
        """Say where the tokens of a prompt came from."""
        num_tokens = {True: 0, False: 0}
        for (part, _), was_in_memory in zip(self._full, self._was_in_memory, strict=True):
            num_tokens[was_in_memory] += min(part.node.end, self.plan.end) - part.node.start
        computed = max(0, num_prompt - self.plan.end)
        return Reuse(pool=num_tokens[True], disk=num_tokens[False], computed=computed)

    @property
    def is_ready(self) -> bool:
        """Whether `advance` would load anything."""
        if self._next < len(self._full):
            return self._full[self._next][1].done()
        return self._has_rest

    @property
    def _has_rest(self) -> bool:
        return all(future.done() for _, future in self._rest)

    def advance(self, backend: ModelBackendPort, max_bytes: int) -> bool:
        """Load what is there, at most about `max_bytes`; True once the sequence can go on.

        Raises:
            CacheCorruptionError: a part could not be read or loaded; the sequence is of no use.
        """
        self.suspects = []
        parts: list[KVPayload] = []
        end = self.plan.end
        while self._next < len(self._full) and self._full[self._next][1].done() and max_bytes > 0:
            parts.append(self._payload(*self._full[self._next]))
            max_bytes -= parts[-1].nbytes
            self._next += 1
        is_full_loaded = self._next == len(self._full)
        is_complete = is_full_loaded and self._has_rest
        if not is_full_loaded and parts:
            end = parts[-1].end
        if is_complete:
            parts += [self._payload(*pair) for pair in self._rest]
        if parts or is_complete:
            # Models without full attention have empty full parts, for the sake of the chain.
            self._load(backend, [part for part in parts if part.buffers], end, is_complete)
        return is_complete

    def _load(
        self, backend: ModelBackendPort, parts: Sequence[KVPayload], end: int, is_complete: bool
    ) -> None:
        has_full = LayerKind.FULL in backend.spec.kinds
        if has_full or is_complete:
            backend.load(self._seq, parts, end)

    def _payload(self, part: WantedPart, future: Future[KVPayload]) -> KVPayload:
        """Take a part that was read; until all of a call's parts are loaded each is a suspect."""
        try:
            payload = future.result()
        except Exception as error:
            self.suspects = [part]
            if isinstance(error, CacheCorruptionError):
                raise
            raise CacheCorruptionError(f"a block could not be read: {error}") from error
        self.suspects.append(part)
        return payload
