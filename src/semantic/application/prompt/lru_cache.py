"""A thread-safe LRU cache, bounded by weight."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Values by key; evicts the least recently used. Thread-safe.

    Attributes:
        weight: Total weight of all entries.
    """

    def __init__(self, max_weight: int, weigh: Callable[[K, V], int] = lambda *_: 1) -> None:
        self.weight = 0
        self._max_weight = max_weight
        self._weigh = weigh
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, *, is_used: bool = True) -> V | None:
        """Return a value; `is_used` marks it as the most recently used."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None and is_used:
                self._entries.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        """Add or replace a value, then evict entries until the total weight fits."""
        with self._lock:
            old = self._entries.pop(key, None)
            if old is not None:
                self.weight -= self._weigh(key, old)
            self._entries[key] = value
            self.weight += self._weigh(key, value)
            while self.weight > self._max_weight:
                self.weight -= self._weigh(*self._entries.popitem(last=False))
