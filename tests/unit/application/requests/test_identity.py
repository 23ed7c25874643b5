"""Which agent a request belongs to: by name, by hint, by content, or a new one."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, cast

import pytest

from semantic.application.requests.identity import BusyAgents, Identities, Identity
from semantic.domain.agents import Turn, conversation_digest
from semantic.domain.chat import AgentHint, Continuation
from semantic.domain.events import Usage
from semantic.ports.storage import LedgerPort
from tests.unit.application.ledger_rig import GatedLedger, agents_of, exchange_of

pytestmark = pytest.mark.unit

HEAD = [1, 2, 3]


class Town:
    """Agents, and conversations they have."""

    def __init__(self, ledger: LedgerPort | None = None) -> None:
        self.now = 100.0
        self.agents = agents_of(ledger, now=lambda: self.now)
        self.identities = Identities(self.agents)
        self.requests = BusyAgents()
        self.busy: set[str] = set()

    def who(self, tokens: list[int], hint: AgentHint | None = None, head: int = 3) -> Identity:
        """The identified agent while `busy` agents run; the request ends at once."""
        with contextlib.ExitStack() as ended:
            for agent_id in self.busy:
                other = self.requests.claim("local")
                other.share(agent_id)
                ended.callback(other.release)
            claim = self.requests.claim("local")
            ended.callback(claim.release)
            return self.identities.identify("local", hint or AgentHint(), tokens, head, claim)

    def talk(self, prompt: list[int], reply: list[int], hint: AgentHint | None = None) -> str:
        """One request, answered and logged; returns whose it was."""
        self.now += 1
        identity = self.who(prompt, hint)
        exchange = exchange_of(prompt, reply, [str(t) for t in (*prompt, *reply)])
        turn, _ = self.agents.commit(
            "local",
            identity.agent_id,
            exchange,
            is_anonymous=identity.is_anonymous,
            fork=identity.fork,
        )
        self.identities.note("local", identity.agent_id, turn)
        return identity.agent_id

    def log(self, agent_id: str) -> list[tuple[int, ...]]:
        turns = self.agents.turns(self.agents.get("local", agent_id))
        return [turn.tokens for turn in reversed(turns)]


@pytest.fixture
def town() -> Town:
    return Town()


def test_a_name_decides(town: Town) -> None:
    assert town.who(HEAD, AgentHint(agent_id="coder")) == Identity("coder", is_anonymous=False)
    assert town.who(HEAD, AgentHint(session="s.1")) == Identity("s.1", is_anonymous=False)
    both = AgentHint(agent_id="coder", session="s", client_key="k")
    assert town.who(HEAD, both).agent_id == "coder"


def test_a_session_that_cannot_be_an_id_still_names_one_agent(town: Town) -> None:
    names = {town.who(HEAD, AgentHint(session="a b/c")).agent_id for _ in range(2)}
    assert [name[:8] for name in names] == ["session-"]
    assert names != {town.who(HEAD, AgentHint(session="a b/d")).agent_id}


def test_a_named_agent_that_is_busy_is_not_disturbed(town: Town) -> None:
    town.busy = {"coder"}
    identity = town.who(HEAD, AgentHint(agent_id="coder"))
    assert identity.agent_id != "coder"
    assert identity.is_anonymous


def test_sub_agents_under_one_session_are_distinguished_by_their_heads(town: Town) -> None:
    hint = AgentHint(client_key="session-7")
    lead = town.talk([1, 2, 3, 10], [11], hint)
    helper = town.talk([4, 5, 6, 10], [11], hint)
    title = town.talk([7, 8, 9, 10], [11], hint)
    assert len({lead, helper, title}) == 3
    assert all(agent.is_anonymous for agent in town.agents.agents("local"))
    assert town.talk([1, 2, 3, 10, 11, 12], [13], hint) == lead
    assert town.talk([4, 5, 6, 10, 11, 12], [13], hint) == helper


class ReadTokens(list[int]):
    """Tokens that count how often they are read."""

    num_read = 0

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        self.num_read += isinstance(place, int)
        return super().__getitem__(place)


def test_a_long_prompt_is_compared_only_where_a_conversation_ended(town: Town) -> None:
    first = town.talk([*HEAD, *[7] * 5000], [7])
    others = [town.talk([*HEAD, 8, *[7] * number], [7]) for number in range(4)]
    prompt = ReadTokens([*HEAD, *[7] * 20_000])  # every token is one that a conversation ended with
    assert town.who(prompt).agent_id == first
    assert first not in others
    assert prompt.num_read <= len(prompt) + 5  # they are packed, each once


ON = ([*HEAD, 10], 11), ([*HEAD, 10, 11, 20], 21), ([*HEAD, 10, 11, 20, 21, 30], 31)


@pytest.mark.parametrize(
    "said, log",
    [
        (ON, [(*HEAD, 10, 11), (20, 21), (30, 31)]),
        ((*ON[:2], (ON[1][0], 22)), [(*HEAD, 10, 11), (20, 22)]),
        ((*ON, ([*HEAD, 10, 11, 40], 41)), [(*HEAD, 10, 11), (40, 41)]),
    ],
    ids=["goes on", "tries again", "goes back"],
)
def test_a_continued_or_rewound_conversation_keeps_its_agent(
    town: Town, said: Sequence[tuple[list[int], int]], log: list[tuple[int, ...]]
) -> None:
    (agent,) = {town.talk(prompt, [reply]) for prompt, reply in said}
    assert town.log(agent) == log


def test_two_agents_that_share_a_whole_prefix_stay_two(town: Town) -> None:
    first = town.talk([*HEAD, 10], [11])
    second = town.talk([*HEAD, 10], [12])
    assert first != second
    assert town.talk([*HEAD, 10, 11, 20], [21]) == first
    assert town.talk([*HEAD, 10, 12, 20], [21]) == second


def test_if_the_agent_is_busy_a_fork_goes_back(town: Town) -> None:
    agent = town.talk([*HEAD, 10], [11])
    town.talk([*HEAD, 10, 11, 20], [21])
    town.busy = {agent}
    fork = town.talk([*HEAD, 10, 11, 40], [41])
    assert fork != agent
    assert town.log(fork) == [(*HEAD, 10, 11), (40, 41)]
    assert town.log(agent) == [(*HEAD, 10, 11), (20, 21)]


def test_a_title_request_beside_a_conversation_is_another_agent(town: Town) -> None:
    agent = town.talk([*HEAD, 10], [11])
    title = town.talk([50, 51, 52, 10], [60])
    assert title != agent
    assert town.talk([*HEAD, 10, 11, 20], [21]) == agent


def test_a_shared_head_alone_identifies_no_agent(town: Town) -> None:
    agent = town.talk([1, 2], [3])  # ends exactly where the head of the next prompt does
    assert town.who([1, 2, 3, 10]).agent_id != agent


def test_of_two_equal_agents_the_idle_one_used_last_continues(town: Town) -> None:
    first = town.talk([*HEAD, 10], [11])
    town.busy = {first}
    second = town.talk([*HEAD, 10], [11])
    town.busy = set()
    assert town.who([*HEAD, 10, 11, 20]).agent_id == second
    town.busy = {second}
    assert town.who([*HEAD, 10, 11, 20]).agent_id == first


def test_tenants_do_not_meet(town: Town) -> None:
    agent = town.talk([*HEAD, 10], [11])
    claim = town.requests.claim("other")
    other = town.identities.identify("other", AgentHint(), [*HEAD, 10, 11, 20], 3, claim)
    assert other.agent_id != agent


def test_after_a_restart_the_latest_turn_is_still_known(town: Town) -> None:
    agent = town.talk([*HEAD, 10], [11])
    town.talk([*HEAD, 10, 11, 20], [21])
    town.identities = Identities(town.agents)
    assert town.who([*HEAD, 10, 11, 20, 21, 30]).agent_id == agent


def test_a_deleted_agent_is_not_found(town: Town) -> None:
    agent = town.talk([*HEAD, 10], [11])
    town.agents.delete("local", agent)
    assert town.who([*HEAD, 10, 11, 20]).agent_id != agent


def names(identities: Iterable[Identity]) -> set[str]:
    return {identity.agent_id for identity in identities}


def test_an_unidentified_request_is_a_new_agent_each_time(town: Town) -> None:
    assert len(names(town.who([*HEAD, 10]) for _ in range(3))) == 3


# -- busy agents --------------------------------------------------------------------------------


def test_a_queued_turn_of_a_busy_agent_keeps_the_agent() -> None:
    town, hint = Town(), AgentHint(agent_id="coder", continuation=Continuation(None))
    town.busy = {"coder"}
    assert town.who(HEAD, hint).agent_id == "coder"
    town.busy = set()
    claim = town.requests.claim("local")
    town.identities.identify("local", hint, HEAD, 3, claim)
    assert town.who(HEAD, AgentHint(agent_id="coder")).agent_id != "coder"
    claim.release()
    claim.release()
    assert town.who(HEAD, AgentHint(agent_id="coder")).agent_id == "coder"


def test_a_fork_is_made_when_its_turn_is_logged(town: Town) -> None:
    agent = town.talk([*HEAD, 10], [11])
    town.busy = {agent}
    fork = town.who([*HEAD, 10, 11, 40]).fork
    assert fork is not None
    assert (fork.head, fork.num_turns) == (town.agents.get("local", agent).head, 1)
    assert [known.id for known in town.agents.agents("local")] == [agent]


# -- what is remembered -------------------------------------------------------------------------


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[GatedLedger]:
    with contextlib.closing(GatedLedger(tmp_path)) as ledger:
        yield ledger


def test_requests_during_start_up_wait_until_agents_are_known(gated: GatedLedger) -> None:
    town = Town(gated)
    agent = town.talk([*HEAD, 10], [11])
    identities = Identities(town.agents)

    def identify() -> Identity:
        claim = BusyAgents().claim("local")
        return identities.identify("local", AgentHint(), [*HEAD, 10, 11, 20], 3, claim)

    gated.stall()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(identify)
        try:
            assert gated.is_read.wait(60)
            second = pool.submit(identify)
            wait([second], timeout=0.2)  # it has the time to go on with what is not there yet
        finally:
            gated.gate.set()
    assert names([first.result(), second.result()]) == {agent}


def test_agents_that_could_not_be_learnt_are_learnt_later(gated: GatedLedger) -> None:
    town = Town(gated)
    agent = town.talk([*HEAD, 10], [11])
    town.identities = Identities(town.agents)
    gated.is_broken = True
    assert town.who([*HEAD, 10, 11, 20]).agent_id != agent
    gated.is_broken = False
    assert town.who([*HEAD, 10, 11, 20]).agent_id == agent


def test_a_ledger_that_cannot_be_read_is_not_asked_for_every_agent(
    gated: GatedLedger, caplog: pytest.LogCaptureFixture
) -> None:
    town = Town(gated)
    for index in range(40):
        town.talk([*HEAD, 10, index], [11], AgentHint(agent_id=f"agent-{index}"))
    town.identities = Identities(town.agents)
    gated.is_broken = True
    town.who([*HEAD, 10, 0, 11, 20])
    assert len(caplog.records) == 16


def test_the_number_of_equal_agents_remembered_is_bounded(town: Town) -> None:
    for _ in range(300):
        town.talk([*HEAD, 10], [11], AgentHint(client_key="one"))
    assert town.identities.num_known == 1
    for index in range(300):
        town.talk([*HEAD, 10], [11], AgentHint(client_key=str(index)))
    assert town.identities.num_known < 300
    for agent in town.agents.agents("local"):
        town.agents.delete("local", agent.id)
    town.who([*HEAD, 10, 11, 20])
    assert town.identities.num_known == 0


# -- the turn that a request names ----------------------------------------------------------------


@pytest.fixture
def past() -> tuple[Town, str, str]:
    """An agent of two turns, and their ids."""
    town, heads = Town(), list[str]()
    for prompt, reply in (([1], [2]), ([1, 2, 3], [4])):
        town.talk(prompt, reply, AgentHint("a"))
        heads.append(town.agents.get("local", "a").head or "")
    first, second = heads
    return town, first, second


def following(town: Town, turn_id: str, name: str | None = None) -> Identity:
    return town.who([1], AgentHint(name, client_key="any", previous_turn=turn_id), head=0)


def test_continuing_the_head_keeps_the_agent(past: tuple[Town, str, str]) -> None:
    town, _, second = past
    assert following(town, second).agent_id == "a"
    assert following(town, second, "me").agent_id == "me"  # a name decides first


def test_continuing_an_older_turn_makes_a_fork_at_that_turn(past: tuple[Town, str, str]) -> None:
    town, first, second = past
    fork = following(town, first).fork
    assert fork is not None
    assert fork.id != "a"
    assert (fork.head, fork.num_turns) == (first, 1)
    assert town.agents.get("local", "a").head == second


def test_continuing_a_busy_head_makes_a_fork(past: tuple[Town, str, str]) -> None:
    town, _, second = past
    town.busy = {"a"}
    fork = following(town, second).fork
    assert fork is not None
    assert fork.id != "a"
    assert fork.head == second


def test_when_an_agent_is_deleted_its_fork_or_a_new_agent_continues(
    past: tuple[Town, str, str],
) -> None:
    town, first, _ = past
    town.agents.fork("local", "a", ["b"], first)
    town.agents.delete("local", "a")
    assert following(town, first).agent_id == "b"
    town.agents.delete("local", "b")
    identity = following(town, first)
    assert identity.agent_id.startswith("anon-")
    assert identity.fork is None


class CountedHash:
    """SHA-256 that counts how often it is fed."""

    num_updates = 0

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, data: bytes) -> None:
        CountedHash.num_updates += 1
        self._hash.update(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def ended(tokens: Sequence[int], *, is_stored: bool = True) -> Turn:
    """The turn with which a conversation of these tokens ended."""
    digest, kept = conversation_digest(tokens), tuple(tokens) if is_stored else ()
    name, num_tokens = f"turn-{digest[:8]}", len(tokens)
    return Turn(name, None, "", (), kept, num_tokens, None, Usage(0), 0.0, digest=digest)


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_lookup_digests_no_more_for_more_conversations(is_stored: bool) -> None:
    counts = {}
    for number in (10, 1000):
        town = Town()
        town.identities = Identities(town.agents, cast("Any", CountedHash))
        mine = town.talk([*HEAD, 4], [5, 9])
        for length in range(number):
            # All lengths up to that of the prompt, with the end that replies have.
            tokens = [*HEAD, *[7] * length, 8, 9]
            turn = ended(tokens, is_stored=is_stored)
            town.identities.note("local", f"other-{length}", turn, tokens)
        CountedHash.num_updates = 0
        assert town.who([*HEAD, 4, 5, 9, *range(100, 1200)]).agent_id == mine
        counts[number] = CountedHash.num_updates
    assert counts[10] == counts[1000] == 1


def test_conversations_whose_end_is_not_known_are_recognised_up_to_a_number(town: Town) -> None:
    mine = town.talk([*HEAD, 4], [5, 9])
    forgetful = Identities(town.agents)
    town.identities = forgetful
    forgetful.note("local", mine, ended([*HEAD, 4, 5, 9], is_stored=False))
    assert town.who([*HEAD, 4, 5, 9, 6]).agent_id == mine


def test_conversations_that_are_forgotten_leave_nothing_behind(town: Town) -> None:
    for number in range(3):
        forked = town.talk([*HEAD, 4], [5, 9 + number])
        town.agents.delete("local", forked)
        town.who([*HEAD, 4, 5, 9 + number, 6])
    assert town.identities.num_known == 0
