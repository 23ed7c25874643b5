"""Ledger storage per tenant, and its quota.

The KV cache of a tenant can be evicted to stay within a quota; agents and turns cannot. So a
request of a tenant that has used its quota is rejected before it stores more. Only tenants with a
quota are counted: the ledger gives the initial size, and every change written adjusts it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from semantic.domain.access import KeyRing
from semantic.domain.errors import QuotaExceededError
from semantic.ports.storage import LedgerPort, PutAgent, PutImage, PutTurn

StoredRow: TypeAlias = PutAgent | PutTurn | PutImage
_MB = 2**20


class TenantQuotas:
    """The disk quota of each tenant: its own, or the default of all.

    Attributes:
        ring: The keys and limits in force; replaced as a whole when they are reloaded.
    """

    def __init__(self, default_bytes: int = 0) -> None:
        """Start without quotas of tenants; a default of 0 is no limit."""
        self.ring = KeyRing()
        self._default_bytes = default_bytes

    @property
    def has_any(self) -> bool:
        return bool(self._default_bytes) or any(
            policy.disk_bytes for policy in self.ring.tenants.values()
        )

    def of(self, tenant: str) -> int | None:
        """Return a tenant's quota in bytes; None for no limit."""
        return self.ring.policy(tenant).disk_bytes or self._default_bytes or None


class StorageQuota:
    """Counts the bytes of tenants' agents, turns and images.

    Thread-safe; `check` and `used` may read the ledger.
    """

    def __init__(self, ledger: LedgerPort, quota: Callable[[str], int | None]) -> None:
        """Start without counts; the result of `quota`, in bytes, may change at any time."""
        self._ledger = ledger
        self._quota = quota
        self._lock = threading.Lock()  # never held across I/O
        self._used: dict[str, int] = {}

    def used(self, tenant: str) -> int:
        """Return the bytes that a tenant's rows take; 0 for a tenant without a quota."""
        if self._quota(tenant) is None:
            with self._lock:
                self._used.pop(tenant, None)
            return 0
        with self._lock:
            known = self._used.get(tenant)
        if known is not None:
            return known
        counted = self._ledger.stored_bytes(tenant)
        with self._lock:
            return self._used.setdefault(tenant, counted)

    def check(self, tenant: str, *new: StoredRow, old: StoredRow | None = None) -> None:
        """Check that a tenant's quota allows replacing `old` with `new`; counts nothing.

        A replacement that is not larger always passes. Call `add` after storing.

        Raises:
            QuotaExceededError: the quota is used up, or too small for the change.
        """
        limit = self._quota(tenant)
        if limit is None:
            return
        used, grown = self.used(tenant), self._grown(new, old)
        if used + max(grown, 1) <= limit or (old is not None and grown <= 0):
            return
        raise QuotaExceededError(
            f"this tenant stores {used / _MB:.1f} MB of agents, turns and images; its disk quota "
            f"is {limit / _MB:.1f} MB. Delete agents (the next garbage collection deletes their "
            "turns), or raise disk_quota_mb."
        )

    def add(self, tenant: str, new: StoredRow, old: StoredRow | None = None) -> None:
        with self._lock:
            if tenant not in self._used:
                return  # `used` counts it when it reads the ledger
        self._grow(tenant, self._grown((new,), old))

    def remove(self, tenant: str, old: StoredRow) -> None:
        with self._lock:
            if tenant not in self._used:
                return
        self._grow(tenant, -self._ledger.size_of(old))

    def refresh(self) -> None:
        """Reset the counters, so that they are read from the ledger again after it deleted rows."""
        with self._lock:
            self._used.clear()

    def _grown(self, new: Sequence[StoredRow], old: StoredRow | None) -> int:
        return self._ledger.size_of(*new) - (self._ledger.size_of(old) if old else 0)

    def _grow(self, tenant: str, nbytes: int) -> None:
        with self._lock:
            if tenant in self._used:
                self._used[tenant] = max(0, self._used[tenant] + nbytes)
