import pytest

from semantic.domain.access import ApiKey, KeyRing, Rate, TenantPolicy, new_secret, secret_digest
from semantic.domain.agents import Principal

pytestmark = pytest.mark.unit


def test_secrets_are_long_and_never_the_same() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100
    assert all(len(secret) >= 50 and secret.startswith("sk-semantic-") for secret in made)


def test_a_key_is_found_by_its_secret_alone() -> None:
    secrets = [new_secret() for _ in range(3)]
    keys = [ApiKey(str(i), "t", secret_digest(secret)) for i, secret in enumerate(secrets)]
    gone = ApiKey("gone", "t", secret_digest("gone" * 8), is_revoked=True)
    ring = KeyRing((*keys, gone))
    assert [ring.find_key(secret) for secret in secrets] == keys
    # Neither what is kept of a secret, nor a part of one, nor a revoked one opens anything.
    for wrong in (*(key.digest for key in keys), secrets[0][:-1], "", "gone" * 8, "é\udc80"):
        assert ring.find_key(wrong) is None


@pytest.mark.parametrize(
    "keys,is_guarded",
    [
        ((), False),
        ((ApiKey("a", "t", "d"),), True),
        ((ApiKey("a", "t", "d", is_revoked=True),), True),
    ],
    ids=["none", "one", "revoked"],
)
def test_once_a_key_was_given_out_one_is_needed(keys: tuple[ApiKey, ...], is_guarded: bool) -> None:
    assert KeyRing(keys).is_guarded is is_guarded


def test_a_keys_own_rate_comes_before_its_tenants() -> None:
    usual, own = Rate(requests=10), Rate(tokens=5)
    keys = (ApiKey("plain", "t", "d"), ApiKey("own", "t", "d", rate=own))
    ring = KeyRing(keys, {"t": TenantPolicy(key_rate=usual)})
    assert ring.key_rate(Principal("t", key_id="plain")) == usual
    assert ring.key_rate(Principal("t", key_id="own")) == own
    assert ring.key_rate(Principal("other")) == Rate()


@pytest.mark.parametrize(
    "ring,has_limits",
    [
        (KeyRing(), False),
        (KeyRing((ApiKey("a", "t", "d"),), {"t": TenantPolicy(weight=2, disk_bytes=1)}), False),
        (KeyRing(rate=Rate(tokens=1)), True),
        (KeyRing((ApiKey("a", "t", "d", rate=Rate(requests=0)),)), True),
        (KeyRing(tenants={"t": TenantPolicy(max_concurrent=0)}), True),
        (KeyRing(tenants={"t": TenantPolicy(agent_rate=Rate(requests=1))}), True),
        (KeyRing(tenants={"t": TenantPolicy(key_rate=Rate(tokens=1))}), True),
    ],
)
def test_a_ring_says_whether_anything_is_limited(ring: KeyRing, has_limits: bool) -> None:
    assert ring.has_limits is has_limits
