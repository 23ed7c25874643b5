"""Leases of agents that several processes share."""

import asyncio
import threading

import pytest

from semantic.cluster.application.leases import AgentLeases
from tests.waiting import await_that

pytestmark = pytest.mark.unit


class SlowLeases:
    """A `LeaseStorePort` that grants every lease once it may answer."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        self.released: list[int] = []

    def acquire(self, tenant: str, agent_id: str, *, ttl_s: float) -> int | None:  # noqa: ARG002
        self.is_asked.set()
        assert self.may_answer.wait(60)
        return 7

    def renew(self, tenant: str, agent_id: str, epoch: int, *, ttl_s: float) -> bool:  # noqa: ARG002
        return True

    def release(self, tenant: str, agent_id: str, epoch: int) -> None:  # noqa: ARG002
        self.released.append(epoch)


async def test_a_request_cancelled_while_it_waits_for_a_lease_releases_it() -> None:
    port = SlowLeases()
    leases = AgentLeases(port)
    waiting = asyncio.create_task(leases.wait("local", "coder", timeout_s=60))
    await asyncio.to_thread(port.is_asked.wait, 60)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    port.may_answer.set()
    await asyncio.to_thread(await_that, lambda: port.released == [7])
    leases.close()
