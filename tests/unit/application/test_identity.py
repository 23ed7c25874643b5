"""Whose turn it is: named, hinted at, known by content, or nobody's yet."""

from collections.abc import Iterable

import pytest

from semantic.adapters.outbound.memory_ledger import MemoryLedger
from semantic.application.agent_ledger import AgentLedger, Exchange, write_at_once
from semantic.application.identity import Identities, Identity
from semantic.domain.agents import Reuse
from semantic.domain.chat import AgentHint, Message, Role, Usage

pytestmark = pytest.mark.unit

HEAD = [1, 2, 3]


class Town:
    """Agents, and conversations they have."""

    def __init__(self) -> None:
        self.now = 100.0
        ledger = MemoryLedger()
        self.agents = AgentLedger(ledger, ledger.load(), write_at_once(ledger), lambda: self.now)
        self.identities = Identities(self.agents)
        self.busy: set[str] = set()

    def who(self, tokens: list[int], hint: AgentHint | None = None, head: int = 3) -> Identity:
        hint = hint or AgentHint()
        return self.identities.identify("local", hint, tokens, head, self.busy.__contains__)

    def talk(self, prompt: list[int], reply: list[int], hint: AgentHint | None = None) -> str:
        """One request, answered and logged; returns whose it was."""
        self.now += 1
        identity = self.who(prompt, hint)
        exchange = Exchange(
            prompt=prompt,
            reply=reply,
            messages=[Message.of(Role.USER, str(t)) for t in (*prompt, *reply)],
            pointer=None,
            usage=Usage(prompt_tokens=len(prompt)),
            reuse=Reuse(),
        )
        turn, _ = self.agents.commit(
            "local", identity.agent_id, exchange, is_anonymous=identity.is_anonymous
        )
        self.identities.note("local", identity.agent_id, turn)
        return identity.agent_id

    def log(self, agent_id: str) -> list[tuple[int, ...]]:
        turns = self.agents.turns(self.agents.get("local", agent_id))
        return [turn.tokens for turn in reversed(turns)]


def test_a_name_decides() -> None:
    town = Town()
    assert town.who(HEAD, AgentHint(agent_id="coder")) == Identity("coder", is_anonymous=False)
    assert town.who(HEAD, AgentHint(session="s.1")) == Identity("s.1", is_anonymous=False)
    both = AgentHint(agent_id="coder", session="s", client_key="k")
    assert town.who(HEAD, both).agent_id == "coder"


def test_a_session_that_cannot_be_an_id_still_names_one_agent() -> None:
    town = Town()
    names = {town.who(HEAD, AgentHint(session="a b/c")).agent_id for _ in range(2)}
    assert len(names) == 1
    assert names != {town.who(HEAD, AgentHint(session="a b/d")).agent_id}


def test_a_named_agent_that_is_busy_is_not_disturbed() -> None:
    town = Town()
    town.busy = {"coder"}
    identity = town.who(HEAD, AgentHint(agent_id="coder"))
    assert identity.agent_id != "coder"
    assert identity.is_anonymous


def test_sub_agents_under_one_session_are_told_apart_by_their_heads() -> None:
    town = Town()
    hint = AgentHint(client_key="session-7")
    lead = town.talk([1, 2, 3, 10], [11], hint)
    helper = town.talk([4, 5, 6, 10], [11], hint)
    title = town.talk([7, 8, 9, 10], [11], hint)
    assert len({lead, helper, title}) == 3
    assert all(agent.is_anonymous for agent in town.agents.agents("local"))
    assert town.talk([1, 2, 3, 10, 11, 12], [13], hint) == lead
    assert town.talk([4, 5, 6, 10, 11, 12], [13], hint) == helper


def test_who_goes_on_with_a_conversation_is_who_had_it() -> None:
    town = Town()
    agent = town.talk([*HEAD, 10], [11])
    assert town.talk([*HEAD, 10, 11, 20], [21]) == agent
    assert town.talk([*HEAD, 10, 11, 20, 21, 30], [31]) == agent
    assert town.log(agent) == [(*HEAD, 10, 11), (20, 21), (30, 31)]


def test_two_agents_that_share_a_whole_prefix_stay_two() -> None:
    town = Town()
    first = town.talk([*HEAD, 10], [11])
    second = town.talk([*HEAD, 10], [12])
    assert first != second
    assert town.talk([*HEAD, 10, 11, 20], [21]) == first
    assert town.talk([*HEAD, 10, 12, 20], [21]) == second


def test_a_retry_takes_the_agent_back_one_turn() -> None:
    town = Town()
    agent = town.talk([*HEAD, 10], [11])
    town.talk([*HEAD, 10, 11, 20], [21])
    assert town.talk([*HEAD, 10, 11, 20], [22]) == agent
    assert town.log(agent) == [(*HEAD, 10, 11), (20, 22)]


def test_a_client_that_went_back_takes_its_agent_along() -> None:
    town = Town()
    agent = town.talk([*HEAD, 10], [11])
    town.talk([*HEAD, 10, 11, 20], [21])
    town.talk([*HEAD, 10, 11, 20, 21, 30], [31])
    assert town.talk([*HEAD, 10, 11, 40], [41]) == agent
    assert town.log(agent) == [(*HEAD, 10, 11), (40, 41)]


def test_if_the_agent_is_busy_a_fork_goes_back() -> None:
    town = Town()
    agent = town.talk([*HEAD, 10], [11])
    town.talk([*HEAD, 10, 11, 20], [21])
    town.busy = {agent}
    fork = town.talk([*HEAD, 10, 11, 40], [41])
    assert fork != agent
    assert town.log(fork) == [(*HEAD, 10, 11), (40, 41)]
    assert town.log(agent) == [(*HEAD, 10, 11), (20, 21)]


def test_a_title_request_beside_a_conversation_is_another_agent() -> None:
    town = Town()
    agent = town.talk([*HEAD, 10], [11])
    title = town.talk([50, 51, 52, 10], [60])
    assert title != agent
    assert town.talk([*HEAD, 10, 11, 20], [21]) == agent


def test_a_shared_head_alone_tells_nobody() -> None:
    town = Town()
    agent = town.talk([1, 2], [3])  # ends exactly where the head of the next prompt does
    assert town.who([1, 2, 3, 10]).agent_id != agent


def test_of_two_that_said_the_same_the_idle_one_used_last_goes_on() -> None:
    town = Town()
    first = town.talk([*HEAD, 10], [11])
    town.busy = {first}
    second = town.talk([*HEAD, 10], [11])
    town.busy = set()
    assert town.who([*HEAD, 10, 11, 20]).agent_id == second
    town.busy = {second}
    assert town.who([*HEAD, 10, 11, 20]).agent_id == first


def test_tenants_do_not_meet() -> None:
    town = Town()
    agent = town.talk([*HEAD, 10], [11])
    other = town.identities.identify("other", AgentHint(), [*HEAD, 10, 11, 20], 3, lambda _: False)
    assert other.agent_id != agent


def test_after_a_restart_the_latest_turn_is_still_known() -> None:
    town = Town()
    agent = town.talk([*HEAD, 10], [11])
    town.talk([*HEAD, 10, 11, 20], [21])
    town.identities = Identities(town.agents)
    assert town.who([*HEAD, 10, 11, 20, 21, 30]).agent_id == agent


def test_who_was_deleted_is_not_found() -> None:
    town = Town()
    agent = town.talk([*HEAD, 10], [11])
    town.agents.delete("local", agent)
    assert town.who([*HEAD, 10, 11, 20]).agent_id != agent


def names(identities: Iterable[Identity]) -> set[str]:
    return {identity.agent_id for identity in identities}


def test_nobody_is_a_new_one_each_time() -> None:
    town = Town()
    assert len(names(town.who([*HEAD, 10]) for _ in range(3))) == 3
