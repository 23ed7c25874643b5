"""Agents and turns, over a ledger in memory and over one whose writes are late."""

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.ledger import AgentLedger, Exchange, write_at_once
from semantic.domain.agents import Agent, Divergence, Reuse, Turn
from semantic.domain.chat import Continuation, Message, Role, Usage
from semantic.domain.errors import AgentNotFoundError, ConflictError
from semantic.ports.storage import LedgerChange

pytestmark = pytest.mark.unit


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


@pytest.fixture
def ledger() -> SqliteLedger:
    return SqliteLedger.in_memory()


@pytest.fixture
def agents(ledger: SqliteLedger) -> AgentLedger:
    return AgentLedger(ledger, ledger.load(), write_at_once(ledger))


def exchange(
    prompt: Sequence[int],
    reply: Sequence[int],
    texts: Sequence[str],
    continuation: Continuation | None = None,
) -> Exchange:
    messages = [Message.of(Role.USER, text) for text in texts]
    usage = Usage(len(prompt), len(reply))
    return Exchange(prompt, reply, messages, None, usage, Reuse(), continuation=continuation)


def talk(agents: AgentLedger, num_turns: int, agent_id: str = "a") -> list[Turn]:
    """Turns of two tokens and one message each, in a conversation the server keeps."""
    turns: list[Turn] = []
    for index in range(num_turns):
        head = turns[-1].id if turns else None
        prompt = list(range(2 * index + 1))
        texts = [f"m{i}" for i in range(index + 1)]
        said = exchange(prompt, [2 * index + 1], texts, Continuation(head))
        turns.append(agents.commit("local", agent_id, said)[0])
    return turns


def test_a_turn_holds_what_it_added(agents: AgentLedger) -> None:
    agents.create(Agent("a", 1.0))

    turns = talk(agents, 3)

    assert [turn.tokens for turn in turns] == [(0, 1), (2, 3), (4, 5)]
    assert [turn.messages[0].text for turn in turns] == ["m0", "m1", "m2"]
    agent = agents.get("local", "a")
    assert agents.tokens(agent) == [0, 1, 2, 3, 4, 5]
    assert [message.text for message in agents.conversation(agent)] == ["m0", "m1", "m2"]
    assert {turn.divergence for turn in turns} == {None}


def test_a_turn_whose_tokens_differ_holds_them_all_and_stays_in_the_log(
    agents: AgentLedger,
) -> None:
    agents.create(Agent("a", 1.0))
    first, second = talk(agents, 2)

    said = exchange([0, 1, 9], [8], ["m0", "m1", "new"], Continuation(second.id))
    third, _ = agents.commit("local", "a", said)

    assert (third.parent, third.tokens) == (second.id, (0, 1, 9, 8))
    assert [message.text for message in third.messages] == ["new"]
    assert third.divergence == Divergence(second.id, 2)
    agent = agents.get("local", "a")
    assert agent.num_turns == 3
    assert agents.tokens(agent) == [0, 1, 9, 8]
    assert [message.text for message in agents.conversation(agent)] == ["m0", "m1", "new"]
    assert [turn.id for turn in agents.turns(agent)] == [third.id, second.id, first.id]


def test_a_conversation_that_was_edited_begins_anew(agents: AgentLedger) -> None:
    agents.create(Agent("a", 1.0))
    _, second = talk(agents, 2)

    edited = Continuation(second.id, is_edited=True, num_dropped=1)
    third, _ = agents.commit("local", "a", exchange([7], [8], ["m1", "new"], edited))

    assert (third.parent, third.num_dropped) == (second.id, 1)
    assert [message.text for message in third.messages] == ["m1", "new"]
    agent = agents.get("local", "a")
    assert [message.text for message in agents.conversation(agent)] == ["m1", "new"]


def test_a_client_that_goes_back_takes_its_agent_along(agents: AgentLedger) -> None:
    first, _ = agents.commit("local", "a", exchange([1], [2], ["q1", "r1"]))
    second, _ = agents.commit("local", "a", exchange([1, 2, 3], [4], ["q1", "r1", "q2", "r2"]))

    other, _ = agents.commit("local", "a", exchange([1, 2, 5], [6], ["q1", "r1", "x", "y"]))

    assert (other.parent, other.tokens) == (first.id, (5, 6))
    assert other.divergence == Divergence(second.id, 2)
    assert agents.get("local", "a").num_turns == 2
    assert agents.log.tokens("local", second.id) == [1, 2, 3, 4]


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
    with pytest.raises(AgentNotFoundError):
        agents.rewind("local", "a", turns[3].id)
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
