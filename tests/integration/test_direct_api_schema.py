"""The agent API against its own OpenAPI document: nothing that can be sent makes it fail."""

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

from tests.http_server import RunningServer

pytestmark = pytest.mark.integration

SETTINGS = {"log_level": "error", "default_max_tokens": 8}

OPERATIONS = [
    ("POST", "/v1/agents"),
    ("GET", "/v1/agents"),
    ("GET", "/v1/agents/{agent_id}"),
    ("PATCH", "/v1/agents/{agent_id}"),
    ("DELETE", "/v1/agents/{agent_id}"),
    ("POST", "/v1/agents/{agent_id}/generate"),
    ("POST", "/v1/agents/{agent_id}/fork"),
    ("POST", "/v1/agents/{agent_id}/rewind"),
    ("GET", "/v1/agents/{agent_id}/turns"),
    ("GET", "/v1/agents/{agent_id}/explain"),
    ("GET", "/v1/agents/{agent_id}/export"),
    ("POST", "/v1/agents/import"),
    ("POST", "/v1/agents/{agent_id}/prefetch"),
    ("POST", "/v1/agents/{agent_id}/evict"),
    ("GET", "/v1/cache"),
    ("GET", "/v1/cache/blocks"),
    ("POST", "/v1/cache/gc"),
    ("POST", "/v1/cache/verify"),
    ("GET", "/v1/events"),
]
ENDLESS = ("GET", "/v1/events")
MAX_REPLY = 8


@schemathesis.serializer("application/x-tar")
def _as_it_is(_: schemathesis.SerializationContext, value: Any) -> bytes:
    content = getattr(value, "data", value)
    return content if isinstance(content, bytes) else str(content).encode()


def test_every_endpoint_is_in_the_document_with_an_example(document: dict[str, Any]) -> None:
    ours = [
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method in methods
        if path.startswith(("/v1/agents", "/v1/cache", "/v1/events"))
    ]
    assert sorted(ours) == sorted(OPERATIONS)
    for method, path in OPERATIONS:
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


@pytest.mark.parametrize("method, path", [op for op in OPERATIONS if op != ENDLESS])
def test_nothing_that_is_sent_makes_it_fail(
    running: RunningServer,
    document: dict[str, Any],
    session: requests.Session,
    method: str,
    path: str,
) -> None:
    schema = schemathesis.openapi.from_dict(document)
    with running.client() as http:
        http.post("/v1/agents", json={"id": "known"})
        http.post("/v1/agents/known/generate", json={"message": "hello"})

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=schema[path][method].as_strategy(), is_known=st.booleans())
    def send(case: schemathesis.Case[Any], is_known: bool) -> None:
        if is_known and "agent_id" in case.path_parameters:
            case.path_parameters["agent_id"] = "known"
        body: Any = case.body
        if isinstance(body, dict) and isinstance(body.get("max_tokens"), int):
            body["max_tokens"] = min(body["max_tokens"], MAX_REPLY)
        answer = case.call(base_url=running.url, session=session)
        checks = [
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
        ]
        case.validate_response(answer, checks=checks)

    send()


@pytest.mark.parametrize("method, path", [op for op in OPERATIONS if op[0] != "GET"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"text"', b"1e999", b"\xff\xfe", b'{"a":' * 5000, b'{"id": NaN}'],
)
def test_bodies_that_are_nothing_are_refused(
    running: RunningServer, session: requests.Session, method: str, path: str, content: bytes
) -> None:
    url = running.url + path.replace("{agent_id}", "nobody")
    answer = session.request(
        method, url, data=content, headers={"content-type": "application/json"}, timeout=30
    )

    assert answer.status_code < 500
