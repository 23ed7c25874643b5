"""Requests are authenticated by their API key."""

import pytest

from semantic.application.requests.access import Access
from semantic.domain.access import ApiKey, KeyRing, TenantPolicy, secret_digest
from semantic.domain.agents import Principal
from semantic.domain.errors import AuthenticationError, InvalidRequestError

pytestmark = pytest.mark.unit

OLD, NEW = "the old secret", "the new secret"


def make_access(*rings: KeyRing) -> Access:
    """Access that reads one ring after another."""
    waiting = iter(rings)
    return Access(lambda: next(waiting), lambda tenant: Principal(tenant, tenant.encode()))


def ring(**keys: str) -> KeyRing:
    """Keys of one tenant by their ids."""
    made = (ApiKey(name, "acme", secret_digest(secret)) for name, secret in keys.items())
    return KeyRing(tuple(made), {"acme": TenantPolicy(weight=3)})


def test_without_keys_every_request_is_local_and_unrestricted() -> None:
    for sent in ([], ["none"], ["anything", "else"]):
        principal = make_access(KeyRing()).authenticate(sent)
        assert (principal.tenant, principal.is_admin, principal.key_id) == ("local", True, "")


def test_a_key_stands_for_its_tenant() -> None:
    access = make_access(ring(k1=OLD))
    principal = access.authenticate(["wrong", OLD])
    assert principal == Principal("acme", b"acme", 3, "k1", is_admin=False)


@pytest.mark.parametrize("sent", [[], [""], ["none"], [secret_digest(OLD)]])
def test_all_else_gets_the_same_refusal(sent: list[str]) -> None:
    with pytest.raises(AuthenticationError, match="valid API key required"):
        make_access(ring(k1=OLD)).authenticate(sent)


def test_a_key_is_replaced_and_the_tenant_stays_who_it_was() -> None:
    access = make_access(ring(k1=OLD), ring(k2=NEW))
    before = access.authenticate([OLD])
    access.reload()
    after = access.authenticate([NEW])
    assert (before.tenant, before.salt) == (after.tenant, after.salt)
    with pytest.raises(AuthenticationError):
        access.authenticate([OLD])


def test_a_lost_key_file_opens_nothing() -> None:
    access = make_access(ring(k1=OLD), KeyRing())
    with pytest.raises(InvalidRequestError, match="stay in force"):
        access.reload()
    assert access.authenticate([OLD]).tenant == "acme"
    with pytest.raises(AuthenticationError):
        access.authenticate([])
