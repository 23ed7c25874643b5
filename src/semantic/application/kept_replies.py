"""The tokens of replies, kept in the ledger: exact replay survives a restart."""

import threading
import time
from collections.abc import Callable, Sequence

from semantic.application.replay import ReplayBook, ReplayKey
from semantic.application.turn_log import WriteChanges
from semantic.domain.errors import CachePersistenceError
from semantic.ports.persistence import LedgerPort, PutReplay

# They are small, and their agents may have any age: kept for long after they were last of use.
REPLAY_TTL_S = 30 * 24 * 3600.0
_DAY_S = 24 * 3600.0
# Keys depend on a tenant's root of names, so tenants cannot meet; the column tells them apart too.
_TENANT = ""


class KeptReplies:
    """A `ReplayStore` in memory over one in the ledger. Safe on any thread."""

    def __init__(
        self, ledger: LedgerPort, write: WriteChanges, now: Callable[[], float] = time.time
    ) -> None:
        self._ledger = ledger
        self._write = write
        self._now = now
        self._book = ReplayBook()
        self._lock = threading.Lock()
        self._day = now()
        self._written: set[ReplayKey] = set()  # today

    def remember(self, key: ReplayKey, tokens: Sequence[int]) -> None:
        """Keep a reply's tokens."""
        self._book.remember(key, tokens)
        self._put(key, tokens)

    def lookup(self, key: ReplayKey) -> tuple[int, ...] | None:
        """Return a reply's tokens; None if it is unknown."""
        tokens = self._book.lookup(key)
        if tokens is None:
            tokens = self._read(key)
            if tokens is None:
                return None
            self._book.remember(key, tokens)
        if not self._is_written_today(key):
            self._put(key, tokens)  # it is of use: it lives on
        return tokens

    def peek(self, key: ReplayKey) -> tuple[int, ...] | None:
        """Return what `lookup` would, and let it get no younger."""
        tokens = self._book.peek(key)
        return self._read(key) if tokens is None else tokens

    def _read(self, key: ReplayKey) -> tuple[int, ...] | None:
        try:
            return self._ledger.replay(_TENANT, key.prompt + key.message)
        except CachePersistenceError:
            return None  # it is rendered anew then

    def _put(self, key: ReplayKey, tokens: Sequence[int]) -> None:
        with self._lock:
            self._written.add(key)
        self._write(PutReplay(_TENANT, key.prompt + key.message, tuple(tokens), self._now()))

    def _is_written_today(self, key: ReplayKey) -> bool:
        with self._lock:
            if self._now() - self._day >= _DAY_S:
                self._day = self._now()
                self._written.clear()
            return key in self._written
