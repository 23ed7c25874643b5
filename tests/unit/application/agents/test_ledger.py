"""Agents and their turns: what a commit continues, and storage quotas."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.ledger import AgentLedger
from semantic.domain.agents import Agent, Divergence, Pointer, Quota, Turn
from semantic.domain.blocks import BlockName
from semantic.domain.chat import Continuation
from semantic.domain.errors import AgentNotFoundError, ConflictError, QuotaExceededError
from semantic.ports.storage import PutTenant, PutTurn
from tests.unit.application.engine_rig import ROOT
from tests.unit.application.ledger_rig import (
    GatedLedger,
    GatedWriter,
    LateWriter,
    agents_of,
    exchange_of,
)

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
    return agents_of(ledger, now=clock)


def commit(
    agents: AgentLedger,
    prompt: Sequence[int],
    reply: Sequence[int],
    texts: Sequence[str] = "01",
    continuation: Continuation | None = None,
) -> Turn:
    """A turn of "a", whose state is in the block `OLD`."""
    pointer = Pointer(ROOT, OLD, len(prompt) + len(reply))
    said = exchange_of(prompt, reply, texts, pointer=pointer, continuation=continuation)
    return agents.commit("local", "a", said)[0]


def the_agent(agents: AgentLedger) -> Agent:
    return agents.get("local", "a")


def texts_of(agents: AgentLedger) -> list[str]:
    return [message.text for message in agents.conversation(the_agent(agents))]


# -- commit -------------------------------------------------------------------------------------


def test_a_turn_continues_the_one_its_prompt_begins_with(agents: AgentLedger) -> None:
    first = commit(agents, [1, 2], [3])
    second = commit(agents, [1, 2, 3, 4], [5], "0123")
    assert (second.parent, second.tokens) == (first.id, (4, 5))
    assert [m.text for m in second.messages] == ["2", "3"]
    assert agents.tokens(the_agent(agents)) == [1, 2, 3, 4, 5]
    assert (the_agent(agents).head, the_agent(agents).num_turns) == (second.id, 2)


@pytest.mark.parametrize("prompt", [[7], [1, 2, 4, 5]])  # shares nothing; the reply was edited
def test_a_prompt_that_continues_nothing_starts_over(
    agents: AgentLedger, prompt: list[int]
) -> None:
    commit(agents, [1, 2], [3])
    assert commit(agents, prompt, [8]).parent is None
    assert the_agent(agents).num_turns == 1
    assert agents.tokens(the_agent(agents)) == [*prompt, 8]


def test_a_client_that_goes_back_takes_its_agent_along(agents: AgentLedger) -> None:
    first, second = commit(agents, [1], [2]), commit(agents, [1, 2, 3], [4], "0123")
    other = commit(agents, [1, 2, 5], [6], "01xy")
    assert (other.parent, other.tokens) == (first.id, (5, 6))
    assert other.divergence == Divergence(second.id, 2)
    assert the_agent(agents).num_turns == 2
    assert agents.log.tokens("local", second.id) == [1, 2, 3, 4]
    assert agents.tokens(the_agent(agents)) == [1, 2, 5, 6]


# -- conversations that the server keeps ---------------------------------------------------------


def talk(agents: AgentLedger, num_turns: int) -> list[Turn]:
    """Turns of two tokens and one message each, in a conversation the server keeps."""
    agents.create(Agent("a", 1.0))
    turns: list[Turn] = []
    for index in range(num_turns):
        head = Continuation(turns[-1].id if turns else None)
        prompt, texts = list(range(2 * index + 1)), "0123456789"[: index + 1]
        turns.append(commit(agents, prompt, [2 * index + 1], texts, head))
    return turns


def test_a_turn_holds_what_it_added(agents: AgentLedger) -> None:
    turns = talk(agents, 3)
    assert [turn.tokens for turn in turns] == [(0, 1), (2, 3), (4, 5)]
    assert [turn.messages[0].text for turn in turns] == ["0", "1", "2"]
    assert agents.tokens(the_agent(agents)) == [0, 1, 2, 3, 4, 5]
    assert texts_of(agents) == ["0", "1", "2"]
    assert {turn.divergence for turn in turns} == {None}


def test_a_turn_whose_tokens_differ_holds_them_all_and_stays_in_the_log(
    agents: AgentLedger,
) -> None:
    first, second = talk(agents, 2)
    third = commit(agents, [0, 1, 9], [8], ["0", "1", "new"], Continuation(second.id))
    assert (third.parent, third.tokens) == (second.id, (0, 1, 9, 8))
    assert [message.text for message in third.messages] == ["new"]
    assert third.divergence == Divergence(second.id, 2)
    assert the_agent(agents).num_turns == 3
    assert agents.tokens(the_agent(agents)) == [0, 1, 9, 8]
    assert texts_of(agents) == ["0", "1", "new"]
    assert agents.turns(the_agent(agents)) == [third, second, first]


def test_a_conversation_that_was_edited_begins_anew(agents: AgentLedger) -> None:
    _, second = talk(agents, 2)
    edited = Continuation(second.id, is_edited=True, num_dropped=1)
    third = commit(agents, [7], [8], ["1", "new"], edited)
    assert (third.parent, third.num_dropped) == (second.id, 1)
    assert [message.text for message in third.messages] == texts_of(agents) == ["1", "new"]


def test_a_turn_that_continues_a_removed_turn_or_agent_is_refused(agents: AgentLedger) -> None:
    first, _ = talk(agents, 2)
    agents.rewind("local", "a", first.id)
    with pytest.raises(ConflictError):
        commit(agents, [1], [2], ["x"], Continuation("turn_gone"))
    agents.delete("local", "a")
    with pytest.raises(AgentNotFoundError):
        commit(agents, [1], [2], ["x"], Continuation(first.id))


@pytest.mark.parametrize("num_written", [0, 2, 3, None])
def test_turns_are_the_same_before_and_after_they_are_written(
    ledger: SqliteLedger, num_written: int | None
) -> None:
    writer = LateWriter(ledger)
    agents = agents_of(ledger, writer)
    turns = talk(agents, 5)
    writer.write(num_written)
    agent = the_agent(agents)
    assert agents.turns(agent) == turns[::-1]
    assert agents.turns(agent, limit=2) == turns[:2:-1]
    assert agents.tokens(agent) == list(range(10))
    assert agents.turn("local", turns[1].id) == turns[1]
    assert agents.before(agent, turns[2].id).head == turns[1].id
    back = agents.rewind("local", "a", turns[1].id)
    assert (back.head, back.num_turns, agents.tokens(back)) == (turns[1].id, 2, [0, 1, 2, 3])
    again = agents.rewind("local", "a", turns[3].id)
    assert (again.num_turns, agents.tokens(again)) == (4, list(range(8)))
    (fork,) = agents.fork("local", "a", ["b"], turns[0].id)
    assert (fork.head, fork.num_turns) == (turns[0].id, 1)
    begun = agents.rewind("local", "a", None)
    assert (begun.head, agents.tokens(begun)) == (None, [])
    assert agents.rewind("local", "a", turns[4].id).num_turns == 5
    with pytest.raises(AgentNotFoundError):
        agents.rewind("local", "a", "turn_unknown")


def test_an_agent_comes_with_its_turns_or_not_at_all(agents: AgentLedger) -> None:
    turns = talk(agents, 2)
    moved = Agent("b", 1.0, head=turns[-1].id, num_turns=2)
    agents.create(moved, turns)
    assert agents.turns(moved) == turns[::-1]
    with pytest.raises(ConflictError):
        agents.create(moved, turns)


def test_settings_change_and_the_past_does_not(agents: AgentLedger) -> None:
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
    agents = agents_of(ledger)
    turns = talk(agents, 6)
    agents.fork("local", "a", ["b"], turns[0].id)
    assert ledger.num_walks == 0
    reopened = agents_of(ledger)
    for index in (1, 1, 3):
        (fork,) = reopened.fork("local", "a", [f"c{index}{ledger.num_walks}"], turns[index].id)
        assert (fork.head, fork.num_turns) == (turns[index].id, index + 1)
        reopened.delete("local", fork.id)
    assert ledger.num_walks == 2  # down to the second turn, and the second turn itself


# -- blocks that are replaced -------------------------------------------------------------------


def block_of(agents: AgentLedger, turn: Turn) -> BlockName:
    found = agents.turn("local", turn.id)
    assert found is not None
    assert found.pointer is not None
    return found.pointer.block


def test_a_turn_follows_its_block_that_moves_before_and_after_it_is_logged(
    agents: AgentLedger,
) -> None:
    turn = commit(agents, [1], [2])
    agents.log.move(OLD, NEW)
    assert block_of(agents, turn) == NEW
    agents.log.move(NEW, NEWER)
    assert block_of(agents, commit(agents, [1], [2])) == NEWER


def test_a_turn_that_is_not_written_yet_follows_its_block(ledger: SqliteLedger) -> None:
    writer = LateWriter(ledger)
    agents = agents_of(ledger, writer)
    turn = commit(agents, [1], [2])
    agents.log.move(OLD, NEW)
    assert block_of(agents, turn) == NEW
    writer.write()
    assert ledger.turn("local", turn.id) is not None
    assert block_of(agents, turn) == NEW


# -- a slow disk --------------------------------------------------------------------------------


def test_a_block_moves_while_a_turn_is_being_written(ledger: SqliteLedger) -> None:
    """The device thread moves blocks: it must not wait for a write of another thread."""
    writer = GatedWriter(ledger, PutTurn)
    agents = agents_of(ledger, writer)
    with ThreadPoolExecutor(2) as pool:
        committing = pool.submit(commit, agents, [1], [2])
        try:
            assert writer.is_writing.wait(60)
            pool.submit(agents.log.move, OLD, NEW).result(60)
            assert not committing.done()
        finally:
            writer.gate.set()
        turn = committing.result(60)
    assert turn.pointer is not None
    assert turn.pointer.block == OLD  # as it was when the write began
    assert block_of(agents, turn) == NEW


def test_known_tenants_are_found_while_another_is_being_written(ledger: SqliteLedger) -> None:
    writer = GatedWriter(ledger, PutTenant)
    writer.gate.set()
    agents = agents_of(ledger, writer)
    agents.principal("known")
    writer.gate.clear()
    writer.is_writing.clear()
    with ThreadPoolExecutor(3) as pool:
        new = [pool.submit(agents.principal, "new") for _ in range(2)]
        try:
            assert writer.is_writing.wait(60)
            assert pool.submit(agents.principal, "known").result(60).tenant == "known"
            assert len(pool.submit(agents.principals).result(60)) == 1
        finally:
            writer.gate.set()
        assert new[0].result(60) == new[1].result(60) == agents.principal("new")
    assert agents_of(ledger).principal("new") == agents.principal("new")


@pytest.mark.parametrize(
    "change",
    [
        lambda agents, _: commit(agents, [1, 2, 3, 4], [5], "0123"),
        lambda agents, turn: agents.fork("local", "a", ["bob"], turn.id),
        lambda agents, turn: agents.rewind("local", "a", turn.id),
        lambda agents, turn: agents.before(the_agent(agents), turn.id),
    ],
)
def test_looking_up_an_agent_never_waits_for_the_disk(
    tmp_path: Path, change: Callable[[AgentLedger, Turn], object]
) -> None:
    ledger = GatedLedger(tmp_path)
    with contextlib.closing(ledger), ThreadPoolExecutor(2) as pool:
        first = agents_of(ledger)
        first.principal()
        turn = commit(first, [1, 2], [3])
        agents = agents_of(ledger)
        ledger.stall()
        changing = pool.submit(change, agents, turn)
        try:
            assert ledger.is_read.wait(60)
            looks: list[Callable[[], object]] = [
                lambda: the_agent(agents),
                lambda: agents.find_agent("local", "a"),
                lambda: agents.agents("local"),
                agents.recent,
                agents.principal,
                agents.principals,
                lambda: agents.principal("new"),
            ]
            for look in looks:
                assert pool.submit(look).result(60)
            assert not changing.done()
        finally:
            ledger.gate.set()
        assert changing.result(60)


# -- agents -------------------------------------------------------------------------------------


def test_an_agent_unused_for_long_is_deleted_unless_pinned(
    agents: AgentLedger, clock: Clock
) -> None:
    for name, is_pinned in (("gone", False), ("pinned", True)):
        agents.create(Agent(name, clock.now, ttl_s=10.0, is_pinned=is_pinned))
    agents.create(Agent("kept", clock.now))
    clock.now += 9
    assert agents.expire() == []
    clock.now += 1
    assert [agent.id for agent in agents.expire()] == ["gone"]
    assert {agent.id for agent in agents.agents("local")} == {"pinned", "kept"}


def test_a_quota_of_turns(agents: AgentLedger) -> None:
    agents.create(Agent("a", 0.0, quota=Quota(max_turns=1)))
    agents.check_quota(the_agent(agents))
    commit(agents, [1], [2])
    with pytest.raises(QuotaExceededError):
        agents.check_quota(the_agent(agents))


def test_of_many_concurrent_creations_of_one_agent_one_succeeds(agents: AgentLedger) -> None:
    barrier = threading.Barrier(8)

    def is_made(_: int) -> bool:
        barrier.wait()
        try:
            agents.create(Agent("a", 1.0))
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(is_made, range(8))) == 1
    assert len(agents.agents("local")) == 1


def test_a_tenant_keeps_its_salt(agents: AgentLedger, ledger: SqliteLedger) -> None:
    salt = agents.principal("team").salt
    again = agents_of(ledger)
    assert again.principal("team").salt == salt
    assert again.principal("other").salt != salt
    assert {p.tenant for p in again.principals()} == {"team", "other"}


def test_agents_belong_to_their_tenant(agents: AgentLedger) -> None:
    agents.create(Agent("a", 1.0, tenant="team"))
    assert agents.find_agent("local", "a") is None
    with pytest.raises(AgentNotFoundError):
        agents.delete("local", "a")
    assert agents.delete("team", "a").id == "a"
    assert agents.find_agent("team", "a") is None
