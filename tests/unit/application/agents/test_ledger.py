"""Agents and their turns: what a commit continues, and who may have how much."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.ledger import AgentLedger, Exchange, write_at_once
from semantic.domain.agents import (
    LOCAL_TENANT,
    Agent,
    Divergence,
    Pointer,
    Quota,
    Reuse,
    Turn,
)
from semantic.domain.blocks import BlockName
from semantic.domain.chat import Continuation, Message, Role
from semantic.domain.errors import AgentNotFoundError, ConflictError, QuotaExceededError
from semantic.domain.events import Usage
from semantic.ports.storage import LedgerChange
from tests.unit.application.engine_rig import ROOT

pytestmark = pytest.mark.unit

OLD, NEW, NEWER = (BlockName(bytes([n]) * 32) for n in (1, 2, 3))


class LateWriter:
    """Keeps changes until it is told to write them."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self._ledger = ledger
        self._waiting: list[tuple[tuple[LedgerChange, ...], Future[None]]] = []

    def __call__(self, *changes: LedgerChange) -> Future[None]:
        done: Future[None] = Future()
        self._waiting.append((changes, done))
        return done

    def write(self, count: int | None = None) -> None:
        due, self._waiting = self._waiting[:count], self._waiting[len(self._waiting[:count]) :]
        for changes, done in due:
            self._ledger.apply(changes, is_synced=False)
            done.set_result(None)


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
    prompt: Sequence[int],
    reply: Sequence[int],
    texts: Sequence[str] = "01",
    continuation: Continuation | None = None,
) -> Exchange:
    messages = [Message.of(Role.USER, text) for text in texts]
    pointer = Pointer(ROOT, OLD, len(prompt) + len(reply))
    usage = Usage(len(prompt), len(reply))
    return Exchange(prompt, reply, messages, pointer, usage, Reuse(), continuation=continuation)


def commit(
    agents: AgentLedger, prompt: Sequence[int], reply: Sequence[int], texts: str = "01"
) -> Turn:
    turn, done = agents.commit(LOCAL_TENANT, "ann", exchange(prompt, reply, texts))
    assert done.result(1) is None
    return turn


def ann(agents: AgentLedger) -> Agent:
    return agents.get(LOCAL_TENANT, "ann")


# -- commit -------------------------------------------------------------------------------------


def test_a_turn_continues_the_one_its_prompt_begins_with(agents: AgentLedger) -> None:
    first = commit(agents, [1, 2], [3])
    second = commit(agents, [1, 2, 3, 4], [5], "0123")
    assert second.parent == first.id
    assert second.tokens == (4, 5)
    assert [m.text for m in second.messages] == ["2", "3"]
    assert agents.tokens(ann(agents)) == [1, 2, 3, 4, 5]
    assert (ann(agents).head, ann(agents).num_turns) == (second.id, 2)


def test_a_prompt_that_shares_nothing_starts_over(agents: AgentLedger) -> None:
    commit(agents, [1, 2], [3])
    other = commit(agents, [7], [8])
    assert other.parent is None
    assert ann(agents).num_turns == 1
    assert agents.tokens(ann(agents)) == [7, 8]


def test_an_edited_reply_is_no_continuation(agents: AgentLedger) -> None:
    commit(agents, [1, 2], [3])
    assert commit(agents, [1, 2, 4, 5], [6]).parent is None


# -- conversations that the server keeps ---------------------------------------------------------


def talk(agents: AgentLedger, num_turns: int, agent_id: str = "a") -> list[Turn]:
    """Turns of two tokens and one message each, in a conversation the server keeps."""
    turns: list[Turn] = []
    for index in range(num_turns):
        head = turns[-1].id if turns else None
        prompt = list(range(2 * index + 1))
        texts = "0123456789"[: index + 1]
        said = exchange(prompt, [2 * index + 1], texts, Continuation(head))
        turns.append(agents.commit("local", agent_id, said)[0])
    return turns


def test_a_turn_holds_what_it_added(agents: AgentLedger) -> None:
    agents.create(Agent("a", 1.0))

    turns = talk(agents, 3)

    assert [turn.tokens for turn in turns] == [(0, 1), (2, 3), (4, 5)]
    assert [turn.messages[0].text for turn in turns] == ["0", "1", "2"]
    agent = agents.get("local", "a")
    assert agents.tokens(agent) == [0, 1, 2, 3, 4, 5]
    assert [message.text for message in agents.conversation(agent)] == ["0", "1", "2"]
    assert {turn.divergence for turn in turns} == {None}


def test_a_turn_whose_tokens_differ_holds_them_all_and_stays_in_the_log(
    agents: AgentLedger,
) -> None:
    agents.create(Agent("a", 1.0))
    first, second = talk(agents, 2)

    said = exchange([0, 1, 9], [8], ["0", "1", "new"], Continuation(second.id))
    third, _ = agents.commit("local", "a", said)

    assert (third.parent, third.tokens) == (second.id, (0, 1, 9, 8))
    assert [message.text for message in third.messages] == ["new"]
    assert third.divergence == Divergence(second.id, 2)
    agent = agents.get("local", "a")
    assert agent.num_turns == 3
    assert agents.tokens(agent) == [0, 1, 9, 8]
    assert [message.text for message in agents.conversation(agent)] == ["0", "1", "new"]
    assert [turn.id for turn in agents.turns(agent)] == [third.id, second.id, first.id]


def test_a_conversation_that_was_edited_begins_anew(agents: AgentLedger) -> None:
    agents.create(Agent("a", 1.0))
    _, second = talk(agents, 2)

    edited = Continuation(second.id, is_edited=True, num_dropped=1)
    third, _ = agents.commit("local", "a", exchange([7], [8], ["1", "new"], edited))

    assert (third.parent, third.num_dropped) == (second.id, 1)
    assert [message.text for message in third.messages] == ["1", "new"]
    agent = agents.get("local", "a")
    assert [message.text for message in agents.conversation(agent)] == ["1", "new"]


def test_a_client_that_goes_back_takes_its_agent_along(agents: AgentLedger) -> None:
    first, _ = agents.commit("local", "a", exchange([1], [2]))
    second, _ = agents.commit("local", "a", exchange([1, 2, 3], [4], "0123"))

    other, _ = agents.commit("local", "a", exchange([1, 2, 5], [6], "01xy"))

    assert (other.parent, other.tokens) == (first.id, (5, 6))
    assert other.divergence == Divergence(second.id, 2)
    assert agents.get("local", "a").num_turns == 2
    assert agents.log.tokens("local", second.id) == [1, 2, 3, 4]
    assert agents.tokens(agents.get("local", "a")) == [1, 2, 5, 6]


def test_what_went_elsewhere_is_not_logged(agents: AgentLedger) -> None:
    agents.create(Agent("a", 1.0))
    first, _ = talk(agents, 2)
    agents.rewind("local", "a", first.id)

    with pytest.raises(ConflictError):
        agents.commit("local", "a", exchange([1], [2], ["x"], Continuation("turn_gone")))
    agents.delete("local", "a")
    with pytest.raises(AgentNotFoundError):
        agents.commit("local", "a", exchange([1], [2], ["x"], Continuation(first.id)))


@pytest.mark.parametrize("num_written", [0, 2, 3, None])
def test_turns_are_the_same_before_and_after_they_are_written(
    ledger: SqliteLedger, num_written: int | None
) -> None:
    writer = LateWriter(ledger)
    agents = AgentLedger(ledger, ledger.load(), writer)
    agents.create(Agent("a", 1.0))
    turns = talk(agents, 5)
    writer.write(num_written)

    agent = agents.get("local", "a")
    assert agents.turns(agent) == turns[::-1]
    assert agents.turns(agent, limit=2) == turns[:2:-1]
    assert agents.tokens(agent) == list(range(10))
    assert agents.turn("local", turns[1].id) == turns[1]
    assert agents.before(agent, turns[2].id).head == turns[1].id
    back = agents.rewind("local", "a", turns[1].id)
    assert (back.head, back.num_turns) == (turns[1].id, 2)
    assert agents.rewind("local", "a", turns[3].id).num_turns == 4
    (fork,) = agents.fork("local", "a", ["b"], turns[0].id)
    assert (fork.head, fork.num_turns) == (turns[0].id, 1)


def test_an_agent_comes_with_its_turns_or_not_at_all(agents: AgentLedger) -> None:
    agents.create(Agent("a", 1.0))
    turns = talk(agents, 2)
    moved = Agent("b", 1.0, head=turns[-1].id, num_turns=2)

    agents.create(moved, turns)

    assert agents.turns(moved) == turns[::-1]
    with pytest.raises(ConflictError):
        agents.create(moved, turns)


def test_settings_change_and_the_past_does_not(agents: AgentLedger) -> None:
    agents.create(Agent("a", 1.0))
    turns = talk(agents, 1)

    changed = agents.update("local", "a", lambda agent: Agent(agent.id, 1.0, weight=3.0))

    assert (changed.weight, changed.head, changed.num_turns) == (3.0, turns[0].id, 1)


class CountingLedger(SqliteLedger):
    """Counts how often it is asked for the ids of a log."""

    num_walks = 0

    def ancestry(self, tenant: str, head: str, *, until: str = "") -> tuple[str, ...]:
        self.num_walks += 1
        return super().ancestry(tenant, head, until=until)


def test_which_turn_follows_which_is_read_once() -> None:
    ledger = CountingLedger.in_memory()
    write = write_at_once(ledger)
    agents = AgentLedger(ledger, ledger.load(), write)
    agents.create(Agent("a", 1.0))
    turns = talk(agents, 6)
    agents.fork("local", "a", ["b"], turns[0].id)
    assert ledger.num_walks == 0

    reopened = AgentLedger(ledger, ledger.load(), write)
    for index in (1, 1, 3):
        (fork,) = reopened.fork("local", "a", [f"c{index}{ledger.num_walks}"], turns[index].id)
        assert (fork.head, fork.num_turns) == (turns[index].id, index + 1)
        reopened.delete("local", fork.id)
    assert ledger.num_walks == 2  # down to the second turn, and the second turn itself


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
    writer = LateWriter(ledger)
    agents = AgentLedger(ledger, ledger.load(), writer)
    turn, _ = agents.commit(LOCAL_TENANT, "ann", exchange([1], [2]))
    agents.log.move(OLD, NEW)
    assert pointer_of(agents, turn) == NEW
    writer.write()
    assert ledger.turn(LOCAL_TENANT, turn.id) is not None
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
        lambda agents, _: agents.commit(LOCAL_TENANT, "ann", exchange([1, 2, 3, 4], [5], "0123")),
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
    with pytest.raises(ConflictError):
        agents.fork(LOCAL_TENANT, "ann", ["bob"])
    with pytest.raises(AgentNotFoundError):
        agents.fork(LOCAL_TENANT, "ann", ["cid"], "turn_unknown")


def test_rewinding(agents: AgentLedger) -> None:
    first = commit(agents, [1, 2], [3])
    second = commit(agents, [1, 2, 3, 4], [5])
    assert agents.rewind(LOCAL_TENANT, "ann", first.id).num_turns == 1
    assert agents.tokens(ann(agents)) == [1, 2, 3]
    assert agents.rewind(LOCAL_TENANT, "ann", None).head is None
    assert agents.tokens(ann(agents)) == []
    with pytest.raises(AgentNotFoundError):
        agents.rewind(LOCAL_TENANT, "ann", "turn_unknown")
    assert agents.rewind(LOCAL_TENANT, "ann", second.id).num_turns == 2
    assert agents.tokens(ann(agents)) == [1, 2, 3, 4, 5]


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
