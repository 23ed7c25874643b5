"""Turns found again by their request."""

from concurrent.futures import Future

import pytest

from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.ledger import AgentLedger, Exchange, write_at_once
from semantic.application.agents.turns import PastTurns, turn_id
from semantic.domain.agents import Principal, Reuse
from semantic.domain.chat import Continuation, Message, Role, TextPart
from semantic.domain.events import Usage
from semantic.ports.storage import LedgerChange

pytestmark = pytest.mark.unit

OWNER = Principal()
INSTRUCTION = Message(Role.SYSTEM, (TextPart("Be."),), is_instruction=True)


@pytest.fixture
def agents() -> AgentLedger:
    ledger = SqliteLedger.in_memory()
    return AgentLedger(ledger, ledger.load(), write_at_once(ledger))


def said(*texts: str) -> tuple[Message, ...]:
    roles = (Role.USER, Role.ASSISTANT)
    return tuple(Message.of(roles[i % 2], text) for i, text in enumerate(texts))


def commit(
    agents: AgentLedger,
    agent_id: str,
    name: str,
    messages: tuple[Message, ...],
    *,
    is_stored: bool = True,
    continuation: Continuation | None = None,
) -> None:
    """Log a turn; a message is as many tokens as it has characters."""
    *asked, reply = ([*m.text.encode()] for m in messages)
    exchange = Exchange(
        prompt=[token for message in asked for token in message],
        reply=reply,
        messages=messages,
        pointer=None,
        usage=Usage(1),
        reuse=Reuse(),
        turn_id=turn_id(name),
        is_stored=is_stored,
        continuation=continuation,
    )
    agents.commit("local", agent_id, exchange)


def test_a_turn_holds_the_whole_conversation_without_instructions(agents: AgentLedger) -> None:
    messages = said("one", "two", "three", "four")
    commit(agents, "a", "1", (INSTRUCTION, *messages[:2]))
    commit(agents, "a", "2", (INSTRUCTION, *messages))
    past = PastTurns(agents.log).find("2", OWNER)
    assert past is not None
    assert past.messages == messages
    assert past.reply == messages[-1]
    assert past.turn_id == turn_id("2")


def test_other_tenants_and_unknown_turns_are_not_found(agents: AgentLedger) -> None:
    commit(agents, "a", "1", said("one", "two"))
    turns = PastTurns(agents.log)
    assert turns.find("2", OWNER) is None
    assert turns.find("1", Principal(tenant="other")) is None
    assert not turns.forget("1", Principal(tenant="other"))
    assert turns.find("1", OWNER) is not None


def test_other_tenants_do_not_find_a_turn_before_it_is_written() -> None:
    ledger = SqliteLedger.in_memory()
    agents = AgentLedger(ledger, ledger.load(), lambda *_: Future())
    commit(agents, "a", "1", said("one", "two"))
    turns = PastTurns(agents.log)
    assert turns.find("1", OWNER) is not None
    assert turns.find("1", Principal(tenant="other")) is None
    assert not turns.forget("1", Principal(tenant="other"))


def test_a_turn_whose_oldest_messages_were_dropped_is_found(agents: AgentLedger) -> None:
    messages = said("one", "two", "three", "four", "five", "six")
    commit(agents, "a", "1", messages[:2])
    edited = Continuation(turn_id("1"), is_edited=True, num_dropped=2)
    commit(agents, "a", "2", messages[2:4], continuation=edited)
    commit(agents, "a", "3", messages[2:], continuation=Continuation(turn_id("2")))
    for name, expected in (("2", messages[2:4]), ("3", messages[2:])):
        past = PastTurns(agents.log).find(name, OWNER)
        assert past is not None
        assert past.messages == expected


def test_text_that_is_forgotten_is_missing_in_what_followed(agents: AgentLedger) -> None:
    messages = said("one", "two", "three", "four")
    commit(agents, "a", "1", messages[:2])
    commit(agents, "a", "2", messages)
    turns = PastTurns(agents.log)
    assert turns.forget("1", OWNER)
    assert not turns.forget("1", OWNER)
    assert turns.find("1", OWNER) is None
    assert turns.find("2", OWNER) is None


def test_text_that_is_forgotten_before_it_is_written_stays_so() -> None:
    ledger = SqliteLedger.in_memory()
    queue: list[tuple[tuple[LedgerChange, ...], Future[None]]] = []

    def write(*changes: LedgerChange) -> Future[None]:
        queue.append((changes, Future()))
        return queue[-1][1]

    agents = AgentLedger(ledger, ledger.load(), write)
    commit(agents, "a", "1", said("one", "two"))
    turns = PastTurns(agents.log)
    assert turns.forget("1", OWNER)
    for changes, done in queue:
        ledger.apply(changes, is_synced=False)
        done.set_result(None)
        assert turns.find("1", OWNER) is None


def test_a_turn_after_an_unstored_one_holds_what_that_does_not(agents: AgentLedger) -> None:
    messages = said("one", "two", "three", "four", "five", "six")
    commit(agents, "a", "1", messages[:2])
    commit(agents, "a", "2", messages[:4], is_stored=False)
    commit(agents, "a", "3", messages)
    turns = PastTurns(agents.log)
    assert turns.find("2", OWNER) is None
    unstored = agents.turn("local", turn_id("2"))
    assert unstored is not None
    assert (unstored.messages, unstored.tokens) == ((), ())
    past = turns.find("3", OWNER)
    assert past is not None
    assert past.messages == messages
    assert agents.get("local", "a").num_turns == 3
