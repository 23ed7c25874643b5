"""Turns found again by their request."""

from concurrent.futures import Future

import pytest

from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.turn_log import PastTurns, turn_id
from semantic.domain.agents import Principal
from semantic.domain.chat import Continuation, Message, Role, TextPart
from tests.unit.application.ledger_rig import LateWriter, agents_of, exchange_of

pytestmark = pytest.mark.unit

OWNER, OTHER = Principal(), Principal(tenant="other")
INSTRUCTION = Message(Role.SYSTEM, (TextPart("Be."),), is_instruction=True)
SAID = tuple(
    Message.of((Role.USER, Role.ASSISTANT)[i % 2], text)
    for i, text in enumerate(("one", "two", "three", "four", "five", "six"))
)


@pytest.fixture
def agents() -> AgentLedger:
    return agents_of()


def commit(
    agents: AgentLedger,
    name: str,
    messages: tuple[Message, ...],
    *,
    is_stored: bool = True,
    continuation: Continuation | None = None,
) -> None:
    """Log a turn; a message is as many tokens as it has characters."""
    *asked, reply = ([*m.text.encode()] for m in messages)
    exchange = exchange_of(
        [token for message in asked for token in message],
        reply,
        messages,
        turn_id=turn_id(name),
        is_stored=is_stored,
        continuation=continuation,
    )
    agents.commit("local", "a", exchange)


def found(agents: AgentLedger, name: str) -> tuple[Message, ...] | None:
    """What is found of a turn."""
    past = PastTurns(agents.log).find_turn(name, OWNER)
    return past.messages if past else None


def test_a_turn_holds_the_whole_conversation_without_instructions(agents: AgentLedger) -> None:
    commit(agents, "1", (INSTRUCTION, *SAID[:2]))
    commit(agents, "2", (INSTRUCTION, *SAID[:4]))
    past = PastTurns(agents.log).find_turn("2", OWNER)
    assert past is not None
    assert (past.messages, past.reply, past.turn_id) == (SAID[:4], SAID[3], turn_id("2"))
    assert past.is_whole


@pytest.mark.parametrize("is_written", [True, False])
def test_other_tenants_and_unknown_turns_are_not_found(is_written: bool) -> None:
    agents = agents_of(write=None if is_written else lambda *_: Future())
    commit(agents, "1", SAID[:2])
    turns = PastTurns(agents.log)
    assert turns.find_turn("2", OWNER) is None
    assert turns.find_turn("1", OTHER) is None
    assert not turns.forget_text("1", OTHER)
    assert turns.find_turn("1", OWNER) is not None


def test_a_turn_whose_oldest_messages_were_dropped_is_found(agents: AgentLedger) -> None:
    commit(agents, "1", SAID[:2])
    edited = Continuation(turn_id("1"), is_edited=True, num_dropped=2)
    commit(agents, "2", SAID[2:4], continuation=edited)
    commit(agents, "3", SAID[2:], continuation=Continuation(turn_id("2")))
    assert (found(agents, "2"), found(agents, "3")) == (SAID[2:4], SAID[2:])


def test_text_that_is_forgotten_is_missing_in_what_followed(agents: AgentLedger) -> None:
    commit(agents, "1", SAID[:2])
    commit(agents, "2", SAID[:4])
    turns = PastTurns(agents.log)
    assert turns.forget_text("1", OWNER)
    assert not turns.forget_text("1", OWNER)
    assert found(agents, "1") is None
    after = turns.find_turn("2", OWNER)
    assert after is not None
    assert (after.reply, after.is_whole) == (SAID[3], False)


def test_text_that_is_forgotten_before_it_is_written_stays_so() -> None:
    ledger = SqliteLedger.in_memory()
    writer = LateWriter(ledger)
    agents = agents_of(ledger, writer)
    commit(agents, "1", SAID[:2])
    assert PastTurns(agents.log).forget_text("1", OWNER)
    while writer.num_waiting:
        writer.write(1)
        assert found(agents, "1") is None


def test_a_turn_after_an_unstored_one_holds_what_that_does_not(agents: AgentLedger) -> None:
    commit(agents, "1", SAID[:2])
    commit(agents, "2", SAID[:4], is_stored=False)
    commit(agents, "3", SAID)
    assert (found(agents, "2"), found(agents, "3")) == (None, SAID)
    unstored = agents.turn("local", turn_id("2"))
    assert unstored is not None
    assert (unstored.messages, unstored.tokens) == ((), ())
    assert agents.get("local", "a").num_turns == 3
