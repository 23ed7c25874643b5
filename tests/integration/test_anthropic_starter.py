"""Anthropic's package against the starter model, with a template that opens thinking."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, TextBlock, ThinkingBlock, ToolUseBlock

from tests.http_server import RunningServer, make_settings, run_server

pytestmark = pytest.mark.integration

SDK = anthropic.Anthropic

KEY = "any"
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.reasoning_content -%}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking else '') -}}
{%- endif -%}
"""
ASKED: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def running(
    starter_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    home = tmp_path_factory.mktemp("home")
    model = home / "thinker"
    model.mkdir()
    for file in starter_model_dir.iterdir():
        if file.name != "tokenizer_config.json":
            (model / file.name).symlink_to(file)
    config = json.loads((starter_model_dir / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    with run_server(make_settings(home, backend="torch", model=str(model))) as server:
        yield server


def create(client: anthropic.Anthropic, **changes: Any) -> Message:
    given = {"model": "thinker", "max_tokens": 24, "extra_body": {"temperature": 0}, **changes}
    with client.messages.stream(**given) as stream:
        return stream.get_final_message()


def prompt_tokens(message: Message) -> int:
    usage = message.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return usage.input_tokens + cached


def test_a_conversation_continues_where_it_ended(client: anthropic.Anthropic) -> None:
    first = create(client, messages=ASKED, system="You are terse.")
    assert any(isinstance(block, TextBlock) and block.text for block in first.content)
    more: Any = [
        *ASKED,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "And of Spain?"},
    ]
    second = create(client, messages=more, system="You are terse.")
    assert second.usage.cache_read_input_tokens is not None
    reused = prompt_tokens(first) + first.usage.output_tokens - 1
    assert second.usage.cache_read_input_tokens >= reused


def test_thinking_ends_with_its_budget_and_comes_back(
    client: anthropic.Anthropic,
) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 12}
    asked: Any = [{"role": "user", "content": "Tell me a long story about a dog."}]
    first = create(client, messages=asked, thinking=thinking, max_tokens=60)
    thought, said = first.content
    assert isinstance(thought, ThinkingBlock)
    assert isinstance(said, TextBlock)
    assert "</think>" not in thought.thinking
    details = first.usage.output_tokens_details
    assert details is not None
    # The marker is no token of its own in this vocabulary.
    assert 12 < details.thinking_tokens <= 12 + len("\n</think>")
    more: Any = [
        *asked,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "Are you sure?"},
    ]
    second = create(client, messages=more, thinking=thinking)
    assert second.usage.cache_read_input_tokens is not None
    assert second.usage.cache_read_input_tokens >= prompt_tokens(first)


def test_a_call_of_a_tool_and_its_result(client: anthropic.Anthropic) -> None:
    tool: Any = {
        "name": "get_weather",
        "description": "The weather in a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
    choice: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    asked: Any = [{"role": "user", "content": "Is it raining in Rome?"}]
    first = create(client, messages=asked, tools=[tool], tool_choice=choice, max_tokens=80)
    (call,) = first.content
    assert isinstance(call, ToolUseBlock)
    assert isinstance(call.input["city"], str)
    assert first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
    more: Any = [
        *asked,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = create(client, messages=more, tools=[tool])
    assert second.usage.cache_read_input_tokens is not None
    reused = prompt_tokens(first) + first.usage.output_tokens - 1
    assert second.usage.cache_read_input_tokens >= reused
    count = client.messages.count_tokens(model="thinker", messages=more, tools=[tool])
    assert count.input_tokens == prompt_tokens(second)


def test_json_of_a_schema(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string", "maxLength": 30}},
        "required": ["title"],
        "additionalProperties": False,
    }
    wanted: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = create(client, messages=ASKED, output_config=wanted, max_tokens=60)
    (block,) = message.content
    assert isinstance(block, TextBlock)
    assert json.loads(block.text).keys() == {"title"}
