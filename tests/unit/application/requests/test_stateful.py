"""Conversations the server keeps, on a real device thread with a fake model of a short context."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer, fake_spec
from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.running_turns import TurnLanes
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import LoadedModel
from semantic.application.prompt.replay import ReplayStore
from semantic.application.requests.reply import ReplyHub
from semantic.application.requests.service import InferenceService
from semantic.application.requests.stateful import StatefulChat
from semantic.domain.agents import Agent, AgentProfile, Overflow, Principal, Quota, Turn
from semantic.domain.chat import Message, Role
from semantic.domain.errors import (
    AgentNotFoundError,
    ContextLengthError,
    GenerationTimeoutError,
    OverloadedError,
    StateQuotaError,
)
from semantic.domain.events import Finished, TextDelta
from semantic.domain.sampling import FinishReason, SamplingParams, StopRules
from semantic.ports.inbound import NewTurn, Reply
from tests.unit.application.device_rig import gate_to, hold, ready_device
from tests.unit.application.ledger_rig import agents_of

pytestmark = pytest.mark.unit

LIMIT = 600
ME = Principal()


@dataclass
class Rig:
    agents: AgentLedger
    device: DeviceThread
    hub: ReplyHub
    lanes: TurnLanes = field(init=False)

    def chat(self, max_waiting: int = 8, timeout_s: float = 60.0) -> StatefulChat:
        inference = InferenceService(
            self.device, self.hub, self.agents, ReplayStore(), gate=gate_to(self.device)
        )
        self.lanes = TurnLanes(max_waiting=max_waiting, timeout_s=timeout_s)
        return StatefulChat(self.agents, self.lanes, inference)

    def make(self, **profile: Any) -> Agent:
        return self.agents.create(Agent("a", 1.0, profile=AgentProfile(**profile)))

    def start(self, quota_tokens: int | None = None, **profile: Any) -> StatefulChat:
        """Make an agent that may keep the bytes of so many tokens, and a chat with it."""
        self.make(**profile)
        if quota_tokens is not None:
            assert self.device.model is not None
            backend = self.device.model.backend
            nbytes = backend.spec.bytes_per_context(quota_tokens, backend.traits.state_bits)
            self.agents.update("local", "a", lambda agent: replace(agent, quota=Quota(nbytes)))
        return self.chat()

    def turns(self, name: str = "a") -> list[Turn]:
        return self.agents.turns(self.agents.get("local", name))


@pytest.fixture
def rig() -> Iterator[Rig]:
    backend = FakeBackend(replace(fake_spec(), max_context=LIMIT))
    with ready_device(LoadedModel("fake", backend, FakeTokenizer())) as (thread, hub):
        yield Rig(agents_of(), thread, hub)


def ask(text: str, max_tokens: int = 9) -> NewTurn:
    stop = StopRules(max_tokens=max_tokens, ignore_eos=True)
    return NewTurn((Message.of(Role.USER, text),), SamplingParams(temperature=0), stop)


async def read(reply: Reply) -> tuple[str, Finished]:
    events = [event async for event in reply]
    assert isinstance(events[-1], Finished)
    return "".join(e.text for e in events if isinstance(e, TextDelta)), events[-1]


async def say(chat: StatefulChat, text: str, max_tokens: int = 9) -> tuple[str, Finished]:
    return await read(await chat.generate(ME, "a", ask(text, max_tokens)))


def said(turn: Turn) -> list[str]:
    return [message.text for message in turn.messages]


# -- overflow ---------------------------------------------------------------------------------


async def test_a_conversation_that_is_too_long_is_refused(rig: Rig) -> None:
    chat = rig.start(system="be brief")
    for text in "01234":
        await say(chat, text * 80)

    with pytest.raises(ContextLengthError):
        await say(chat, "x" * 80)

    assert len(rig.turns()) == 5
    assert rig.lanes.num_turns("local", "a") == 0


async def test_the_oldest_messages_go_where_the_agent_permits_it(rig: Rig) -> None:
    chat = rig.start(system="be brief", overflow=Overflow.DROP_OLDEST)
    for text in "01234":
        await say(chat, text * 80)

    reply, _ = await say(chat, "x" * 80)

    turn, before, *_ = rig.turns()
    first, *rest = said(turn)
    assert first == "be brief"
    num_kept = 5 - int(rest[0][0])
    assert [text[0] for text in rest[:-2:2]] == [str(i) for i in range(5 - num_kept, 5)]
    assert rest[-2:] == ["x" * 80, reply]
    assert turn.num_dropped == 2 * (5 - num_kept)
    assert (turn.parent, turn.holds_all_messages, turn.holds_all_tokens) == (before.id, True, True)
    assert 0.4 * LIMIT < turn.usage.prompt_tokens <= 0.75 * LIMIT
    assert turn.divergence is not None
    assert turn.divergence.turn_id == before.id
    assert rig.agents.get("local", "a").num_turns == 6


async def test_what_was_dropped_stays_dropped_and_the_rest_is_reused(rig: Rig) -> None:
    chat = rig.start(system="be brief", overflow=Overflow.DROP_OLDEST)
    for text in "01234x":
        await say(chat, text * 80)
    shortened = rig.turns()[0]

    _, finished = await say(chat, "still there?")

    assert finished.usage.cache_read_tokens >= shortened.num_tokens - 1
    assert rig.turns()[0].num_dropped == 0
    agent = rig.agents.get("local", "a")
    assert rig.agents.conversation(agent)[0].text == "be brief"
    assert len(rig.agents.conversation(agent)) == shortened.num_messages + 2
    assert len(rig.agents.tokens(agent)) == rig.turns()[0].num_tokens


async def test_a_long_reply_makes_room_for_itself(rig: Rig) -> None:
    chat = rig.start(overflow=Overflow.DROP_OLDEST)
    for text in "0123":
        await say(chat, text * 80)

    _, finished = await say(chat, "x" * 80, max_tokens=400)

    assert finished.usage.completion_tokens == 400
    assert rig.turns()[0].num_dropped


@pytest.mark.parametrize("max_tokens", [LIMIT - 1, 10 * LIMIT])
async def test_a_reply_that_never_fits_is_cut_to_the_room(rig: Rig, max_tokens: int) -> None:
    chat = rig.start(overflow=Overflow.DROP_OLDEST)
    await say(chat, "0" * 80)

    _, finished = await say(chat, "x" * 80, max_tokens=max_tokens)

    assert finished.reason is FinishReason.CONTEXT_FULL
    assert finished.usage.total_tokens == LIMIT
    # Room that could be made is made; what cannot be had costs no memory.
    assert bool(rig.turns()[0].num_dropped) == (max_tokens < LIMIT)


async def test_a_message_that_never_fits_is_refused_all_the_same(rig: Rig) -> None:
    chat = rig.start(overflow=Overflow.DROP_OLDEST)
    await say(chat, "hello")

    with pytest.raises(ContextLengthError):
        await say(chat, "x" * LIMIT)

    await say(chat, "again")
    assert len(rig.turns()) == 2


# -- a quota of bytes -------------------------------------------------------------------------


async def test_the_oldest_messages_go_until_a_quota_of_bytes_is_kept(rig: Rig) -> None:
    chat = rig.start(330, system="be brief", overflow=Overflow.DROP_OLDEST)
    await say(chat, "0" * 80)
    second, _ = await say(chat, "1" * 80)

    reply, finished = await say(chat, "x" * 80, max_tokens=350)

    turn = rig.turns()[0]
    assert said(turn) == ["be brief", "1" * 80, second, "x" * 80, reply]
    assert turn.num_dropped == 2
    assert turn.usage.prompt_tokens <= 0.75 * 330
    assert finished.usage.completion_tokens == 350  # a reply may go beyond the quota


async def test_dropping_goes_on_until_context_and_quota_are_both_kept(rig: Rig) -> None:
    chat = rig.start(400, overflow=Overflow.DROP_OLDEST)
    for text in "0123":
        await say(chat, text * 80)

    _, finished = await say(chat, "x" * 80, max_tokens=450)

    assert finished.usage.completion_tokens == 450
    assert finished.usage.prompt_tokens <= LIMIT - 450


async def test_a_message_beyond_the_quota_is_refused_all_the_same(rig: Rig) -> None:
    chat = rig.start(100, overflow=Overflow.DROP_OLDEST)
    await say(chat, "hello")

    with pytest.raises(StateQuotaError):
        await say(chat, "x" * 200)

    assert len(rig.turns()) == 1


# -- the queue --------------------------------------------------------------------------------


async def test_a_reply_that_is_not_read_does_not_block_the_next(rig: Rig) -> None:
    chat = rig.start()
    await chat.generate(ME, "a", ask("unread"))

    await say(chat, "read")

    assert [said(turn)[0] for turn in rig.turns()] == ["read", "unread"]


async def test_a_queue_that_is_full_refuses(rig: Rig) -> None:
    rig.make()
    chat = rig.chat(max_waiting=1)
    may_go_on = hold(rig.device)
    running = await chat.generate(ME, "a", ask("long", 200))
    waiting = asyncio.create_task(say(chat, "waits"))
    await asyncio.sleep(0)
    assert rig.lanes.num_turns("local", "a") == 2

    with pytest.raises(OverloadedError):
        await chat.generate(ME, "a", ask("too many"))

    may_go_on.set()
    await read(running)
    await waiting
    assert rig.lanes.num_turns("local", "a") == 0


async def test_a_turn_that_never_comes_times_out(rig: Rig) -> None:
    rig.make()
    chat = rig.chat(timeout_s=0.0)
    may_go_on = hold(rig.device)
    running = await chat.generate(ME, "a", ask("long", 500))

    with pytest.raises(GenerationTimeoutError):
        await chat.generate(ME, "a", ask("late"))

    running.cancel()
    may_go_on.set()
    _, finished = await read(running)
    assert finished.reason is FinishReason.CANCELLED


async def test_requests_waiting_for_a_deleted_agent_are_refused(rig: Rig) -> None:
    made = rig.make()
    chat = rig.chat()
    may_go_on = hold(rig.device)
    running = await chat.generate(ME, "a", ask("long", 500))
    waiting = [asyncio.create_task(say(chat, text)) for text in ("deleted", "and made anew")]
    await asyncio.sleep(0)
    assert rig.lanes.num_turns("local", "a") == 3

    rig.agents.delete("local", "a")
    rig.agents.create(replace(made, created_at=2.0))
    rig.lanes.discard("local", "a")
    may_go_on.set()

    _, finished = await read(running)
    assert finished.reason is FinishReason.CANCELLED
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, AgentNotFoundError)
    assert rig.turns() == []
