"""What tenants may store besides their KV cache."""

from dataclasses import replace

import pytest

from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.storage_quota import StorageQuota
from semantic.domain.agents import Agent, AgentProfile
from semantic.domain.errors import QuotaExceededError
from tests.unit.application.ledger_rig import agents_of, exchange_of

pytestmark = pytest.mark.unit

QUOTA = 10_000


class Quotas(dict[str, int]):
    def of(self, tenant: str) -> int | None:
        return self.get(tenant)


@pytest.fixture
def quotas() -> Quotas:
    return Quotas(a=QUOTA)


@pytest.fixture
def ledger() -> SqliteLedger:
    return SqliteLedger.in_memory()


@pytest.fixture
def storage(ledger: SqliteLedger, quotas: Quotas) -> StorageQuota:
    return StorageQuota(ledger, quotas.of)


@pytest.fixture
def agents(ledger: SqliteLedger, storage: StorageQuota) -> AgentLedger:
    made = agents_of(ledger)
    made.storage = storage
    return made


def agent(name: str, size: int, tenant: str = "a") -> Agent:
    return Agent(name, 1.0, tenant=tenant, profile=AgentProfile(system="\u00e4" * (size // 2)))


def test_agents_are_refused_before_they_exceed_the_quota(
    agents: AgentLedger, ledger: SqliteLedger, storage: StorageQuota
) -> None:
    agents.create(agent("one", 4000))
    agents.create(agent("two", 4000))
    with pytest.raises(QuotaExceededError, match=r"stores 0\.0 MB .*Delete agents.*disk_quota_mb"):
        agents.create(agent("three", 4000))
    with pytest.raises(QuotaExceededError):
        agents.fork("a", "one", ["three"])
    with pytest.raises(QuotaExceededError):
        agents.update("a", "one", lambda one: replace(one, profile=agent("x", 7000).profile))
    assert {known.id for known in agents.agents("a")} == {"one", "two"}
    assert 8000 < ledger.stored_bytes("a") == storage.used("a") < QUOTA
    agents.create(agent("other", 4 * QUOTA, tenant="b"))
    agents.update("a", "one", lambda one: replace(one, profile=agent("x", 100).profile))
    agents.create(agent("three", 3000))
    agents.delete("a", "two")
    agents.create(agent("four", 3000))
    assert ledger.stored_bytes("a") == storage.used("a")


def test_a_fork_of_many_is_refused_as_a_whole(agents: AgentLedger) -> None:
    agents.create(agent("one", 2500))
    with pytest.raises(QuotaExceededError):
        agents.fork("a", "one", ["two", "three", "four"])
    assert [known.id for known in agents.agents("a")] == ["one"]
    agents.fork("a", "one", ["two", "three"])


def test_turns_count_until_they_are_forgotten(
    agents: AgentLedger, ledger: SqliteLedger, storage: StorageQuota
) -> None:
    agents.create(agent("one", 0))
    storage.check("a")
    agents.commit("a", "one", exchange_of([1, 2], [3], ["a" * QUOTA, "b"]))
    agents.commit("a", "new", exchange_of([1], [2], ["a", "b"]))
    # An agent's row grows a little with its first turn, which is counted after the next refresh.
    assert ledger.stored_bytes("a") - 100 < storage.used("a") <= ledger.stored_bytes("a")
    assert storage.used("a") > QUOTA
    with pytest.raises(QuotaExceededError):
        storage.check("a")
    # What takes no more room may still be changed.
    agents.update("a", "one", lambda one: replace(one, is_pinned=one.is_pinned))
    agents.delete("a", "one")
    with pytest.raises(QuotaExceededError):
        storage.check("a")
    ledger.forget_unreachable(before=2.0**40, replays_before=0.0)
    storage.refresh()
    storage.check("a")


def test_a_quota_may_come_and_go(
    agents: AgentLedger, quotas: Quotas, storage: StorageQuota
) -> None:
    agents.create(agent("one", 100, tenant="b"))
    assert storage.used("b") == 0
    quotas["b"] = QUOTA
    assert storage.used("b") > 0
    del quotas["b"]
    agents.create(agent("two", 2 * QUOTA, tenant="b"))
    assert storage.used("b") == 0
    quotas["b"] = QUOTA
    with pytest.raises(QuotaExceededError):
        storage.check("b")
