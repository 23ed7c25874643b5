"""Ollama's bodies and objects: tool calls, durations, and how a failure ends a stream."""

import json
from typing import Any

import pytest

from semantic.adapters.inbound.http.streaming import ReplySet
from semantic.adapters.inbound.ollama.events import OllamaWriter, collect, in_message, lines
from semantic.adapters.inbound.ollama.requests import (
    OllamaChatRequest,
    context_of,
    duration_s,
    request_id_of,
)
from semantic.domain.chat import AgentHint, ToolResultPart, ToolUsePart
from semantic.domain.errors import GenerationTimeoutError
from semantic.domain.events import Event, Failed, Started, TextDelta, Usage
from tests.canned_replies import CUT_CALL, EVERYTHING, CannedReply

pytestmark = pytest.mark.unit

FAILING: tuple[Event, ...] = (
    Started("abc", "m", Usage(20)),
    TextDelta("Hi \u2028"),
    Failed(GenerationTimeoutError("too late.")),
)


async def stream_of(events: tuple[Event, ...]) -> list[dict[str, Any]]:
    writer = OllamaWriter("m:latest", in_message)
    made = [line async for line in lines(ReplySet([CannedReply(events)]), writer)]
    # Clients split at every line end of Unicode.
    assert all(len(line.splitlines()) == 1 and line.endswith("\n") for line in made)
    return [json.loads(line) for line in made]


async def test_a_stream_has_whole_calls_with_objects_as_arguments() -> None:
    *pieces, last = await stream_of(EVERYTHING)
    assert {piece["model"] for piece in pieces} == {"m:latest"}
    assert "".join(piece["message"].get("thinking", "") for piece in pieces) == "Let me look."
    calls = [call for piece in pieces for call in piece["message"].get("tool_calls", ())]
    assert calls == [
        {
            "id": "call_1",
            "function": {"index": 0, "name": "read", "arguments": {"path": "ä.txt"}},
        },
        {"id": "call_2", "function": {"index": 1, "name": "list", "arguments": {}}},
    ]
    assert (last["done_reason"], last["prompt_eval_count"], last["cached_tokens"]) == (
        "stop",
        20,
        15,
    )
    whole = await collect(ReplySet([CannedReply(EVERYTHING)]), OllamaWriter("m:latest", in_message))
    assert whole["message"] == {
        "role": "assistant",
        "content": "I look.",
        "thinking": "Let me look.",
        "tool_calls": calls,
    }


async def test_a_call_that_was_cut_off_is_left_out() -> None:
    made = await stream_of(CUT_CALL)
    assert not any("tool_calls" in piece["message"] for piece in made)
    assert made[-1]["done_reason"] == "length"


async def test_a_failure_is_the_last_line() -> None:
    assert (await stream_of(FAILING))[-1] == {"error": "too late."}
    with pytest.raises(GenerationTimeoutError):
        await collect(ReplySet([CannedReply(FAILING)]), OllamaWriter("m", in_message))


def call(name: str, arguments: Any, **fields: str) -> dict[str, Any]:
    return {**fields, "function": {"name": name, "arguments": arguments}}


def parts_of(*messages: dict[str, Any]) -> list[Any]:
    body = OllamaChatRequest.model_validate({"model": "m", "messages": list(messages)})
    made = body.to_domain("m", AgentHint()).messages
    return [part for message in made for part in message.parts]


def test_calls_and_results_without_ids_find_each_other() -> None:
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "tool_calls": [call("a", {"x": 1}), call("b", '{"y": 2}'), call("a", {}, id="call_7")],
        },
        {"role": "tool", "tool_name": "b", "content": "of b"},
        {"role": "tool", "content": "of the first a"},
        {"role": "tool", "tool_call_id": "call_7", "content": "of the last"},
    ]
    _, first, second, third, *results = parts_of(*said)
    assert [part.arguments for part in (first, second, third)] == [{"x": 1}, {"y": 2}, {}]
    assert all(isinstance(part, ToolResultPart) for part in results)
    assert [part.tool_use_id for part in results] == [second.id, first.id, "7"]
    assert len({first.id, second.id, third.id}) == 3
    again = [part.id for part in parts_of(*said) if isinstance(part, ToolUsePart)]
    assert again == [first.id, second.id, "7"]


@pytest.mark.parametrize(
    "value, seconds",
    [
        (None, None),
        ("", None),
        (0, 0),
        (-1, -1),
        (2.5, 2.5),
        ("300", 300),
        ("-1", -1),
        ("0s", 0),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("-1m", -60),
        ("100ms", 0.1),
    ],
)
def test_durations_are_those_of_go(value: Any, seconds: float | None) -> None:
    assert duration_s(value) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("value", ["soon", "m5", "5 m", "nan", "inf", "1d"])
def test_other_durations_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="5m"):
        duration_s(value)


def test_a_context_names_a_request() -> None:
    request_id = "00ffee1234567890abcdef00"
    assert request_id_of(context_of(request_id)) == request_id
    for foreign in ([], [1, 2, 3], [1, 2, 3, 2**24], [1, 2, 3, -1], [1, 2, 3, 4, 5]):
        assert request_id_of(foreign) == ""
