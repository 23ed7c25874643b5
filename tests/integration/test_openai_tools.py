"""Custom tools and the choice of allowed tools, by OpenAI's client in both of its protocols."""

import re
from typing import Any

import httpx
import openai
import pytest

from tests.http_server import RunningServer
from tests.integration.test_openai_chat import HELLO, chat
from tests.integration.test_openai_responses import cached, respond

pytestmark = pytest.mark.integration

SDK = openai.OpenAI
SETTINGS = {"default_max_tokens": 400}
NAMES = ("get_weather", "get_time", "get_date")
NO_ARGUMENTS: Any = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS: Any = [{"name": name, "parameters": NO_ARGUMENTS, "strict": True} for name in NAMES]
CHAT_TOOLS: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
TOOLS: Any = [{"type": "function", **function} for function in FUNCTIONS]
SIZE = {"type": "grammar", "syntax": "regex", "definition": r"^[0-9]{2,4} \"px\"\n$"}
CUSTOM: Any = {"type": "custom", "name": "resize", "description": "Resizes.", "format": SIZE}
CHAT_SIZE = {"type": "grammar", "grammar": {k: v for k, v in SIZE.items() if k != "type"}}
CHAT_CUSTOM: Any = {"type": "custom", "custom": {"name": "resize", "format": CHAT_SIZE}}
IS_SIZE = re.compile(r'[0-9]{2,4} "px"\n')


def allow(*names: str, mode: str = "required") -> Any:
    """The choice as Responses takes it."""
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


def allow_in_chat(*names: str, mode: str = "required") -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("name", NAMES)
def test_only_allowed_tools_are_called_and_the_prompt_stays_the_same(
    client: openai.OpenAI, name: str
) -> None:
    reply = chat(client, tools=CHAT_TOOLS, tool_choice=allow_in_chat(name), temperature=1)
    calls = reply.choices[0].message.tool_calls
    assert {call.function.name for call in calls} == {name}
    free = chat(client, tools=CHAT_TOOLS, max_tokens=2)
    assert free.usage.prompt_tokens == reply.usage.prompt_tokens
    assert free.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens - 1
    asked: Any = {"tools": TOOLS, "max_output_tokens": 100, "temperature": 1}
    response = respond(client, "hello", tool_choice=allow(name), **asked)
    assert {item.name for item in response.output} == {name}
    assert response.tool_choice.to_dict() == allow(name)
    assert cached(respond(client, "hello", **asked)) == response.usage.input_tokens - 1


def test_allowed_tools_may_be_left_alone(client: openai.OpenAI) -> None:
    choice = allow_in_chat("get_time", mode="auto")
    for seed in range(3):
        reply = chat(client, tools=CHAT_TOOLS, tool_choice=choice, seed=seed, max_tokens=40)
        calls = reply.choices[0].message.tool_calls or []
        assert {call.function.name for call in calls} <= {"get_time"}


@pytest.mark.parametrize("names, why", [(["get_rich"], "get_rich"), ([], "no tool")])
def test_a_choice_of_unknown_tools_is_refused(
    client: openai.OpenAI, names: list[str], why: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as caught:
        chat(client, tools=CHAT_TOOLS, tool_choice=allow_in_chat(*names))
    assert caught.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError, match=why) as caught:
        respond(client, "x", tools=TOOLS, tool_choice=allow(*names))
    assert caught.value.param == "tool_choice"


def test_a_custom_tool_receives_text(client: openai.OpenAI) -> None:
    asked: Any = {"tools": [CUSTOM], "max_output_tokens": 200}
    first = respond(client, "smaller", tool_choice={"type": "custom", "name": "resize"}, **asked)
    (call,) = first.output
    assert call.type == "custom_tool_call"
    assert IS_SIZE.fullmatch(call.input)
    assert first.tools[0].to_dict() == CUSTOM
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    by_id = respond(client, [result], previous_response_id=first.id, **asked)
    history: Any = [{"role": "user", "content": "smaller"}, call.to_dict(), result]
    for reply in (by_id, respond(client, history, **asked)):
        assert cached(reply) >= first.usage.total_tokens - 1
    listed: Any = client.responses.input_items.list(by_id.id, order="asc").data
    kinds = ["message", "custom_tool_call", "custom_tool_call_output"]
    assert [item.type for item in listed] == kinds
    assert (listed[1].input, listed[2].output) == (call.input, "done")


def test_a_custom_call_is_streamed_as_text(client: openai.OpenAI) -> None:
    asked: Any = {"tools": [CUSTOM], "tool_choice": "required", "max_output_tokens": 200}
    events = list(respond(client, "smaller", stream=True, **asked))
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    (done, *_) = [e.input for e in events if e.type == "response.custom_tool_call_input.done"]
    inputs = [item.input for item in events[-1].response.output]
    assert "".join(deltas) == "".join(inputs)
    assert done == inputs[0]
    assert IS_SIZE.fullmatch(done)


def test_a_custom_tool_in_chat(client: openai.OpenAI) -> None:
    choice = {"type": "custom", "custom": {"name": "resize"}}
    reply = chat(client, tools=[CHAT_CUSTOM], tool_choice=choice)
    (call,) = reply.choices[0].message.tool_calls
    assert (call.type, call.custom.name) == ("custom", "resize")
    assert IS_SIZE.fullmatch(call.custom.input)
    assert reply.choices[0].finish_reason == "tool_calls"
    history = [
        *HELLO,
        reply.choices[0].message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    later = chat(client, history, tools=[CHAT_CUSTOM], max_tokens=2)
    reused = later.usage.prompt_tokens_details.cached_tokens
    assert reused >= reply.usage.total_tokens - 1


GRAMMAR = {"syntax": "lark", "definition": 'start: "a"'}


@pytest.mark.parametrize(
    "form, param, why",
    [
        ({"type": "grammar", **GRAMMAR}, "format.syntax", "Lark"),
        ({"type": "grammar"}, "format.syntax", "needs it"),
        ({"type": "grammar", "syntax": "regex"}, "format.definition", "needs it"),
        ({"type": "grammar", "syntax": "regex", "definition": "("}, "format", "resize"),
        ({"type": "poem"}, "format.type", "text"),
    ],
)
def test_a_format_that_cannot_be_enforced_is_refused(
    running: RunningServer, form: Any, param: str, why: str
) -> None:
    tools = [{"type": "web_search"}, {**CUSTOM, "format": form}]
    error = refused(running, "responses", {"input": "x", "tools": tools})
    assert error["param"] == f"tools[1].{param}"
    assert why in error["message"]
    inner = {key: value for key, value in form.items() if key != "type"}
    nested = {"type": form["type"], **({"grammar": inner} if inner else {})}
    tools = [{"type": "custom", "custom": {"name": "resize", "format": nested}}]
    error = refused(running, "chat/completions", {"messages": HELLO, "tools": tools})
    assert error["param"].replace("grammar.", "") == f"tools[0].custom.{param}"
    assert why in error["message"]


def refused(running: RunningServer, path: str, body: Any) -> Any:
    with running.client() as http:
        answer: httpx.Response = http.post(f"/v1/{path}", json={"model": "fake", **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]
