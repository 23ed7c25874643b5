import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantic.domain.agents import Agent, Principal, Quota
from semantic.domain.chat import ServiceClass
from semantic.domain.errors import InvalidRequestError

pytestmark = pytest.mark.unit

quick = settings(deadline=None)


def agent(agent_id: str = "coder", *, weight: float = 1.0) -> Agent:
    return Agent(agent_id, created_at=5.0, weight=weight)


# -- ids --------------------------------------------------------------------------------------


@quick
@given(st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True))
def test_ids_of_plain_characters_are_taken(agent_id: str) -> None:
    assert agent(agent_id).id == agent_id


@quick
@given(st.text(), st.characters().filter(lambda c: not re.match(r"[A-Za-z0-9._-]", c)), st.text())
def test_one_other_character_is_enough_to_refuse_an_id(before: str, odd: str, after: str) -> None:
    with pytest.raises(InvalidRequestError):
        agent(before + odd + after)


@pytest.mark.parametrize("agent_id", ["", "a" * 129, "a b", "a/b", "coder\n", "ä", "٣"])
def test_a_refused_id_names_its_field(agent_id: str) -> None:
    with pytest.raises(InvalidRequestError, match="an agent id must be 1 to 128") as refused:
        agent(agent_id)

    assert refused.value.param == "agent_id"


@pytest.mark.parametrize("weight", [0, -1, math.nan])
def test_weights_are_positive(weight: float) -> None:
    for make in (lambda: Principal(weight=weight), lambda: agent(weight=weight)):
        with pytest.raises(InvalidRequestError, match=f"must be positive, got {weight}") as refused:
            make()
        assert refused.value.param == "weight"


# -- the latest turn --------------------------------------------------------------------------


def test_a_fork_inherits_everything_but_id_pin_and_times() -> None:
    original = Agent(
        "coder",
        created_at=1.0,
        tenant="acme",
        head="t1",
        num_turns=1,
        last_used=2.0,
        weight=2.0,
        service_class=ServiceClass.BACKGROUND,
        is_pinned=True,
        ttl_s=60.0,
        quota=Quota(max_turns=3),
        labels=(("team", "core"),),
    )

    fork = original.fork("other", at=4.0)

    assert fork == replace(original, id="other", is_pinned=False, created_at=4.0, last_used=4.0)
    assert original.is_pinned


def test_a_fork_of_an_unnamed_agent_lives_like_a_named_one() -> None:
    unnamed = replace(agent("anon-1"), is_anonymous=True, ttl_s=60.0)

    fork = unnamed.fork("coder", at=5.0)

    assert not fork.is_anonymous
    assert not fork.is_expired(1e12)


def test_a_fork_needs_a_proper_id() -> None:
    with pytest.raises(InvalidRequestError):
        agent().fork("a b", at=0.0)


@pytest.mark.parametrize(
    "change, now, is_expired",
    [
        ({}, 1e12, False),
        ({"ttl_s": 10.0}, 14.9, False),
        ({"ttl_s": 10.0}, 15.0, True),
        ({"ttl_s": 10.0, "last_used": 8.0}, 15.0, False),
        ({"ttl_s": 10.0, "is_pinned": True}, 1e12, False),
    ],
)
def test_an_agent_expires_when_it_was_not_used(
    change: dict[str, Any], now: float, is_expired: bool
) -> None:
    assert replace(agent(), **change).is_expired(now) is is_expired
