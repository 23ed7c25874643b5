"""The Messages endpoints over a socket: what the official package does not show."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from semantic.adapters.inbound.anthropic.requests import MessagesRequest
from semantic.adapters.inbound.http import streaming
from semantic.domain.agents import LOCAL_TENANT
from tests.http_server import RunningServer, make_settings, run_server
from tests.pictures import anthropic_image, picture
from tests.waiting import await_that

pytestmark = pytest.mark.integration

SETTINGS = {"max_body_mb": 0.3}

HI = [{"role": "user", "content": "hi"}]
INVALID = "invalid_request_error"
IMAGE = anthropic_image(picture())
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
BAD_TOOL = {
    "name": "f",
    "strict": True,
    "input_schema": {"type": "object", "properties": {"a": {"type": "wish"}}},
}


def body(**changes: Any) -> dict[str, Any]:
    base = {"model": "fake", "messages": HI, "max_tokens": 8, "temperature": 0}
    return {**base, **changes}


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def post(running: RunningServer, payload: Any, **headers: str) -> httpx.Response:
    with running.client() as http:
        given = {"content-type": "application/json", **headers}
        return http.post("/v1/messages?beta=true", content=json.dumps(payload), headers=given)


BAD_REQUESTS: list[tuple[str, Any, int, str, str]] = [
    ("unknown model", body(model="x"), 404, "not_found_error", "'fake'"),
    ("no messages", body(messages=[]), 400, INVALID, "messages: "),
    ("no max_tokens", {"model": "fake", "messages": HI}, 400, INVALID, "max_tokens: "),
    ("max_tokens of zero", body(max_tokens=0), 400, INVALID, "max_tokens: "),
    ("an unknown role", body(messages=[{"role": "king", "content": ""}]), 400,
     INVALID, "messages[0].role: "),
    ("temperature out of range", body(temperature=-1), 400, INVALID, "temperature: "),
    ("an image", body(messages=user(IMAGE)), 400, INVALID, "images"),
    ("an image in a result",
     body(messages=user({"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]})), 400,
     INVALID, "messages[0].content[0].content[0].source: "),
    ("a PDF", body(messages=user({"type": "document", "source": {"type": "base64"}})), 400,
     INVALID, "plain text"),
    ("a block without its text", body(messages=user({"type": "text"})), 400,
     INVALID, "messages[0].content[0]: a block of type text needs"),
    ("an unknown block", body(messages=user({"type": "hologram"})), 400,
     INVALID, "'hologram'"),
    ("an unknown block in the system prompt", body(system=[{"type": "tool_use", "id": "1",
     "name": "f", "input": {}}]), 400, INVALID, "system[0]: "),
    ("nothing but a reply to continue", body(messages=[{"role": "assistant", "content": "So "}]),
     400, INVALID, "end the conversation with a user message"),
    ("a tool without a schema", body(tools=[{"name": "f"}]), 400, INVALID,
     "tools[0].input_schema: "),
    ("a tool without a name", body(tools=[{"input_schema": {}}]), 400, INVALID,
     "tools[0].name: "),
    ("a choice of no tool", body(tool_choice={"type": "any"}), 400, INVALID, "tools: "),
    ("a choice without a name", body(tool_choice={"type": "tool"}), 400, INVALID,
     "tool_choice.name: "),
    ("too many stop sequences", body(stop_sequences=["x"] * 17), 400, INVALID,
     "stop_sequences: "),
    ("far too many stop sequences", body(stop_sequences=[5] * 2000), 400, INVALID,
     "at most 1024"),
    ("too many blocks", body(messages=user(*[5] * 10_001)), 400, INVALID,
     "at most 10000 blocks"),
    ("a format that is none", body(output_config={"format": {"type": "xml"}}), 400,
     INVALID, "output_config.format: "),
    ("a schema that cannot be", body(output_config={"format": {"type": "json_schema",
     "schema": {"type": "wish"}}}), 400, INVALID, "output_config.format: "),
    ("such a schema in the older field", body(output_format={"type": "json_schema",
     "schema": {"type": "wish"}}), 400, INVALID, "output_format: "),
    ("an image after a system prompt", body(system="Hm.", messages=user({"type": "text",
     "text": "x"}, IMAGE)), 400, INVALID, "messages[0].content[1].source: "),
    ("an image in the system prompt", body(system=[IMAGE]), 400, INVALID, "system: "),
    ("only a reply after a system prompt", body(system="Hm.", messages=[*HI, *HI,
     {"role": "assistant", "content": [CALL]}]), 400, INVALID, "messages[2]: cannot continue"),
    ("a tool after one that is ignored", body(tools=[{"type": "web_search_1", "name": "s"},
     {"name": "later", "input_schema": {}, "defer_loading": True}, BAD_TOOL]), 400, INVALID,
     "tools[2].input_schema: "),
    ("half a surrogate pair", body(system="\ud800"), 400, INVALID, "text contains half"),
    ("a body that is no object", [1], 400, INVALID, "object"),
    ("a body that is too large", body(system="x" * 400_000), 413, "request_too_large", "larger"),
]  # fmt: skip


@pytest.mark.parametrize(
    "payload,status,kind,words",
    [case[1:] for case in BAD_REQUESTS],
    ids=[case[0] for case in BAD_REQUESTS],
)
def test_bad_requests_are_refused_in_anthropics_shape(
    running: RunningServer, payload: Any, status: int, kind: str, words: str
) -> None:
    for stream in (False, True):
        given = {**payload, "stream": stream} if isinstance(payload, dict) else payload
        answer = post(running, given)
        assert answer.status_code == status
        told = answer.json()
        assert told.keys() == {"type", "error", "request_id"}
        assert told["type"] == "error"
        assert told["error"]["type"] == kind
        assert words in told["error"]["message"]
        assert told["request_id"] == answer.headers["request-id"]


def test_unknown_paths_and_bodies_too(running: RunningServer) -> None:
    with running.client() as http:
        unknown = http.get("/v1/messages/batches")
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
        garbled = http.post(
            "/v1/messages", content="{", headers={"content-type": "application/json"}
        )
        assert garbled.json()["error"]["type"] == INVALID
        # Other clients get OpenAI's format, unless a header names Anthropic's.
        assert "type" not in http.get("/v1/nowhere").json()
        version = {"anthropic-version": "2023-06-01"}
        assert http.get("/v1/nowhere", headers=version).json()["type"] == "error"


def test_a_full_queue_is_an_overload(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, max_batch_size=1, max_queue=0, prefill_step_size=8)
    with run_server(settings) as running, running.client() as http:
        busy = body(messages=user({"type": "text", "text": "x" * 100_000}), stream=True)
        with http.stream("POST", "/v1/messages", json=busy) as first:
            pieces = first.iter_text()  # its end would be the stream's
            next(pieces)
            answer = post(running, body())
    assert answer.status_code == 529
    assert answer.json()["error"]["type"] == "overloaded_error"
    assert int(answer.headers["retry-after"]) >= 1


def test_what_claude_code_asks_besides(running: RunningServer) -> None:
    with running.client() as http:
        for path in ("/", "/api/hello"):
            probe = http.head(path)
            assert (probe.status_code, probe.content) == (200, b"")
        events = {"events": [{"event_type": "ClaudeCodeInternalEvent", "event_data": {}}]}
        assert http.post("/api/event_logging/batch", json=events).status_code == 200
        anthropics = http.get("/v1/models?limit=1000", headers={"anthropic-version": "2023-06-01"})
        assert anthropics.json()["data"][0]["type"] == "model"
        assert http.get("/v1/models").json()["object"] == "list"


def test_fields_that_change_nothing_are_ignored(running: RunningServer) -> None:
    plain = post(running, body())
    extended = body(
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high", "task_budget": {"type": "tokens"}},
        service_tier="auto",
        container=None,
        mcp_servers=[],
        betas=["x"],
        metadata={"user_id": "someone"},
        speed="fast",
        cache_control={"type": "ephemeral"},
        thinking={"type": "disabled", "surprise": 1},
        tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
    )
    answer = post(running, extended)
    assert answer.status_code == 200
    assert answer.json()["content"] == plain.json()["content"]
    told = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "redacted_thinking", "data": "opaque"},
        {"type": "text", "text": "Found.", "citations": []},
    ]
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "d"}}
    history = [*HI, {"role": "assistant", "content": told}, *user(document)]
    assert post(running, body(messages=history)).status_code == 200


def test_null_is_accepted_wherever_a_field_may_be_left_out(running: RunningServer) -> None:
    fields = MessagesRequest.model_fields.items()
    nulls = {name: None for name, field in fields if not field.is_required()}
    assert {"system", "tools", "tool_choice", "thinking", "stream"} < nulls.keys()
    assert post(running, body(**nulls)).status_code == 200


def test_waiting_is_visible(running: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "HEARTBEAT_S", 0.01)
    long = body(messages=[{"role": "user", "content": "w" * 80_000}], stream=True, max_tokens=1)
    answer = post(running, long)
    text = answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert text.startswith(": waiting\n\n")
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in text
    assert ": prefill " in text
    assert text.rstrip().endswith('{"type":"message_stop"}')


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_in_mid_prefill_cancels_its_work(tmp_path: Path, stream: bool) -> None:
    with run_server(make_settings(tmp_path, prefill_step_size=64)) as running:
        long = body(messages=[{"role": "user", "content": "q" * 100_000}], stream=stream)

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
                asking = asyncio.create_task(http.post("/v1/messages", json=long, timeout=60))
                await asyncio.to_thread(await_that, lambda: running.server.device.num_live == 1)
                asking.cancel()

        asyncio.run(leave())
        await_that(lambda: running.server.device.num_live == 0)
        # It was cut short: much of the prompt was not computed.
        sealed = running.server.memory.cache.store.nodes()
        assert max((node.end for node in sealed), default=0) < 80_000
        assert running.server.memory.agents.agents(LOCAL_TENANT) == []  # and it left no turn


def test_agents_are_known_by_claude_codes_session(running: RunningServer) -> None:
    session = "97858200-a072-462a-8534-47e9c8bdf255"
    told = {"user_id": json.dumps({"device_id": "d", "session_id": session})}
    agents = running.server.memory.agents

    def known() -> set[str]:
        return {agent.id for agent in agents.agents(LOCAL_TENANT)}

    before = known()
    post(running, body(metadata=told))
    (agent,) = known() - before
    history = [*HI, {"role": "assistant", "content": "x"}, *HI]
    header = {"x-claude-code-session-id": session}
    post(running, body(metadata=told, messages=history), **header)
    post(running, body(messages=history), **header)
    old = f"user_abc_account__session_{session}"
    post(running, body(metadata={"user_id": old}))
    assert known() - before == {agent}
    assert agents.get(LOCAL_TENANT, agent).num_turns >= 1
    # A sub-agent is another one, and so is another system prompt.
    post(running, body(metadata=told), **header, **{"x-claude-code-agent-id": "explore-1"})
    post(running, body(metadata=told, system="Write a title."), **header)
    assert len(known() - before) == 3
    post(running, body(), **{"X-Agent-ID": "coder"})
    assert "coder" in known()
    post(running, body(session_id="my-session"))
    assert "my-session" in known()
