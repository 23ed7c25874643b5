"""The disk tier: writes, queueing and eviction; no row is lost."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.cache.restore_plan import WantedPart
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.domain.agents import LOCAL_TENANT, Agent, Turn
from semantic.domain.blocks import BlockName
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError, DrainingError
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload
from semantic.ports.storage import PutAgent, PutReplay
from tests.unit.application.engine_rig import ROOT
from tests.unit.application.ledger_rig import exchange_of
from tests.unit.application.memory_rig import (
    HEADER_BYTES,
    MakeRig,
    MemoryRig,
    RigLimits,
    fetch,
    make_payload,
)
from tests.waiting import await_that

pytestmark = pytest.mark.unit

BLOCK_BYTES = 4 * 8
FILE_BYTES = BLOCK_BYTES + 4 * 4 + HEADER_BYTES
ROOM = 4096 + BLOCK_BYTES + 16  # what must be free for one more file


def stored(rig: MemoryRig) -> set[BlockName]:
    rig.flush()
    return {name for name, _ in rig.files.files}


def agent(name: str) -> Agent:
    return Agent(name, created_at=1.0)


# -- writing behind -----------------------------------------------------------------------------


def test_a_part_that_does_not_fit_the_queue_is_offered_again(make_rig: MakeRig) -> None:
    rig = make_rig(queue=2 * BLOCK_BYTES)
    rig.files.write_gate.clear()
    rig.seal(list(range(20)))
    assert rig.disk.queued_bytes == 2 * BLOCK_BYTES
    rig.files.write_gate.set()
    await_that(lambda: len(rig.files.files) == 5)
    rig.flush()
    assert len(rig.ledger.parts) == 5
    assert rig.store.usage().held == 0


def test_a_part_offered_after_close_is_refused(make_rig: MakeRig) -> None:
    """Its callback would never come, and memory would stay held for it."""
    rig = make_rig()
    assert rig.disk.close(60)
    rig.seal(list(range(20)))
    assert rig.disk.queued_bytes == 0
    assert not rig.store.is_busy


def test_a_block_is_recalled_while_it_waits_to_be_written(rig: MemoryRig) -> None:
    rig.files.write_gate.clear()
    rig.seal(list(range(8)))
    assert rig.recall(list(range(9)))[0] == 8


def test_a_block_that_waits_to_be_written_is_not_evicted(make_rig: MakeRig) -> None:
    rig = make_rig(memory=2 * BLOCK_BYTES)
    rig.files.write_gate.clear()
    rig.seal(list(range(8)))
    assert rig.seal([99] * 4) == (None, 0)
    rig.files.write_gate.set()
    rig.flush()
    assert rig.seal([99] * 4)[1] == 4


def test_a_full_disk_costs_durability_and_is_tried_again(rig: MemoryRig) -> None:
    rig.files.is_full = True
    turn = rig.talk("ann", list(range(9)))
    rig.flush()
    assert rig.disk.problem == "No space left on device"
    assert rig.store.counts.unwritten == 3
    assert is_durable(rig, turn) is False
    rig.files.is_full = False
    rig.store.offer_again()
    rig.flush()
    assert rig.disk.problem == ""
    assert len(rig.files.files) == 3
    assert is_durable(rig, turn) is True


def test_blocks_that_found_no_room_in_the_queue_are_written_at_the_end(make_rig: MakeRig) -> None:
    rig = make_rig(queue=1)
    rig.files.write_gate.clear()
    rig.seal(list(range(20)))
    rig.files.write_gate.set()
    assert rig.disk.close(60)
    assert rig.disk.is_closed
    assert rig.store.counts.written == len(rig.files.files) == 5
    assert rig.ledger.ended == ["backed up", "closed"]


def test_closing_with_much_to_write_keeps_the_turns(rig: MemoryRig) -> None:
    rig.files.write_gate.clear()
    turn = rig.talk("ann", list(range(9)))
    assert rig.files.write_begun.wait(60)
    assert not rig.disk.close(0.02)
    rig.files.write_gate.set()
    assert rig.disk.close(60)
    assert rig.ledger.turn(LOCAL_TENANT, turn.id) is not None
    assert len(rig.files.files) <= 1
    late = rig.disk.change(PutAgent(agent("late")))
    assert isinstance(late.exception(60), CachePersistenceError)


def test_closing_does_not_wait_for_a_long_backup_once_everything_is_written(
    rig: MemoryRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(rig.ledger, "back_up", gate.wait)
    rig.seal(list(range(20)))
    rig.flush()
    assert rig.disk.close(2)
    assert not rig.disk.is_closed
    assert "the ledger's backup was not finished" in caplog.text
    gate.set()
    await_that(lambda: rig.disk.is_closed)


def test_a_closed_disk_reads_nothing(rig: MemoryRig) -> None:
    rig.seal(list(range(4)))
    rig.flush()
    (node,) = rig.store.nodes()
    rig.store.drop_payloads([WantedPart(node, LayerKind.FULL)])
    rig.close()
    read = fetch(rig.store, WantedPart(node, LayerKind.FULL))
    assert isinstance(read.exception(60), CacheCorruptionError)
    assert node.num_leases == 0


# -- the ledger ---------------------------------------------------------------------------------


def test_a_busy_ledger_loses_nothing_and_keeps_the_order(rig: MemoryRig) -> None:
    rig.ledger.is_busy = True
    done = [rig.disk.change(PutAgent(replace(agent("bob"), num_turns=n))) for n in range(3)]
    turn, committed = rig.agents.commit(LOCAL_TENANT, "ann", exchange_of([1, 2], [3]))
    # Who waits hears of it at once, for a reply must go out; the rows are written later.
    for future in (*done, committed):
        assert isinstance(future.exception(60), CachePersistenceError)
    assert rig.disk.problem == "the ledger is busy."
    assert rig.agents.turn(LOCAL_TENANT, turn.id) == turn  # not written, and not forgotten
    rig.ledger.is_busy = False
    rig.flush()
    assert rig.disk.problem == ""
    assert {a.id: a.num_turns for a in rig.ledger.load().agents} == {"ann": 1, "bob": 2}
    assert rig.ledger.turn(LOCAL_TENANT, turn.id) == turn


def test_a_row_that_cannot_be_stored_takes_no_other_along(rig: MemoryRig) -> None:
    bad = PutReplay("local", b"key", (1,), 1.0)
    rig.ledger.unstorable = bad
    good, broken, last = (
        rig.disk.change(change) for change in (PutAgent(agent("ann")), bad, PutAgent(agent("bob")))
    )
    assert isinstance(broken.exception(60), CachePersistenceError)
    assert good.result(60) is last.result(60) is None
    assert {a.id for a in rig.ledger.load().agents} == {"ann", "bob"}


def test_a_cancelled_waiter_does_not_stop_the_writer(rig: MemoryRig) -> None:
    rig.files.write_gate.clear()
    rig.seal([1])
    assert rig.disk.change(PutAgent(agent("ann"))).cancel()
    rig.files.write_gate.set()
    rig.flush()
    assert [a.id for a in rig.ledger.load().agents] == ["ann"]


# -- durable turns ------------------------------------------------------------------------------


def is_durable(rig: MemoryRig, turn: Turn) -> bool:
    rig.flush()
    found = rig.ledger.turn(LOCAL_TENANT, turn.id)
    assert found is not None
    return found.is_durable


def test_a_turn_that_was_repointed_becomes_durable(rig: MemoryRig) -> None:
    rig.files.write_gate.clear()
    first = rig.talk("ann", [1, 2])
    rig.talk("ann", [1, 2, 3, 4, 5])
    rig.files.write_gate.set()
    assert is_durable(rig, first)
    found = rig.ledger.turn(LOCAL_TENANT, first.id)
    assert found is not None
    assert found.pointer is not None
    assert rig.store.get(found.pointer.block) is not None


def test_a_tails_file_stays_until_what_it_went_into_is_on_disk(rig: MemoryRig) -> None:
    turn = rig.talk("ann", [1, 2])
    (tail,) = stored(rig)
    rig.files.is_full = True
    rig.talk("ann", [1, 2, 3, 4, 5])
    assert stored(rig) == {tail}
    rig.files.is_full = False
    rig.store.offer_again()
    assert is_durable(rig, turn)
    assert tail not in stored(rig)
    assert len(stored(rig)) == 2
    rig.files.is_full = True
    longer = rig.talk("ann", [1, 2, 3, 4, 5, 6])
    rig.flush()
    rig.restart()
    assert not is_durable(rig, longer)
    assert rig.recall([1, 2, 3, 4, 5, 6, 7])[0] == 5


def test_a_turn_that_was_not_kept_is_not_durable(make_rig: MakeRig) -> None:
    rig = make_rig(memory=0)
    assert not is_durable(rig, rig.talk("ann", [1, 2, 3]))


# -- eviction -----------------------------------------------------------------------------------


def sealed(rig: MemoryRig, first: int, num_blocks: int) -> list[BlockName]:
    """Seal a chain of its own; returns the names from the first."""
    rig.now[0] += 1
    pointer, _ = rig.seal([first] * 4 * num_blocks)
    rig.flush()
    return [node.name for node in rig.store.chain(pointer or ROOT)]


def test_a_recalled_block_counts_as_recently_used(make_rig: MakeRig) -> None:
    rig = make_rig(disk=3 * FILE_BYTES + ROOM)
    first, second = sealed(rig, 1, 2), sealed(rig, 2, 2)
    rig.now[0] += 1
    rig.recall([1] * 9)
    sealed(rig, 3, 1)
    assert set(first) <= stored(rig)
    assert second[1] not in stored(rig)


def test_pinned_and_leased_files_stay(make_rig: MakeRig) -> None:
    rig = make_rig(disk=2 * FILE_BYTES + ROOM)
    (pinned,), (leased,) = sealed(rig, 1, 1), sealed(rig, 2, 1)
    nodes = {node.name: node for node in rig.store.nodes()}
    nodes[pinned].num_pins = 1
    nodes[leased].num_leases = 1
    (third,) = sealed(rig, 3, 1)
    (fourth,) = sealed(rig, 4, 1)
    assert stored(rig) == {pinned, leased, fourth}
    assert third not in stored(rig)


def test_a_chain_does_not_evict_its_own_beginning(make_rig: MakeRig) -> None:
    rig = make_rig(disk=2 * FILE_BYTES + ROOM)
    names = sealed(rig, 1, 6)
    assert stored(rig) == set(names[:3])
    assert "no block can be evicted" in rig.disk.problem
    rig.store.check_integrity()


def test_quarantine_makes_room_before_any_block_does(make_rig: MakeRig) -> None:
    rig = make_rig(disk=4 * FILE_BYTES + ROOM)
    kept = sealed(rig, 1, 2)
    rig.files.quarantined = 3 * FILE_BYTES
    (name,) = sealed(rig, 2, 1)
    assert stored(rig) == {*kept, name}
    assert rig.files.quarantined == 0


def test_a_bad_file_is_set_aside_and_one_that_is_evicted_is_not(make_rig: MakeRig) -> None:
    rig = make_rig(disk=2 * FILE_BYTES + ROOM)
    for first in range(1, 6):
        sealed(rig, first, 1)
    assert rig.files.quarantined == 0
    rig.files.bad = set(rig.files.files)
    list(rig.upkeep.verify())
    rig.flush()
    assert rig.files.quarantined > 0


def test_a_ledger_larger_than_the_budget_costs_no_file(make_rig: MakeRig) -> None:
    rig = make_rig(disk=20 * FILE_BYTES)
    old = sealed(rig, 1, 3)
    rig.files.other = 30 * FILE_BYTES
    turn = rig.talk("ann", [2] * 4)
    rig.flush()
    assert stored(rig) == set(old)
    assert not is_durable(rig, turn)
    assert "raise disk_budget_mb" in rig.disk.problem.lower()
    assert rig.agents.tokens(rig.agents.get(LOCAL_TENANT, "ann")) == [2] * 4
    assert rig.recall([1] * 13)[0] == 12
    rig.files.other = 0
    rig.store.offer_again()
    assert is_durable(rig, turn)
    assert rig.disk.problem == ""
    assert len(stored(rig)) == 4


def test_beside_a_large_ledger_only_the_needed_blocks_are_evicted(make_rig: MakeRig) -> None:
    rig = make_rig(disk=10**7)
    rig.files.other = 10**7 - 5 * FILE_BYTES - ROOM
    names = [name for first in range(6) for name in sealed(rig, first, 1)]
    assert stored(rig) == set(names)
    (newest,) = sealed(rig, 6, 1)
    assert stored(rig) == {*names[2:], newest}


def test_blocks_stay_if_evicting_them_makes_no_room(make_rig: MakeRig) -> None:
    rig = make_rig(disk=3 * FILE_BYTES + ROOM)
    others, pinned = sealed(rig, 1, 1), sealed(rig, 2, 3)
    for node in rig.store.nodes():
        node.num_pins = int(node.name in pinned)
    rig.files.other = FILE_BYTES  # now two would have to go
    sealed(rig, 3, 1)
    assert stored(rig) == {*pinned, *others}
    assert "no block can be evicted" in rig.disk.problem


def test_blocks_stay_if_evicting_them_makes_no_room_in_the_tenants_quota(rig: MemoryRig) -> None:
    others, pinned = sealed(rig, 1, 1), sealed(rig, 2, 3)
    rig.restart(RigLimits(disk=DiskLimits(10**7, 10**6, tenant_bytes=lambda _: ROOM)))
    for node in rig.store.nodes():
        node.num_pins = int(node.name in pinned)
    sealed(rig, 3, 1)
    assert stored(rig) == {*pinned, *others}
    assert "the tenant's disk quota" in rig.disk.problem


def test_a_tenant_beyond_its_share_evicts_its_own(make_rig: MakeRig) -> None:
    rig = make_rig(tenant=2 * FILE_BYTES + ROOM)
    other = BlockName(bytes(32))
    payloads = [make_payload(rig.spec, [0] * 4, 0, 4, LayerKind.FULL)]
    foreign = rig.store.seal(other, other, [0] * 4, payloads)
    old, young = sealed(rig, 1, 2), sealed(rig, 2, 1)
    newest = sealed(rig, 3, 1)
    assert stored(rig) == {foreign, old[0], *young, *newest}
    own = [node for node in rig.store.nodes() if node.root == ROOT]
    assert sum(node.disk_bytes for node in own) <= 2 * FILE_BYTES + ROOM


def block(first: int) -> tuple[list[int], list[KVPayload]]:
    """A block of its own."""
    data = HostBuffer("full", (8,), "u32", bytes(32))
    return [first] * 8, [KVPayload("fake.v1", LayerKind.FULL, 0, 8, (data,))]


# -- reading ------------------------------------------------------------------------------------


def test_closing_while_parts_wait_to_be_read_ends_and_loses_none_of_them(rig: MemoryRig) -> None:
    rig.talk("ann", list(range(400)))
    rig.flush()
    ann = rig.agents.get(LOCAL_TENANT, "ann")
    rig.upkeep.evict(ann)
    before = dict(rig.files.files)
    rig.files.gate.clear()
    busy = [rig.disk.read(part) for part, _ in list(before.values())[:2]]
    assert rig.upkeep.prefetch(ann) == 100

    closing = threading.Thread(target=rig.disk.close, args=(10,), daemon=True)
    closing.start()
    closing.join(60)

    assert not closing.is_alive()
    late = rig.disk.read(next(iter(before.values()))[0])
    assert isinstance(late.exception(60), DrainingError)
    rig.files.gate.set()
    assert all(reading.result(60) for reading in busy)
    await_that(lambda: not rig.store.tiers.is_reading)
    assert rig.store.counts.corrupt == 0
    assert rig.files.files == before


class NeverThere:
    """Bytes whose copy from the device failed."""

    nbytes = 32

    def wait(self) -> memoryview:
        raise CacheCorruptionError("state was not copied")


def test_a_block_whose_bytes_never_come_is_a_miss(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path)
    ledger.load()
    disk = DiskTier(SafetensorsCache(tmp_path), ledger, DiskLimits(2**20, 2**20))
    store = AgentCacheStore(BlockPool(fake_spec(block_tokens=8), 2**20), disk)
    disk.start(store.is_on_disk)
    buffer = HostBuffer("full", (8,), "u32", NeverThere())
    lost = KVPayload("fake.v1", LayerKind.FULL, 0, 8, (buffer,))
    assert store.seal(ROOT, ROOT, [1] * 8, [lost])
    assert store.seal(ROOT, ROOT, *block(2))
    assert disk.flush(60)
    assert store.plan(ROOT, [1] * 8).end == 0
    assert store.plan(ROOT, [2] * 8).end == 8
    assert (store.counts.written, store.counts.corrupt) == (1, 1)
    assert not disk.problem
    store.check_integrity()
    disk.close(60)
