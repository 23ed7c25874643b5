"""The reason of a cache miss, from two turns in the ledger, also after a restart."""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import pytest

from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.comparison import CacheFacts, RequestShape, request_change
from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.turn_log import FinishedTurn, PastTurns
from semantic.domain.agents import Pointer, Principal, Reuse, Turn
from semantic.domain.blocks import BlockName, common_prefix
from semantic.domain.chat import (
    ImagePart,
    Message,
    Role,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    ToolSpec,
    ToolUsePart,
)
from semantic.domain.events import CacheMiss, MissReason, Usage
from tests.unit.application.engine_rig import ROOT
from tests.unit.application.ledger_rig import agents_of

pytestmark = pytest.mark.unit

OTHER_ROOT = BlockName(b"r" * 32)
A, B, C, D, E = (ToolSpec(name, f"Does {name}.", {"type": "object"}) for name in "ABCDE")
SYSTEM = Message.of(Role.SYSTEM, "You are a coder.")
ASKED, ASKED_NEXT = Message.of(Role.USER, "What is in a.py?"), Message.of(Role.USER, "And b.py?")
CALL = ToolUsePart("c1", "A", {"path": "a.py"})
REPLY = Message(Role.ASSISTANT, (ThinkingPart("I read it.", "s"), TextPart("Let me see."), CALL))


@dataclass(frozen=True)
class Ask:
    """A request, its reply, and what the engine found in the cache."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = (A, B)
    model: str = "m"
    is_thinking: bool | None = None
    num_reused: int | None = None  # all that agrees with the turn before if None
    num_stored: int = 0
    is_damaged: bool = False
    root: BlockName = ROOT
    is_sealed: bool = True
    is_stored: bool = True
    num_dropped: int = 0

    @property
    def prompt(self) -> list[int]:
        """The prompt, a token for each byte; the model's default is to think."""
        head = "".join(f"{tool.name}{tool.description}" for tool in self.tools)
        texts = [self._written(message) for message in self.messages]
        ending = ">" if self.is_thinking is not False else "!"
        return [*"".join([head, *texts, ending]).encode()]

    def _written(self, message: Message) -> str:
        thinking = "".join(p.text for p in message.parts if isinstance(p, ThinkingPart))
        return f"{'>' if message.role is Role.ASSISTANT else '<'}{thinking}{message.text}"


FIRST = Ask((SYSTEM, ASKED))
NEXT = Ask((SYSTEM, ASKED, REPLY, ASKED_NEXT))


def log(agents: AgentLedger, ask: Ask, agent_id: str = "a", before: Turn | None = None) -> Turn:
    prompt = ask.prompt
    reply = [*f"{REPLY.parts[0].text}{REPLY.text}".encode()]  # type: ignore[union-attr]
    num_tokens = len(prompt) + len(reply)
    agreed = common_prefix(agents.log.tokens("local", before.id), prompt) if before else 0
    num_reused = min(agreed, len(prompt) - 1) if ask.num_reused is None else ask.num_reused
    reuse = Reuse(pool=num_reused, computed=len(prompt) - num_reused)
    finished = FinishedTurn(
        prompt,
        reply,
        (*ask.messages, REPLY),
        Pointer(ask.root, BlockName(b"b" * 32), num_tokens) if ask.is_sealed else None,
        Usage(len(prompt), len(reply)),
        reuse,
        is_stored=ask.is_stored,
        model=ask.model,
        num_dropped=ask.num_dropped,
        tools=ask.tools,
        is_thinking=ask.is_thinking,
        facts=CacheFacts(ask.root, reuse, ask.num_stored, ask.is_damaged),
    )
    if agents.find_agent("local", agent_id) is None:
        previous = agents.likely_previous("local", ask.messages)
        finished = replace(finished, previous=previous.id if previous else None)
    turn, _ = agents.commit("local", agent_id, finished)
    return turn


def second(ask: Ask, first: Ask = FIRST, agent_id: str = "a") -> Turn:
    """The second turn of a conversation, read from the ledger by another server."""
    ledger = SqliteLedger.in_memory()
    before = log(agents_of(ledger), first)
    turn = log(agents_of(ledger), ask, agent_id, before)
    found = agents_of(ledger).turn("local", turn.id)
    assert found == turn
    return found


def messages(*said: Message | str) -> tuple[Message, ...]:
    return tuple(Message.of(Role.USER, one) if isinstance(one, str) else one for one in said)


PLAIN_REPLY = Message(Role.ASSISTANT, REPLY.parts[1:])
CHANGES: dict[str, tuple[Any, MissReason, str]] = {
    "three tools added": (
        {"tools": (A, C, D, E, B)},
        MissReason.TOOLS_CHANGED,
        "tool list changed: 3 tools added at position 2",
    ),
    "tools added apart": (
        {"tools": (C, A, D, B)},
        MissReason.TOOLS_CHANGED,
        "tool list changed: 2 tools added from position 1",
    ),
    "a tool removed": (
        {"tools": (A,)},
        MissReason.TOOLS_CHANGED,
        "tool list changed: 1 tool removed at position 2",
    ),
    "a tool replaced": (
        {"tools": (A, C)},
        MissReason.TOOLS_CHANGED,
        "tool list changed: 1 tool added at position 2, 1 tool removed at position 2",
    ),
    "a tool changed": (
        {"tools": (A, replace(B, description="Does b."))},
        MissReason.TOOLS_CHANGED,
        "tool list changed: 1 tool changed at position 2",
    ),
    "tools reordered": (
        {"tools": (B, A)},
        MissReason.TOOLS_CHANGED,
        "tool list changed: tools reordered from position 1",
    ),
    "the system prompt changed": (
        {"messages": (Message.of(Role.SYSTEM, "You are a cook."), *NEXT.messages[1:])},
        MissReason.SYSTEM_CHANGED,
        "system prompt changed after 12 characters",
    ),
    "the system prompt removed": (
        {"messages": NEXT.messages[1:]},
        MissReason.SYSTEM_CHANGED,
        "system prompt removed",
    ),
    "the question changed": (
        {"messages": messages(SYSTEM, "What is in c.py?", REPLY, ASKED_NEXT)},
        MissReason.MESSAGES_CHANGED,
        "message 1 (user) changed",
    ),
    "the reply changed": (
        {"messages": messages(SYSTEM, ASKED, Message.of(Role.ASSISTANT, "No."), ASKED_NEXT)},
        MissReason.MESSAGES_CHANGED,
        "message 2 (assistant) changed",
    ),
    "the thinking left out": (
        {"messages": messages(SYSTEM, ASKED, PLAIN_REPLY, ASKED_NEXT)},
        MissReason.MESSAGES_CHANGED,
        "message 2 (assistant) came back without its thinking",
    ),
    "the oldest messages dropped": (
        {"messages": messages(SYSTEM, ASKED_NEXT), "num_dropped": 2},
        MissReason.MESSAGES_CHANGED,
        "2 of the oldest messages were dropped to make room",
    ),
    "another model": (
        {"model": "n", "tools": (B,)},
        MissReason.MODEL_CHANGED,
        "model changed from m to n",
    ),
    "another model with the same tokens": (
        {"model": "n", "root": OTHER_ROOT, "num_reused": 0},
        MissReason.MODEL_CHANGED,
        "model changed from m to n",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_request_is_described(name: str) -> None:
    changes, reason, detail = CHANGES[name]
    turn = second(replace(NEXT, **changes))
    assert turn.miss is not None
    assert (turn.miss.reason, turn.miss.detail) == (reason, detail)
    index = turn.divergence.index if turn.divergence else 0
    is_other_model = reason is MissReason.MODEL_CHANGED
    before = len(FIRST.prompt) + len(f"{REPLY.parts[0].text}{REPLY.text}")  # type: ignore[union-attr]
    lost = min(before, turn.usage.prompt_tokens) - (0 if is_other_model else index)
    assert turn.miss.num_tokens == min(lost, turn.reuse.computed) > 0
    assert turn.miss.text == f"{detail}, {turn.miss.num_tokens:,} tokens recomputed"


def test_names_of_tools_are_kept() -> None:
    miss = second(replace(NEXT, tools=(A, C, D, E))).miss
    assert miss is not None
    assert miss.names == ("C", "D", "E", "B")


LONG = "x" * 100
CACHE_SIDE: dict[str, tuple[Any, Any, MissReason]] = {
    "evicted": ({}, {"num_reused": 0}, MissReason.EVICTED),
    "partly evicted": ({}, {"num_reused": 40, "num_stored": 40}, MissReason.EVICTED),
    "damaged": ({}, {"num_reused": 0, "is_damaged": True}, MissReason.DAMAGED),
    "never stored": ({"is_sealed": False}, {"num_reused": 0}, MissReason.NOT_STORED),
    "not loaded": ({}, {"num_reused": 0, "num_stored": 90}, MissReason.NOT_LOADED),
    "another dtype": ({}, {"num_reused": 0, "root": OTHER_ROOT}, MissReason.FORMAT_CHANGED),
}


@pytest.mark.parametrize("name", CACHE_SIDE)
def test_a_cache_that_is_gone_is_described(name: str) -> None:
    first, changes, reason = CACHE_SIDE[name]
    turn = second(replace(NEXT, **changes), replace(FIRST, **first))
    assert turn.divergence is None
    assert turn.miss is not None
    assert turn.miss.reason is reason
    before = len(FIRST.prompt) + len(f"{REPLY.parts[0].text}{REPLY.text}")  # type: ignore[union-attr]
    assert turn.miss.num_tokens == before - turn.reuse.reused


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_reused": len(FIRST.prompt) + 10},  # the end of a reply may be computed again
        {"messages": FIRST.messages},  # the client asks again
        {"tools": (A, B, replace(C, is_deferred=True))},
        {"tools": (A, replace(B, parameters={"type": "object"}))},
    ],
)
def test_a_conversation_that_goes_on_has_no_miss(changes: dict[str, Any]) -> None:
    deferred = any(tool.is_deferred for tool in changes.get("tools", ()))
    ask = replace(NEXT, **changes)
    turn = second(replace(ask, tools=(A, B)) if deferred else ask)
    assert turn.miss is None


def test_a_miss_that_other_agents_make_good_is_none() -> None:
    ask = replace(NEXT, tools=(A, C, B))
    assert second(replace(ask, num_reused=len(ask.prompt))).miss is None


def test_a_client_that_gets_a_new_agent_is_recognised() -> None:
    """Claude Code's agents are told apart by tools and system prompt."""
    turn = second(replace(NEXT, tools=(A, C, D, E, B)), agent_id="b")
    assert turn.parent is None
    assert turn.miss is not None
    assert turn.miss.detail == "tool list changed: 3 tools added at position 2"


@pytest.mark.parametrize(
    "said",
    [
        (SYSTEM, ASKED),
        (SYSTEM, ASKED_NEXT, REPLY, ASKED),
        (SYSTEM, ASKED, Message.of(Role.ASSISTANT, "An example."), ASKED_NEXT),
    ],
)
def test_another_conversation_of_a_client_is_none(said: tuple[Message, ...]) -> None:
    assert second(Ask(said, tools=(C,)), agent_id="b").miss is None


def test_thinking_that_is_switched_off_is_named() -> None:
    """Only if nothing else differs."""
    first = replace(FIRST, is_thinking=True)
    ask = Ask(messages(SYSTEM, ASKED, REPLY, ASKED_NEXT), is_thinking=False)
    ledger = SqliteLedger.in_memory()
    agents = agents_of(ledger)
    before = log(agents, first)
    tokens = tuple(reversed(ask.prompt))  # a template that writes everything in another way
    reuse = Reuse(computed=len(tokens))
    usage, said = Usage(len(tokens), 1), (*ask.messages, REPLY)
    finished = FinishedTurn(tokens, (1,), said, None, usage, reuse, model="m", tools=ask.tools)
    turn, _ = agents.commit("local", "a", replace(finished, is_thinking=False))
    assert turn.miss is not None
    assert turn.miss.reason is MissReason.PARAMETERS_CHANGED
    assert turn.miss.detail == "thinking changed from on to off"
    again = replace(finished, prompt=tokens[1:], messages=(*said, ASKED, REPLY))
    turn, _ = agents.commit("local", "a", replace(again, is_thinking=False))
    assert turn.miss is not None
    assert turn.miss.reason is MissReason.RENDERED_DIFFERENTLY
    assert before.is_thinking


def test_text_that_is_not_stored_cannot_be_compared() -> None:
    turn = second(replace(NEXT, tools=(C,)), replace(FIRST, is_stored=False))
    assert turn.miss is None
    assert second(replace(NEXT, is_stored=False)).tools == ()


def test_forgetting_a_text_forgets_the_names_of_tools() -> None:
    ledger = SqliteLedger.in_memory()
    agents = agents_of(ledger)
    turn = log(agents, FIRST)
    assert dict(turn.tools).keys() == {"A", "B"}
    PastTurns(agents.log).forget_text(turn.id.removeprefix("turn_"), Principal())
    found = agents.turn("local", turn.id)
    assert found is not None
    assert (found.tools, found.miss) == ((), None)


def test_a_turn_that_continues_another_stores_no_tools() -> None:
    ledger = SqliteLedger.in_memory()
    agents = agents_of(ledger)
    before = log(agents, FIRST)
    going_on = log(agents, NEXT, before=before)
    assert going_on.parent == before.id
    assert going_on.tools == ()
    third = replace(NEXT, messages=(*NEXT.messages, REPLY, ASKED), tools=(A, B, C))
    miss = log(agents, third, before=going_on).miss
    assert miss == CacheMiss(
        MissReason.TOOLS_CHANGED,
        miss.num_tokens if miss else 0,
        "tool list changed: 1 tool added at position 3",
        ("C",),
    )


def image(name: str, width: int, height: int) -> ImagePart:
    return ImagePart(hashlib.sha256(name.encode()).hexdigest(), "image/png", width, height)


OLD, NEW, TWIN = image("old", 800, 600), image("new", 1024, 768), image("twin", 800, 600)


@pytest.mark.parametrize(
    "first, second, text, detail",
    [
        (OLD, NEW, "Look.", "image 2 differs (1024x768 instead of 800x600)"),
        (TWIN, OLD, "Look.", "image 1 differs (both 800x600)"),
        (OLD, NEW, "See.", "message 2 (tool) changed"),
        (OLD, None, "Look.", "message 2 (tool) changed"),
        (OLD, OLD, "Look.", "the chat template writes earlier messages in another way"),
    ],
)
def test_a_changed_image_is_named(
    first: ImagePart, second: ImagePart | None, text: str, detail: str
) -> None:
    def shape(one: ImagePart, two: ImagePart | None, said: str) -> RequestShape:
        content = (TextPart(said), *((two,) if two else ()))
        result = Message(Role.TOOL, (ToolResultPart("c", content),))
        return RequestShape((SYSTEM, Message(Role.USER, (TextPart("?"), one)), result), ())

    miss = request_change(shape(OLD, OLD, "Look."), shape(first, second, text), 7)

    assert miss is not None
    assert miss.detail == detail
