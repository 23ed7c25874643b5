"""OpenAI's protocols on the starter model: small, and held to what is asked for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from semantic.adapters.config.settings import STARTER_MODEL
from semantic.application.prompt.renderer import render
from semantic.domain.chat import ChatRequest, Message, Role
from tests.http_server import RunningServer, make_settings, run_server

pytestmark = pytest.mark.integration

SDK = openai.OpenAI

PARIS = "What is the capital of France? Answer in one sentence."
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def running(starter_home: Path) -> Iterator[RunningServer]:
    with run_server(make_settings(starter_home, backend="torch", model=STARTER_MODEL)) as server:
        yield server


def test_a_conversation_by_response_ids(client: openai.OpenAI, running: RunningServer) -> None:
    first = client.responses.create(model=running.model, input=PARIS, temperature=0)
    assert "Paris" in first.output_text
    second = client.responses.create(
        model=running.model,
        input="And of Italy? Answer in one sentence.",
        previous_response_id=first.id,
        temperature=0,
    )
    assert "Rome" in second.output_text
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1


def test_a_tool_loop_as_items(client: openai.OpenAI, running: RunningServer) -> None:
    asked: Any = {"model": running.model, "temperature": 0, "tools": [WEATHER], "store": False}
    history: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.responses.create(
        input=history, tool_choice="required", parallel_tool_calls=False, **asked
    )
    (call,) = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    history += [
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 22 degrees"},
    ]
    second = client.responses.create(input=history, max_output_tokens=30, **asked)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1


def test_a_reply_that_was_begun_is_the_same_prompts_and_is_replayed(
    client: openai.OpenAI, running: RunningServer
) -> None:
    begun: Any = [
        {"role": "user", "content": PARIS},
        {"role": "assistant", "content": "The capital of France is the"},
    ]
    usual: Any = {"model": running.model, "temperature": 0, "max_tokens": 6}
    first = client.chat.completions.create(messages=begun, **usual)
    text = first.choices[0].message.content or ""
    assert text
    model = running.server.device.ready_model()
    asked = ChatRequest(model.id, (Message.of(Role.USER, PARIS),))
    written = model.tokenizer.encode_plain(begun[1]["content"])
    tokens = [*render(asked, model.tokenizer).tokens, *written]
    fresh = client.completions.create(prompt=tokens, **usual)
    assert fresh.choices[0].text == text
    begun[1]["content"] += text
    begun.append({"role": "user", "content": "And of Italy?"})
    second = client.chat.completions.create(messages=begun, **usual)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= first.usage.total_tokens - 1


def test_it_is_sampled_as_its_authors_advise(client: openai.OpenAI, running: RunningServer) -> None:
    made = client.responses.create(model=running.model, input=PARIS, max_output_tokens=1)
    assert (made.temperature, made.top_p) == (0.2, 0.9)


def test_a_schema_is_kept(client: openai.OpenAI, running: RunningServer) -> None:
    class Answer(pydantic.BaseModel):
        city: str
        is_capital: bool

    messages: Any = [{"role": "user", "content": "Is Paris the capital of France?"}]
    chat = client.chat.completions.parse(
        model=running.model, messages=messages, response_format=Answer, max_tokens=60
    )
    assert chat.choices[0].message.parsed is not None
    response = client.responses.parse(
        model=running.model, input=PARIS, text_format=Answer, max_output_tokens=60
    )
    assert response.output_parsed is not None


def test_a_raw_prompt_is_continued(client: openai.OpenAI, running: RunningServer) -> None:
    reply = client.completions.create(
        model=running.model, prompt="The capital of France is", temperature=0, max_tokens=4
    )
    assert "Paris" in reply.choices[0].text
