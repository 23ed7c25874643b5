"""Responses by the official client, every answer and event checked by it."""

import json
import threading
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests.http_server import RunningServer, make_settings, run_server
from tests.integration.conftest import sdk_client

pytestmark = pytest.mark.integration

SDK = openai.OpenAI
SETTINGS = {"default_max_tokens": 400}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"days": {"type": "integer"}},
        "required": ["days"],
        "additionalProperties": False,
    },
    "strict": True,
}


def agents_of(running: RunningServer) -> dict[str, int]:
    return {agent.id: agent.num_turns for agent in running.server.memory.agents.agents("local")}


def cached(response: Any) -> int:
    assert response.usage is not None
    return int(response.usage.input_tokens_details.cached_tokens)


def test_a_response_and_its_stream_agree(client: openai.OpenAI) -> None:
    asked: Any = {"model": "fake", "input": "hello", "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    assert whole.status in ("completed", "incomplete")
    last: Any = events[-1]
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert cached(last.response) == last.response.usage.input_tokens - 1
    assert last.response.usage.input_tokens_details.cache_write_tokens == 1


def test_an_incomplete_response_says_why(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="fake", input="hello", max_output_tokens=2, extra_body={"ignore_eos": True}
    )
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_going_on_from_the_head_advances_and_from_elsewhere_forks(
    client: openai.OpenAI, running: RunningServer
) -> None:
    before = agents_of(running)

    def made() -> list[int]:
        new = (turns for name, turns in agents_of(running).items() if name not in before)
        return sorted(new)

    def ask(text: str, previous: str | None) -> Any:
        return client.responses.create(
            model="fake",
            input=text,
            instructions="Be brief.",
            previous_response_id=previous,
            max_output_tokens=8,
        )

    first = ask("one of a kind", None)
    second = ask("two", first.id)
    assert made() == [2]
    assert cached(second) >= first.usage.total_tokens - 1
    other = ask("another two", first.id)
    assert made() == [2, 2]
    assert cached(other) >= first.usage.total_tokens - 1
    ask("three", second.id)
    assert made() == [2, 3]


def test_what_goes_on_is_the_whole_conversation(client: openai.OpenAI) -> None:
    """Sent as a whole or by an id, the prompt is the same."""
    first = client.responses.create(
        model="fake", input="whole or not", instructions="Old.", max_output_tokens=6
    )
    by_id = client.responses.create(
        model="fake",
        input="go on",
        previous_response_id=first.id,
        instructions="New.",
        max_output_tokens=6,
        temperature=0,
    )
    output: Any = [item.to_dict() for item in first.output]
    whole = client.responses.create(
        model="fake",
        input=[
            {"role": "developer", "content": "New."},
            {"role": "user", "content": [{"type": "input_text", "text": "whole or not"}]},
            *output,
            {"type": "message", "role": "user", "content": "go on"},
        ],
        max_output_tokens=6,
        temperature=0,
    )
    assert whole.output_text == by_id.output_text
    assert whole.usage is not None
    assert by_id.usage is not None
    assert whole.usage.input_tokens == by_id.usage.input_tokens


def test_a_tool_loop(client: openai.OpenAI) -> None:
    asked: Any = {"model": "fake", "tools": [WEATHER, {"type": "web_search"}]}
    with client.responses.stream(input="weather?", tool_choice="required", **asked) as stream:
        done = [e for e in stream if e.type == "response.function_call_arguments.done"]
        response = stream.get_final_response()
    calls = [item for item in response.output if item.type == "function_call"]
    assert len(calls) == len(done) >= 1
    assert [tool.type for tool in response.tools] == ["function"]
    assert set(json.loads(calls[0].arguments)) == {"days"}
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}
        for call in calls
    ]
    by_id = client.responses.create(input=results, previous_response_id=response.id, **asked)
    history: Any = [
        {"role": "user", "content": "weather?"},
        *(item.to_dict() for item in response.output),
        *results,
    ]
    whole = client.responses.create(input=history, store=False, **asked)
    assert response.usage is not None
    for reply in (by_id, whole):
        assert cached(reply) >= response.usage.total_tokens - 1


def test_a_named_tool_is_called(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="fake",
        input="x",
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "get_weather"},
        parallel_tool_calls=False,
    )
    assert [item.type for item in response.output] == ["function_call"]


def test_a_schema_is_parsed(client: openai.OpenAI) -> None:
    class Answer(pydantic.BaseModel):
        is_right: bool
        score: int

    response = client.responses.parse(model="fake", input="x", text_format=Answer)
    assert isinstance(response.output_parsed, Answer)


def test_logprobs(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="fake",
        input="x",
        max_output_tokens=5,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    )
    part: Any = response.output[0]
    scored = part.content[0].logprobs
    assert "".join(token.token for token in scored) == response.output_text
    assert all(len(token.top_logprobs) == 2 for token in scored)


def test_a_stored_response_is_found_and_removed(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model="fake", input="keep me", max_output_tokens=5, metadata={"a": "b"}
    )
    after = client.responses.create(
        model="fake", input="and me", previous_response_id=made.id, max_output_tokens=5
    )
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)
    for gone in (made.id, after.id):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="fake", input="x", previous_response_id=gone)
        assert caught.value.param == "previous_response_id"


def test_an_unstored_response_keeps_state_and_no_text(
    client: openai.OpenAI, running: RunningServer
) -> None:
    asked: Any = {"model": "fake", "max_output_tokens": 6, "store": False}
    first = client.responses.create(input="a secret of mine", **asked)
    agents = running.server.memory.agents
    head = agents.agents("local")[0].head
    assert head == f"turn_{first.id.removeprefix('resp_')}"
    turn = agents.turn("local", head)
    assert turn is not None
    assert (turn.messages, turn.tokens) == ((), ())
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    history: Any = [
        {"role": "user", "content": "a secret of mine"},
        *(item.to_dict() for item in first.output),
        {"role": "user", "content": "more"},
    ]
    second = client.responses.create(model="fake", input=history, max_output_tokens=6)
    assert first.usage is not None
    assert cached(second) >= first.usage.total_tokens - 1
    # What follows and is stored can be gone on from: it holds what the turn before does not.
    third = client.responses.create(
        model="fake", input="on", previous_response_id=second.id, max_output_tokens=6
    )
    assert second.usage is not None
    assert cached(third) >= second.usage.total_tokens - 1


def test_responses_outlive_the_server(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, durability="sync")
    with run_server(settings) as running, sdk_client(openai.OpenAI, running) as client:
        first = client.responses.create(
            model="fake",
            input="remember",
            instructions="Be.",
            max_output_tokens=6,
            extra_body={"ignore_eos": True},
        )
        assert first.status == "incomplete"
    with run_server(settings) as running, sdk_client(openai.OpenAI, running) as client:
        again = client.responses.retrieve(first.id)
        assert again.output == first.output
        assert (again.status, again.completed_at) == ("incomplete", None)
        assert again.incomplete_details == first.incomplete_details
        assert again.created_at - first.created_at in (0, 1)
        second = client.responses.create(
            model="fake",
            input="on",
            instructions="Be.",
            previous_response_id=first.id,
            max_output_tokens=6,
        )
        assert first.usage is not None
        assert cached(second) >= first.usage.total_tokens - 1


def test_a_response_in_the_background_is_cancelled(
    client: openai.OpenAI, running: RunningServer
) -> None:
    endless: Any = {"ignore_eos": True}
    started = client.responses.create(
        model="fake", input="x", background=True, max_output_tokens=100_000, extra_body=endless
    )
    assert started.status == "in_progress"
    assert client.responses.retrieve(started.id).status == "in_progress"
    assert client.responses.cancel(started.id).status == "cancelled"
    assert client.responses.retrieve(started.id).status == "cancelled"
    assert running.server.device.num_live == 0


def test_a_response_in_the_background_ends(client: openai.OpenAI) -> None:
    started = client.responses.create(model="fake", input="x", background=True, max_output_tokens=5)
    found = started
    for _ in range(200):
        if found.status != "in_progress":
            break
        threading.Event().wait(0.02)
        found = client.responses.retrieve(started.id)
    assert found.status in ("completed", "incomplete")
    assert client.responses.cancel(started.id).status == found.status
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_nothing")


def test_a_stream_in_the_background_goes_on_without_its_client(
    client: openai.OpenAI,
) -> None:
    asked: Any = {
        "model": "fake",
        "input": "a long story",
        "max_output_tokens": 300,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    with client.responses.create(**asked, background=True, stream=True) as stream:
        first: Any = next(iter(stream))
    name = first.response.id
    assert first.response.background

    def resumed(after: int) -> list[Any]:
        events = client.responses.retrieve(name, stream=True, starting_after=after)
        return list(events)

    rest = resumed(first.sequence_number)
    last = rest[-1]
    assert [event.sequence_number for event in rest] == list(range(1, len(rest) + 1))
    assert last.type == "response.incomplete"
    text = "".join(event.delta for event in rest if event.type == "response.output_text.delta")
    found = client.responses.retrieve(name)
    assert found.output_text == last.response.output_text == text
    assert len(text) == 300
    assert resumed(len(rest) - 2) == rest[-2:]
    assert resumed(len(rest)) == []
    assert client.responses.retrieve(name, stream=True).__next__() == first
    client.responses.delete(name)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(name, stream=True)


def test_a_stream_in_the_background_is_cancelled(
    client: openai.OpenAI, running: RunningServer
) -> None:
    stream = client.responses.create(
        model="fake",
        input="x",
        background=True,
        stream=True,
        max_output_tokens=100_000,
        extra_body={"ignore_eos": True},
    )
    first: Any = next(stream)
    assert client.responses.retrieve(first.response.id).status == "in_progress"
    assert client.responses.cancel(first.response.id).status == "cancelled"
    assert list(stream)[-1].type == "response.incomplete"
    assert running.server.device.num_live == 0


def test_only_a_late_stream_in_the_background_can_be_resumed(client: openai.OpenAI) -> None:
    def streamed() -> str:
        stream = client.responses.create(
            model="fake", input="x", background=True, stream=True, max_output_tokens=2
        )
        last: Any = list(stream)[-1]
        return str(last.response.id)

    whole = client.responses.create(model="fake", input="x", max_output_tokens=5).id
    first, *others = (streamed() for _ in range(17))
    for name in others:
        assert list(client.responses.retrieve(name, stream=True))
    for name in (whole, first):
        assert client.responses.retrieve(name).id == name
        with pytest.raises(openai.BadRequestError, match="background") as caught:
            client.responses.retrieve(name, stream=True)
        assert caught.value.param == "stream"


def test_items_of_tools_that_run_elsewhere_are_skipped(running: RunningServer) -> None:
    body = {
        "model": "fake",
        "max_output_tokens": 2,
        "input": [
            {"role": "user", "content": "x"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "sig"},
            {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
        ],
        "metadata": {"half": "\ud800"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "truncation": "auto",
        "service_tier": "auto",
    }
    headers = {"content-type": "application/json"}
    with running.client() as http:
        answer = http.post("/v1/responses", content=json.dumps(body), headers=headers)
    assert answer.status_code == 200, answer.text
