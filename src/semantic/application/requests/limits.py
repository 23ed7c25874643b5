"""Who asks, by the keys there are now, and how much: requests and tokens a minute, replies at once.

Each limit is a bucket that holds a minute's worth and refills steadily. A request is admitted while
every bucket that concerns it (of all together, of its key, of its agent) has something in it. Its
prompt is taken out when it is known, its reply when it has ended; tokens that were reused are given
back then. So a bucket can be overdrawn by what runs already, and the next request waits longer.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from semantic.domain.access import LIMIT_KINDS, Allowance, KeyRing, LimitKind, Rate
from semantic.domain.agents import LOCAL_TENANT, Principal, Reuse
from semantic.domain.errors import AuthenticationError, InvalidRequestError, RateLimitedError
from semantic.domain.events import Failed, Finished

_MINUTE_S = 60.0
_MAX_BUCKETS = 4096
_BUSY_RETRY_S = 1.0


@dataclass(slots=True)
class Bucket:
    """What is left of a minute's worth; less than nothing if more was used than there was.

    Attributes:
        per_minute: What it holds, and by how much it fills in a minute.
        level: What was in it at a time.
        at: That time.
    """

    per_minute: int
    level: float
    at: float

    def refill(self, per_minute: int, now: float) -> None:
        """Let time pass; the limit may have changed meanwhile."""
        self.per_minute = per_minute
        gained = (now - self.at) * per_minute / _MINUTE_S
        self.level, self.at = min(self.level + gained, per_minute), now

    def wait_s(self, level: float) -> float:
        """How long until it holds so much."""
        return max(0.0, level - self.level) * _MINUTE_S / self.per_minute


@dataclass(frozen=True, slots=True)
class _Scope:
    """What a limit counts over: everything, a key, or an agent."""

    key: tuple[str, ...]
    noun: str
    rate: Rate


class RateLimits:
    """All buckets, and who has replies running. Used on the event loop's thread."""

    def __init__(
        self, ring: Callable[[], KeyRing] = KeyRing, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Start full.

        Args:
            ring: The limits in force; they may change at any time.
            now: Seconds, from whenever.
        """
        self._ring = ring
        self._now = now
        self._buckets: dict[tuple[str, ...], Bucket] = {}
        self._running: Counter[str] = Counter()

    def admit(self, principal: Principal) -> "Ticket":
        """Count a request, before anything is done for it.

        Raises:
            RateLimitedError: it is one too many.
        """
        limit = self._ring().policy(principal.tenant).max_concurrent
        if limit is not None and self._running[principal.tenant] >= limit:
            raise RateLimitedError(
                f"{limit} replies of this tenant are in progress, which is its limit; try again.",
                retry_after_s=_BUSY_RETRY_S,
            )
        scopes = self._scopes(principal)
        self.take_request(scopes)
        self._running[principal.tenant] += 1
        return Ticket(self, principal, scopes)

    def leave(self, tenant: str) -> None:
        """Undo an `admit` as far as replies at once are concerned."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def allowances(self, principal: Principal) -> list[Allowance]:
        """What is left for a key: the tightest limit of each kind that there is."""
        tightest: dict[LimitKind, Allowance] = {}
        for _, kind, bucket in self._filled(self._scopes(principal)):
            left = _allowance(kind, bucket)
            known = tightest.setdefault(kind, left)
            if left.remaining < known.remaining:
                tightest[kind] = left
        return list(tightest.values())

    def agent_scope(self, principal: Principal, agent_id: str) -> _Scope:
        """The limits of one agent."""
        rate = self._ring().policy(principal.tenant).agent_rate
        return _Scope(("agent", principal.tenant, agent_id), f"agent {agent_id}", rate)

    def take_request(self, scopes: list[_Scope]) -> None:
        """Take a request out of buckets, if each has one, and some tokens.

        Raises:
            RateLimitedError: one has not; nothing was taken.
        """
        filled = list(self._filled(scopes))
        for scope, kind, bucket in filled:
            wait_s = bucket.wait_s(1)
            if wait_s > 0:
                left = _allowance(kind, bucket)
                raise RateLimitedError(
                    f"{scope.noun} may have {left.limit} {kind} a minute, and has had them; "
                    f"try again in {math.ceil(wait_s)} s.",
                    retry_after_s=wait_s,
                    allowance=(kind, left.limit, left.reset_s),
                )
        for _, kind, bucket in filled:
            bucket.level -= kind == "requests"

    def take_tokens(self, scopes: list[_Scope], number: int) -> None:
        """Take tokens out of buckets, whatever is in them; a negative number is given back."""
        for _, kind, bucket in self._filled(scopes):
            if kind == "tokens":
                bucket.level -= number

    def _scopes(self, principal: Principal) -> list[_Scope]:
        ring = self._ring()
        everything = _Scope(("all",), "all clients together", ring.rate)
        key = ("key", principal.tenant, principal.key_id)
        return [everything, _Scope(key, "this key", ring.key_rate(principal))]

    def _filled(self, scopes: list[_Scope]) -> Iterator[tuple[_Scope, LimitKind, Bucket]]:
        """The buckets of those limits that there are, as full as they are now."""
        now = self._now()
        for scope, kind in itertools.product(scopes, LIMIT_KINDS):
            per_minute = getattr(scope.rate, kind)
            if per_minute is not None:
                yield scope, kind, self._bucket((*scope.key, kind), per_minute, now)

    def _bucket(self, key: tuple[str, ...], per_minute: int, now: float) -> Bucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= _MAX_BUCKETS:
                self._forget_full(now)
            bucket = self._buckets[key] = Bucket(per_minute, per_minute, now)
        bucket.refill(per_minute, now)
        return bucket

    def _forget_full(self, now: float) -> None:
        """Forget agents whose buckets are full, and the oldest half if all have used theirs."""
        agents = [key for key in self._buckets if key[0] == "agent"]
        used = []
        for key in agents:
            bucket = self._buckets[key]
            bucket.refill(bucket.per_minute, now)
            if bucket.level < bucket.per_minute:
                used.append(key)
        for key in used[len(used) // 2 :] if len(used) == len(agents) else used:
            agents.remove(key)
        for key in agents:
            del self._buckets[key]


class Ticket:
    """One admitted request, until it has ended."""

    def __init__(self, limits: RateLimits, principal: Principal, scopes: list[_Scope]) -> None:
        self._limits = limits
        self._principal = principal
        self._scopes = scopes
        self._is_open = True

    def charge(self, agent_id: str | None, num_prompt: int) -> None:
        """Count a prompt, once its agent is known; None is no agent's.

        Raises:
            RateLimitedError: the agent has had all it may have.
        """
        if agent_id is not None:
            agent = self._limits.agent_scope(self._principal, agent_id)
            self._limits.take_request([agent])
            self._scopes = [*self._scopes, agent]
        self._limits.take_tokens(self._scopes, num_prompt)

    def end(self, event: Finished | Failed, reuse: Reuse) -> None:
        """Count a reply, and give back what was reused; an end hook of replies."""
        if self._is_open:
            generated = event.usage.completion_tokens if isinstance(event, Finished) else 0
            self._limits.take_tokens(self._scopes, generated - reuse.reused)
        self.release()

    def release(self) -> None:
        """Let another reply take its place; idempotent."""
        if self._is_open:
            self._is_open = False
            self._limits.leave(self._principal.tenant)


def _allowance(kind: LimitKind, bucket: Bucket) -> Allowance:
    remaining = max(0, math.floor(bucket.level))
    return Allowance(kind, bucket.per_minute, remaining, bucket.wait_s(bucket.per_minute))


# -- who asks -------------------------------------------------------------------------------------


class Access:
    """The keys in force. Safe on any thread: they are replaced as a whole.

    Attributes:
        ring: All keys and limits.
    """

    def __init__(self, load: Callable[[], KeyRing], principal: Callable[[str], Principal]) -> None:
        """Read the keys.

        Args:
            load: Reads them, from wherever they are.
            principal: Finds a tenant, or makes it with a salt of its own.

        Raises:
            InvalidRequestError: they cannot be read.
        """
        self._load = load
        self._principal = principal
        self.ring = load()

    def reload(self) -> None:
        """Read the keys again; those in force stay if that fails.

        Raises:
            InvalidRequestError: they cannot be read, or there are none where there were some: a
                lost file must not open a server to everybody.
        """
        ring = self._load()
        if self.ring.is_guarded and not ring.is_guarded:
            raise InvalidRequestError(
                "there are no keys any more; those in force stay until a restart.", param="key_file"
            )
        self.ring = ring

    def authenticate(self, secrets: Iterable[str]) -> Principal:
        """Say on whose behalf a request comes.

        Args:
            secrets: What it sent as its key; clients may send two.

        Raises:
            AuthenticationError: none of them is a key. Says nothing else, whatever was wrong.
        """
        ring = self.ring
        if not ring.is_guarded:
            return self._known(ring, LOCAL_TENANT, is_admin=True)
        for key in map(ring.find, secrets):
            if key is not None:
                return self._known(ring, key.tenant, key_id=key.id, is_admin=key.is_admin)
        raise AuthenticationError(
            "a valid key is needed: send it as x-api-key, or as authorization: Bearer."
        )

    def _known(
        self, ring: KeyRing, tenant: str, *, key_id: str = "", is_admin: bool = False
    ) -> Principal:
        weight = ring.policy(tenant).weight
        return replace(self._principal(tenant), weight=weight, key_id=key_id, is_admin=is_admin)
