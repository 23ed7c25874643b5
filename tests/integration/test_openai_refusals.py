"""OpenAI's protocols refuse a request by the name of the field, before they compute anything."""

import json
from typing import Any

import httpx
import pytest

from semantic.adapters.inbound.openai.requests import ChatCompletionRequest
from tests.pictures import openai_image, picture, responses_image

pytestmark = pytest.mark.integration

SETTINGS = {"default_max_tokens": 20}
CHAT, OLD, NEW = "chat/completions", "completions", "responses"
HELLO: Any = [{"role": "user", "content": "hello"}]
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 8},
    OLD: {"prompt": "x"},
    NEW: {"input": "x"},
}
GBNF = 'root ::= "yes" | "no"'
JSON_FORM = {"type": "json_object"}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}}
BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "what"}}}
MANY_WORDS = {f"word {index}": 1 for index in range(1025)}
IMAGE = openai_image(picture())
TIME = {"type": "function", "function": {"name": "get_time"}}
WEATHER = {"type": "function", "function": {"name": "get_weather"}}
BAD_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "strict": True, "parameters": BAD_SCHEMA},
}


def said(*parts: Any) -> dict[str, Any]:
    """A message of parts."""
    return {"messages": [{"role": "user", "content": list(parts)}]}


# What all three have in common.
EVERYWHERE: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": -1}, "temperature", "between"),
    ({"temperature": 1000}, "temperature", "between"),
    ({"top_p": 2}, "top_p", "between"),
    ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias", "at most 1024"),
    ({"logit_bias": MANY_WORDS}, "logit_bias", "at most 1024"),
    ({"logit_bias": {"word": 1}}, "logit_bias", "integer"),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": ["x", 1]}, "stop[1]", "string"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": "x" * 1025}, "stop", "at most 1024"),
    ({"stop": [5] * 1025}, "stop", "at most 1024"),
    ({"stop_token_ids": [7] * 1025}, "stop_token_ids", "1024"),
    ({"session_id": "x" * 513}, "session_id", "512"),
    ({"grammar": GBNF}, "grammar", "GBNF"),
    ({"guided_grammar": GBNF}, "guided_grammar", "not supported"),
    ({"guided_regex": "a"}, "guided_regex", "structured_outputs.regex"),
    ({"guided_json": {}}, "guided_json", "structured_outputs.json"),
    ({"min_tokens": 5}, "min_tokens", "not supported"),
    ({"bad_words": ["no"]}, "bad_words", "logit_bias"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids", "structured_outputs"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ({"n_predict": 5}, "n_predict", "max_tokens"),
    ({"json_schema": {"type": "nonsense"}}, "json_schema", "schema"),
    ({"json_schema": SCHEMA, "structured_outputs": {"regex": "a"}}, "json_schema", "not both"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs.regex", "unicode"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
    ({"structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs.choice[0]", "unicode"),
    ({"structured_outputs": {"json": {"type": "what"}}}, "structured_outputs.json", "schema"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "JSON schema"),
    ({"structured_outputs": {"grammar": GBNF}}, "structured_outputs.grammar", "not supported"),
]
# What one of them refuses.
ONE: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": []}, "messages", "at least 1"),
    (CHAT, {"messages": None}, "messages", "list"),
    (CHAT, {"messages": "hi"}, "messages", "list"),
    (CHAT, {"messages": HELLO * 10_001}, "messages", "at most 10000"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role",
     "'system', 'developer', 'user', 'assistant' or 'tool'"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    (CHAT, {"messages": [*HELLO, {"role": "user", "content": "\ud800"}]}, "messages[1]",
     "surrogate"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]},
     "tools", "surrogate"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id",
     "required"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
     "messages[0].tool_calls[0].function.name", "required"),
    (CHAT, said({"type": "input_text", "text": "x"}), "messages[0].content[0].type",
     "'text', 'image_url' or 'refusal'"),
    (CHAT, said({"type": "text"}), "messages[0].content[0].text", "required"),
    (CHAT, said({"type": "text", "text": "x"}, 5), "messages[0].content[1]", "object"),
    (CHAT, said(IMAGE), "messages[0].content[0].image_url", "images"),
    (CHAT, {"messages": [*said(*[5] * 5000)["messages"], {"content": [5] * 5001}]}, "messages",
     "at most 10000 parts"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "between 1 and"),
    (CHAT, {"max_tokens": -2}, "max_tokens", "greater than or equal to -1"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "between 1 and"),
    (CHAT, {"logprobs": True, "top_logprobs": 99}, "top_logprobs", "20"),
    (CHAT, {"n": 0}, "n", "greater than or equal to 1"),
    (CHAT, {"n": 129}, "n", "less than or equal to 128"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions", "tools"),
    (CHAT, {"tools": [5] * 1025}, "tools", "at most 1024"),
    (CHAT, {"tools": [TIME, BAD_TOOL], "tool_choice": "required"},
     "tools[1].function.parameters", "'f'"),
    (CHAT, {"tool_choice": "required"}, "tools", "none is offered"),
    (CHAT, {"tools": [TIME], "tool_choice": WEATHER}, "tool_choice", "get_weather"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema",
     "needs it"),
    (CHAT, {"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.type",
     "json_schema"),
    (CHAT, {"response_format": {**JSON_FORM, "schema": SCHEMA, "json_schema": {"schema": SCHEMA}}},
     "response_format.schema", "not both"),
    (CHAT, {"structured_outputs": {"regex": "a"}, "response_format": JSON_FORM},
     "structured_outputs", "response_format"),
    (CHAT, {"json_schema": SCHEMA, "response_format": JSON_FORM}, "json_schema",
     "response_format"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities[1]", "'text'"),
    (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template", "uses the model's own"),
    (CHAT, {"echo": True}, "echo", "does not repeat"),
    (CHAT, {"add_generation_prompt": False}, "add_generation_prompt", "leave it out"),
    (CHAT, {"continue_final_message": True}, "messages[0]", "cannot continue the last message"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True},
     "add_generation_prompt", "not both"),
    (OLD, {"suffix": "y"}, "suffix", "fill in the middle"),
    (OLD, {"prompt": [1, 2], "suffix": "y"}, "suffix", "token ids"),
    (OLD, {"best_of": 4}, "best_of", "not supported"),
    (OLD, {"prompt": [97] * 50_000, "echo": True, "logprobs": 20}, "logprobs", "shorter prompt"),
    (OLD, {"suffix": "x", "echo": True, "logprobs": 1}, "suffix", "not supported with echo"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "between 1"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "between 1"),
    (OLD, {"prompt": ""}, "prompt", "empty"),
    (OLD, {"prompt": []}, "prompt", "must be"),
    (OLD, {"prompt": [[]]}, "prompt", "must be"),
    (OLD, {"prompt": ["a", 1]}, "prompt", "must be"),
    (OLD, {"prompt": [True]}, "prompt", "must be"),
    (OLD, {"prompt": [99999]}, "prompt", "not in"),
    (OLD, {"prompt": [-1]}, "prompt", "not in"),
    (OLD, {"prompt": "\ud800"}, "prompt", "surrogate"),
    (OLD, {"prompt": ["x"] * 129}, "prompt", "at most 128"),
    (OLD, {"prompt": ["x"] * 64, "n": 3}, "n", "at most 128"),
    (NEW, {"input": []}, "input", "at least one"),
    (NEW, {"input": None}, "input", "at least one"),
    (NEW, {"input": 5}, "input", "string"),
    (NEW, {"input": "\ud800"}, "input", "surrogate"),
    (NEW, {"instructions": "\ud800"}, "instructions", "surrogate"),
    (NEW, {"input": [{"type": "item_reference"}]}, "input[0].id", "required"),
    (NEW, {"input": [{"type": "riddle"}]}, "input[0].type", "'riddle'"),
    (NEW, {"input": [{"role": "user"}]}, "input[0].content", "required"),
    (NEW, {"input": [{"content": "x"}]}, "input[0].role", "required"),
    (NEW, {"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name", "required"),
    (NEW, {"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output",
     "required"),
    (NEW, {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
     "input[0].content[0].type", "'input_file'"),
    (NEW, {"instructions": "x", "input": [*HELLO, {"role": "user", "content": [
        responses_image(picture())]}]}, "input[1].content[0].image_url", "images"),
    (NEW, {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
     "input[0].content[0].file_id", "stores no files"),
    (NEW, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input[0].content[0].image_url", "required"),
    (NEW, {"max_output_tokens": -2}, "max_output_tokens", "greater than"),
    (NEW, {"max_output_tokens": 0}, "max_output_tokens", "between 1 and"),
    (NEW, {"tools": [{"type": "function"}]}, "tools[0].name", "needs it"),
    (NEW, {"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].name", "needs it"),
    (NEW, {"tools": [{"type": "web_search"}, {"type": "function", **BAD_TOOL["function"]}]},
     "tools[1].parameters", "'f'"),
    (NEW, {"tool_choice": "required"}, "tools", "none is offered"),
    (NEW, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "needs it"),
    (NEW, {"text": {"format": {"type": "json_schema", "schema": {"type": "what"}}}},
     "text.format", "schema"),
    (NEW, {"structured_outputs": {"regex": "a"}, "text": {"format": JSON_FORM}},
     "structured_outputs", "text.format"),
    (NEW, {"conversation": "conv_1"}, "conversation", "previous_response_id"),
    (NEW, {"prompt": {"id": "x"}}, "prompt", "input"),
    (NEW, {"background": True, "store": False}, "background", "store"),
    (NEW, {"previous_response_id": "resp_x"}, "previous_response_id", "'resp_x'"),
]  # fmt: skip
REFUSED = [(path, *case) for path in BASES for case in EVERYWHERE] + ONE


def post(http: httpx.Client, path: str, changes: dict[str, Any], **headers: Any) -> httpx.Response:
    content = json.dumps({"model": "fake", **BASES[path], **changes})
    headers = {"content-type": "application/json", **headers}
    return http.post(f"/v1/{path}", content=content, headers=headers)


@pytest.mark.parametrize(
    "path, changes, param, words",
    REFUSED,
    ids=[f"{index}-{path}-{param}" for index, (path, _, param, _) in enumerate(REFUSED)],
)
def test_what_cannot_be_honoured_names_the_field(
    http: httpx.Client, path: str, changes: dict[str, Any], param: str, words: str
) -> None:
    answer = post(http, path, changes)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]
    assert param.rpartition(".")[2].partition("[")[0] in error["message"]


def test_a_missing_field_and_a_body_that_is_no_object(http: httpx.Client) -> None:
    missing = http.post("/v1/chat/completions", json={"model": "fake"}).json()["error"]
    assert (missing["param"], missing["message"]) == ("messages", "messages: Field required")
    wrong = http.post("/v1/chat/completions", json=[1, 2])
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, None)
    assert wrong.json()["error"]["message"] == "the body: it must be a JSON object"
    asked = http.get("/v1/chat/completions").json()["error"]
    assert asked["message"] == "/v1/chat/completions takes POST, not GET."


@pytest.mark.parametrize(
    "field, value",
    [
        *(("max_tokens", value) for value in (True, "3", 3.0)),
        *(("temperature", value) for value in ("1", True)),
        *(("stream", value) for value in ("yes", 1)),
        ("ignore_eos", "true"),
        ("n", "1"),
        ("seed", "7"),
        ("logit_bias", {"5": "1"}),
    ],
)
def test_types_are_not_coerced(http: httpx.Client, field: str, value: Any) -> None:
    answer = post(http, CHAT, {field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_null_is_accepted_wherever_a_field_may_be_left_out(http: httpx.Client) -> None:
    fields = ChatCompletionRequest.model_fields.items()
    nulls = {name: None for name, field in fields if not field.is_required()}
    assert {"ignore_eos", "stream", "logit_bias", "stop", "tools"} < nulls.keys()
    spelled: list[dict[str, Any]] = [
        nulls,
        {"stream": True, "stream_options": {"include_usage": None}},
        {"temperature": 1, "top_p": 1.0, "seed": 7, "n": 1, "logit_bias": {"123": -1}},
        {"store": True, "metadata": {"a": "b"}, "future_field": 1},  # not known
        # Defaults that clients spell out are no constraint.
        {"grammar": "", "json_schema": None, "min_tokens": 0, "bad_words": [], "echo": False},
        {"add_generation_prompt": True, "continue_final_message": False, "use_beam_search": False},
    ]
    for changes in spelled:
        answer = post(http, CHAT, changes)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "changes, status",
    [
        ({"stop": ["\ud800"]}, 200),
        ({"session_id": "\ud800"}, 400),
        ({"model": "\ud800"}, 404),
        ({"messages": [{"role": "\ud800", "content": "x"}]}, 400),
        (said({"type": "\ud800"}), 400),
        ({"logit_bias": {"\ud800": 1}}, 400),
        ({"\ud800": 1}, 200),
    ],
)
def test_half_a_surrogate_pair_is_nowhere_a_defect(
    http: httpx.Client, changes: Any, status: int
) -> None:
    assert post(http, CHAT, changes).status_code == status


@pytest.mark.parametrize("agent_id", ["", "x" * 129, "a b", "a/b", "..", b"\xed\xa0\x80"])
def test_an_agent_id_is_checked(http: httpx.Client, agent_id: Any) -> None:
    assert post(http, CHAT, {}, **{"X-Agent-ID": "coder.1_a-b"}).status_code == 200
    answer = post(http, CHAT, {}, **{"X-Agent-ID": agent_id})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Agent-ID")


def test_an_overlong_prompt_is_refused_with_the_limit(http: httpx.Client) -> None:
    error = post(http, CHAT, {"messages": [{"role": "user", "content": "x" * 200_000}]}).json()
    assert error["error"]["code"] == "context_length_exceeded"
    assert error["error"]["param"] == "messages"
    assert "131072" in error["error"]["message"]


@pytest.mark.parametrize("content_type", ["", "text/plain", "multipart/form-data"])
def test_another_content_type_is_refused(http: httpx.Client, content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    content = json.dumps({"model": "fake", "messages": HELLO})
    answer = http.post("/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "send content-type: application/json."
