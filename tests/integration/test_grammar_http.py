"""Schemas as clients send them, in every protocol, on the fake backend."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.http_server import RunningServer

pytestmark = pytest.mark.integration

ASK = [{"role": "user", "content": "hi"}]
Json = dict[str, Any]


def _chat(schema: Json, *, is_strict: bool = False) -> tuple[str, Json]:
    form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": is_strict}}
    return "/v1/chat/completions", {"messages": ASK, "max_tokens": 40, "response_format": form}


def _responses(schema: Json, *, is_strict: bool = False) -> tuple[str, Json]:
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": is_strict}
    return "/v1/responses", {"input": "hi", "max_output_tokens": 40, "text": {"format": form}}


def _messages(schema: Json) -> tuple[str, Json]:
    form = {"type": "json_schema", "schema": schema}
    body = {"messages": ASK, "max_tokens": 40, "output_config": {"format": form}}
    return "/v1/messages", body


HOSTILE: dict[str, Json] = {
    "all memory": {
        "allOf": [
            {"type": "integer", "multipleOf": 99_999_989},
            {"multipleOf": 99_999_971},
            {"multipleOf": 1_000_003},
        ]
    },
    "a very small number": {"type": "integer", "minimum": -(10**300)},
    "keys without an end": {
        "type": "object",
        "properties": {key: {"$ref": "#"} for key in "abcde"},
        "required": list("abcde"),
    },
    "a very long value": {"enum": ["x" * 1_000_000]},
    "nested counts": {"type": "string", "pattern": "^((.{1,1000}){1,100}){1,100}b$"},
    "very many keys": {
        "type": "object",
        "properties": {f"key{index}": {"type": "string"} for index in range(5000)},
    },
}


def post(running: RunningServer, path: str, body: Json) -> httpx.Response:
    with running.client() as http:
        return http.post(path, json={"model": "fake", "temperature": 0, **body})


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("ask", [_chat, _responses, _messages])
def test_a_schema_that_takes_too_much_is_a_bad_request(
    running: RunningServer, ask: Callable[[Json], tuple[str, Json]], name: str
) -> None:
    answer = post(running, *ask(HOSTILE[name]))
    assert answer.status_code == 400, answer.text
    assert "enforce" in answer.json()["error"]["message"]


def test_others_are_answered_beside_schemas_that_refer_to_each_other(
    running: RunningServer,
) -> None:
    names = [f"d{index}" for index in range(12)]
    properties = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    shared = {name: {"type": "object", "properties": properties} for name in names}
    answer = post(running, *_chat({"$ref": "#/$defs/d0", "$defs": shared}))
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) is not None


def test_a_length_too_short_for_a_schema_cuts_the_reply(running: RunningServer) -> None:
    path, body = _chat({"type": "object", "properties": {"a": {}}, "required": ["a"]})
    answer = post(running, path, {**body, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "keyword, schema",
    [
        ("propertyNames", {"type": "object", "propertyNames": {"type": "string"}}),
        ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
    ],
)
def test_what_generators_write_is_taken_unless_it_is_strict(
    running: RunningServer, keyword: str, schema: Json
) -> None:
    for path, body in (_chat(schema), _responses(schema), _messages(schema)):
        assert post(running, path, body).status_code == 200
    for path, body in (_chat(schema, is_strict=True), _responses(schema, is_strict=True)):
        answer = post(running, path, body)
        assert answer.status_code == 400
        assert keyword in answer.json()["error"]["message"]


def test_a_named_tool_is_called_once(running: RunningServer) -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
    body = {
        "messages": ASK,
        "max_tokens": 1000,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }
    choice = post(running, "/v1/chat/completions", body).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    anthropic = {
        "messages": ASK,
        "max_tokens": 1000,
        "tools": [{"name": "f", "input_schema": parameters}],
        "tool_choice": {"type": "tool", "name": "f"},
    }
    reply = post(running, "/v1/messages", anthropic).json()
    assert reply["stop_reason"] == "tool_use"
    assert [part["type"] for part in reply["content"]] == ["tool_use"]
