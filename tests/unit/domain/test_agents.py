import math
import re
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantic.domain.agents import LOCAL_TENANT, Agent, Pointer, Principal, Quota, Turn
from semantic.domain.blocks import BlockNamespace
from semantic.domain.chat import Message, Role, ServiceClass, Usage
from semantic.domain.errors import AgentNotFoundError, InvalidRequestError

pytestmark = pytest.mark.unit

quick = settings(deadline=None)

ROOT = BlockNamespace("model@1", "bf16").root()


def turn(turn_id: str, num_tokens: int = 2) -> Turn:
    return Turn(
        turn_id,
        (Message.of(Role.USER, "hello"), Message.of(Role.ASSISTANT, "hi")),
        tuple(range(num_tokens)),
        Pointer(ROOT, num_tokens),
        Usage(prompt_tokens=num_tokens),
        created_at=0.0,
    )


def agent_with(*turn_ids: str) -> Agent:
    agent = Agent("coder")
    for turn_id in turn_ids:
        agent = agent.commit(turn(turn_id))
    return agent


# -- ids --------------------------------------------------------------------------------------


@quick
@given(st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True))
def test_ids_of_plain_characters_are_taken(agent_id: str) -> None:
    assert Agent(agent_id).id == agent_id


@quick
@given(st.text(), st.characters().filter(lambda c: not re.match(r"[A-Za-z0-9._-]", c)), st.text())
def test_one_other_character_is_enough_to_refuse_an_id(before: str, odd: str, after: str) -> None:
    with pytest.raises(InvalidRequestError):
        Agent(before + odd + after)


@pytest.mark.parametrize("agent_id", ["", "a" * 129, "a b", "a/b", "coder\n", "ä", "٣"])
def test_a_refused_id_names_its_field(agent_id: str) -> None:
    with pytest.raises(InvalidRequestError, match="an agent id is 1 to 128") as refused:
        Agent(agent_id)

    assert refused.value.param == "agent_id"


@pytest.mark.parametrize("weight", [0, -1, math.nan])
def test_weights_are_positive(weight: float) -> None:
    for make in (lambda: Principal(weight=weight), lambda: Agent("coder", weight=weight)):
        with pytest.raises(InvalidRequestError, match=f"must be positive, got {weight}") as refused:
            make()
        assert refused.value.param == "weight"


def test_everyone_is_local_unless_said_otherwise() -> None:
    assert Principal().tenant == Agent("coder").tenant == LOCAL_TENANT


# -- the log of turns -------------------------------------------------------------------------


def test_a_new_agent_has_no_past() -> None:
    agent = Agent("coder")

    assert agent.head is None
    assert agent.num_tokens == 0


def test_commit_returns_the_agent_that_follows() -> None:
    agent = agent_with("t1")

    later = agent.commit(turn("t2", num_tokens=5))

    assert later.head == turn("t2", num_tokens=5)
    assert later.num_tokens == 7
    assert agent.head == turn("t1")
    with pytest.raises(FrozenInstanceError):
        agent.turns = later.turns  # type: ignore[misc]


@quick
@given(st.integers(1, 6), st.data())
def test_rewind_undoes_every_later_commit(num_turns: int, data: st.DataObject) -> None:
    turn_ids = [f"t{index}" for index in range(num_turns)]
    agent = agent_with(*turn_ids)
    kept = data.draw(st.integers(1, num_turns))

    assert agent.rewind(turn_ids[kept - 1]) == agent_with(*turn_ids[:kept])
    assert agent.rewind(None) == Agent("coder")
    assert agent == agent_with(*turn_ids)


def test_rewind_to_the_head_changes_nothing() -> None:
    agent = agent_with("t1", "t2")

    assert agent.rewind("t2") == agent


def test_rewind_to_a_turn_that_was_undone_is_refused() -> None:
    agent = agent_with("t1", "t2").rewind("t1")

    with pytest.raises(AgentNotFoundError, match="agent coder has no turn t2"):
        agent.rewind("t2")


def test_a_fork_has_the_same_past_and_its_own_future() -> None:
    agent = agent_with("t1", "t2")

    fork = agent.fork("reviewer").rewind("t1").commit(turn("t3"))

    assert fork.id == "reviewer"
    assert [t.id for t in fork.turns] == ["t1", "t3"]
    assert [t.id for t in agent.turns] == ["t1", "t2"]
    assert fork.turns[0] is agent.turns[0]


def test_a_fork_inherits_everything_but_id_and_pin() -> None:
    agent = Agent(
        "coder",
        tenant="acme",
        turns=(turn("t1"),),
        weight=2.0,
        service_class=ServiceClass.BACKGROUND,
        is_pinned=True,
        quota=Quota(max_turns=3),
        labels=(("team", "core"),),
    )

    assert agent.fork("other") == Agent(
        "other",
        tenant="acme",
        turns=(turn("t1"),),
        weight=2.0,
        service_class=ServiceClass.BACKGROUND,
        is_pinned=False,
        quota=Quota(max_turns=3),
        labels=(("team", "core"),),
    )
    assert agent.is_pinned


def test_a_fork_needs_a_proper_id() -> None:
    with pytest.raises(InvalidRequestError):
        agent_with("t1").fork("a b")
