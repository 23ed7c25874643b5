"""The tokens of replies, kept in the ledger: exact replay survives a restart."""

import time
from collections.abc import Callable, Sequence

from semantic.application.replay import ReplayBook, ReplayKey
from semantic.application.unwritten_turns import WriteChanges
from semantic.domain.errors import CachePersistenceError
from semantic.ports.persistence import LedgerPort, PutReplay

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

    def remember(self, key: ReplayKey, tokens: Sequence[int]) -> None:
        """Keep a reply's tokens."""
        self._book.remember(key, tokens)
        self._write(PutReplay(_TENANT, key.prompt + key.message, tuple(tokens), self._now()))

    def lookup(self, key: ReplayKey) -> tuple[int, ...] | None:
        """Return a reply's tokens; None if it is unknown."""
        known = self._book.lookup(key)
        if known is not None:
            return known
        try:
            kept = self._ledger.replay(_TENANT, key.prompt + key.message)
        except CachePersistenceError:
            return None  # it is rendered anew then
        if kept is not None:
            self._book.remember(key, kept)
        return kept
