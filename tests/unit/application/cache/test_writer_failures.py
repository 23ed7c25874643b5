"""What the writer does when the ledger fails, when nobody waits any more, and at the end."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.domain.agents import Agent
from semantic.domain.errors import CachePersistenceError
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload
from semantic.ports.storage import LedgerChange, PutAgent
from tests.unit.application.engine_rig import ROOT
from tests.unit.application.ledger_rig import agents_of, exchange_of

pytestmark = pytest.mark.unit


class FailingLedger(SqliteLedger):
    """A ledger whose disk is full while it is told so."""

    def __init__(self) -> None:
        super().__init__(None)
        self.load()
        self.is_full = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.ended: list[str] = []

    def apply(self, changes: Sequence[LedgerChange], *, is_synced: bool) -> None:
        self.may_go_on.wait(10)
        if self.is_full:
            raise CachePersistenceError("the disk is full.")
        super().apply(changes, is_synced=is_synced)

    def back_up(self) -> None:
        self.ended.append("backed up")

    def close(self) -> None:
        self.ended.append("closed")


@pytest.fixture
def ledger() -> FailingLedger:
    return FailingLedger()


@pytest.fixture
def make_disk(tmp_path: Path, ledger: FailingLedger) -> Iterator[Callable[[int], DiskTier]]:
    made: list[DiskTier] = []

    def make(queue_bytes: int) -> DiskTier:
        files = SafetensorsCache(tmp_path)
        made.append(DiskTier(files, ledger, DiskLimits(2**30, queue_bytes)))
        return made[-1]

    yield make
    ledger.may_go_on.set()
    for disk in made:
        disk.close(10)


def store_over(disk: DiskTier) -> AgentCacheStore:
    return AgentCacheStore(BlockPool(fake_spec(block_tokens=8), 2**20), disk)


def test_who_waits_hears_of_a_full_disk_at_once_and_the_turn_is_written_later(
    make_disk: Callable[[int], DiskTier], ledger: FailingLedger
) -> None:
    disk = make_disk(2**20)
    disk.start(store_over(disk).is_on_disk)
    agents = agents_of(ledger, disk.change)
    ledger.is_full = True
    turn, done = agents.commit("local", "coder", exchange_of([1, 2], [3], ["hello"]))
    with pytest.raises(CachePersistenceError, match="full"):
        done.result(10)
    assert disk.problem == "the disk is full."
    assert agents.turn("local", turn.id) == turn  # not written, and not forgotten
    ledger.is_full = False
    assert disk.flush(10)
    assert disk.problem == ""
    assert ledger.turn("local", turn.id) == turn


async def test_a_caller_that_no_longer_waits_does_not_end_the_writer(
    make_disk: Callable[[int], DiskTier], ledger: FailingLedger
) -> None:
    disk = make_disk(2**20)
    disk.start(store_over(disk).is_on_disk)
    ledger.may_go_on.clear()
    waiting = asyncio.wrap_future(disk.change(PutAgent(Agent("coder", 1.0))))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting, 0.01)
    ledger.may_go_on.set()
    assert await asyncio.to_thread(disk.flush, 10)
    assert [agent.id for agent in ledger.load().agents] == ["coder"]


def block(first: int) -> tuple[list[int], list[KVPayload]]:
    """A block of its own."""
    data = HostBuffer("full", (8,), "u32", bytes(32))
    return [first] * 8, [KVPayload("fake.v1", LayerKind.FULL, 0, 8, (data,))]


def test_a_ledger_that_outgrows_the_budget_keeps_turns_and_files(tmp_path: Path) -> None:
    budget = 2**20
    ledger = SqliteLedger(tmp_path)
    disk = DiskTier(SafetensorsCache(tmp_path), ledger, DiskLimits(budget, 2**20))
    agents = agents_of(ledger, disk.change)
    store = store_over(disk)
    disk.start(store.is_on_disk)
    assert store.seal(ROOT, ROOT, *block(1))
    assert disk.flush(10)
    said = ["word " * 20_000]
    done = [agents.commit("local", "talker", exchange_of([n], [n], said))[1] for n in range(12)]
    assert [future.result(10) for future in done] == [None] * 12
    assert disk.other_bytes > budget
    assert store.seal(ROOT, ROOT, *block(2))
    assert disk.flush(10)
    assert "delete agents" in disk.problem
    assert (store.counts.written, store.counts.unwritten) == (1, 1)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    # Without its turns the ledger shrinks, and what waited is written.
    agents.delete("local", "talker")
    assert disk.flush(10)
    assert ledger.forget_unreachable(before=math.inf, replays_before=0) == 12
    assert disk.close(10)
    disk = DiskTier(SafetensorsCache(tmp_path), ledger, DiskLimits(budget, 2**20))
    store = store_over(disk)
    ledger.load()
    disk.start(store.is_on_disk)
    assert disk.other_bytes < budget
    assert store.seal(ROOT, ROOT, *block(2))
    assert disk.close(10)
    assert disk.problem == ""
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


def test_blocks_that_found_no_room_in_the_queue_are_written_at_the_end(
    make_disk: Callable[[int], DiskTier], ledger: FailingLedger, tmp_path: Path
) -> None:
    disk = make_disk(1)
    store = store_over(disk)
    for first in range(5):
        assert store.seal(ROOT, ROOT, *block(first))
    disk.start(store.is_on_disk)
    assert disk.close(10)
    assert disk.is_closed
    assert store.counts.written == 5
    assert len(list(tmp_path.rglob("*.safetensors"))) == 5
    assert ledger.ended == ["backed up", "closed"]
