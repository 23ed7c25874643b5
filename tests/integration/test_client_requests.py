"""What clients made for other servers send, over a socket, on the fake backend."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.http_server import RunningServer, make_settings, run_server

pytestmark = pytest.mark.integration

HI: Any = [{"role": "user", "content": "hi"}]
GREEDY: Any = {"temperature": 0}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = make_settings(
        tmp_path_factory.mktemp("home"), default_max_tokens=20, model_aliases=["gpt-*"]
    )
    with run_server(settings) as server:
        yield server


@pytest.fixture
def http(running: RunningServer) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client


@pytest.fixture
def openai_client(running: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{running.url}/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


@pytest.fixture
def anthropic_client(running: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=running.url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


# -- names of models --------------------------------------------------------------------------

BODIES = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": HI, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": HI},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "named", [{}, {"model": None}, {"model": "anthropic/claude-x"}, {"model": "GPT-9"}]
)
def test_a_model_may_be_left_out_or_asked_for_by_an_alias(
    http: httpx.Client, path: str, named: dict[str, Any]
) -> None:
    answer = http.post(path, json=BODIES[path] | named)
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", "fake") == "fake"


@pytest.mark.parametrize("path", BODIES)
def test_another_name_is_refused_with_the_names_that_are_served(
    http: httpx.Client, path: str
) -> None:
    answer = http.post(path, json=BODIES[path] | {"model": "llama"})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert all(word in message for word in ("'fake'", "'claude*'", "'gpt-*'", "model_aliases"))


def test_every_name_may_be_served(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, model_aliases=["*"])
    with run_server(settings) as running, running.client() as http:
        path = "/v1/chat/completions"
        assert http.post(path, json=BODIES[path] | {"model": "a/b c"}).status_code == 200
        assert http.get("/v1/models/anything").json()["id"] == "fake"


def test_models_say_how_long_they_are_as_vllm_does(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert model["max_model_len"] == model["max_context"] == 131_072


# -- numbers ----------------------------------------------------------------------------------


def test_minus_one_means_none(http: httpx.Client) -> None:
    for path, body in BODIES.items():
        if "count_tokens" in path:
            continue
        limit = "max_output_tokens" if "responses" in path else "max_tokens"
        answer = http.post(path, json={**body, "top_k": -1, limit: -1})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        # The server's own default, or where the reply ended.
        assert 3 < usage.get("completion_tokens", usage.get("output_tokens")) <= 20
        assert http.post(path, json={**body, limit: 0}).status_code == 400
        assert http.post(path, json={**body, "top_k": -2}).status_code == 400
    http.post("/v1/agents", json={"id": "a"}).raise_for_status()
    said = {"message": "hi", "max_tokens": -1, "top_k": -1}
    assert http.post("/v1/agents/a/generate", json=said).status_code == 200


def test_a_fingerprint_tells_what_answered(openai_client: openai.OpenAI) -> None:
    chat = openai_client.chat.completions.create(model="fake", messages=HI, max_tokens=3)
    assert chat.system_fingerprint is not None
    assert chat.system_fingerprint.startswith("fp_")
    stream = openai_client.chat.completions.create(
        model="fake", messages=HI, max_tokens=3, stream=True
    )
    assert {chunk.system_fingerprint for chunk in stream} == {chat.system_fingerprint}
    old = openai_client.completions.create(model="fake", prompt="hi", max_tokens=3)
    assert old.system_fingerprint == chat.system_fingerprint


def test_a_stream_of_calls_has_no_empty_text(openai_client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    stream = openai_client.chat.completions.create(
        model="fake",
        messages=HI,
        max_tokens=100,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
    )
    deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    assert any(delta.tool_calls for delta in deltas)
    assert all(delta.content is None for delta in deltas)


# -- usage ------------------------------------------------------------------------------------


def test_without_cache_control_what_was_computed_is_input(
    anthropic_client: anthropic.Anthropic,
) -> None:
    messages: Any = [{"role": "user", "content": "count me"}]

    def ask() -> Any:
        with anthropic_client.messages.stream(
            model="fake", max_tokens=3, messages=messages, extra_body=GREEDY
        ) as stream:
            start = next(iter(stream))
            message = stream.get_final_message()
        assert start.type == "message_start"
        begun = start.message.usage
        assert begun.input_tokens == message.usage.input_tokens
        assert begun.cache_read_input_tokens == message.usage.cache_read_input_tokens
        return message.usage

    count = anthropic_client.messages.count_tokens(model="fake", messages=messages).input_tokens
    first, second = ask(), ask()
    assert first.input_tokens + first.cache_read_input_tokens == count
    assert (second.input_tokens, second.cache_read_input_tokens) == (1, count - 1)
    assert first.cache_creation_input_tokens == second.cache_creation_input_tokens == 0


MARK = {"cache_control": {"type": "ephemeral"}}
TEXT = {"type": "text", "text": "hello"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
MARKED: list[dict[str, Any]] = [
    MARK,
    {"system": [TEXT | MARK]},
    {"tools": [TOOL | MARK]},
    {"messages": [{"role": "user", "content": [TEXT | MARK]}]},
    {
        "messages": [
            *HI,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "1", "content": [TEXT | MARK]}],
            },
        ]
    },
]


@pytest.mark.parametrize("marked", MARKED)
def test_with_cache_control_what_was_computed_is_written(
    http: httpx.Client, marked: dict[str, Any]
) -> None:
    body = {"messages": HI, "max_tokens": 3, **marked}
    usage = http.post("/v1/messages", json=body).json()["usage"]
    assert usage["input_tokens"] == 0
    assert usage["cache_creation_input_tokens"] > 0


# -- what responses repeat --------------------------------------------------------------------


def test_a_response_says_how_it_was_sampled(openai_client: openai.OpenAI) -> None:
    given = openai_client.responses.create(
        model="fake", input="hi", temperature=0.5, max_output_tokens=3
    )
    assert (given.temperature, given.top_p) == (0.5, 1.0)
    found = openai_client.responses.retrieve(given.id)
    assert (found.temperature, found.top_p) == (0.5, 1.0)
    assert json.loads(given.model_dump_json())["temperature"] == 0.5
