"""In front of every endpoint: browser origins, short paths, HEAD, compressed bodies."""

import gzip
import json
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from semantic.application.engine.model import LoadedModel
from semantic.entrypoints.loading import ModelLoader
from tests.http_server import make_settings, run_server

pytestmark = pytest.mark.integration

SETTINGS = {"max_body_mb": 0.1}
FOREIGN = "https://evil.example"
CHAT = {"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
CHANGING = [
    ("POST", "/v1/agents/import"),
    ("POST", "/v1/cache/gc"),
    ("POST", "/v1/cache/verify"),
    ("POST", "/v1/agents/coder/evict"),
    ("POST", "/v1/agents/coder/prefetch"),
    ("POST", "/v1/responses/resp_x/cancel"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/chat/completions"),
    ("PATCH", "/v1/agents/coder"),
    ("DELETE", "/v1/agents/coder"),
    ("POST", "/nowhere"),
]


@pytest.mark.parametrize("method,path", CHANGING)
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": FOREIGN},
        {"origin": "null"},
        {"origin": "http://localhost.evil.example"},
        {"origin": "http://localhost:3000@evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": FOREIGN, "sec-fetch-site": "same-origin"},
    ],
)
def test_a_foreign_page_changes_nothing(
    http: httpx.Client, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = http.request(method, path, headers=headers)
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "origin_not_allowed"
    assert "cors_origins" in error["message"]
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
        {"origin": "https://127.0.0.1"},
        {"origin": "http://[::1]:5173", "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "same-origin"},
    ],
)
def test_programs_and_pages_of_this_machine_are_served(
    http: httpx.Client, headers: dict[str, str]
) -> None:
    answer = http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 200
    assert answer.headers.get("access-control-allow-origin") == headers.get("origin")


def test_a_page_of_this_machine_may_ask_first(http: httpx.Client) -> None:
    asked = {
        "origin": "http://localhost:3000",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    for path in ("/v1/chat/completions", "/v1/messages", "/models"):
        answer = http.options(path, headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    refused = http.options("/v1/messages", headers={**asked, "origin": FOREIGN})
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize(
    "method,path,options,status",
    [
        ("GET", "/nowhere", {}, 404),
        ("POST", "/v1/chat/completions", {"content": b"x" * 200_000}, 413),
        ("POST", "/v1/chat/completions", {"json": {}}, 400),
        ("GET", "/v1/models", {"headers": {"host": "evil.example"}}, 400),
    ],
)
def test_errors_can_be_read_by_pages_of_this_machine(
    http: httpx.Client, method: str, path: str, options: Any, status: int
) -> None:
    headers = {"origin": "http://localhost:3000", **options.pop("headers", {})}
    answer = http.request(method, path, headers=headers, **options)
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    exposed = answer.headers["access-control-expose-headers"]
    assert {"request-id", "x-request-id", "retry-after"} <= set(exposed.split(", "))
    assert answer.headers["request-id"]


@pytest.mark.parametrize("origins", ["*", f"https://other.example,{FOREIGN}"])
def test_other_pages_can_be_permitted(tmp_path: Path, origins: str) -> None:
    settings = make_settings(tmp_path, cors_origins=origins)
    with run_server(settings) as running, running.client() as http:
        headers = {"origin": FOREIGN, "sec-fetch-site": "cross-site"}
        answer = http.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] in ("*", FOREIGN)


def test_a_page_may_use_the_server_it_came_from(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, allowed_hosts="box")
    with run_server(settings) as running, running.client() as http:
        for origin, status in (("http://box:8000", 200), ("http://box:8001", 403)):
            headers = {"origin": origin, "host": "box:8000"}
            answer = http.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.status_code == status


def test_a_browser_is_led_to_a_page_and_a_program_is_not(http: httpx.Client) -> None:
    page = http.get("/", headers={"accept": "text/html,*/*"})
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert http.get("/").headers["content-type"] == "text/plain; charset=utf-8"
    assert http.head("/").status_code == 200


def test_the_version_may_be_left_out_of_paths(http: httpx.Client) -> None:
    said = {"model": "fake", "max_tokens": 2}
    assert http.get("/models").json() == http.get("/v1/models").json()
    assert http.get("/models/fake").status_code == 200
    assert http.post("/chat/completions", json=CHAT).json()["object"] == "chat.completion"
    answer = http.post("/completions", json={**said, "prompt": "hi"})
    assert answer.json()["object"] == "text_completion"
    answer = http.post("/responses", json={"model": "fake", "input": "hi"})
    assert http.get(f"/responses/{answer.json()['id']}").json()["object"] == "response"
    assert http.post("/messages", json=CHAT).json()["type"] == "message"
    assert http.post("/messages", json={}).json()["type"] == "error"
    assert "not supported" in http.post("/moderations", json={}).json()["error"]["message"]
    assert http.get("/nowhere").status_code == 404


@pytest.mark.parametrize(
    "path",
    ["/health", "/v1/models", "/models", "/openapi.json", "/docs", "/v1/agents", "/v1/cache"],
)
def test_head_answers_as_get_does_without_the_body(http: httpx.Client, path: str) -> None:
    head, whole = http.head(path), http.get(path)
    assert head.status_code == whole.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert "content-length" in head.headers


def test_head_requests_to_endless_and_missing_paths(http: httpx.Client) -> None:
    assert http.head("/v1/events").headers["content-type"].startswith("text/event-stream")
    assert http.head("/v1/agents/nobody").status_code == 404
    assert http.head("/v1/chat/completions").status_code == 405
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "encoding,pack",
    [
        ("gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("gzip", lambda body: gzip.compress(body[:9]) + gzip.compress(body[9:])),
        ("deflate", zlib.compress),
        ("identity", bytes),
    ],
)
def test_packed_bodies_are_unpacked(http: httpx.Client, encoding: str, pack: Any) -> None:
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    packed = pack(json.dumps(CHAT).encode())
    answer = http.post("/v1/chat/completions", content=packed, headers=headers)
    assert answer.status_code == 200, answer.text
    pieces = (packed[index : index + 7] for index in range(0, len(packed), 7))
    answer = http.post("/v1/chat/completions", content=pieces, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "encoding,content,status",
    [
        pytest.param("gzip", gzip.compress(b" " * 10_000_000), 413, id="bomb"),
        pytest.param("gzip", gzip.compress(gzip.compress(b"{}")), 400, id="packed twice"),
        pytest.param("gzip", b"plain text", 400, id="not packed"),
        pytest.param("gzip", gzip.compress(b"{}")[:-3], 400, id="cut off"),
        pytest.param("gzip", gzip.compress(b"{}") + b"more", 400, id="something behind"),
        pytest.param("deflate", gzip.compress(b"{}"), 400, id="packed otherwise"),
        pytest.param("br", b"{}", 415, id="unknown"),
        pytest.param("gzip, gzip", b"{}", 415, id="two"),
    ],
)
def test_bodies_that_cannot_be_unpacked_are_refused(
    http: httpx.Client, encoding: str, content: bytes, status: int
) -> None:
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    answer = http.post("/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert http.get("/health").status_code == 200


def test_an_oversized_body_is_refused_declared_or_streamed(http: httpx.Client) -> None:
    big = json.dumps({**CHAT, "messages": [{"role": "user", "content": "x" * 200_000}]}).encode()
    declared = http.post("/v1/chat/completions", content=big)
    streamed = http.post("/v1/chat/completions", content=iter([big[:100_000], big[100_000:]]))
    for answer in (declared, streamed):
        assert answer.status_code == 413
        assert "max_body_mb" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]", "[::1]:80"])
def test_local_hosts_are_answered(http: httpx.Client, host: str) -> None:
    assert http.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1:80:80", "[::1", "::1", "[::2]"]
)
def test_other_hosts_are_refused(http: httpx.Client, host: str) -> None:
    answer = http.get("/v1/models", headers={"host": host})
    assert answer.status_code == 400
    assert "allowed_hosts" in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"].startswith("req_")


PATHS = ("/", "/v1/agents", "/admin/models", "/v1/cache", "/metrics", "/health", "/openapi.json")


def test_a_local_address_answers_local_and_allowed_names_alone(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, allow_remote=True, allowed_hosts="Chat.example,[::2]")
    with run_server(settings) as running, running.client() as http:
        for path in PATHS:
            for host in ("evil.example", "chat.example.evil.example", "", "[::1", "a b"):
                answer = http.get(path, headers={"host": host})
                assert answer.status_code == 400, (path, host)
            for host in ("localhost:1", "chat.example", "CHAT.example:443", "[::2]:80"):
                assert http.get(path, headers={"host": host}).status_code == 200, (path, host)


def test_any_name_is_accepted_where_other_machines_need_a_key(tmp_path: Path) -> None:
    key = "a key of twenty characters"
    remote = {"host": "0.0.0.0", "allow_remote": True, "api_key": key}  # noqa: S104
    for allowed, status in (("", 404), ("chat.example", 400)):
        settings = make_settings(
            tmp_path / allowed, **remote, **({"allowed_hosts": allowed} if allowed else {})
        )
        with run_server(settings) as running, running.client() as http:
            for host in ("evil.example", "[::1", "a b"):
                headers = {"host": host, "x-api-key": key}
                assert http.get("/v1/nothing", headers=headers).status_code == status


def test_unknown_paths_and_methods_answer_in_shape(http: httpx.Client) -> None:
    missing, wrong = http.get("/v1/nothing"), http.get("/v1/chat/completions")
    assert missing.status_code == 404
    assert "GET /v1/nothing" in missing.json()["error"]["message"]
    assert wrong.status_code == 405
    assert missing.headers["x-request-id"].startswith("req_")


def test_requests_wait_while_the_first_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load = threading.Event()
    load = ModelLoader._load_fake

    def load_late(*given: Any) -> LoadedModel:
        assert may_load.wait(60)
        return load(*given)

    monkeypatch.setattr(ModelLoader, "_load_fake", load_late)
    asked = {
        "/v1/chat/completions": CHAT,
        "/v1/messages": CHAT,
        "/v1/messages/count_tokens": CHAT,
        "/v1/responses": {"model": "fake", "input": "hi", "max_output_tokens": 16},
        "/api/chat": {**CHAT, "stream": False},
        "/api/generate": {"model": "fake"},
    }
    settings = make_settings(tmp_path)
    with (
        run_server(settings, is_ready=False) as running,
        running.client() as http,
        ThreadPoolExecutor(len(asked)) as pool,
    ):
        assert http.get("/health/ready").status_code == 503
        unknown = http.post("/v1/chat/completions", json={**CHAT, "model": "unknown"})
        answers = [pool.submit(http.post, path, json=body) for path, body in asked.items()]
        streamed = {**CHAT, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=streamed) as stream:
            lines = stream.iter_lines()
            assert "the model is loading" in next(lines)
            assert not any(answer.done() for answer in answers)
            may_load.set()
            assert "[DONE]" in list(lines)[-2]
        assert [answer.result().status_code for answer in answers] == [200] * len(asked)
    assert unknown.status_code == 404


def test_requests_after_a_failed_load_are_refused_with_the_reason(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, backend="torch", model="no/such/model")
    with run_server(settings) as running, running.client() as http:
        assert http.get("/health/live").status_code == 503
        ready = http.get("/health/ready")
        answer = http.post("/v1/chat/completions", json={**CHAT, "model": "model"})
    assert ready.status_code == 503
    assert "there is no model" in ready.json()["detail"]
    assert answer.status_code == 503
    assert "no/such/model" in answer.json()["error"]["message"]


def test_routes_are_built_before_anyone_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    create = TypeAdapter.__init__

    def count(self: TypeAdapter[Any], *args: Any, **options: Any) -> None:
        made.append(self)
        create(self, *args, **options)

    asked = ("/v1/cache", "/v1/agents", "/admin/models", "/api/tags")
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        monkeypatch.setattr(TypeAdapter, "__init__", count)
        assert [http.get(path).status_code for path in asked] == [200] * len(asked)
    assert len(made) <= 4 * len(asked)  # what an endpoint itself makes
