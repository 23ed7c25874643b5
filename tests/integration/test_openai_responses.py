"""Responses by the official client, every answer and event checked by it."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.http_server import RunningServer, make_settings, run_server
from tests.integration.conftest import sdk_client
from tests.integration.test_openai_chat import CALLING, ENDLESS, agents_of
from tests.waiting import await_that

pytestmark = pytest.mark.integration

SDK = openai.OpenAI
SETTINGS = {"default_max_tokens": 400}
HI: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {"type": "function", **CALLING["tools"][0]["function"]}


def respond(client: openai.OpenAI, text: Any, **given: Any) -> Any:
    usual: Any = {"max_output_tokens": 6, "temperature": 0}
    return client.responses.create(model="fake", input=text, **usual | given)


def cached(response: Any) -> int:
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


def test_an_incomplete_response_gives_the_reason(client: openai.OpenAI) -> None:
    response = respond(client, "hello", **ENDLESS)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


def test_going_on_from_the_head_advances_and_from_elsewhere_forks(
    client: openai.OpenAI, running: RunningServer
) -> None:
    before = agents_of(running)

    def made() -> list[int]:
        new = (turns for name, turns in agents_of(running).items() if name not in before)
        return sorted(new)

    def ask(text: str, previous: str | None) -> Any:
        return respond(client, text, instructions="Be brief.", previous_response_id=previous)

    first = ask("one of a kind", None)
    second = ask("two", first.id)
    assert made() == [2]
    assert cached(second) >= first.usage.total_tokens - 1
    other = ask("another two", first.id)
    assert made() == [2, 2]
    assert cached(other) >= first.usage.total_tokens - 1
    ask("three", second.id)
    assert made() == [2, 3]


def test_a_continued_response_contains_the_whole_conversation(client: openai.OpenAI) -> None:
    """Sent as a whole or by an id, the prompt is the same."""
    first = respond(client, "whole or not", instructions="Old.")
    by_id = respond(
        client, "go on", previous_response_id=first.id, instructions="New.", temperature=0
    )
    history = [
        {"role": "developer", "content": "New."},
        {"role": "user", "content": [{"type": "input_text", "text": "whole or not"}]},
        *(item.to_dict() for item in first.output),
        {"type": "message", "role": "user", "content": "go on"},
    ]
    whole = respond(client, history, temperature=0)
    assert whole.output_text == by_id.output_text
    assert whole.usage.input_tokens == by_id.usage.input_tokens


def test_items_are_sent_by_reference(client: openai.OpenAI) -> None:
    """A later turn may refer to a message, a call and its input; the prompt is the same."""
    asked: Any = {"model": "fake", "temperature": 0, "tools": [WEATHER]}
    first: Any = client.responses.create(input="by reference?", tool_choice="required", **asked)
    calls = [item for item in first.output if item.type == "function_call"]
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}
        for call in calls
    ]
    question = client.responses.input_items.list(first.id).data[0]
    references: Any = [
        {"type": "item_reference", "id": item.id} for item in (question, *first.output)
    ]
    asked["max_output_tokens"] = 6
    named: Any = client.responses.create(input=[*references, *results], **asked)
    assert cached(named) >= first.usage.total_tokens - 1
    sent: Any = [
        {"role": "user", "content": "by reference?"},
        *(item.to_dict() for item in first.output),
        *results,
    ]
    whole: Any = client.responses.create(input=sent, **asked)
    assert named.output_text == whole.output_text
    assert named.usage.input_tokens == whole.usage.input_tokens
    # The first turn's items have other ids as input of the second; the type may be left out.
    again: Any = [
        {"id": item.id} for item in client.responses.input_items.list(named.id, order="asc")
    ]
    third = client.responses.create(input=[*again, *HI], **asked)
    assert cached(third) >= first.usage.total_tokens - 1


@pytest.mark.parametrize("name", ["msg_1", "nonsense", "rs_{}_9", "msg_{}_in7"])
def test_an_item_that_is_not_stored_is_not_found(client: openai.OpenAI, name: str) -> None:
    made = respond(client, "an item")
    wanted = name.format(made.id.removeprefix("resp_"))
    items: Any = [*HI, {"type": "item_reference", "id": wanted}]
    with pytest.raises(openai.NotFoundError, match=wanted) as caught:
        respond(client, items)
    assert (caught.value.code, caught.value.param) == ("item_not_found", "input[1].id")


def test_items_of_unstored_and_deleted_responses_are_not_found(client: openai.OpenAI) -> None:
    unstored, deleted = respond(client, "not kept", store=False), respond(client, "kept")
    client.responses.delete(deleted.id)
    for made in (unstored, deleted):
        with pytest.raises(openai.NotFoundError, match="store: false"):
            respond(client, [*HI, {"type": "item_reference", "id": made.output[0].id}])


def test_a_tool_loop(client: openai.OpenAI) -> None:
    asked: Any = {"model": "fake", "temperature": 0, "tools": [WEATHER, {"type": "web_search"}]}
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
    assert response.usage
    for reply in (by_id, whole):
        assert cached(reply) >= response.usage.total_tokens - 1


def test_a_named_tool_is_called(client: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "get_weather"}
    asked: Any = {**CALLING, "tools": [WEATHER], "tool_choice": choice}
    response = respond(client, "x", max_output_tokens=400, **asked)
    assert [item.type for item in response.output] == ["function_call"]


def test_logprobs(client: openai.OpenAI) -> None:
    response = respond(client, "x", top_logprobs=2, include=["message.output_text.logprobs"])
    scored = response.output[0].content[0].logprobs
    assert "".join(token.token for token in scored) == response.output_text
    assert all(len(token.top_logprobs) == 2 for token in scored)


def test_a_stored_response_is_found_and_removed(client: openai.OpenAI) -> None:
    made = respond(client, "keep me", metadata={"a": "b"})
    after = respond(client, "and me", previous_response_id=made.id)
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    for gone, why in ((made.id, "no stored response"), (after.id, "before .* was deleted")):
        with pytest.raises(openai.BadRequestError, match=why) as caught:
            respond(client, "x", previous_response_id=gone)
        assert caught.value.param == "previous_response_id"


def test_what_a_response_was_asked_is_listed_and_counted(client: openai.OpenAI) -> None:
    asked: Any = {"instructions": "Be brief.", "tools": [WEATHER], "tool_choice": "required"}
    first = respond(client, "the weather?", **asked, max_output_tokens=100)
    call = first.output[0]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    more: Any = {"input": [result, *HI], "previous_response_id": first.id}
    second = client.responses.create(model="fake", max_output_tokens=4, **more)
    counted = client.responses.input_tokens.count(model="fake", **more)
    assert counted.input_tokens == second.usage.input_tokens
    items: Any = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.type for item in items] == [
        "message", "function_call", "function_call_output", "message"
    ]  # fmt: skip
    assert (items[0].role, items[0].content[0].text) == ("user", "the weather?")
    assert items[1].to_dict() | {"id": ""} == call.to_dict() | {"id": ""}
    assert (items[2].call_id, items[2].output) == (call.call_id, "rain")
    newest = client.responses.input_items.list(second.id).data[0]
    assert newest == items[-1]
    with pytest.raises(openai.BadRequestError, match="no such item"):
        client.responses.input_items.list(second.id, after="msg_x")
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_x")


def test_an_unstored_response_keeps_state_and_no_text(
    client: openai.OpenAI, running: RunningServer
) -> None:
    first = respond(client, "a secret of mine", store=False)
    agents = running.server.memory.agents
    head = agents.agents("local")[0].head
    assert head == f"turn_{first.id.removeprefix('resp_')}"
    turn = agents.turn("local", head)
    assert turn is not None
    assert (turn.messages, turn.tokens) == ((), ())
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    history = [
        {"role": "user", "content": "a secret of mine"},
        *(item.to_dict() for item in first.output),
        {"role": "user", "content": "more"},
    ]
    second = respond(client, history)
    assert cached(second) >= first.usage.total_tokens - 1
    # What follows and is stored can be gone on from: it holds what the turn before does not.
    third = respond(client, "on", previous_response_id=second.id)
    assert cached(third) >= second.usage.total_tokens - 1


def test_responses_outlive_the_server(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, durability="sync")
    with run_server(settings) as running, sdk_client(openai.OpenAI, running) as client:
        first = respond(client, "remember", instructions="Be.", **ENDLESS)
        assert first.status == "incomplete"
        root = respond(client, "root")
        leaf = respond(client, "leaf", previous_response_id=root.id)
        client.responses.delete(root.id)
    with run_server(settings) as running, sdk_client(openai.OpenAI, running) as client:
        assert client.responses.retrieve(leaf.id).output == leaf.output
        again = client.responses.retrieve(first.id)
        assert again.output == first.output
        assert (again.status, again.completed_at) == ("incomplete", None)
        assert again.incomplete_details == first.incomplete_details
        assert 0 <= again.created_at - first.created_at < 60
        second = respond(client, "on", instructions="Be.", previous_response_id=first.id)
        assert cached(second) >= first.usage.total_tokens - 1


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_response_in_the_background_is_cancelled(
    client: openai.OpenAI, running: RunningServer, is_stream: bool
) -> None:
    asked: Any = {"background": True, "max_output_tokens": 100_000, **ENDLESS}
    events: Any = iter(())
    if is_stream:
        events = respond(client, "x", stream=True, **asked)
        started = next(events).response
    else:
        started = respond(client, "x", **asked)
    assert started.status == "queued"
    assert client.responses.retrieve(started.id).status in ("queued", "in_progress")
    with pytest.raises(openai.BadRequestError, match="and cannot be continued"):
        respond(client, "x", previous_response_id=started.id)
    assert client.responses.cancel(started.id).status == "cancelled"
    assert client.responses.retrieve(started.id).status == "cancelled"
    assert [event.type for event in events][-1:] == ["response.incomplete"] * is_stream
    await_that(lambda: running.server.device.num_live == 0)


def test_a_cancelled_response_is_continued_from_what_is_written(client: openai.OpenAI) -> None:
    asked: Any = {"background": True, "max_output_tokens": 100_000, **ENDLESS}
    events = respond(client, "x", stream=True, **asked)
    started = next(events).response
    begun = next(event.delta for event in events if event.type == "response.output_text.delta")
    client.responses.cancel(started.id)
    stopped = list(events)[-1].response
    assert stopped.output_text.startswith(begun)
    later = respond(client, "y", previous_response_id=started.id)
    assert cached(later) >= stopped.usage.total_tokens - 1


def test_a_response_in_the_background_ends(client: openai.OpenAI) -> None:
    started = respond(client, "x", background=True)
    ended = ("completed", "incomplete")
    await_that(lambda: client.responses.retrieve(started.id).status in ended)
    found = client.responses.retrieve(started.id)
    assert client.responses.cancel(started.id).status == found.status


def test_a_stream_in_the_background_goes_on_without_its_client(
    client: openai.OpenAI,
) -> None:
    asked: Any = {"background": True, "stream": True, "max_output_tokens": 300, **ENDLESS}
    with respond(client, "a long story", **asked) as stream:
        first = next(iter(stream))
    name = first.response.id
    assert first.response.background

    def resumed(after: int) -> list[Any]:
        return list(client.responses.retrieve(name, stream=True, starting_after=after))

    rest = resumed(first.sequence_number)
    last = rest[-1]
    assert [event.sequence_number for event in rest] == list(range(1, len(rest) + 1))
    assert last.type == "response.incomplete"
    text = "".join(event.delta for event in rest if event.type == "response.output_text.delta")
    found = client.responses.retrieve(name)
    assert found.output_text == last.response.output_text == text
    assert found.usage is not None
    assert found.usage.output_tokens == 300
    assert resumed(len(rest) - 2) == rest[-2:]
    assert resumed(len(rest)) == []
    assert client.responses.retrieve(name, stream=True).__next__() == first
    client.responses.delete(name)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(name, stream=True)


def test_only_a_late_stream_in_the_background_can_be_resumed(client: openai.OpenAI) -> None:
    def streamed() -> str:
        return str([*respond(client, "x", background=True, stream=True)][-1].response.id)

    whole = respond(client, "x").id
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
