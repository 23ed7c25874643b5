"""Requests generated from the OpenAPI document make no endpoint fail."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from semantic.entrypoints.bootstrap import bootstrap
from semantic.entrypoints.server import create_app
from tests.http_server import RunningServer, make_settings, run_server

pytestmark = pytest.mark.integration

SETTINGS = {"log_level": "error", "default_max_tokens": 4}

AGENT_API = ("/v1/agents", "/v1/cache", "/v1/events")
ENDLESS = "/v1/events"
DOCUMENTED_FAILURES = {503, 504, 529}  # of the others
MAX_REPLY = 4
# What a request needs to be carried out; what else a valid one may hold is made up.
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "fake", "prompt": "hi"},
    "/v1/responses": {"model": "fake", "input": "hi"},
    "/v1/messages": {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": MAX_REPLY,
    },
    "/api/chat": {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "options": {"num_predict": MAX_REPLY},
    },
    "/api/generate": {"model": "fake", "prompt": "hi", "options": {"num_predict": MAX_REPLY}},
    "/api/embed": {"model": "fake", "input": ["hi"]},
    "/api/embeddings": {"model": "fake", "prompt": "hi"},
    "/api/show": {"model": "fake"},
    "/api/pull": {"model": "fake"},
}
HARMLESS = {
    "stream",
    "stream_options",
    "tools",
    "response_format",
    "text",
    "reasoning",
    "metadata",
    "stop",
    "seed",
    "echo",
    "logprobs",
    "n",
    "store",
    "include",
    "instructions",
    "user",
    "reasoning_effort",
    "parallel_tool_calls",
    "ignore_eos",
    "stop_token_ids",
    "session_id",
    "background",
    "structured_outputs",
}
LIMITS = {"max_tokens": MAX_REPLY, "max_completion_tokens": MAX_REPLY, "max_output_tokens": 4}


def operations() -> list[tuple[str, str]]:
    """All operations of the document, as the server makes it."""
    with tempfile.TemporaryDirectory() as home:
        server = bootstrap(make_settings(Path(home), durability="none"))
        paths = create_app(server).openapi()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


OPERATIONS = operations()
AGENT_OPERATIONS = [operation for operation in OPERATIONS if operation[1].startswith(AGENT_API)]


@schemathesis.serializer("application/x-tar")
def _as_it_is(_: schemathesis.SerializationContext, value: Any) -> bytes:
    content = getattr(value, "data", value)
    return content if isinstance(content, bytes) else str(content).encode()


def _carried_out(path: str, body: Any) -> Any:
    """A body of the same kind that is hardly ever refused."""
    if not isinstance(body, dict) or path not in NEEDED:
        return body
    return {name: body[name] for name in body if name in HARMLESS} | NEEDED[path]


def _shortened(body: Any) -> Any:
    """The body, asking for little."""
    limits = {"n": 2, **LIMITS}
    if isinstance(body, dict):
        for name, limit in limits.items():
            if isinstance(body.get(name), int):
                body[name] = min(body[name], limit)
    return body


def test_every_endpoint_of_the_agent_api_has_an_example(
    document: dict[str, Any],
) -> None:
    assert len(AGENT_OPERATIONS) >= 19
    for method, path in AGENT_OPERATIONS:
        operation = document["paths"][path][method.lower()]
        assert operation["description"], path
        requests_and_answers = [
            operation.get("requestBody", {}),
            next(answer for status, answer in operation["responses"].items() if status[0] == "2"),
        ]
        for part in requests_and_answers:
            for media in part.get("content", {}).values():
                assert "example" in media or _has_example(document, media["schema"]), path


def _has_example(document: dict[str, Any], schema: dict[str, Any]) -> bool:
    if schema.get("format") == "binary":
        return True
    found = [schema, *schema.get("anyOf", [])]
    named = [entry["$ref"].split("/")[-1] for entry in found if "$ref" in entry]
    return any("examples" in document["components"]["schemas"][name] for name in named)


@pytest.fixture(scope="module")
def governed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that may be drained, swapped and reconfigured while others are asked."""
    with run_server(make_settings(tmp_path_factory.mktemp("governed"))) as server:
        yield server


@pytest.mark.parametrize("method, path", [op for op in OPERATIONS if op[1] != ENDLESS])
def test_answers_are_as_documented(
    request: pytest.FixtureRequest,
    document: dict[str, Any],
    session: requests.Session,
    method: str,
    path: str,
) -> None:
    schema = schemathesis.openapi.from_dict(document)
    name = "governed" if path.startswith("/admin") else "running"
    running: RunningServer = request.getfixturevalue(name)
    with running.client() as http:
        http.delete("/admin/drain")
        known = http.post("/v1/responses", json={"model": "fake", "input": "hi"}).json()["id"]
        http.post("/v1/agents", json={"id": "known"})
        http.post("/v1/agents/known/generate", json={"message": "hello"})

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=schema[path][method].as_strategy(), is_known=st.booleans())
    def send(case: schemathesis.Case[Any], is_known: bool) -> None:
        if is_known and "response_id" in case.path_parameters:
            case.path_parameters["response_id"] = known
        if is_known and "agent_id" in case.path_parameters:
            case.path_parameters["agent_id"] = "known"
        if is_known and not path.startswith(AGENT_API):
            case.body = _carried_out(path, case.body)
            case.headers.clear()
        case.body = _shortened(case.body)
        answer = case.call(base_url=running.url, session=session, timeout=120)
        checks = [content_type_conformance, response_schema_conformance, status_code_conformance]
        if path.startswith(AGENT_API) or answer.status_code not in DOCUMENTED_FAILURES:
            checks.append(not_a_server_error)
        case.validate_response(answer, checks=checks)

    send()


NOTHING = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"1e999",
    b"\xff\xfe",
    b'{"a":' * 5000,
    b'{"id": NaN}',
]


@pytest.mark.parametrize("method, path", [op for op in AGENT_OPERATIONS if op[0] != "GET"])
def test_bodies_that_are_nothing_are_refused(
    running: RunningServer, session: requests.Session, method: str, path: str
) -> None:
    url = running.url + path.replace("{agent_id}", "nobody")
    for content in NOTHING:
        headers = {"content-type": "application/json"}
        answer = session.request(method, url, data=content, headers=headers, timeout=120)
        assert answer.status_code < 500, content[:20]
