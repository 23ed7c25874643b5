"""API keys, the tenants they belong to, and their limits.

A key is a secret of 32 random bytes, of which only the SHA-256 digest is stored. A random secret
cannot be guessed from its digest, so a slow hash would add time to every request and no security.
Several keys may belong to one tenant. Agents and blocks belong to the tenant, so a key can be
replaced freely.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from semantic.domain.agents import Principal

_PREFIX = "sk-semantic-"
_SECRET_BYTES = 32
MIN_SECRET_CHARS = 20


def new_secret() -> str:
    """Generate the secret of a new key."""
    return _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def secret_digest(secret: str) -> str:
    """Return the digest under which a secret is stored.

    Example:
        >>> secret_digest("abc")[:15]
        'sha256:ba7816bf'
    """
    return f"sha256:{hashlib.sha256(secret.encode('utf-8', 'surrogatepass')).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Rate:
    """Limits per minute; None means unlimited.

    Attributes:
        tokens: Prompt and reply tokens; prompt tokens reused from the KV cache do not count.
    """

    requests: int | None = None
    tokens: int | None = None


LimitKind: TypeAlias = Literal["requests", "tokens"]
LIMIT_KINDS: tuple[LimitKind, ...] = ("requests", "tokens")


@dataclass(frozen=True, slots=True)
class Allowance:
    """The remainder of a limit.

    Attributes:
        limit: Per minute.
        reset_s: Seconds until the whole limit is available again.
    """

    kind: LimitKind
    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """Limits of a tenant; None means unlimited.

    Attributes:
        weight: Its share of the device, relative to other tenants.
        disk_bytes: Limit for agents and turns, and separately for the KV cache of each model.
        key_rate: Rate of each key without a rate of its own.
    """

    weight: float = 1.0
    disk_bytes: int | None = None
    max_concurrent: int | None = None
    max_connections: int | None = None
    key_rate: Rate = field(default_factory=Rate)
    agent_rate: Rate = field(default_factory=Rate)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An issued key.

    Attributes:
        id: Its public name; reveals nothing about the secret.
        is_admin: Whether it grants access to operations that affect all tenants.
        rate: Replaces its tenant's `key_rate`.
    """

    id: str
    tenant: str
    digest: str
    is_admin: bool = False
    is_revoked: bool = False
    rate: Rate | None = None


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys and limits of a server.

    Attributes:
        rate: Limit of all requests together.
        has_limits: Whether any rate or number of concurrent replies is limited.
    """

    keys: tuple[ApiKey, ...] = ()
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict)
    rate: Rate = field(default_factory=Rate)
    has_limits: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        policies = self.tenants.values()
        rates = {self.rate, *(key.rate for key in self.keys)}
        rates |= {rate for policy in policies for rate in (policy.key_rate, policy.agent_rate)}
        is_limited = bool(rates - {None, Rate()})
        is_limited |= any(policy.max_concurrent is not None for policy in policies)
        object.__setattr__(self, "has_limits", is_limited)

    @property
    def is_guarded(self) -> bool:
        """Whether requests need a key: true once a key was issued, even if it was revoked since."""
        return bool(self.keys)

    def find_key(self, secret: str) -> ApiKey | None:
        """Find the key with a secret, in time that does not depend on the result."""
        digest = secret_digest(secret)
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest) and not key.is_revoked:
                found = key
        return found

    def policy(self, tenant: str) -> TenantPolicy:
        return self.tenants.get(tenant) or TenantPolicy()

    def key_rate(self, principal: Principal) -> Rate:
        own = next((key.rate for key in self.keys if key.id == principal.key_id), None)
        return own or self.policy(principal.tenant).key_rate
