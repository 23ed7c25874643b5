"""Anthropic's own package against the Messages endpoints, on the fake backend."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import RawMessageStartEvent, TextBlock, ThinkingBlock, ToolUseBlock

from semantic.adapters.outbound.backends import fake as fake_backend
from semantic.adapters.outbound.backends.fake import FakeTokenizer
from tests.http_server import RunningServer, make_settings, run_server

pytestmark = pytest.mark.integration

SDK = anthropic.Anthropic

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK: Any = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
HI: Any = [{"role": "user", "content": "hi"}]


class ThinkingTokenizer(FakeTokenizer):
    """A model whose template opens its thinking, unless it is told not to."""

    chat_template = "<think></think>"

    def render_chat(self, messages: Any, tools: Any = (), **options: Any) -> str:
        is_thinking = options.pop("is_thinking", None) is not False
        is_open = options.get("add_generation_prompt", True) and is_thinking
        return super().render_chat(messages, tools, **options) + ("<think>\n" if is_open else "")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_backend, "FakeTokenizer", ThinkingTokenizer)
        with run_server(make_settings(tmp_path_factory.mktemp("home"))) as server:
            yield server


GREEDY: Any = {"temperature": 0}  # the package knows no sampling parameters any more


def create(client: anthropic.Anthropic, **changes: Any) -> Any:
    given = {"model": "fake", "max_tokens": 12, "extra_body": GREEDY, "messages": HI, **changes}
    return client.messages.create(**given)


def streamed(client: anthropic.Anthropic, **changes: Any) -> Any:
    given = {"model": "fake", "max_tokens": 12, "extra_body": GREEDY, "messages": HI, **changes}
    with client.messages.stream(**given) as stream:
        return stream.get_final_message()


def prompt_tokens(message: Any) -> int:
    usage = message.usage
    parts = usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    return sum(part or 0 for part in parts)


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def test_whole_and_streamed_replies_agree(client: anthropic.Anthropic) -> None:
    whole = create(client, system="Agree.")
    with client.messages.stream(
        model="fake", max_tokens=12, extra_body=GREEDY, messages=HI, system="Agree."
    ) as stream:
        events = list(stream)
        streamed = stream.get_final_message()
    assert text_of(whole) == text_of(streamed) != ""
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == streamed.usage.output_tokens == 12
    assert whole.id.startswith("msg_")
    assert whole._request_id.startswith("req_")
    # The stream came second and found everything but the last token, and said so at once.
    (start,) = [event for event in events if isinstance(event, RawMessageStartEvent)]
    assert start.message.usage.cache_read_input_tokens == prompt_tokens(whole) - 1
    assert streamed.usage.cache_read_input_tokens == prompt_tokens(whole) - 1
    assert prompt_tokens(start.message) == prompt_tokens(streamed) == prompt_tokens(whole)


def test_counts_agree_with_generation_to_the_token(client: anthropic.Anthropic) -> None:
    common: Any = {
        "model": "fake",
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [WEATHER, {**CLOCK, "defer_loading": True}],
        "messages": [*HI, {"role": "user", "content": [{"type": "text", "text": "again"}]}],
    }
    counts = {client.messages.count_tokens(**common).input_tokens for _ in range(24)}
    assert counts == {prompt_tokens(create(client, **common))}
    assert client.messages.count_tokens(model="fake", messages=HI, tools=[]).input_tokens > 0


def test_a_forced_call_and_its_result(client: anthropic.Anthropic) -> None:
    asked = create(
        client,
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
        max_tokens=300,
    )
    (call,) = [block for block in asked.content if isinstance(block, ToolUseBlock)]
    assert len(asked.content) == 1
    assert asked.stop_reason == "tool_use"
    assert call.id.startswith("toolu_")
    assert call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "is_error": True}
    history: Any = [
        *HI,
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [{**result, "content": [{"type": "text", "text": "Rain."}]}]},
    ]
    told = create(client, tools=[WEATHER, CLOCK], messages=history)
    # What was sampled is replayed: the whole prompt and the reply but for its end are reused.
    reply = prompt_tokens(asked) + asked.usage.output_tokens
    assert told.usage.cache_read_input_tokens >= reply - 1


def test_any_tool_may_be_forced_and_none(client: anthropic.Anthropic) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = streamed(client, max_tokens=400, tools=[WEATHER, CLOCK], tool_choice=choice)
    assert [block.type for block in message.content] == ["tool_use"]
    silent = create(client, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block.type for block in silent.content] == ["text"]


def test_deferred_tools_appear_where_they_are_referenced(client: anthropic.Anthropic) -> None:
    """A tool that becomes known does not change the prompt before it."""
    search: Any = {"name": "search", "input_schema": {"type": "object", "properties": {}}}
    deferred = {**CLOCK, "defer_loading": True}
    call = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}}
    found = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "tool_reference", "tool_name": "get_time"}],
    }
    before = create(client, tools=[search], messages=HI)
    history = [
        *HI,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [found]},
    ]
    after = create(client, tools=[deferred, search], messages=history)
    assert after.usage.cache_read_input_tokens >= prompt_tokens(before) - 1
    plain = {**found, "content": "get_time"}
    untold = [*history[:-1], {"role": "user", "content": [plain]}]
    shorter = client.messages.count_tokens(model="fake", tools=[search], messages=untold)
    assert prompt_tokens(after) > shorter.input_tokens + len("get_time")


def test_json_of_a_schema(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"title": {"enum": ["a", "b"]}},
        "required": ["title"],
        "additionalProperties": False,
    }
    message = create(
        client,
        max_tokens=100,
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    )
    assert json.loads(text_of(message))["title"] in ("a", "b")
    assert message.stop_reason == "end_turn"


def test_thinking_ends_when_its_budget_is_spent(client: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 20}
    message = create(client, thinking=thinking, max_tokens=60)
    thought, said = message.content
    assert isinstance(thought, ThinkingBlock)
    assert isinstance(said, TextBlock)
    assert thought.signature
    assert len(thought.thinking) <= 20
    assert message.usage.output_tokens_details.thinking_tokens == 20 + len("\n</think>")
    # The client sends it back as it is, and the next prompt begins with this one.
    history: Any = [*HI, {"role": "assistant", "content": message.content}, *HI]
    create(client, messages=history, thinking=thinking)


def test_thinking_may_be_omitted_or_off(client: anthropic.Anthropic) -> None:
    hidden: Any = {"type": "enabled", "budget_tokens": 8, "display": "omitted"}
    thought = streamed(client, max_tokens=40, thinking=hidden).content[0]
    assert isinstance(thought, ThinkingBlock)
    assert thought.thinking == ""
    assert thought.signature
    for thinking in ({"type": "disabled"}, anthropic.omit):
        message = create(client, thinking=thinking)
        assert [block.type for block in message.content] == ["text"]
    adaptive = create(client, thinking={"type": "adaptive"})
    assert [block.type for block in adaptive.content] == ["thinking"]


def test_stop_sequences_are_reported(client: anthropic.Anthropic) -> None:
    free = text_of(create(client, max_tokens=20))
    stop = free[5:8]
    message = create(client, max_tokens=20, stop_sequences=["\x00", stop])
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == stop
    assert text_of(message) == free[: free.index(stop)]


def test_sampling_parameters(client: anthropic.Anthropic) -> None:
    greedy = create(client, extra_body={"temperature": 1, "top_k": 1, "top_p": 0.9})
    assert text_of(greedy) == text_of(create(client))


def test_messages_of_every_shape_are_the_same_prompt(client: anthropic.Anthropic) -> None:
    text = {"type": "text", "text": "hi", "cache_control": None}
    blocks: Any = [{"role": "user", "content": [text]}]
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=9f;"}
    shapes: list[Any] = [
        {"messages": HI, "system": "Be brief."},
        {"messages": blocks, "system": [{"type": "text", "text": "Be brief."}]},
        {"messages": blocks, "system": [billing, {"type": "text", "text": "Be brief."}]},
        {"messages": [{"role": "system", "content": "Be brief."}, *HI]},
    ]
    counts = {client.messages.count_tokens(model="fake", **s).input_tokens for s in shapes}
    assert len(counts) == 1
    assert len({text_of(create(client, **shape)) for shape in shapes}) == 1


def test_system_messages_stay_where_they_stand(client: anthropic.Anthropic) -> None:
    first = create(client, system="Order.")
    later: Any = [
        *HI,
        {"role": "assistant", "content": first.content},
        {"role": "system", "content": "A reminder."},
        {"role": "user", "content": "go"},
        {"role": "user", "content": "on"},
    ]
    second = create(client, system="Order.", messages=later)
    assert second.usage.cache_read_input_tokens >= prompt_tokens(first) + 11


def test_models(client: anthropic.Anthropic) -> None:
    page = client.models.list(limit=1000)
    assert [model.id for model in page] == ["fake", "fake-2"]
    info = client.models.retrieve("fake")
    assert info.type == "model"
    assert info.max_input_tokens == 131_072
    assert client.models.retrieve("claude-haiku-9").id == "fake"
    with pytest.raises(anthropic.NotFoundError, match="not served"):
        client.models.retrieve("gpt-9")


def test_lengths_are_refused_in_the_words_clients_parse(client: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "x" * 140_000}]
    length = client.messages.count_tokens(model="fake", messages=long).input_tokens
    with pytest.raises(anthropic.BadRequestError) as refusal:
        create(client, messages=long)
    assert refusal.value.body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": f"prompt is too long: {length} tokens > 131071 maximum",
        },
        "request_id": refusal.value.request_id,
    }


def test_a_reply_longer_than_the_room_is_not_refused(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="fake", max_tokens=1_000_000, messages=HI, extra_body=GREEDY
    ) as stream:
        assert next(stream.text_stream)
