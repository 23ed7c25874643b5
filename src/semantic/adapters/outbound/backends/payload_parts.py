"""Checks every backend makes before it loads payloads: do they bring a sequence to its end?

Looks at positions and kinds alone; shapes and bytes are each backend's own business.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from semantic.domain.errors import CacheCorruptionError
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import KVPayload


@dataclass(frozen=True, slots=True)
class SortedParts:
    """Payloads by kind, in order of position."""

    full: tuple[KVPayload, ...] = ()
    window: tuple[KVPayload, ...] = ()
    state: KVPayload | None = None


def sort_parts(
    parts: Sequence[KVPayload], length: int, end: int, spec: ModelCacheSpec, abi: str
) -> SortedParts:
    """Sort what brings a sequence of `length` tokens to `end`.

    Raises:
        CacheCorruptionError: a part is foreign, or positions are missing; see
            `ModelBackendPort.load`.
    """
    for part in parts:
        if part.abi != abi:
            raise CacheCorruptionError(f"a payload of {part.abi} cannot be loaded")
        if part.kind not in spec.kinds or not 0 <= part.start < part.end:
            raise CacheCorruptionError(f"a {part.kind.value} payload does not belong here")
    full = tuple(part for part in parts if part.kind is LayerKind.FULL)
    window = tuple(part for part in parts if part.kind is LayerKind.WINDOW)
    state = next((part for part in parts if part.kind is LayerKind.STATE), None)
    if full and full[0].start != length:
        raise CacheCorruptionError(f"a payload from {full[0].start} does not follow {length}")
    if full or LayerKind.FULL in spec.kinds:
        _check_run(full, length, end)
    if window or (end > length and LayerKind.FULL not in spec.kinds and spec.window):
        _check_run(window, max(0, end - spec.window), end)
    if state is not None and state.end != end:
        raise CacheCorruptionError(f"the state at {state.end} is not that of {end}")
    return SortedParts(full, window, state)


def _check_run(parts: Sequence[KVPayload], start: int, end: int) -> None:
    """See that parts cover ``[start, end)`` without a gap and without one too many."""
    position = min(start, parts[0].start) if parts else start
    for part in parts:
        if part.start != position or position >= end:
            raise CacheCorruptionError(f"a payload from {part.start} does not follow {position}")
        position = part.end
    if position < end:
        raise CacheCorruptionError(f"payloads reach {position} and not {end}")
