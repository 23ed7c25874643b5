"""Why a prompt was not reused, in every protocol, with the vendors' own packages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from tests.http_server import RunningServer, give_keys, make_settings, run_server
from tests.integration.conftest import sdk_client

pytestmark = pytest.mark.integration

RECORDING = Path(__file__).parents[1] / "recordings" / "pi.json"
EXPLAIN = {"X-Cache-Explain": "1"}
SYSTEM = "You are a careful assistant. " * 20
GREEDY: Any = {"temperature": 0}


def tool(name: str) -> Any:
    return {"name": name, "description": f"Does {name}.", "input_schema": {"type": "object"}}


READ, GREP, GLOB, EDIT, LIST = map(tool, ("Read", "Grep", "Glob", "Edit", "List"))
TOOLS: Any = [READ, EDIT]
MORE_TOOLS: Any = [READ, GREP, GLOB, LIST, EDIT]
ADDED = "tool list changed: 3 tools added at position 2"


def user(text: str) -> Any:
    return {"role": "user", "content": text}


# -- Anthropic -------------------------------------------------------------------------------------


def ask(client: anthropic.Anthropic, said: list[Any], previous: Any = ..., **changes: Any) -> Any:
    """Send a request with diagnostics, unless `previous` is left out."""
    given: Any = {"model": "fake", "max_tokens": 8, "system": SYSTEM, "tools": TOOLS, **changes}
    told: Any = {} if previous is ... else {"diagnostics": {"previous_message_id": previous}}
    return client.messages.create(
        messages=said, extra_body={**GREEDY, "ignore_eos": True}, **told, **given
    )


def go_on(said: list[Any], reply: Any) -> list[Any]:
    content = [block.model_dump(exclude_none=True) for block in reply.content]
    return [*said, {"role": "assistant", "content": content}, user("And then?")]


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"tools": MORE_TOOLS}, "tools_changed"),
    ({"tools": [EDIT, READ]}, "tools_changed"),
    ({"system": SYSTEM + "It is noon."}, "system_changed"),
    ({"system": "It is noon."}, "system_changed"),
]


@pytest.fixture(scope="module")
def first(running: RunningServer) -> tuple[list[Any], Any]:
    """A conversation's first request and reply."""
    said = [user("What is in the file?")]
    with sdk_client(anthropic.Anthropic, running) as client:
        return said, ask(client, said, None)


@pytest.mark.parametrize("changes, kind", CHANGES)
def test_a_changed_request_has_a_reason(
    anthropic_client: anthropic.Anthropic,
    first: tuple[list[Any], Any],
    changes: dict[str, Any],
    kind: str,
) -> None:
    said, reply = first
    assert reply.diagnostics is None
    found = ask(anthropic_client, go_on(said, reply), reply.id, **changes)
    reason = found.diagnostics.cache_miss_reason
    assert reason.type == kind
    usage = reply.usage
    num_before = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
    assert 0 < reason.cache_missed_input_tokens <= num_before


def test_changed_messages_have_a_reason(
    anthropic_client: anthropic.Anthropic, first: tuple[list[Any], Any]
) -> None:
    _, reply = first
    edited = go_on([user("What is in this file?")], reply)
    assert ask(anthropic_client, edited, reply.id).diagnostics.cache_miss_reason.type == (
        "messages_changed"
    )


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_conversation_that_goes_on_has_none(
    anthropic_client: anthropic.Anthropic, first: tuple[list[Any], Any], is_streamed: bool
) -> None:
    said, reply = first
    going_on: Any = go_on(said, reply)
    if not is_streamed:
        found = ask(anthropic_client, going_on, reply.id)
        assert found.diagnostics is None
        assert "diagnostics" in found.model_fields_set
        assert "diagnostics" not in ask(anthropic_client, going_on).model_fields_set
        return
    for tools, expected in ((TOOLS, None), (MORE_TOOLS, "tools_changed")):
        with anthropic_client.messages.stream(
            model="fake",
            max_tokens=8,
            system=SYSTEM,
            tools=tools,
            messages=going_on,
            diagnostics={"previous_message_id": reply.id},
            extra_body=GREEDY,
        ) as stream:
            start = next(iter(stream))
            whole = stream.get_final_message()
        assert start.type == "message_start"
        told = start.message.diagnostics
        assert whole.diagnostics == told
        reason = told.cache_miss_reason if told else None
        assert (reason.type if reason else None) == expected


def test_an_unknown_message_is_no_error(anthropic_client: anthropic.Anthropic) -> None:
    for unknown in ("msg_unknown", "x" * 200):
        told = ask(anthropic_client, [user("hi")], unknown).diagnostics
        assert told.cache_miss_reason.type == "previous_message_not_found"


def test_a_client_of_the_beta_gets_the_same(
    anthropic_client: anthropic.Anthropic, first: tuple[list[Any], Any]
) -> None:
    said, reply = first
    found = anthropic_client.beta.messages.create(
        model="fake",
        max_tokens=8,
        system=SYSTEM,
        tools=MORE_TOOLS,
        messages=go_on(said, reply),
        diagnostics={"previous_message_id": reply.id},
        betas=["cache-diagnosis-2026-04-07"],
    )
    assert found.diagnostics is not None
    assert found.diagnostics.cache_miss_reason is not None
    assert found.diagnostics.cache_miss_reason.type == "tools_changed"


def test_an_invalid_field_is_named(http: httpx.Client) -> None:
    body = {"messages": [user("hi")], "max_tokens": 3, "diagnostics": {"previous_message_id": 3}}
    refused = http.post("/v1/messages", json=body)
    assert refused.status_code == 400
    assert "diagnostics.previous_message_id" in refused.json()["error"]["message"]
    refused = http.post("/v1/messages", json=body, headers={"X-Cache-Explain": "maybe"})
    assert refused.status_code == 400
    refused = http.post(
        "/v1/chat/completions", json={"messages": [user("hi")]}, headers={"X-Cache-Explain": "x"}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Cache-Explain")


def test_other_tenants_messages_are_not_found(tmp_path: Path) -> None:
    keys = give_keys(tmp_path, "one", "two")
    with run_server(make_settings(tmp_path)) as running:
        clients = {
            name: anthropic.Anthropic(base_url=running.url, api_key=key, max_retries=0)
            for name, key in keys.items()
        }
        reply = ask(clients["one"], [user("hi")], None)
        kinds = {
            name: ask(
                client, [user("hi")], reply.id, tools=MORE_TOOLS
            ).diagnostics.cache_miss_reason.type
            for name, client in clients.items()
        }
        for client in clients.values():
            client.close()
    assert kinds == {"one": "tools_changed", "two": "previous_message_not_found"}


def test_after_a_restart(tmp_path: Path) -> None:
    said = [user("What is in the file?")]
    with (
        run_server(make_settings(tmp_path)) as running,
        sdk_client(anthropic.Anthropic, running) as client,
    ):
        reply = ask(client, said, None)
        hidden = ask(client, said, None, extra_headers={"X-Agent-Ephemeral": "true"})
    with (
        run_server(make_settings(tmp_path)) as running,
        sdk_client(anthropic.Anthropic, running) as client,
    ):
        # An ephemeral request leaves nothing to compare with, and may compare.
        lost = ask(client, go_on(said, hidden), hidden.id, tools=MORE_TOOLS)
        assert lost.diagnostics.cache_miss_reason.type == "previous_message_not_found"
        ephemeral = {"X-Agent-Ephemeral": "true"}
        more = go_on(said, reply)
        found = ask(client, more, reply.id, tools=MORE_TOOLS, extra_headers=ephemeral)
        assert found.diagnostics.cache_miss_reason.type == "tools_changed"
        found = ask(client, more, reply.id, tools=MORE_TOOLS, extra_headers=EXPLAIN)
        told = found.usage.model_dump()["cache_explain"]
        assert told["text"].startswith(f"{ADDED}, ")
        missed = found.diagnostics.cache_miss_reason.cache_missed_input_tokens
        assert 0 < told["missed_tokens"] <= missed
        assert told["changed_tools"] == ["Grep", "Glob", "List"]


# -- every protocol --------------------------------------------------------------------------------


def _chat(running: RunningServer, agent: str, tools: Any, said: str) -> Any:
    functions: Any = [{"type": "function", "function": {"name": t["name"]}} for t in tools]
    with sdk_client(openai.OpenAI, running) as client:
        made = client.chat.completions.create(
            model="fake",
            messages=[user(said)],
            tools=functions,
            max_tokens=4,
            extra_headers={**EXPLAIN, "X-Agent-ID": agent},
        )
    return made.usage.model_dump()


def _chat_stream(running: RunningServer, agent: str, tools: Any, said: str) -> Any:
    functions: Any = [{"type": "function", "function": {"name": t["name"]}} for t in tools]
    with sdk_client(openai.OpenAI, running) as client:
        *_, last = client.chat.completions.create(
            model="fake",
            messages=[user(said)],
            tools=functions,
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={**EXPLAIN, "X-Agent-ID": agent},
        )
    assert last.usage is not None
    return last.usage.model_dump()


def _responses(running: RunningServer, agent: str, tools: Any, said: str) -> Any:
    functions: Any = [
        {"type": "function", "name": t["name"], "parameters": {}, "strict": False} for t in tools
    ]
    with sdk_client(openai.OpenAI, running) as client:
        made = client.responses.create(
            model="fake",
            input=said,
            tools=functions,
            max_output_tokens=4,
            extra_headers={**EXPLAIN, "X-Agent-ID": agent},
        )
    assert made.usage is not None
    assert made.prompt_cache_diagnostics is None
    return made.usage.model_dump()


def _messages(running: RunningServer, agent: str, tools: Any, said: str) -> Any:
    with sdk_client(anthropic.Anthropic, running) as client:
        made = client.messages.create(
            model="fake",
            messages=[user(said)],
            tools=tools,
            max_tokens=4,
            extra_headers={**EXPLAIN, "X-Agent-ID": agent},
        )
    assert "diagnostics" not in made.model_fields_set
    return made.usage.model_dump()


def _ollama(running: RunningServer, agent: str, tools: Any, said: str) -> Any:
    functions = [{"type": "function", "function": {"name": t["name"]}} for t in tools]
    headers = {**EXPLAIN, "X-Agent-ID": agent}
    body = {
        "model": "fake",
        "messages": [user(said)],
        "tools": functions,
        "options": {"num_predict": 4},
    }
    with running.client(headers=headers) as http:  # Ollama's package drops fields it does not know
        *_, last = http.post("/api/chat", json=body).raise_for_status().text.splitlines()
    assert ollama.ChatResponse.model_validate_json(last).done
    return json.loads(last)


def _agent(running: RunningServer, agent: str, tools: Any, said: str) -> Any:
    functions = [{"name": t["name"], "parameters": {}} for t in tools]
    with running.client(headers=EXPLAIN) as http:
        http.post("/v1/agents", json={"id": agent, "tools": functions})
        http.patch(f"/v1/agents/{agent}", json={"tools": functions}).raise_for_status()
        body = {"message": said, "max_tokens": 4}
        return http.post(f"/v1/agents/{agent}/generate", json=body).raise_for_status().json()


PROTOCOLS: dict[str, Callable[[RunningServer, str, Any, str], Any]] = {
    "chat": _chat,
    "chat-stream": _chat_stream,
    "responses": _responses,
    "messages": _messages,
    "ollama": _ollama,
    "agent": _agent,
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_header_explains_in_every_protocol(running: RunningServer, protocol: str) -> None:
    send, agent = PROTOCOLS[protocol], f"explained-{protocol}"
    said = f"{protocol} " * 40
    begun = send(running, agent, TOOLS, said)["cache_explain"]
    assert (begun["reason"], begun["compared_with"]) == (None, None)
    assert begun["text"].startswith("no earlier turn to compare with, ")
    found = send(running, agent, MORE_TOOLS, said)["cache_explain"]
    assert found["reason"] == "tools_changed"
    assert found["text"] == f"{ADDED}, {found['missed_tokens']:,} tokens recomputed"
    assert 0 < found["missed_tokens"] <= found["computed"]
    assert found["compared_with"].startswith("turn_")
    with running.client() as http:
        explained = http.get(f"/v1/agents/{agent}/explain").json()
        assert explained["miss"]["text"] == found["text"]
        assert found["text"][1:] in explained["summary"]
        # The turn that it diverged from is in the timeline, though no longer in the log.
        entries = http.get(f"/v1/agents/{agent}/timeline").json()["data"]
    assert [bool(entry["miss"]) for entry in entries] == [True, False]
    assert entries[0]["miss"] == explained["miss"]
    assert entries[1]["turn_id"] == found["compared_with"]


def test_completions_are_explained(openai_client: openai.OpenAI) -> None:
    def explained(prompt: str) -> Any:
        made = openai_client.completions.create(
            model="fake",
            prompt=prompt,
            max_tokens=4,
            extra_headers={**EXPLAIN, "X-Agent-ID": "raw"},
        )
        assert made.usage is not None
        return made.usage.model_dump()["cache_explain"]

    text = "once upon a time " * 10
    assert explained(text)["reason"] is None
    found = explained("Once" + text[4:])
    assert (found["reason"], found["text"].split(",")[0]) == ("messages_changed", "prompt changed")


def test_nothing_is_explained_unless_asked(http: httpx.Client) -> None:
    body = {"messages": [user("hi")], "max_tokens": 3}
    for headers in ({}, {"X-Cache-Explain": "0"}):
        for path in ("/v1/chat/completions", "/v1/messages"):
            answer = http.post(path, json=body, headers=headers).raise_for_status()
            assert "cache_explain" not in answer.text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_responses_are_compared_by_id(openai_client: openai.OpenAI, is_streamed: bool) -> None:
    tools: Any = [{"type": "function", "name": "f", "parameters": {}, "strict": False}]

    def create(compared: str | None, **changes: Any) -> Any:
        options: Any = {"comparison_response_id": compared}
        given = {"model": "fake", "input": "hi " * 50, "max_output_tokens": 4, **changes}
        made: Any = openai_client.responses.create(
            stream=is_streamed, prompt_cache_options=options, **given
        )
        return [*made][-1].response if is_streamed else made

    first = create(None)
    assert first.prompt_cache_diagnostics is None
    assert create(first.id).prompt_cache_diagnostics.type == "cache_hit"
    assert create("resp_x").prompt_cache_diagnostics.type == "comparison_response_not_found"
    for changes, reason in (
        ({"tools": tools}, "tools_changed"),
        ({"instructions": "Be brief."}, "input_changed"),
        ({"input": "ho " * 50}, "input_changed"),
    ):
        told = create(first.id, **changes).prompt_cache_diagnostics
        assert (told.type, told.reason) == ("cache_miss", reason)
        assert told.cache_missed_tokens >= 0
    assert "cache_explain" not in first.usage.model_dump()


# -- what happens to the cache -----------------------------------------------------------------


def test_an_evicted_cache_is_named(http: httpx.Client) -> None:
    http.post("/v1/agents", json={"id": "gone", "system": SYSTEM}).raise_for_status()

    def say(text: str) -> Any:
        body = {"message": text, "max_tokens": 4}
        made = http.post("/v1/agents/gone/generate", json=body, headers=EXPLAIN)
        return made.raise_for_status().json()["cache_explain"]

    say("one")
    assert say("two")["reason"] is None
    http.post("/v1/agents/gone/evict", json={"to": "cold"}).raise_for_status()
    found = say("three")
    assert found["reason"] == "evicted"
    assert found["text"] == f"KV cache was evicted, {found['missed_tokens']:,} tokens recomputed"
    (latest, *_) = http.get("/v1/agents/gone/timeline").json()["data"]
    assert latest["miss"]["text"] == found["text"]
    assert latest["reuse"]["computed"] >= found["missed_tokens"]


def test_a_real_model(tiny_starter_dir: Path, tmp_path: Path) -> None:
    real = {"backend": "torch", "model": str(tiny_starter_dir), "threads": 1}
    said = [user("What is in the file?")]
    with (
        run_server(make_settings(tmp_path, **real)) as running,
        sdk_client(anthropic.Anthropic, running) as client,
    ):
        reply = ask(client, said, None, model=running.model)
        more = {"model": running.model, "extra_headers": EXPLAIN}
        going_on = ask(client, go_on(said, reply), reply.id, **more)
        assert going_on.diagnostics is None
        assert going_on.usage.model_dump()["cache_explain"]["reason"] is None
        found = ask(client, go_on(said, reply), reply.id, tools=MORE_TOOLS, **more)
    assert found.diagnostics.cache_miss_reason.type == "tools_changed"
    told = found.usage.model_dump()["cache_explain"]
    assert told["text"] == f"{ADDED}, {told['missed_tokens']:,} tokens recomputed"
    assert 0 < told["missed_tokens"] <= told["computed"] == found.usage.input_tokens


# -- a recorded conversation -------------------------------------------------------------------


def replay(http: httpx.Client, requests: list[Any]) -> None:
    """Send recorded requests, with the replies that this server gave to those before."""
    replies: list[Any] = []
    for request in requests:
        mine, said = iter(replies), []
        for one in request["messages"]:
            if one["role"] == "tool":
                said.append({**one, "tool_call_id": replies[0]["tool_calls"][0]["id"]})
            else:
                said.append(next(mine) if one["role"] == "assistant" else one)
        short = {"stream": False, "max_completion_tokens": 100}
        body = {**request, **GREEDY, **short, "messages": said}
        if not replies:  # the model must call the tool that it called in the recording
            body["tool_choice"] = {"type": "function", "function": {"name": "read"}}
        made = http.post("/v1/chat/completions", json=body).raise_for_status().json()
        replies.append(made["choices"][0]["message"])


def test_a_recorded_conversation_of_pi(tmp_path: Path) -> None:
    """The client names no session, and its system prompt lists the tools too."""
    recorded = json.loads(RECORDING.read_text())
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        replay(http, recorded["requests"])
        latest = running.server.memory.agents.recent()[0]
        entries = http.get(f"/v1/agents/{latest.id}/timeline").json()["data"]
    assert [bool(entry["miss"]) for entry in entries] == [True, False, False]
    assert entries[1]["agent_id"] != latest.id
    assert entries[1]["reuse"]["computed"] < 300
    miss = entries[0]["miss"]
    assert miss["text"] == f"{ADDED}, {miss['missed_tokens']:,} tokens recomputed"
    assert miss["changed_tools"] == ["grep", "find", "ls"]
    assert miss["missed_tokens"] > 3000
