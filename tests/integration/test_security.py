"""Attacks on the HTTP edge of a server with keys and of a local one.

Elsewhere: silent and slow connections (`tests/smoke/test_connections.py`, `tests/attack`);
tenants (`test_tenants.py`); foreign pages, packed bombs (`test_http_front.py`); names of hosts
(`test_http_front.py`); tampered files (`test_foreign_files.py`, `tests/attack`).
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from semantic.adapters.inbound.http.connections import ConnectionLimits, OpenConnections
from tests.http_server import RunningServer, give_keys, make_settings, run_server
from tests.waiting import await_that

pytestmark = pytest.mark.integration

CHAT: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 2,
    "messages": [{"role": "user", "content": "hi"}],
}


class Target:
    """A guarded server, and a client with a valid key."""

    def __init__(self, running: RunningServer, home: Path, key: str) -> None:
        self.running = running
        self.home = home
        self.key = key
        self.http = running.client(headers={"x-api-key": key})

    def raw(self, content: bytes) -> bytes:
        """Send bytes as they are; returns all that comes back."""
        url = httpx.URL(self.running.url)
        with socket.create_connection((url.host, url.port or 0), timeout=60) as opened:
            with contextlib.suppress(OSError):  # it may have been refused and closed meanwhile
                opened.sendall(content)
                opened.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := opened.recv(65536):
                    answer += piece
        return answer

    def is_well(self) -> bool:
        return self.http.post("/v1/chat/completions", json=CHAT).status_code == 200

    def files(self) -> set[str]:
        """Everything under home, and beside it, but what a cache writes anyway."""
        found = (path.relative_to(self.home.parent) for path in self.home.parent.rglob("*"))
        return {str(path) for path in found if "cache" not in path.parts}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    home = tmp_path_factory.mktemp("place") / "home"
    secret = give_keys(home, "acme")["acme"]
    with run_server(make_settings(home, max_body_mb=1)) as running:
        target = Target(running, home, secret)
        with target.http:
            yield target


# -- names ----------------------------------------------------------------------------------------

HOSTILE_NAMES = {
    "up": "../../../etc/passwd",
    "absolute": "/etc/passwd",
    "windows": "..\\..\\boot.ini",
    "encoded": "%2e%2e%2fetc%2fpasswd",
    "twice encoded": "%252e%252e%252f",
    "zero": "a\x00b",
    "newline": "a\nb",
    "return": "a\r\nx-evil: 1",
    "space": "a b",
    "quote": 'a"; filename="b',
    "template": "{{7*7}}",
    "format": "%s%n{0}",
    "sql": "a' OR 1=1 --",
    "right to left": "a\u202eb",
    "zero width": "co\u200bder",
    "homoglyph": "c\u043eder",
    "full width": "\uff43oder",
    "full width dots": "\uff0e\uff0e\uff0fetc",
    "combining": "e\u0301",
    "ligature": "\ufb01le",
    "long": "x" * 5000,
    "empty": "",
}


@pytest.mark.parametrize("name", HOSTILE_NAMES.values(), ids=HOSTILE_NAMES)
def test_hostile_names_of_agents_are_refused_and_make_no_file(target: Target, name: str) -> None:
    before = target.files()
    http = target.http
    assert http.post("/v1/agents", json={"id": name}).status_code == 400
    made = http.post("/v1/agents", json={"id": "victim"})
    assert made.status_code in (200, 201)
    assert http.post("/v1/agents/victim/fork", json={"ids": [name]}).status_code == 400
    path = quote(name, safe="")
    for suffix in ("", "/turns", "/explain", "/export"):
        if path:
            status = http.get(f"/v1/agents/{path}{suffix}").status_code
            assert status in (400, 404), suffix
    with contextlib.suppress(UnicodeEncodeError, httpx.LocalProtocolError, ValueError):
        named = {"x-agent-id": name}
        answer = http.post("/v1/chat/completions", json=CHAT, headers=named)
        assert answer.status_code == 400
    assert target.files() == before


@pytest.mark.parametrize("name", [".a", "...a", "-", "CON", "a.tar", "local"])
def test_strange_names_that_are_allowed_are_names_only(target: Target, name: str) -> None:
    before = target.files()
    assert target.http.post("/v1/agents", json={"id": name}).status_code in (200, 201)
    said = {"message": "hi", "max_tokens": 2}
    url = httpx.URL(target.running.url).copy_with(
        raw_path=f"/v1/agents/{name.replace('.', '%2E')}/generate".encode()
    )
    assert target.http.post(url, json=said).status_code == 200
    assert target.files() == before


@pytest.mark.parametrize("name", HOSTILE_NAMES.values(), ids=HOSTILE_NAMES)
def test_hostile_names_of_models_are_refused(target: Target, name: str) -> None:
    before = target.files()
    refused = (400, 404) if name else (200,)
    http = target.http
    assert http.post("/v1/chat/completions", json={**CHAT, "model": name}).status_code in refused
    assert http.post("/v1/messages", json={**CHAT, "model": name}).status_code in refused
    if name:
        answer = http.get(f"/v1/models/{quote(name, safe='')}")
        assert answer.status_code == 404
        assert "root:" not in answer.text
    assert target.files() == before


@pytest.mark.parametrize(
    "path",
    [
        "/v1/agents/../../etc/passwd",
        "/docs/../../../etc/passwd",
        "/docs/%2e%2e/%2e%2e/etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/v1/models/..%2f..%2fkeys.json",
        "//etc/passwd",
        "/v1/./agents/victim/../../keys.json",
        "/v1/agents/%00",
    ],
)
def test_no_path_leads_to_a_file(target: Target, path: str) -> None:
    url = httpx.URL(target.running.url).copy_with(raw_path=path.encode())
    answer = target.http.get(url)
    assert answer.status_code in (400, 404)
    assert "root:" not in answer.text
    assert "sha256" not in answer.text


# -- requests that are no HTTP, or too much of it -------------------------------------------------


def _head(*lines: str) -> bytes:
    return "\r\n".join(["POST /v1/chat/completions HTTP/1.1", *lines, "", ""]).encode("latin-1")


HOSTILE_HEADS = {
    "two lengths": _head("host: localhost", "content-length: 2", "content-length: 20") + b"{}",
    "length and chunks": _head("host: localhost", "content-length: 4", "transfer-encoding: chunked")
    + b"0\r\n\r\nGET /v1/agents HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "negative length": _head("host: localhost", "content-length: -1"),
    "folded": _head("host: localhost", "x-a: b", " x-api-key: {key}"),
    "space before colon": _head("host: localhost", "x-api-key : {key}"),
    "bare newline": _head("host: localhost", "x-a: b\nx-api-key: {key}"),
    "zero byte": _head("host: localhost", "x-a: b\x00c"),
    "no host": _head("content-length: 2") + b"{}",
    "two hosts": _head("host: localhost", "host: evil.example", "content-length: 2") + b"{}",
    "absolute": b"GET http://evil.example/v1/models HTTP/1.1\r\nhost: evil.example\r\n\r\n",
    "large header": _head("host: localhost", "x-a: " + "b" * 100_000),
    "many headers": _head("host: localhost", *(f"x-{i}: y" for i in range(20_000))),
    "long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("content", HOSTILE_HEADS.values(), ids=HOSTILE_HEADS)
def test_malformed_requests_reach_nothing(target: Target, content: bytes) -> None:
    answer = target.raw(content.replace(b"{key}", target.key.encode()))
    statuses = [line for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert len(statuses) <= 1, "one request smuggled another"
    assert not statuses or statuses[0][9:12] in (b"400", b"401", b"431"), statuses
    assert target.is_well()


def test_request_text_never_becomes_a_header(target: Target) -> None:
    evil = "x\r\nset-cookie: evil=1"
    for body in ({**CHAT, "model": evil}, {**CHAT, "user": evil}, {**CHAT, "session_id": evil}):
        answer = target.http.post("/v1/chat/completions", json=body)
        assert "set-cookie" not in answer.headers
    answer = target.http.get(f"/v1/agents/{quote(evil, safe='')}/export")
    assert "set-cookie" not in answer.headers
    assert answer.status_code == 400


DEEP = 100_000
NO_JSON = "the body is not valid JSON"
BODIES: dict[str, tuple[bytes, str]] = {
    "lists": (b"[" * DEEP + b"]" * DEEP, NO_JSON),
    "objects": (b'{"a":' * DEEP + b"1" + b"}" * DEEP, NO_JSON),
    "deep message": (
        json.dumps(CHAT).encode().replace(b'"hi"', b"[" * DEEP + b"]" * DEEP),
        NO_JSON,
    ),
    "a huge number": (b'{"seed": ' + b"9" * 100_000 + b"}", NO_JSON),
    "cut off": (b'{"model":', f"{NO_JSON}: "),
    "infinity": (b'{"model": "fake", "temperature": 1e999, "messages": []}', ""),
    "not a number": (b'{"model": "fake", "temperature": NaN, "messages": []}', ""),
    "lone surrogate": (b'{"model": "\\ud800", "messages": []}', ""),
    "bad UTF-8": (b'{"model": "\xff\xfe"}', NO_JSON),
    "zero bytes": (b"\x00" * 1000, NO_JSON),
    "no object": (b'"text"', ""),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("body, words", BODIES.values(), ids=BODIES)
def test_hostile_json_is_refused(target: Target, path: str, body: bytes, words: str) -> None:
    headers = {"content-type": "application/json"}
    answer = target.http.post(path, content=body, headers=headers)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["message"].startswith(words)
    assert len(answer.content) < 10_000
    assert target.is_well()


def test_a_schema_too_deep_is_refused(target: Target) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(150):
        schema = {"type": "object", "properties": {"a": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = target.http.post("/v1/chat/completions", json={**CHAT, "response_format": form})
    assert answer.status_code == 400
    assert target.is_well()


# -- pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"origin": "https://evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"host": "evil.example"}, 400),
    ],
    ids=["origin", "fetch site", "host"],
)
def test_a_key_opens_nothing_to_foreign_pages(
    target: Target, headers: dict[str, str], status: int
) -> None:
    answer = target.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == status
    read = target.http.get("/v1/agents", headers=headers)
    assert "access-control-allow-origin" not in {**answer.headers, **read.headers}


def test_secrets_are_not_logged(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    target.is_well()
    target.http.get(f"/v1/models?key={target.key}")
    with target.running.client(headers={"x-api-key": f"{target.key}x"}) as other:
        other.get("/v1/models")
    assert target.key not in capsys.readouterr().out


# -- readers that do not read ---------------------------------------------------------------------


def test_a_stream_that_is_not_read_is_cut_and_holds_little() -> None:
    num_sent, is_cut = 0, threading.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_sent
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        piece = b"x" * 2**14
        with contextlib.suppress(OSError, asyncio.CancelledError):
            watching = asyncio.ensure_future(_left(receive))
            while not watching.done():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                num_sent += len(piece)
        is_cut.set()

    async def _left(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    limits = ConnectionLimits(10, 1, read_timeout_s=5, write_timeout_s=0.2)
    config = uvicorn.Config(
        endless, port=0, log_config=None, http=OpenConnections(limits).protocol(), lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    await_that(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", port))
        reader.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert is_cut.wait(30)
    server.should_exit = True
    thread.join(10)
    assert num_sent < 2**25


HUGE = 10**18
SAID = CHAT["messages"]
HUGE_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": SAID, "max_tokens": HUGE}, "max_tokens"),
    (
        "/v1/chat/completions",
        {"messages": SAID, "max_completion_tokens": HUGE},
        "max_completion_tokens",
    ),
    ("/v1/chat/completions", {"messages": SAID, "n": HUGE}, "n"),
    ("/v1/chat/completions", {"messages": SAID, "top_k": HUGE}, "top_k"),
    (
        "/v1/chat/completions",
        {"messages": SAID, "logprobs": True, "top_logprobs": HUGE},
        "top_logprobs",
    ),
    (
        "/v1/chat/completions",
        {"messages": SAID, "logit_bias": {str(token): 1 for token in range(2000)}},
        "logit_bias",
    ),
    ("/v1/chat/completions", {"messages": SAID, "stop": ["x"] * 2000}, "stop"),
    ("/v1/completions", {"prompt": "hi", "max_tokens": HUGE}, "max_tokens"),
    ("/v1/completions", {"prompt": "hi", "best_of": HUGE}, "best_of"),
    ("/v1/completions", {"prompt": "hi", "logprobs": HUGE}, "logprobs"),
    ("/v1/responses", {"input": "hi", "max_output_tokens": HUGE}, "max_output_tokens"),
    ("/v1/messages", {"messages": SAID, "max_tokens": HUGE}, "max_tokens"),
    (
        "/v1/messages",
        {
            "messages": SAID,
            "max_tokens": 4,
            "thinking": {"type": "enabled", "budget_tokens": HUGE},
        },
        "budget_tokens",
    ),
    ("/v1/agents/huge/generate", {"message": "hi", "max_tokens": HUGE}, "max_tokens"),
    ("/v1/agents/huge/fork", {"n": HUGE}, "n"),
]


@pytest.mark.parametrize("path, fields, param", HUGE_FIELDS)
def test_a_number_beyond_all_use_is_refused_by_name(
    target: Target, path: str, fields: dict[str, Any], param: str
) -> None:
    target.http.post("/v1/agents", json={"id": "huge"})
    body = fields if "agents" in path else {"model": "fake", **fields}
    answer = target.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert param in json.dumps(answer.json()["error"])


def test_a_reply_that_is_longer_than_the_context_is_cut_to_what_fits(target: Target) -> None:
    body = {**CHAT, "temperature": 0, "max_tokens": 2**31, "stop": ["a", "e", "o", "t"]}
    assert target.http.post("/v1/chat/completions", json=body).status_code == 200
