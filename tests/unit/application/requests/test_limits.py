"""Rate limits, on a clock that the tests move."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from semantic.application.requests.limits import Admission, RateLimits
from semantic.domain.access import ApiKey, KeyRing, Rate, TenantPolicy
from semantic.domain.agents import Principal, Reuse
from semantic.domain.errors import BackendError, GenerationTimeoutError, RateLimitedError
from semantic.domain.events import Failed, Finished, Usage
from semantic.domain.sampling import FinishReason

pytestmark = pytest.mark.unit

A, B, OTHER = Principal("t", key_id="a"), Principal("t", key_id="b"), Principal("u", key_id="c")


@dataclass
class Rig:
    ring: KeyRing
    now: float = 100.0
    limits: RateLimits = field(init=False)

    def __post_init__(self) -> None:
        self.limits = RateLimits(lambda: self.ring, lambda: self.now)

    def ask(self, who: Principal, agent: str = "coder", prompt: int = 0) -> Admission:
        admission = self.limits.admit(who)
        admission.charge(agent, prompt)
        return admission

    def refused(self, who: Principal, agent: str = "coder") -> float:
        """Ask in vain; returns after how many seconds it is worth trying again."""
        with pytest.raises(RateLimitedError) as refusal:
            self.ask(who, agent)
        assert refusal.value.retry_after_s is not None
        return refusal.value.retry_after_s


def finished(prompt: int, generated: int) -> Finished:
    return Finished(FinishReason.END_TURN, Usage(prompt, generated))


def by_key(rate: Rate) -> KeyRing:
    return KeyRing(tenants={"t": TenantPolicy(key_rate=rate)})


def by_agent(rate: Rate) -> KeyRing:
    return KeyRing(tenants={"t": TenantPolicy(agent_rate=rate)})


def by_all(rate: Rate) -> KeyRing:
    return KeyRing(rate=rate)


def test_without_limits_all_are_admitted() -> None:
    rig = Rig(KeyRing())
    for _ in range(1000):
        rig.ask(A, prompt=10**6)
    assert rig.limits.allowances(A) == []


@pytest.mark.parametrize(
    "make,shares,spares",
    [
        (by_key, [(A, "coder"), (A, "other")], [(B, "coder"), (OTHER, "coder")]),
        (by_agent, [(A, "coder"), (B, "coder")], [(A, "other"), (OTHER, "coder")]),
        (by_all, [(A, "coder"), (B, "other"), (OTHER, "x")], []),
    ],
    ids=["key", "agent", "all"],
)
@pytest.mark.parametrize("kind", ["requests", "tokens"])
def test_a_limit_counts_over_what_it_is_for(
    make: Callable[[Rate], KeyRing],
    shares: list[tuple[Principal, str]],
    spares: list[tuple[Principal, str]],
    kind: str,
) -> None:
    rig = Rig(make(Rate(requests=6) if kind == "requests" else Rate(tokens=600)))
    for index in range(6):
        who, agent = shares[index % len(shares)]
        rig.ask(who, agent, prompt=100)
    for who, agent in shares:
        assert rig.refused(who, agent) == pytest.approx(10 if kind == "requests" else 0.1)
    for who, agent in spares:
        rig.ask(who, agent)
    rig.now += 10
    rig.ask(*shares[0])


def test_a_limit_refills_steadily_up_to_one_minutes_worth() -> None:
    rig = Rig(by_key(Rate(requests=60)))
    rig.now += 3600
    for _ in range(60):
        rig.ask(A)
    assert rig.refused(A) == pytest.approx(1)
    rig.now += 2.5
    rig.ask(A)
    rig.ask(A)
    assert rig.refused(A) == pytest.approx(0.5)


def test_replies_count_when_they_have_ended_and_what_was_reused_does_not() -> None:
    rig = Rig(by_key(Rate(tokens=1000)))
    first, second = rig.ask(A, prompt=900), rig.ask(A, prompt=900)
    assert rig.refused(A) == pytest.approx(801 * 60 / 1000)  # overdrawn by 800
    first.end(finished(900, 50), Reuse(hot=400, pool=100, disk=100))
    (left,) = rig.limits.allowances(A)
    assert (left.kind, left.limit, left.remaining) == ("tokens", 1000, 0)
    second.end(Failed(GenerationTimeoutError("too long")), Reuse())
    assert rig.refused(A) == pytest.approx(251 * 60 / 1000)
    first.end(finished(900, 50), Reuse())  # a second end counts nothing
    rig.now += 60
    assert rig.limits.allowances(A)[0].remaining == 750


def test_tokens_computed_ahead_count_when_a_request_uses_them() -> None:
    rig = Rig(by_key(Rate(tokens=1000)))
    rig.ask(A, prompt=900).end(finished(900, 50), Reuse(hot=800, computed=100, ahead=300))
    assert rig.limits.allowances(A)[0].remaining == 1000 - 100 - 300 - 50


def test_a_refused_request_takes_nothing() -> None:
    rig = Rig(KeyRing(tenants={"t": TenantPolicy(key_rate=Rate(requests=5, tokens=10))}))
    rig.ask(A, prompt=10)
    for _ in range(10):
        rig.refused(A)
    requests, tokens = rig.limits.allowances(A)
    assert (requests.remaining, tokens.remaining) == (4, 0)


def test_a_request_that_is_refused_or_fails_gets_its_tokens_back() -> None:
    rig = Rig(KeyRing((), {"t": TenantPolicy(agent_rate=Rate(tokens=500))}, Rate(tokens=1000)))
    refused, failed = rig.ask(A, prompt=900), rig.ask(A, "other", prompt=900)
    refused.refund()
    assert rig.limits.allowances(A)[0].remaining == 100
    failed.end(Failed(BackendError("lost")), Reuse(pool=100))
    for admission in (refused, failed):  # only once
        admission.refund()
        admission.end(Failed(BackendError("lost")), Reuse())
    assert rig.limits.allowances(A)[0].remaining == 1000
    rig.ask(A)  # the agent's tokens came back too
    rig.ask(A, "other")


def test_the_refusal_names_the_limit() -> None:
    rig = Rig(by_agent(Rate(requests=2)))
    rig.ask(A)
    rig.ask(A)
    with pytest.raises(
        RateLimitedError, match="rate limit of 2 requests/minute exceeded for agent coder"
    ) as it:
        rig.ask(A)
    assert it.value.allowance is not None
    assert it.value.allowance[:2] == ("requests", 2)


def test_the_tightest_limit_is_reported() -> None:
    ring = KeyRing(tenants={"t": TenantPolicy(key_rate=Rate(requests=10))}, rate=Rate(requests=4))
    rig = Rig(ring)
    rig.ask(A)
    (left,) = rig.limits.allowances(A)
    assert (left.limit, left.remaining) == (4, 3)
    assert left.reset_s == pytest.approx(15)


def test_so_many_replies_at_once() -> None:
    rig = Rig(KeyRing(tenants={"t": TenantPolicy(max_concurrent=2)}))
    one, _ = rig.ask(A), rig.ask(B)
    rig.refused(A)
    rig.ask(OTHER)
    one.release()
    one.release()
    rig.ask(A)
    assert rig.refused(B) == 1


def test_limits_that_change_count_from_then_on() -> None:
    rig = Rig(by_key(Rate(requests=100)))
    rig.ask(A)
    rig.ring = by_key(Rate(requests=1))
    rig.ask(A)
    rig.refused(A)
    rig.ring = KeyRing()
    rig.ask(A)


def test_a_keys_own_rate_counts() -> None:
    keys = (ApiKey("a", "t", "d", rate=Rate(requests=1)), ApiKey("b", "t", "d"))
    rig = Rig(KeyRing(keys))
    rig.ask(A)
    rig.refused(A)
    for _ in range(5):
        rig.ask(B)


def test_many_agents_cost_bounded_memory_and_no_keys_count() -> None:
    policy = TenantPolicy(key_rate=Rate(requests=10**6), agent_rate=Rate(requests=1))
    rig = Rig(KeyRing(tenants={"t": policy}))
    for index in range(10_000):
        rig.ask(A, f"agent-{index}")
    rig.refused(A, "agent-9999")
    (left,) = rig.limits.allowances(A)
    assert left.remaining == 10**6 - 10_001
    assert len(rig.limits._buckets) <= 4097
