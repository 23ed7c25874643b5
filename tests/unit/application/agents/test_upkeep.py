"""Background work: tiers, garbage collection, verification, warm starts and old boundaries."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.application.cache.restore_plan import WantedPart
from semantic.domain.agents import LOCAL_TENANT, Agent, Tier, Turn
from semantic.domain.blocks import BlockPart
from semantic.domain.errors import CachePersistenceError
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.inbound import StateView
from semantic.ports.storage import TurnPlace
from tests.unit.application.engine_rig import ROOT
from tests.unit.application.memory_rig import IndexedLedger, MakeRig, MemoryRig, fetch

pytestmark = pytest.mark.unit

HEAD = [9] * 6


def who(rig: MemoryRig, name: str) -> Agent:
    return rig.agents.get(LOCAL_TENANT, name)


def where(rig: MemoryRig, name: str) -> StateView:
    rig.flush()
    return rig.upkeep.footprint(who(rig, name))


# -- tiers --------------------------------------------------------------------------------------


def test_an_agent_is_hot_then_warm_then_cold(rig: MemoryRig) -> None:
    rig.talk("ann", list(range(10)))
    found = where(rig, "ann")
    assert (found.tier, found.memory_tokens, found.disk_tokens) == (Tier.HOT, 10, 10)
    assert found.memory_bytes == 10 * 8
    assert rig.upkeep.evict(who(rig, "ann")) == 3
    assert where(rig, "ann").tier is Tier.WARM
    assert rig.upkeep.prefetch(who(rig, "ann")) == 3
    rig.recall(list(range(11)))
    assert where(rig, "ann").tier is Tier.HOT
    rig.upkeep.evict(who(rig, "ann"), is_cold=True)
    found = where(rig, "ann")
    assert (found.tier, found.num_tokens, found.disk_bytes) == (Tier.COLD, 10, 0)
    assert rig.agents.tokens(who(rig, "ann")) == list(range(10))


def test_an_agent_whose_first_block_is_gone_is_cold(rig: MemoryRig) -> None:
    rig.talk("ann", list(range(10)))
    rig.flush()
    rig.upkeep.evict(who(rig, "ann"))
    first = min(rig.store.nodes(), key=lambda node: node.start)
    rig.files.bad.add((first.name, LayerKind.FULL))
    assert [p.num_bad for p in rig.upkeep.verify()][-1] == 1
    assert where(rig, "ann").tier is Tier.COLD


def test_later_turns_of_others_in_a_shared_block_are_no_part_of_an_agent(rig: MemoryRig) -> None:
    rig.talk("ann", HEAD)
    rig.talk("bob", [*HEAD, 1, 2])  # in the same block
    found = where(rig, "ann")
    assert (found.num_tokens, found.memory_tokens, found.disk_tokens) == (6, 6, 6)
    whole = where(rig, "bob")
    assert (whole.memory_tokens, whole.memory_bytes) == (8, 8 * 8)
    # Of the block that both share, an agent's bytes are those of its own tokens.
    assert found.memory_bytes == 6 * 8
    assert found.disk_bytes == whole.disk_bytes * 6 // 8


def test_eviction_spares_what_others_share(rig: MemoryRig) -> None:
    rig.talk("ann", [*HEAD, 1, 2, 3, 4])
    rig.talk("bob", [*HEAD, 5, 6])
    rig.upkeep.evict(who(rig, "ann"), is_cold=True)
    assert where(rig, "bob").disk_tokens == len(HEAD) + 2
    # A block can be used up to any token: also the one that bob goes on in.
    assert where(rig, "ann").disk_tokens == where(rig, "ann").reusable_tokens == len(HEAD)
    assert rig.recall([*HEAD, 5, 6, 7])[0] == len(HEAD) + 2


def test_an_agent_that_shares_only_a_first_token_is_cold(rig: MemoryRig) -> None:
    rig.talk("ann", [9, *range(20, 29)])
    rig.talk("bob", [9, 1, 2])
    rig.upkeep.evict(who(rig, "ann"), is_cold=True)
    found = where(rig, "ann")
    assert (found.tier, found.reusable_tokens) == (Tier.COLD, 1)


def test_what_is_left_of_an_agent_is_no_garbage(rig: MemoryRig) -> None:
    rig.talk("ann", list(range(10)))
    rig.flush()
    rig.upkeep.evict(who(rig, "ann"))
    last = max(rig.store.nodes(), key=lambda node: node.start)
    rig.store.drop_files([WantedPart(last, LayerKind.FULL)])
    rig.now[0] += 1000
    rig.upkeep.collect()
    found = where(rig, "ann")
    assert (found.tier, found.disk_tokens, found.num_tokens) == (Tier.WARM, 8, 10)


def test_what_is_not_on_disk_is_not_evicted_to_it(rig: MemoryRig) -> None:
    rig.files.is_full = True
    rig.talk("ann", list(range(10)))
    rig.flush()
    assert rig.upkeep.evict(who(rig, "ann")) == 0
    assert where(rig, "ann").tier is Tier.HOT
    assert rig.upkeep.evict(who(rig, "ann"), is_cold=True) == 3


def test_without_a_disk_eviction_makes_cold(make_rig: MakeRig) -> None:
    rig = make_rig(has_disk=False)
    rig.talk("ann", list(range(10)))
    rig.talk("ann", list(range(15)))  # the first turn's tail went into a longer block
    assert where(rig, "ann").memory_tokens == 15
    assert rig.upkeep.evict(who(rig, "ann")) == 4
    assert where(rig, "ann").tier is Tier.COLD


# -- pins ---------------------------------------------------------------------------------------


def test_pins_follow_an_agent_and_survive_a_restart(rig: MemoryRig) -> None:
    rig.talk("ann", list(range(10)))
    rig.pin("ann")
    rig.talk("ann", list(range(18)))
    rig.upkeep.tick()
    assert all(node.num_pins == 1 for node in rig.store.nodes())
    rig.restart()
    rig.upkeep.start(interval_s=1000)
    rig.upkeep.stop(10)
    assert len(rig.store.nodes()) == 5
    assert all(node.num_pins == 1 for node in rig.store.nodes())
    rig.pin("ann", is_pinned=False)
    assert not any(node.num_pins for node in rig.store.nodes())


# -- garbage ------------------------------------------------------------------------------------


def test_what_no_agent_reaches_goes_when_it_is_old(rig: MemoryRig) -> None:
    rig.talk("ann", [*HEAD, 1, 2])
    rig.talk("bob", [*HEAD, 3, 4])
    rig.agents.delete(LOCAL_TENANT, "bob")
    rig.now[0] += 50
    assert rig.upkeep.collect() == 0
    rig.now[0] += 51
    assert rig.upkeep.collect() > 0
    rig.flush()
    assert {node.end for node in rig.store.nodes()} == {4, 8}
    assert len(rig.files.files) == 2
    assert where(rig, "ann").disk_tokens == 8


def test_what_is_being_read_is_not_garbage(rig: MemoryRig) -> None:
    rig.talk("ann", [1, 2, 3, 4])
    rig.flush()
    rig.upkeep.evict(who(rig, "ann"))
    rig.agents.delete(LOCAL_TENANT, "ann")
    (node,) = rig.store.nodes()
    rig.files.gate.clear()
    plan = rig.store.plan(ROOT, [1, 2, 3, 4])
    read = fetch(rig.store, plan.parts[0])
    rig.now[0] += 1000
    assert rig.upkeep.collect() == 0
    rig.files.gate.set()
    assert read.result(60).end == 4
    assert rig.store.get(node.name) is node


def test_anonymous_state_without_a_disk_is_kept_while_it_is_young(make_rig: MakeRig) -> None:
    rig = make_rig(has_disk=False)
    rig.seal([1, 2, 3, 4])
    rig.upkeep.collect()
    assert rig.recall([1, 2, 3, 4, 5])[0] == 4
    rig.now[0] += 101
    rig.upkeep.collect()
    assert rig.recall([1, 2, 3, 4, 5])[0] == 0


def test_verification_drops_what_is_bad_and_it_is_made_anew(rig: MemoryRig) -> None:
    rig.talk("ann", list(range(12)))
    rig.flush()
    middle = next(node for node in rig.store.nodes() if node.start == 4)
    rig.files.bad.add((middle.name, LayerKind.FULL))
    rig.upkeep.evict(who(rig, "ann"))
    progress = list(rig.upkeep.verify())
    assert (progress[0].num_checked, progress[-1].num_checked) == (0, 3)
    assert (progress[-1].num_total, progress[-1].num_bad) == (3, 1)
    assert rig.store.counts.corrupt == 1
    assert rig.recall(list(range(13)))[0] == 4
    rig.talk("ann", list(range(13)))
    assert rig.recall(list(range(14)))[0] == 13
    assert where(rig, "ann").disk_tokens == 13


def test_what_is_discarded_while_it_is_read_counts_once(rig: MemoryRig) -> None:
    rig.talk("ann", list(range(12)))
    rig.flush()
    rig.upkeep.evict(who(rig, "ann"))
    middle = next(node for node in rig.store.nodes() if node.start == 4)
    wanted = WantedPart(middle, LayerKind.FULL)
    rig.files.bad.add((middle.name, LayerKind.FULL))
    rig.files.gate.clear()
    is_told = threading.Event()
    fetch(rig.store, wanted).add_done_callback(lambda _: is_told.set())
    rig.store.discard([wanted])
    rig.files.gate.set()
    assert is_told.wait(60)
    assert rig.store.counts.corrupt == 1


# -- starts -------------------------------------------------------------------------------------


def test_files_without_rows_and_rows_without_files_are_reconciled(rig: MemoryRig) -> None:
    rig.talk("ann", list(range(8)))
    rig.flush()
    lost, gone = sorted(rig.ledger.parts.values(), key=lambda part: part.start)
    del rig.ledger.parts[lost.key], rig.files.files[gone.key]
    rig.ledger.index.is_index_lost = True
    rig.restart()
    assert rig.recall(list(range(9)))[0] == 0
    rig.upkeep.reconcile()
    rig.flush()
    assert set(rig.ledger.parts) == {lost.key}
    assert not rig.ledger.index.is_index_lost
    assert rig.store.counts.corrupt == 1
    assert rig.recall(list(range(9)))[0] == 4


def test_a_file_that_is_written_again_during_the_comparison_is_not_missing(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    rig.talk("ann", list(range(8)))
    rig.flush()
    node = next(node for node in rig.store.nodes() if node.start == 0)
    listed = rig.files.scan

    def scan() -> Iterator[BlockPart]:
        yield from [part for part in listed() if part.name != node.name]
        rig.store.tiers.index.put_file(node, replace(node.files[LayerKind.FULL], last_used=2000.0))

    rig.files.scan = scan  # type: ignore[method-assign]
    rig.upkeep.reconcile()
    rig.flush()
    assert LayerKind.FULL in node.files
    assert rig.store.counts.corrupt == 0


def test_a_stop_does_not_wait_for_files_to_be_compared(rig: MemoryRig) -> None:
    rig.talk("ann", list(range(8)))
    rig.flush()
    rig.ledger.index.is_index_lost = True
    rig.upkeep.stop(1)
    rig.upkeep.reconcile()
    rig.flush()
    assert rig.ledger.index.is_index_lost, "it was not read to its end"


def test_memory_that_was_freed_goes_back_to_the_system_now_and_then(make_rig: MakeRig) -> None:
    upkeep = make_rig().upkeep
    is_trimmed = threading.Event()
    upkeep.trim_memory = is_trimmed.set
    upkeep.start(0.001)
    assert is_trimmed.wait(60)
    upkeep.stop(10)


def test_a_warm_start_reads_the_latest_agents_within_its_share(make_rig: MakeRig) -> None:
    rig = make_rig(memory=4 * 100)  # a quarter of it: three blocks
    for name, first in (("old", 1), ("young", 2)):
        rig.talk(name, [first] * 4 * 6)
        rig.now[0] += 1
    rig.restart()
    rig.upkeep.warm_up()
    rig.recall([2] * 13)
    assert where(rig, "young").memory_tokens == 12
    assert where(rig, "old").memory_tokens == 0
    assert rig.store.usage().used <= rig.limits.memory // 4


def test_the_latest_agents_are_reopened_after_a_restart(rig: MemoryRig) -> None:
    for number in range(18):
        rig.talk(f"agent-{number}", [number] * 9)
        rig.now[0] += 1
    rig.restart()
    reopened = []
    rig.upkeep.reopen = lambda agent, root, tokens: reopened.append((agent.id, root, tokens))
    rig.upkeep.warm_up()
    assert [name for name, _, _ in reopened] == [f"agent-{n}" for n in range(17, 1, -1)]
    assert reopened[0][2][:9] == (17,) * 9
    assert {root for _, root, _ in reopened} == rig.store.roots


def test_a_turn_after_a_restart_is_known_to_be_used(rig: MemoryRig) -> None:
    rig.talk("ann", list(range(8)))
    rig.flush()
    assert {part.last_used for part in rig.ledger.parts.values()} == {rig.now[0]}
    rig.now[0] += 500
    rig.recall(list(range(9)))
    rig.upkeep.tick()
    rig.flush()
    assert {part.last_used for part in rig.ledger.parts.values()} == {rig.now[0]}


# -- boundaries ---------------------------------------------------------------------------------

WINDOWED = fake_spec(block_tokens=4, window=5)
STATEFUL = fake_spec(block_tokens=4, has_state=True)


def num_boundary_parts(rig: MemoryRig) -> int:
    rig.flush()
    return sum(kind is not LayerKind.FULL for _, kind in rig.files.files)


@pytest.mark.parametrize("spec", [WINDOWED, STATEFUL])
def test_boundaries_that_an_agent_went_past_are_dropped(
    make_rig: MakeRig, spec: ModelCacheSpec
) -> None:
    rig = make_rig(spec)
    said = list(HEAD)
    sizes: list[int] = []
    for turn in range(12):
        said = [*said, *range(turn, turn + 5)]
        rig.talk("ann", said, num_reply=2, boundaries=(len(HEAD), len(said) - 2))
        rig.now[0] += 61
        rig.upkeep.tick()
        sizes.append(num_boundary_parts(rig))
    # As many as at the start, though the conversation grew.
    assert max(sizes[4:]) <= max(sizes[:4]) + 1
    rig.restart()
    assert rig.recall([*said, 1])[0] == len(said)
    assert rig.recall([*said[:-2], 99])[0] == len(said) - 2
    assert rig.recall([*said[:-5], 98])[0] == len(said) - 5
    assert rig.recall([*HEAD, 97, 97])[0] == len(HEAD)
    # Full attention's state is all there; only where it can be resumed has become less.
    assert rig.recall([*said[:20], 97])[0] in (len(HEAD), 0)


def test_boundaries_of_another_branch_are_kept(make_rig: MakeRig) -> None:
    rig = make_rig(WINDOWED)
    said = [*HEAD, 1, 2, 3, 4, 5, 6]
    rig.talk("ann", said, boundaries=(len(HEAD), len(said) - 1))
    rig.agents.fork(LOCAL_TENANT, "ann", ["bob"])
    longer = said
    for turn in range(4):
        longer = [*longer, *range(20 + turn, 30 + turn)]
        rig.talk("ann", longer, boundaries=(len(HEAD), len(longer) - 1))
        rig.now[0] += 61
        rig.upkeep.tick()
    rig.flush()
    assert rig.recall([*said, 77])[0] == len(said)


def test_boundaries_of_a_turn_that_is_not_logged_yet_are_kept(make_rig: MakeRig) -> None:
    rig = make_rig(WINDOWED)
    said = [*HEAD, 1, 2, 3]
    rig.talk("ann", said, boundaries=(len(HEAD),))
    longer = [*said, *range(20, 29)]
    _, chain, num_whole = rig.recall(longer)
    rig.seal(longer, chain, num_whole, (len(HEAD),))
    rig.now[0] += 30
    rig.upkeep.tick()
    assert rig.recall([*longer, 1])[0] == len(longer)


def test_a_check_that_a_stop_cuts_short_finds_nothing_bad(rig: MemoryRig) -> None:
    rig.talk("ann", list(range(10)))
    rig.flush()
    checking = rig.upkeep.verify()
    assert next(checking).num_total == 3
    rig.close()

    assert [progress.num_bad for progress in checking if progress.num_bad] == []
    assert rig.store.counts.corrupt == 0


# -- what fails ---------------------------------------------------------------------------------


class TornLedger(IndexedLedger):
    """A ledger in which one agent's turns cannot be read, and that may fail to be backed up."""

    torn: str | None = None
    can_back_up = True

    def place(self, tenant: str, turn_id: str) -> TurnPlace | None:
        self._check(turn_id)
        return super().place(tenant, turn_id)

    def places(self, tenant: str, turn_ids: Sequence[str]) -> dict[str, TurnPlace]:
        for turn_id in turn_ids:
            self._check(turn_id)
        return super().places(tenant, turn_ids)

    def turns(self, tenant: str, head: str, *, limit: int) -> tuple[Turn, ...]:
        self._check(head)
        return super().turns(tenant, head, limit=limit)

    def back_up(self) -> None:
        if not self.can_back_up:
            raise CachePersistenceError("the disk is full.")
        super().back_up()

    def _check(self, turn_id: str) -> None:
        if turn_id == self.torn:
            raise CachePersistenceError("the ledger is damaged.")


@pytest.fixture
def torn(make_rig: MakeRig) -> tuple[MemoryRig, TornLedger]:
    """Two pinned agents; the turns of the first cannot be read."""
    ledger = TornLedger()
    rig = make_rig(ledger=ledger)
    for name, start in (("ann", 0), ("bob", 50)):
        rig.talk(name, list(range(start, start + 10)))
        rig.pin(name)
    rig.flush()
    ledger.torn = who(rig, "ann").head
    return rig, ledger


def test_upkeep_that_fails_for_one_agent_continues_for_the_others(
    torn: tuple[MemoryRig, TornLedger],
) -> None:
    rig, ledger = torn
    assert rig.upkeep.problem == ""

    rig.upkeep.tick()
    rig.upkeep.warm_up()

    assert sum(node.num_pins > 0 for node in rig.store.nodes()) == 3  # bob's
    assert ledger.ended == ["backed up"]
    told = rig.upkeep.problem
    assert "pinning of agent ann failed: the ledger is damaged" in told
    assert "warming up of agent ann failed" in told
    assert "bob" not in told
    ledger.torn = None
    rig.upkeep.tick()
    rig.upkeep.warm_up()
    assert rig.upkeep.problem == ""


def test_a_deleted_agent_is_no_problem(torn: tuple[MemoryRig, TornLedger]) -> None:
    rig, _ = torn
    rig.upkeep.tick()
    assert "agent ann" in rig.upkeep.problem

    rig.agents.delete(LOCAL_TENANT, "ann")

    assert rig.upkeep.problem == ""


def test_garbage_is_collected_although_one_agent_cannot_be_read(
    torn: tuple[MemoryRig, TornLedger],
) -> None:
    rig, _ = torn
    rig.upkeep.evict(who(rig, "bob"), is_cold=False)
    rig.now[0] += 10**6

    rig.upkeep.collect()

    assert "finding the blocks of agent ann failed" in rig.upkeep.problem
    assert rig.files.files


def test_a_backup_that_is_late_is_a_problem(torn: tuple[MemoryRig, TornLedger]) -> None:
    rig, ledger = torn
    ledger.torn, ledger.can_back_up = None, False
    rig.upkeep.start(3600)

    rig.upkeep.tick()

    assert rig.upkeep.problem == ("upkeep: backing up the ledger failed: the disk is full.")
    rig.now[0] += 6 * 3600
    assert "the ledger was last backed up 360 minutes ago" in rig.upkeep.problem
    ledger.can_back_up = True
    rig.upkeep.tick()
    assert rig.upkeep.problem == ""
