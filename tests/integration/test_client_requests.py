"""Requests of clients written for other servers, over a socket, on the fake backend."""

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from semantic.adapters.outbound.backends.fake import FakeTokenizer
from semantic.application.prompt.renderer import render
from semantic.domain.chat import ChatRequest, Message, Role
from tests.http_server import RunningServer, make_settings, run_server

pytestmark = pytest.mark.integration

SETTINGS = {"default_max_tokens": 20, "model_aliases": ["gpt-*"]}
HI: Any = [{"role": "user", "content": "hi"}]
GREEDY: Any = {"temperature": 0}


def chat(client: openai.OpenAI, messages: list[Any], **given: Any) -> Any:
    extra = {"ignore_eos": True, **given.pop("extra_body", {})}
    asked = {"temperature": 0, "max_tokens": 6, **given, "extra_body": extra}
    return client.chat.completions.create(model="fake", messages=messages, **asked)


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
    assert answer.json()["error"].get("param", "model") == "model"
    message = answer.json()["error"]["message"]
    assert all(word in message for word in ("'fake'", "'claude*'", "'gpt-*'", "model_aliases"))


def test_every_name_may_be_served(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, model_aliases=["*"])
    with run_server(settings) as running, running.client() as http:
        path = "/v1/chat/completions"
        assert http.post(path, json=BODIES[path] | {"model": "a/b c"}).status_code == 200
        assert http.get("/v1/models/anything").json()["id"] == "fake"


# -- numbers ----------------------------------------------------------------------------------


def test_minus_one_means_none(http: httpx.Client) -> None:
    for path, body in BODIES.items():
        if "count_tokens" in path:
            continue
        limit = "max_output_tokens" if "responses" in path else "max_tokens"
        answer = http.post(path, json={**body, **GREEDY, "top_k": -1, limit: -1})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        # The server's own default, or where the reply ended.
        assert 3 < usage.get("completion_tokens", usage.get("output_tokens")) <= 20
        # Completions compute the prompt alone.
        is_allowed = path == "/v1/completions"
        assert http.post(path, json={**body, limit: 0}).status_code == (200 if is_allowed else 400)
        assert http.post(path, json={**body, "top_k": -2}).status_code == 400
    http.post("/v1/agents", json={"id": "a"}).raise_for_status()
    said = {"message": "hi", "max_tokens": -1, "top_k": -1}
    assert http.post("/v1/agents/a/generate", json=said).status_code == 200


def test_a_fingerprint_tells_what_answered(openai_client: openai.OpenAI) -> None:
    whole = chat(openai_client, HI)
    assert whole.system_fingerprint.startswith("fp_")
    chunks = chat(openai_client, HI, stream=True)
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}
    old = openai_client.completions.create(model="fake", prompt="hi", max_tokens=3)
    assert old.system_fingerprint == whole.system_fingerprint


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
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [TEXT | MARK]}
NAMED = {"type": "text", "text": "NAME"}
ENDING = len("<assistant\n")  # the fake model's special token is one, and the rest bytes
SAID = {"role": "assistant", "content": "yes"}
# Each with the number of tokens after the mark.
MARKED: list[tuple[dict[str, Any], int]] = [
    (MARK, ENDING),
    ({"messages": [{"role": "user", "content": [TEXT | MARK]}]}, ENDING),
    (
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": [RESULT]},
            ]
        },
        ENDING,
    ),
    (
        {"messages": [{"role": "user", "content": [TEXT | MARK]}, SAID, *HI]},
        len("<assistant\nyes><user\nhi>") + ENDING,
    ),
    ({"system": [NAMED | MARK]}, len("hi>") + ENDING),
    ({"tools": [TOOL | MARK]}, len("hi>") + ENDING),
]


@pytest.mark.parametrize("number", range(len(MARKED)))
def test_cache_control_divides_what_was_computed(http: httpx.Client, number: int) -> None:
    """What comes before the last mark is written to the cache, and what comes after it is input."""
    marked, num_after = MARKED[number]
    body = json.dumps({"messages": HI, "max_tokens": 3, "system": [NAMED], **marked})
    body = body.replace("NAME", f"prompt {number}")  # no two share a block

    def post(path: str) -> Any:
        headers = {"content-type": "application/json"}
        return http.post(path, content=body, headers=headers).json()

    first, again = (post("/v1/messages")["usage"] for _ in range(2))
    count = post("/v1/messages/count_tokens")["input_tokens"]
    read, written = first["cache_read_input_tokens"], first["cache_creation_input_tokens"]
    assert (first["input_tokens"], read + written) == (num_after, count - num_after)
    assert read < 64
    # The last token is computed in any case.
    assert (again["input_tokens"], again["cache_creation_input_tokens"]) == (1, 0)
    assert again["cache_read_input_tokens"] == count - 1


# -- what responses repeat --------------------------------------------------------------------


def test_a_response_reports_its_sampling_parameters(openai_client: openai.OpenAI) -> None:
    given = openai_client.responses.create(
        model="fake", input="hi", temperature=0.5, max_output_tokens=3
    )
    assert (given.temperature, given.top_p) == (0.5, 1.0)
    found = openai_client.responses.retrieve(given.id)
    assert (found.temperature, found.top_p) == (0.5, 1.0)
    assert json.loads(given.model_dump_json())["temperature"] == 0.5


# -- what constrains a reply ------------------------------------------------------------------

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
]


@pytest.mark.parametrize("form", FORMS)
def test_a_schema_is_followed_wherever_a_client_puts_it(
    http: httpx.Client, form: dict[str, Any]
) -> None:
    answer = http.post(
        "/v1/chat/completions", json={"messages": HI, "max_tokens": 60, **GREEDY, **form}
    )
    assert answer.status_code == 200, answer.text
    made = json.loads(answer.json()["choices"][0]["message"]["content"])
    assert made["city"] in ("Paris", "Rome")


def test_a_schema_is_followed_in_the_other_protocols(http: httpx.Client) -> None:
    old = http.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 60, **GREEDY, **FORMS[0]}
    ).json()
    assert json.loads(old["choices"][0]["text"])["city"]
    new = http.post("/v1/responses", json={"input": "x", **GREEDY, **FORMS[0]}).json()
    assert json.loads(new["output"][0]["content"][0]["text"])["city"]


Json = dict[str, Any]


def _chat(schema: Json, *, is_strict: bool = False) -> tuple[str, Json]:
    form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": is_strict}}
    return "/v1/chat/completions", {"messages": HI, "response_format": form}


def _response(schema: Json, *, is_strict: bool = False) -> tuple[str, Json]:
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": is_strict}
    return "/v1/responses", {"input": "hi", "text": {"format": form}}


def _message(schema: Json) -> tuple[str, Json]:
    form = {"type": "json_schema", "schema": schema}
    return "/v1/messages", {"messages": HI, "max_tokens": 40, "output_config": {"format": form}}


@pytest.mark.parametrize("ask", [_chat, _response, _message])
def test_a_schema_that_takes_too_much_is_a_bad_request(http: httpx.Client, ask: Any) -> None:
    path, body = ask({"enum": ["x" * 1_000_000]})
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert "enforce" in answer.json()["error"]["message"]


def test_what_generators_write_is_taken_unless_it_is_strict(http: httpx.Client) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    for path, body in (_chat(schema), _response(schema), _message(schema)):
        assert http.post(path, json=body).status_code == 200
    for path, body in (_chat(schema, is_strict=True), _response(schema, is_strict=True)):
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        assert "uniqueItems" in answer.json()["error"]["message"]


# -- a reply that was begun -------------------------------------------------------------------


def test_a_reply_goes_on_with_the_assistants_message(
    openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic, http: httpx.Client
) -> None:
    begun: list[Any] = [*HI, {"role": "assistant", "content": "Well, "}]
    whole = chat(openai_client, begun).choices[0].message.content
    assert whole
    # The same tokens as a prompt of their own.
    asked = ChatRequest("fake", (Message.of(Role.USER, "hi"),))
    tokens = (*render(asked, FakeTokenizer()).tokens, *FakeTokenizer().encode_plain("Well, "))
    greedy: Any = {"temperature": 0, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    fresh = openai_client.completions.create(model="fake", prompt=list(tokens), **greedy)
    assert fresh.choices[0].text == whole
    told = chat(openai_client, begun, extra_body={"continue_final_message": True})
    assert told.choices[0].message.content == whole
    streamed = anthropic_client.messages.create(
        model="fake", max_tokens=6, messages=begun, extra_body=GREEDY
    )
    assert streamed.content[0].type == "text"
    assert whole.startswith(streamed.content[0].text)
    made = http.post(
        "/v1/responses",
        json={"input": begun, "temperature": 0, "max_output_tokens": 6, "ignore_eos": True},
    ).json()
    assert made["output"][0]["content"][0]["text"] == whole
    http.post("/v1/agents", json={"id": "begun"}).raise_for_status()
    said = {"messages": begun, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    reply = http.post("/v1/agents/begun/generate", json=said).json()
    assert reply["text"] == reply["message"]["content"][0]["text"] == f"Well, {whole}"
    counted = anthropic_client.messages.count_tokens(model="fake", messages=begun)
    assert counted.input_tokens == told.usage.prompt_tokens


def test_a_new_message_follows_where_it_is_asked_for(openai_client: openai.OpenAI) -> None:
    begun: list[Any] = [*HI, {"role": "assistant", "content": "Well, "}]
    continued = chat(openai_client, begun).usage.prompt_tokens
    for opened in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        assert chat(openai_client, begun, extra_body=opened).usage.prompt_tokens > continued


def test_the_next_turn_goes_on_from_a_reply_that_was_begun(
    openai_client: openai.OpenAI, running: RunningServer
) -> None:
    agents = running.server.memory.agents
    first: list[Any] = [{"role": "user", "content": "tell me of prefill"}]
    before = {agent.id for agent in agents.agents("local")}
    begun = chat(openai_client, [*first, {"role": "assistant", "content": "Once "}])
    (agent,) = (a for a in agents.agents("local") if a.id not in before)
    text = "Once " + begun.choices[0].message.content
    after = chat(
        openai_client,
        [*first, {"role": "assistant", "content": text}, {"role": "user", "content": "and?"}],
    )
    cached = after.usage.prompt_tokens_details.cached_tokens
    assert cached >= begun.usage.total_tokens - 1
    found = agents.get("local", agent.id)
    assert found.num_turns == 2
    said = [message.text for message in agents.conversation(found)]
    assert said[:3] == ["tell me of prefill", text, "and?"]


def test_a_form_counts_from_the_beginning(openai_client: openai.OpenAI, http: httpx.Client) -> None:
    begun: list[Any] = [*HI, {"role": "assistant", "content": '{"city": "R'}]
    reply = chat(openai_client, begun, max_tokens=60, extra_body={"json_schema": SCHEMA})
    assert json.loads('{"city": "R' + reply.choices[0].message.content) == {"city": "Rome"}
    begun[-1]["content"] = "Sure: "
    answer = http.post("/v1/chat/completions", json={"messages": begun, "json_schema": SCHEMA})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "json_schema")


def test_only_text_after_another_message_is_continued(http: httpx.Client) -> None:
    for messages in (
        [*HI, {"role": "assistant", "content": [CALL]}],
        [{"role": "assistant", "content": "alone"}],
    ):
        answer = http.post("/v1/messages", json={"messages": messages, "max_tokens": 3})
        assert answer.status_code == 400
        assert "cannot continue the last message" in answer.json()["error"]["message"]
    said = {"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}
    http.post("/v1/agents", json={"id": "order"}).raise_for_status()
    assert http.post("/v1/agents/order/generate", json=said).status_code == 400
