"""What was worked out before, up to a bound."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Values by key; the least recently used go first. Safe on any thread.

    Attributes:
        weight: Of all entries.
    """

    def __init__(self, max_weight: int, weigh: Callable[[K, V], int] = lambda *_: 1) -> None:
        self.weight = 0
        self._max_weight = max_weight
        self._weigh = weigh
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, *, is_used: bool = True) -> V | None:
        """Return a value; it gets no younger unless `is_used`."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None and is_used:
                self._entries.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        """Keep a value, in place of what was kept under the same key."""
        with self._lock:
            old = self._entries.pop(key, None)
            if old is not None:
                self.weight -= self._weigh(key, old)
            self._entries[key] = value
            self.weight += self._weigh(key, value)
            while self.weight > self._max_weight:
                self.weight -= self._weigh(*self._entries.popitem(last=False))
