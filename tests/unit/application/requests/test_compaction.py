"""Where conversations are cut, and the overflow policy `compact`, on a model of a short context."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from semantic.adapters.outbound.backends.fake import (
    END_TOKEN,
    FakeBackend,
    FakeTokenizer,
    fake_spec,
)
from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.running_turns import TurnLanes
from semantic.application.engine.model import LoadedModel
from semantic.application.prompt.replay import ReplayStore
from semantic.application.requests.compaction.summary import (
    OPENING,
    CompactionPolicy,
    Summariser,
    cut_to_fit,
    first_kept,
)
from semantic.application.requests.service import InferenceService
from semantic.application.requests.stateful import StatefulChat
from semantic.domain.agents import Agent, AgentProfile, Overflow, Principal
from semantic.domain.chat import Message, Role, TextPart, ToolResultPart, ToolUsePart
from semantic.domain.errors import CompactionError, ContextLengthError
from semantic.domain.events import Finished, TextDelta
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.ports.inbound import NewTurn
from tests.unit.application.device_rig import gate_to, ready_device
from tests.unit.application.ledger_rig import agents_of

pytestmark = pytest.mark.unit

LIMIT = 900
ME = Principal()
# With this bias, a summary of the fake model ends after some 30 tokens.
SAMPLING = SamplingParams(seed=3, logit_bias=((END_TOKEN, 4.0),))
POLICY = CompactionPolicy("Sum up.", keep_turns=1, max_tokens=150, sampling=SAMPLING)


class Rig:
    """A chat with an agent that compacts, on a real device thread."""

    def __init__(self, inference: InferenceService, agents: AgentLedger) -> None:
        self.agents = agents
        self._inference = inference

    def start(self, policy: CompactionPolicy = POLICY) -> None:
        profile = AgentProfile(system="be brief", overflow=Overflow.COMPACT)
        self.agents.create(Agent("a", 1.0, profile=profile))
        summariser = Summariser(self._inference, policy)
        lanes = TurnLanes(max_waiting=8, timeout_s=60)
        self._chat = StatefulChat(self.agents, lanes, self._inference, summariser)

    async def say(self, text: str, max_tokens: int = 9) -> tuple[str, Finished]:
        stop = StopRules(max_tokens=max_tokens, ignore_eos=True)
        turn = NewTurn((Message.of(Role.USER, text),), SamplingParams(temperature=0), stop)
        reply = await self._chat.generate(ME, "a", turn)
        events = [event async for event in reply]
        assert isinstance(events[-1], Finished)
        return "".join(e.text for e in events if isinstance(e, TextDelta)), events[-1]

    @property
    def turns(self) -> Any:
        return self.agents.turns(self.agents.get("local", "a"))


@pytest.fixture
def rig() -> Iterator[Rig]:
    backend = FakeBackend(replace(fake_spec(), max_context=LIMIT))
    with ready_device(LoadedModel("fake", backend, FakeTokenizer())) as (thread, hub):
        agents = agents_of()
        yield Rig(
            InferenceService(thread, hub, agents, ReplayStore(), gate=gate_to(thread)), agents
        )


async def test_a_full_conversation_continues_from_its_summary(rig: Rig) -> None:
    rig.start()
    for text in "01234":
        await rig.say(text * 100)
    assert not any(turn.num_summarised for turn in rig.turns)

    reply, _ = await rig.say("x" * 100)

    turn, before, *_ = rig.turns
    system, summary, *rest = (message.text for message in turn.messages)
    assert (system, summary[: len(OPENING)]) == ("be brief", OPENING)
    assert [text[0] for text in rest[:-1:2]] == ["4", "x"]
    assert rest[-1] == reply
    assert (turn.num_summarised, turn.num_dropped, turn.parent) == (8, 0, before.id)
    assert turn.starts_anew
    assert len(rig.turns) == 6  # the summary itself is no turn
    _, finished = await rig.say("still there?")
    assert finished.usage.cache_read_tokens >= turn.num_tokens - 1
    assert not rig.turns[0].num_summarised


async def test_a_summary_that_is_cut_off_refuses_the_turn_and_changes_nothing(rig: Rig) -> None:
    rig.start(replace(POLICY, sampling=SamplingParams(temperature=0)))
    for text in "01234":
        await rig.say(text * 100)
    with pytest.raises(CompactionError, match=r"cut off after .* compaction_max_tokens"):
        await rig.say("x" * 100)
    assert len(rig.turns) == 5


async def test_a_message_that_never_fits_is_refused_without_a_summary(rig: Rig) -> None:
    rig.start()
    await rig.say("hello")
    with pytest.raises(ContextLengthError):
        await rig.say("x" * LIMIT)
    assert len(rig.turns) == 1


async def test_a_long_reply_makes_room_of_at_most_a_third_of_the_context(rig: Rig) -> None:
    rig.start()
    for text in "0123":
        await rig.say(text * 100)
        assert not rig.turns[0].num_summarised

    await rig.say("x" * 100, max_tokens=10 * LIMIT)

    assert rig.turns[0].num_summarised == 6


# -- where to cut ---------------------------------------------------------------------------------


def exchange(text: str, *, num_calls: int = 0) -> list[Message]:
    made = [Message.of(Role.USER, text)]
    for number in range(num_calls):
        made.append(Message(Role.ASSISTANT, (ToolUsePart(str(number), "read", {}),)))
        made.append(Message(Role.TOOL, (ToolResultPart(str(number), (TextPart(text),)),)))
    return [*made, Message.of(Role.ASSISTANT, "done")]


def test_the_latest_turns_are_kept() -> None:
    history = [*exchange("a"), *exchange("b", num_calls=2), *exchange("c")]
    assert [first_kept(history, number) for number in (0, 1, 2)] == [len(history), 8, 2]
    with pytest.raises(CompactionError, match="too short") as caught:
        first_kept(history, 3)
    assert caught.value.param == "keep_turns"
    with pytest.raises(CompactionError):
        first_kept((), 0)


HISTORY = [one for text in "abc" for one in exchange(text * 60, num_calls=1)]
GO_ON = Message.of(Role.USER, "go on")
CALL = Message(Role.ASSISTANT, (ToolUsePart("x", "read", {}),))
RESULT = Message(Role.TOOL, (ToolResultPart("x", (TextPart("found"),)),))


@pytest.mark.parametrize(
    "keep_turns, max_tokens, num_prompt, expected",
    [
        (1, 50, 1000, 8),  # the wanted turn is kept
        (2, 50, 1000, 5),  # less is kept if it does not fit, from a reply on
        (2, 200, 1100, 7),
        (0, 50, 1000, 9),  # more is kept if there is no room to summarise it
        (1, 300, 1100, None),
    ],
)
def test_a_cut_leaves_room_for_the_summary_and_for_what_follows(
    keep_turns: int, max_tokens: int, num_prompt: int, expected: int | None
) -> None:
    refusal = ContextLengthError(num_prompt=num_prompt, limit=1000, param="messages")
    policy = replace(POLICY, max_tokens=max_tokens, keep_turns=keep_turns)
    assert cut_to_fit((), HISTORY, [GO_ON], refusal, policy) == expected


@pytest.mark.parametrize("size, num_kept", [(5, 2), (3000, 1)])
def test_an_open_call_is_kept_with_its_result(size: int, num_kept: int) -> None:
    history = [*HISTORY, Message.of(Role.USER, "d" * size), CALL]
    refusal = ContextLengthError(num_prompt=930, limit=1000, param="messages")
    policy = replace(POLICY, max_tokens=50, keep_turns=0)
    assert cut_to_fit((), history, [RESULT], refusal, policy) == len(history) - num_kept
