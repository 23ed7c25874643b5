"""Rate limits: requests and tokens per minute, concurrent replies.

Each limit is a token bucket that holds one minute's worth and refills continuously. A request is
admitted if each of its buckets (global, per key, per agent) holds at least 1. Prompt tokens are
charged when the prompt is known, completion tokens when the reply ends. Reused prompt tokens are
refunded at the end, except those that were computed ahead; all prompt tokens are refunded if the
request is refused or the server fails it. Running requests can therefore overdraw a bucket, and the
next request waits longer.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from semantic.domain.access import LIMIT_KINDS, Allowance, KeyRing, LimitKind, Rate
from semantic.domain.agents import Principal, Reuse
from semantic.domain.errors import GenerationTimeoutError, RateLimitedError
from semantic.domain.events import Failed, Finished

_MINUTE_S = 60.0
_MAX_BUCKETS = 4096
_BUSY_RETRY_S = 1.0


@dataclass(slots=True)
class Bucket:
    """A token bucket for one limit; its level is negative while it is overdrawn.

    Attributes:
        per_minute: Capacity, and the amount refilled per minute.
        level: Amount left at the time `at`.
        at: Time of the last refill, in seconds.
    """

    per_minute: int
    level: float
    at: float

    def refill(self, per_minute: int, now: float) -> None:
        """Add what accrued up to `now`; `per_minute` is the current limit, which may change."""
        self.per_minute = per_minute
        gained = (now - self.at) * per_minute / _MINUTE_S
        self.level, self.at = min(self.level + gained, per_minute), now

    def wait_s(self, level: float) -> float:
        return max(0.0, level - self.level) * _MINUTE_S / self.per_minute


@dataclass(frozen=True, slots=True)
class _Scope:
    """What a limit applies to: all clients, a key, or an agent."""

    key: tuple[str, ...]
    noun: str
    rate: Rate


class RateLimits:
    """All buckets, and the number of running replies per tenant. Event loop's thread only."""

    def __init__(
        self, ring: Callable[[], KeyRing] = KeyRing, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Start with full buckets; the limits that `ring` returns may change at any time."""
        self._ring = ring
        self._now = now
        self._buckets: dict[tuple[str, ...], Bucket] = {}
        self._running: Counter[str] = Counter()

    def admit(self, principal: Principal) -> "Admission":
        """Count a request before any work for it; raises RateLimitedError if a limit is reached."""
        limit = self._ring().policy(principal.tenant).max_concurrent
        if limit is not None and self._running[principal.tenant] >= limit:
            raise RateLimitedError(
                f"limit of {limit} concurrent replies exceeded for this tenant; try again.",
                retry_after_s=_BUSY_RETRY_S,
            )
        scopes = self._scopes(principal)
        self.take_request(scopes)
        self._running[principal.tenant] += 1
        return Admission(self, principal, scopes)

    def leave(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def allowances(self, principal: Principal) -> list[Allowance]:
        """Return what a key has left: for each kind of limit, the one with the least remaining."""
        tightest: dict[LimitKind, Allowance] = {}
        for _, kind, bucket in self._filled(self._scopes(principal)):
            left = _allowance(kind, bucket)
            known = tightest.setdefault(kind, left)
            if left.remaining < known.remaining:
                tightest[kind] = left
        return list(tightest.values())

    def agent_scope(self, principal: Principal, agent_id: str) -> _Scope:
        rate = self._ring().policy(principal.tenant).agent_rate
        return _Scope(("agent", principal.tenant, agent_id), f"agent {agent_id}", rate)

    def take_request(self, scopes: list[_Scope]) -> None:
        """Charge one request, if every bucket of requests and of tokens holds at least 1.

        Raises:
            RateLimitedError: a bucket holds less than 1; nothing was charged.
        """
        filled = list(self._filled(scopes))
        for scope, kind, bucket in filled:
            wait_s = bucket.wait_s(1)
            if wait_s > 0:
                left = _allowance(kind, bucket)
                raise RateLimitedError(
                    f"rate limit of {left.limit} {kind}/minute exceeded for {scope.noun}; "
                    f"try again in {math.ceil(wait_s)} s.",
                    retry_after_s=wait_s,
                    allowance=(kind, left.limit, left.reset_s),
                )
        for _, kind, bucket in filled:
            bucket.level -= kind == "requests"

    def take_tokens(self, scopes: list[_Scope], number: int) -> None:
        """Charge tokens, even if that overdraws a bucket; a negative number is a refund."""
        for _, kind, bucket in self._filled(scopes):
            if kind == "tokens":
                bucket.level -= number

    def _scopes(self, principal: Principal) -> list[_Scope]:
        ring = self._ring()
        everything = _Scope(("all",), "all clients together", ring.rate)
        key = ("key", principal.tenant, principal.key_id)
        return [everything, _Scope(key, "this key", ring.key_rate(principal))]

    def _filled(self, scopes: list[_Scope]) -> Iterator[tuple[_Scope, LimitKind, Bucket]]:
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


class Admission:
    """Accounts for one admitted request until it ends."""

    def __init__(self, limits: RateLimits, principal: Principal, scopes: list[_Scope]) -> None:
        self._limits = limits
        self._principal = principal
        self._scopes = scopes
        self._num_prompt = 0
        self._is_open = True

    def charge(self, agent_id: str | None, num_prompt: int) -> None:
        """Charge prompt tokens, and a request to the agent, if any; may raise RateLimitedError."""
        if agent_id is not None:
            agent = self._limits.agent_scope(self._principal, agent_id)
            self._limits.take_request([agent])
            self._scopes = [*self._scopes, agent]
        self._limits.take_tokens(self._scopes, num_prompt)
        self._num_prompt = num_prompt

    def end(self, event: Finished | Failed, reuse: Reuse) -> None:
        """Charge the completion tokens and refund reused prompt tokens; an end hook of replies.

        A failed reply costs no tokens, unless it failed because it exceeded its time limit.
        """
        if isinstance(event, Failed) and not isinstance(event.error, GenerationTimeoutError):
            self.refund()
        if self._is_open:
            generated = event.usage.completion_tokens if isinstance(event, Finished) else 0
            self._limits.take_tokens(self._scopes, generated - reuse.reused + reuse.ahead)
        self.release()

    def refund(self) -> None:
        """Refund the prompt's tokens of a refused or failed request, and release. Idempotent."""
        if self._is_open:
            self._limits.take_tokens(self._scopes, -self._num_prompt)
        self.release()

    def release(self) -> None:
        """Free the slot among the tenant's concurrent replies. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._limits.leave(self._principal.tenant)


def _allowance(kind: LimitKind, bucket: Bucket) -> Allowance:
    remaining = max(0, math.floor(bucket.level))
    return Allowance(kind, bucket.per_minute, remaining, bucket.wait_s(bucket.per_minute))
