"""Agents and their turns: what a commit continues, and who may have how much."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.ledger import AgentLedger, Exchange, write_at_once
from semantic.domain.agents import LOCAL_TENANT, Agent, Pointer, Quota, Reuse, Turn
from semantic.domain.blocks import BlockName
from semantic.domain.chat import Message, Role, Usage
from semantic.domain.errors import AgentNotFoundError, InvalidRequestError, QuotaExceededError
from semantic.ports.storage import LedgerChange, PutTurn
from tests.unit.application.engine_rig import ROOT

pytestmark = pytest.mark.unit

OLD, NEW, NEWER = (BlockName(bytes([n]) * 32) for n in (1, 2, 3))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger() -> SqliteLedger:
    return SqliteLedger.in_memory()


@pytest.fixture
def agents(ledger: SqliteLedger, clock: Clock) -> AgentLedger:
    return AgentLedger(ledger, ledger.load(), write_at_once(ledger), clock)


def exchange(
    prompt: Sequence[int], reply: Sequence[int], num_messages: int = 2, block: BlockName = OLD
) -> Exchange:
    messages = [Message.of(Role.USER, str(index)) for index in range(num_messages)]
    pointer = Pointer(ROOT, block, len(prompt) + len(reply))
    return Exchange(prompt, reply, messages, pointer, Usage(len(prompt)), Reuse())


def commit(agents: AgentLedger, prompt: Sequence[int], reply: Sequence[int], num: int = 2) -> Turn:
    turn, done = agents.commit(LOCAL_TENANT, "ann", exchange(prompt, reply, num))
    assert done.result(1) is None
    return turn


def ann(agents: AgentLedger) -> Agent:
    return agents.get(LOCAL_TENANT, "ann")


# -- commit -------------------------------------------------------------------------------------


def test_a_turn_continues_the_one_its_prompt_begins_with(agents: AgentLedger) -> None:
    first = commit(agents, [1, 2], [3])
    second = commit(agents, [1, 2, 3, 4], [5], 4)
    assert second.parent == first.id
    assert second.tokens == (4, 5)
    assert [m.text for m in second.messages] == ["2", "3"]
    assert agents.tokens(ann(agents)) == [1, 2, 3, 4, 5]
    assert (ann(agents).head, ann(agents).num_turns) == (second.id, 2)


def test_a_prompt_that_went_back_rewinds_the_agent(agents: AgentLedger) -> None:
    first = commit(agents, [1, 2], [3])
    commit(agents, [1, 2, 3, 4], [5], 4)
    other = commit(agents, [1, 2, 3, 9], [8], 4)
    assert other.parent == first.id
    assert ann(agents).num_turns == 2
    assert agents.tokens(ann(agents)) == [1, 2, 3, 9, 8]


def test_a_prompt_that_shares_nothing_starts_over(agents: AgentLedger) -> None:
    commit(agents, [1, 2], [3])
    other = commit(agents, [7], [8])
    assert other.parent is None
    assert ann(agents).num_turns == 1
    assert agents.tokens(ann(agents)) == [7, 8]


def test_an_edited_reply_is_no_continuation(agents: AgentLedger) -> None:
    commit(agents, [1, 2], [3])
    assert commit(agents, [1, 2, 4, 5], [6]).parent is None


# -- blocks that are replaced -------------------------------------------------------------------


def pointer_of(agents: AgentLedger, turn: Turn) -> BlockName:
    found = agents.turn(LOCAL_TENANT, turn.id)
    assert found is not None
    assert found.pointer is not None
    return found.pointer.block


def test_a_turn_follows_its_block(agents: AgentLedger) -> None:
    turn = commit(agents, [1], [2])
    agents.log.move(OLD, NEW)
    assert pointer_of(agents, turn) == NEW


def test_a_turn_that_is_logged_after_its_block_moved_is_right_too(agents: AgentLedger) -> None:
    agents.log.move(OLD, NEW)
    agents.log.move(NEW, NEWER)
    assert pointer_of(agents, commit(agents, [1], [2])) == NEWER


def test_a_turn_that_is_not_written_yet_follows_its_block(ledger: SqliteLedger) -> None:
    queue: list[tuple[tuple[LedgerChange, ...], Future[None]]] = []

    def write(*changes: LedgerChange) -> Future[None]:
        queue.append((changes, Future()))
        return queue[-1][1]

    agents = AgentLedger(ledger, ledger.load(), write)
    turn, _ = agents.commit(LOCAL_TENANT, "ann", exchange([1], [2]))
    agents.log.move(OLD, NEW)
    assert pointer_of(agents, turn) == NEW
    for changes, done in queue:
        ledger.apply(changes, is_synced=False)
        done.set_result(None)
    assert any(isinstance(change, PutTurn) for changes, _ in queue for change in changes)
    assert pointer_of(agents, turn) == NEW


# -- a slow disk --------------------------------------------------------------------------------


class StuckLedger(SqliteLedger):
    """Its turns cannot be read until the gate is open."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gate, self.is_read = threading.Event(), threading.Event()
        self.gate.set()

    def turn(self, tenant: str, turn_id: str) -> Turn | None:
        self._wait()
        return super().turn(tenant, turn_id)

    def turns(self, tenant: str, head: str, *, limit: int) -> tuple[Turn, ...]:
        self._wait()
        return super().turns(tenant, head, limit=limit)

    def ancestry(self, tenant: str, head: str, *, until: str = "") -> tuple[str, ...]:
        self._wait()
        return super().ancestry(tenant, head, until=until)

    def _wait(self) -> None:
        self.is_read.set()
        assert self.gate.wait(60)


@pytest.mark.parametrize(
    "change",
    [
        lambda agents, _: agents.commit(LOCAL_TENANT, "ann", exchange([1, 2, 3, 4], [5], 4)),
        lambda agents, turn: agents.fork(LOCAL_TENANT, "ann", ["bob"], turn.id),
        lambda agents, turn: agents.rewind(LOCAL_TENANT, "ann", turn.id),
        lambda agents, turn: agents.before(ann(agents), turn.id),
    ],
)
def test_who_looks_up_an_agent_never_waits_for_the_disk(
    tmp_path: Path, change: Callable[[AgentLedger, Turn], object]
) -> None:
    ledger = StuckLedger(tmp_path)
    with contextlib.closing(ledger), ThreadPoolExecutor(2) as pool:
        first = AgentLedger(ledger, ledger.load(), write_at_once(ledger))
        first.principal()
        turn = commit(first, [1, 2], [3])
        agents = AgentLedger(ledger, ledger.load(), write_at_once(ledger))
        ledger.gate.clear()
        ledger.is_read.clear()
        changing = pool.submit(change, agents, turn)
        try:
            assert ledger.is_read.wait(60)
            looks: list[Callable[[], object]] = [
                lambda: ann(agents),
                lambda: agents.find(LOCAL_TENANT, "ann"),
                lambda: agents.agents(LOCAL_TENANT),
                agents.recent,
                agents.principal,
                agents.principals,
            ]
            for look in looks:
                assert pool.submit(look).result(5)
            assert not changing.done()
        finally:
            ledger.gate.set()
        assert changing.result(60)


# -- agents -------------------------------------------------------------------------------------


def test_a_fork_has_the_same_past_and_its_own_future(agents: AgentLedger) -> None:
    first = commit(agents, [1, 2], [3])
    commit(agents, [1, 2, 3, 4], [5])
    (fork,) = agents.fork(LOCAL_TENANT, "ann", ["bob"], first.id)
    assert agents.tokens(fork) == [1, 2, 3]
    agents.commit(LOCAL_TENANT, "bob", exchange([1, 2, 3, 9], [9]))
    assert agents.tokens(ann(agents)) == [1, 2, 3, 4, 5]
    with pytest.raises(InvalidRequestError):
        agents.fork(LOCAL_TENANT, "ann", ["bob"])
    with pytest.raises(AgentNotFoundError):
        agents.fork(LOCAL_TENANT, "ann", ["cid"], "turn_unknown")


def test_rewinding(agents: AgentLedger) -> None:
    first = commit(agents, [1, 2], [3])
    commit(agents, [1, 2, 3, 4], [5])
    assert agents.rewind(LOCAL_TENANT, "ann", first.id).num_turns == 1
    assert agents.tokens(ann(agents)) == [1, 2, 3]
    assert agents.rewind(LOCAL_TENANT, "ann", None).head is None
    assert agents.tokens(ann(agents)) == []
    with pytest.raises(AgentNotFoundError):
        agents.rewind(LOCAL_TENANT, "ann", first.id)


def test_who_was_not_used_for_long_is_forgotten_unless_pinned(
    agents: AgentLedger, clock: Clock
) -> None:
    for name, is_pinned in (("gone", False), ("pinned", True)):
        agents.create(Agent(name, clock.now, ttl_s=10.0, is_pinned=is_pinned))
    agents.create(Agent("kept", clock.now))
    clock.now += 9
    assert agents.expire() == []
    clock.now += 1
    assert [agent.id for agent in agents.expire()] == ["gone"]
    assert {agent.id for agent in agents.agents(LOCAL_TENANT)} == {"pinned", "kept"}


def test_a_quota_of_turns(agents: AgentLedger) -> None:
    agents.create(Agent("ann", 0.0, quota=Quota(max_turns=1)))
    agents.check_quota(ann(agents))
    commit(agents, [1], [2])
    with pytest.raises(QuotaExceededError):
        agents.check_quota(ann(agents))


def test_settings_change_and_the_head_does_not(agents: AgentLedger) -> None:
    turn = commit(agents, [1], [2])
    changed = agents.update(LOCAL_TENANT, "ann", lambda agent: replace(agent, weight=2.0))
    assert (changed.head, changed.weight) == (turn.id, 2.0)


def test_who_is_asked_for_by_many_at_once_is_made_once(ledger: SqliteLedger) -> None:
    agents = AgentLedger(ledger, ledger.load(), write_at_once(ledger))
    barrier = threading.Barrier(8)
    found: list[Agent] = []

    def ensure() -> None:
        barrier.wait()
        found.append(agents.ensure(LOCAL_TENANT, "ann"))

    threads = [threading.Thread(target=ensure) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({agent.created_at for agent in found}) == 1
    assert len(agents.agents(LOCAL_TENANT)) == 1


def test_a_tenant_keeps_its_salt(agents: AgentLedger, ledger: SqliteLedger) -> None:
    salt = agents.principal("team").salt
    again = AgentLedger(ledger, ledger.load(), write_at_once(ledger))
    assert again.principal("team").salt == salt
    assert again.principal("other").salt != salt
    assert {p.tenant for p in again.principals()} == {"team", "other"}


def test_agents_belong_to_their_tenant(agents: AgentLedger) -> None:
    agents.ensure("team", "ann")
    assert agents.find(LOCAL_TENANT, "ann") is None
    with pytest.raises(AgentNotFoundError):
        agents.delete(LOCAL_TENANT, "ann")
    assert agents.delete("team", "ann").id == "ann"
    assert agents.find("team", "ann") is None
