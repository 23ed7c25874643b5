"""Clients that hold connections open: a server process keeps serving the others."""

import contextlib
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from semantic.adapters.config.keys import TenantEntry
from tests.http_server import give_keys
from tests.smoke.server_process import ServerProcess, serve_forked
from tests.waiting import await_that

pytestmark = pytest.mark.smoke

HALF_A_REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
HALF_A_BODY = HALF_A_REQUEST + b"content-type: application/json\r\ncontent-length: 99\r\n\r\n{"


def fake_server(
    tmp_path: Path, **settings: Any
) -> contextlib.AbstractContextManager[ServerProcess]:
    return serve_forked(tmp_path / "home", tmp_path / "log", "--backend", "fake", **settings)


def connect(server: ServerProcess, content: bytes = b"") -> socket.socket:
    url = urlsplit(server.url)
    opened = socket.create_connection((url.hostname or "", url.port or 0), timeout=30)
    with contextlib.suppress(OSError):  # it may be closed at once
        opened.sendall(content)
    return opened


def ask(server: ServerProcess, method: str, path: str, **options: Any) -> httpx.Response:
    """Ask on a connection of its own."""
    with server.client() as http:
        return http.request(method, path, **options)


def is_closed(opened: socket.socket) -> bool:
    """Whether a connection is ended by the server, within the socket's timeout."""
    try:
        return opened.recv(1) == b""
    except ConnectionResetError:
        return True


def drips(opened: socket.socket) -> bool:
    """Send one more header; returns whether the server has ended the connection."""
    try:
        opened.sendall(b"x: y\r\n")
        return is_closed(opened)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_connections_that_send_no_request_in_time_are_closed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"read_timeout_s": 0.3, "keep_alive_s": 1}
    with fake_server(tmp_path, **settings) as server:
        for content in (b"", HALF_A_REQUEST, HALF_A_BODY):
            with connect(server, content) as opened:
                assert is_closed(opened)
        with connect(server, HALF_A_REQUEST) as drip:
            drip.settimeout(0.05)
            await_that(lambda: drips(drip))  # a header that never ends
        with connect(server, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n") as idle:
            await_that(lambda: is_closed(idle))


def test_a_body_may_take_long_if_it_keeps_coming(tmp_path: Path) -> None:
    content = b'{"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}'
    head = HALF_A_REQUEST + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with (
        fake_server(tmp_path, read_timeout_s=3) as server,
        connect(server, head % len(content)) as slow,
    ):
        slow.settimeout(0.04)
        for index in range(len(content)):  # longer than the timeout, taken together
            slow.sendall(content[index : index + 1])
            if index < len(content) - 1:
                with pytest.raises(TimeoutError):
                    slow.recv(1)
        slow.settimeout(30)
        assert slow.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"


def test_a_tenant_has_so_many_connections(tmp_path: Path) -> None:
    limits = TenantEntry(max_connections=2)
    secrets = give_keys(tmp_path / "home", "few", "many", limits=limits)

    def request(tenant: str) -> bytes:
        head = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-api-key: {secrets[tenant]}\r\n\r\n"
        return head.encode()

    def status(opened: socket.socket) -> int:
        return int(opened.makefile("rb").readline().split()[1])

    with fake_server(tmp_path) as server, contextlib.ExitStack() as stack:
        opened = [stack.enter_context(connect(server, request("few"))) for _ in range(3)]
        assert sorted(map(status, opened)) == [200, 200, 429]
        with connect(server, request("many")) as other:
            assert status(other) == 200
        opened[0].close()
        opened[1].close()
        with connect(server, request("few")) as again:
            assert status(again) == 200


def test_while_all_are_answered_there_is_room_for_health_and_cancel(tmp_path: Path) -> None:
    feed = b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with (
        fake_server(tmp_path, max_connections=2) as server,
        connect(server, feed) as one,
        connect(server, feed) as other,
    ):
        for opened in (one, other):
            assert opened.recv(12) == b"HTTP/1.1 200"
        assert ask(server, "GET", "/health").status_code == 200
        refused = ask(server, "GET", "/v1/models")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["request-id"]
        cancelled = ask(server, "POST", "/v1/responses/resp_none/cancel")
        assert cancelled.json()["error"]["code"] == "response_not_found"
        one.close()
        await_that(lambda: ask(server, "GET", "/v1/models").status_code != 503)
        assert other.recv(1)
