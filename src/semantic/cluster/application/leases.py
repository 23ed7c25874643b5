"""Leases on agents that several servers share: one request at a time may move an agent's head."""

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from semantic.cluster.ports import LeaseStorePort
from semantic.domain.errors import CachePersistenceError, GenerationTimeoutError
from semantic.ports.sharing import Lease

_log = logging.getLogger(__name__)
_POLL_S = 0.05


class AgentLeases:
    """`AgentLeasesPort`: the leases of this process's requests, renewed until released.

    If a process dies, others may take over its leases after `ttl_s`.
    """

    def __init__(self, port: LeaseStorePort, ttl_s: float = 15.0) -> None:
        self._port = port
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._held: set[Lease] = set()
        self._is_closed = threading.Event()
        self._renewer: threading.Thread | None = None
        self._releases = ThreadPoolExecutor(1, "semantic-leases")

    def acquire(self, tenant: str, agent_id: str, *, patience_s: float = 0.0) -> Lease | None:
        end = time.monotonic() + patience_s
        while True:
            epoch = self._port.acquire(tenant, agent_id, ttl_s=self._ttl_s)
            if epoch is not None:
                lease = Lease(tenant, agent_id, epoch)
                self._keep_renewed(lease)
                return lease
            if time.monotonic() >= end:
                return None
            time.sleep(_POLL_S)

    async def wait(self, tenant: str, agent_id: str, timeout_s: float) -> Lease:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            asked = asyncio.ensure_future(asyncio.to_thread(self.acquire, tenant, agent_id))
            try:
                lease = await asyncio.shield(asked)
            except asyncio.CancelledError:
                asked.add_done_callback(self._release_unclaimed)
                raise
            if lease is not None:
                return lease
            await asyncio.sleep(_POLL_S)
        raise GenerationTimeoutError("the agent's earlier turns took too long.")

    def _release_unclaimed(self, asked: "asyncio.Future[Lease | None]") -> None:
        """Release a lease whose request was cancelled while it was being acquired."""
        if asked.cancelled() or asked.exception() is not None:
            return
        if (lease := asked.result()) is not None:
            self.release(lease)

    def release(self, lease: Lease) -> None:
        with self._lock:
            self._held.discard(lease)
        if not self._is_closed.is_set():
            self._releases.submit(self._release, lease)

    def close(self) -> None:
        self._is_closed.set()
        with self._lock:
            left, self._held = self._held, set()
        for lease in left:
            self._releases.submit(self._release, lease)
        self._releases.shutdown()

    def _keep_renewed(self, lease: Lease) -> None:
        with self._lock:
            if self._renewer is None:
                renewer = threading.Thread(
                    target=self._renew, name="semantic-lease-renewer", daemon=True
                )
                renewer.start()  # if this raises, the lease expires and the next request retries
                self._renewer = renewer
            self._held.add(lease)

    def _renew(self) -> None:
        while not self._is_closed.wait(self._ttl_s / 3):
            with self._lock:
                held = tuple(self._held)
            for lease in held:
                if not self._is_renewed(lease):
                    _log.warning("another server took over the lease of agent %s", lease.agent_id)
                    with self._lock:
                        self._held.discard(lease)

    def _is_renewed(self, lease: Lease) -> bool:
        with self._lock:
            if lease not in self._held:
                return True  # released meanwhile
        try:
            is_renewed = self._port.renew(
                lease.tenant, lease.agent_id, lease.epoch, ttl_s=self._ttl_s
            )
        except CachePersistenceError as error:
            _log.warning("could not renew a lease: %s", error.message)
            return True  # retried in the next round
        with self._lock:
            return is_renewed or lease not in self._held

    def _release(self, lease: Lease) -> None:
        try:
            self._port.release(lease.tenant, lease.agent_id, lease.epoch)
        except CachePersistenceError as error:
            _log.warning("could not release a lease; it expires on its own: %s", error.message)
