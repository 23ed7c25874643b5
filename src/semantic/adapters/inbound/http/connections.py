"""Limits open connections: how many there may be, and how long a client may stay silent.

A connection is *silent* while the server waits for a request's headers or the rest of its body.
At the limit, a new connection replaces the one that has been silent longest, so a new client
always gets in. If all connections are being answered, a few more are accepted for health checks
and cancels; other requests on them get 503.
"""

import asyncio
import contextlib
import errno
import resource
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

_log = structlog.get_logger(__name__)

_MAX_DESCRIPTORS = 65536  # some systems report no limit, or one of a billion
_MAX_KEPT_FOR_FILES = 256
_MAX_SPARE = 32
_ACCEPTED_AT_ONCE = 16
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOG_EVERY_S = 60.0
# Keys in a request's state: its connection, and whether that one is beyond the limit.
CONNECTION, IS_BEYOND_LIMIT = "connection", "is_full"


def raise_descriptor_limit() -> int:
    """Raise the process's limit on open files as far as permitted, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft >= limit:
        return soft
    with contextlib.suppress(ValueError, OSError):  # macOS permits less than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return soft


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on client connections.

    Attributes:
        num_spare: Additional connections while all others are being answered.
        read_timeout_s: Longest wait for a request's headers, and for the next chunk of its body.
        write_timeout_s: Longest wait for a client that does not read.
    """

    max_open: int
    num_spare: int
    read_timeout_s: float
    write_timeout_s: float

    @classmethod
    def within(
        cls,
        num_descriptors: int,
        max_connections: int,
        *,
        read_timeout_s: float,
        write_timeout_s: float,
    ) -> "ConnectionLimits":
        """Lower `max_connections` to what the descriptors permit, leaving some for files."""
        for_clients = num_descriptors - min(_MAX_KEPT_FOR_FILES, num_descriptors // 2)
        num_spare = min(_MAX_SPARE, for_clients // 4)
        max_open = max(1, min(max_connections, for_clients - num_spare))
        if max_open < max_connections:
            _log.warning(
                "max_connections lowered to fit the limit on open files",
                max_connections=max_connections,
                permitted=max_open,
                open_files=num_descriptors,
            )
        return cls(max_open, num_spare, read_timeout_s, write_timeout_s)


class OpenConnections:
    """All connections of a server. Use it on the event loop's thread."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._open: set[Connection] = set()
        self._silent: OrderedDict[Connection, None] = OrderedDict()  # the longest silent first
        self._owned: Counter[str] = Counter()
        self._num_cut = 0
        self._logged_at = float("-inf")

    def protocol(self) -> "type[Connection]":
        """Return the protocol class that the HTTP server creates for each connection."""

        class PooledConnection(Connection):
            pool = self

        return PooledConnection

    def enter(self, connection: "Connection") -> None:
        """Add a new connection; at the limit, close the longest silent one or this one."""
        self._open.add(connection)
        self._silent[connection] = None
        oldest = next(iter(self._silent))
        if len(self._open) > self.limits.max_open and oldest is not connection:
            self._cut(oldest)
        num_over = len(self._open) - self.limits.max_open
        if num_over > self.limits.num_spare:
            self._cut(connection)
        elif num_over > 0:
            connection.app_state = {**connection.app_state, IS_BEYOND_LIMIT: True}

    def leave(self, connection: "Connection") -> None:
        self._open.discard(connection)
        self._silent.pop(connection, None)
        self._disown(connection)

    def claim(self, connection: "Connection", tenant: str, limit: int | None) -> bool:
        """Count a connection as a tenant's; return False if the tenant is at its limit."""
        if connection.tenant != tenant:
            if limit is not None and self._owned[tenant] >= limit:
                return False
            self._disown(connection)
            connection.tenant = tenant
            self._owned[tenant] += 1
        return True

    def _disown(self, connection: "Connection") -> None:
        if connection.tenant is not None:
            self._owned[connection.tenant] -= 1
            connection.tenant = None

    def note(self, connection: "Connection", *, is_silent: bool) -> None:
        """Record activity; `is_silent` says whether the server waits for the client."""
        self._silent.pop(connection, None)
        if is_silent and connection in self._open:
            self._silent[connection] = None

    def make_room(self) -> None:
        """Close some silent connections because descriptors ran out."""
        for connection in list(self._silent)[:_ACCEPTED_AT_ONCE]:
            self._cut(connection)

    def _cut(self, connection: "Connection") -> None:
        self.leave(connection)
        connection.transport.abort()
        self._num_cut += 1
        now = time.monotonic()
        if now - self._logged_at >= _LOG_EVERY_S:
            _log.warning(
                "too many connections; closing those that have been silent longest",
                closed=self._num_cut,
                max_connections=self.limits.max_open,
            )
            self._logged_at, self._num_cut = now, 0


class _Timer:
    """Calls a function after a delay, unless it is stopped or restarted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self, delay_s: float, call: Callable[[], None]) -> None:
        self.stop()
        self._handle = self._loop.call_later(delay_s, call)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(H11Protocol):
    """One connection, aborted when its client does not send, or does not read, for too long.

    uvicorn itself closes connections that are idle between two requests. `tenant` is that of the
    latest request.
    """

    pool: OpenConnections
    tenant: str | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._read_timer = _Timer(self.loop)
        self._write_timer = _Timer(self.loop)

    @property
    def _is_answering(self) -> bool:
        return self._is_in_request and not self.cycle.more_body

    @property
    def _is_in_request(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, CONNECTION: self}
        self._expect_more()
        self.pool.enter(self)

    def claim(self, tenant: str, limit: int | None) -> bool:
        return self.pool.claim(self, tenant, limit)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.pool.leave(self)
        self._read_timer.stop()
        self._write_timer.stop()

    def data_received(self, data: bytes) -> None:
        """All headers must arrive within the read timeout; each chunk of a body restarts it."""
        super().data_received(data)
        self.pool.note(self, is_silent=not self._is_answering)
        if self._is_answering:
            self._read_timer.stop()
        elif self._is_in_request or not self._read_timer.is_running:
            self._expect_more()

    def on_response_complete(self) -> None:
        """Stop the read timer; uvicorn's own timeout applies to idle connections."""
        self._read_timer.stop()
        super().on_response_complete()
        self.pool.note(self, is_silent=not self._is_answering)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer.start(self.pool.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer.stop()

    def _expect_more(self) -> None:
        self._read_timer.start(self.pool.limits.read_timeout_s, self._end_wait)

    def _end_wait(self) -> None:
        if self.flow.read_paused:  # the server itself has paused reading
            self._expect_more()
        else:
            self.transport.abort()


class Listener(socket.socket):
    """A listening socket from which an event loop accepts a few connections at a time.

    asyncio accepts all waiting connections before it serves any of them. When descriptors run out,
    it logs every attempt, thousands in a row. With this class it tries once, and again after a
    second.
    """

    def __init__(self, family: int, pool: OpenConnections) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._pool = pool
        self._num_accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept; `BlockingIOError` also if the event loop should run other tasks first."""
        if self._num_accepted >= _ACCEPTED_AT_ONCE:
            self._num_accepted = 0
            raise BlockingIOError
        self._num_accepted += 1
        try:
            return super().accept()
        except OSError as error:
            is_short = error.errno in _OUT_OF_DESCRIPTORS
            self._num_accepted = _ACCEPTED_AT_ONCE if is_short else 0
            if is_short:
                self._pool.make_room()
            raise
