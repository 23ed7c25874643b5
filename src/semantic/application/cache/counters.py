"""What happened to sealed blocks since the start."""

from dataclasses import dataclass


@dataclass(slots=True)
class CacheCounters:
    """Only ever grow."""

    sealed: int = 0
    evicted: int = 0
    read: int = 0
    written: int = 0
    corrupt: int = 0
    unwritten: int = 0
