"""Who may ask, and how much: keys, the tenants they belong to, and their limits.

A key is a secret of 32 random bytes. Only its SHA-256 is kept: what is drawn at random cannot be
guessed from it, so a slow hash would cost time at every request and add nothing. Several keys may
belong to one tenant; agents and blocks belong to the tenant, so a key can be replaced freely.
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
    """Draw the secret of a new key."""
    return _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def secret_digest(secret: str) -> str:
    """What is kept of a secret.

    Example:
        >>> secret_digest("abc")[:15]
        'sha256:ba7816bf'
    """
    return f"sha256:{hashlib.sha256(secret.encode('utf-8', 'surrogatepass')).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Rate:
    """What may be asked for in a minute; None is unlimited.

    Attributes:
        tokens: Of prompts and replies; those that were reused do not count.
    """

    requests: int | None = None
    tokens: int | None = None


LimitKind: TypeAlias = Literal["requests", "tokens"]
LIMIT_KINDS: tuple[LimitKind, ...] = ("requests", "tokens")


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of a limit.

    Attributes:
        limit: In a minute.
        reset_s: In how many seconds all of it is there again.
    """

    kind: LimitKind
    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """What a tenant may take up; None is unlimited.

    Attributes:
        weight: Its share of the device, relative to other tenants.
        disk_bytes: Of the KV cache on disk, for each model.
        max_concurrent: Replies that are made at once.
        max_connections: Open connections.
        key_rate: For each key that has none of its own.
        agent_rate: For each agent.
    """

    weight: float = 1.0
    disk_bytes: int | None = None
    max_concurrent: int | None = None
    max_connections: int | None = None
    key_rate: Rate = field(default_factory=Rate)
    agent_rate: Rate = field(default_factory=Rate)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that was given out.

    Attributes:
        id: Its public name; tells nothing of the secret.
        digest: See `secret_digest`.
        is_admin: Whether it opens what concerns all tenants.
        is_revoked: It opens nothing any more.
        rate: In place of its tenant's `key_rate`.
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
        rate: Of all requests together.
    """

    keys: tuple[ApiKey, ...] = ()
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict)
    rate: Rate = field(default_factory=Rate)

    @property
    def is_guarded(self) -> bool:
        """Whether a key is needed: one was given out, even if it was revoked since."""
        return bool(self.keys)

    def find(self, secret: str) -> ApiKey | None:
        """Find the key of a secret; takes as long whether it is there or not."""
        digest = secret_digest(secret)
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest) and not key.is_revoked:
                found = key
        return found

    def policy(self, tenant: str) -> TenantPolicy:
        """What a tenant may take up."""
        return self.tenants.get(tenant) or TenantPolicy()

    def key_rate(self, principal: Principal) -> Rate:
        """What may be asked with a principal's key."""
        own = next((key.rate for key in self.keys if key.id == principal.key_id), None)
        return own or self.policy(principal.tenant).key_rate
