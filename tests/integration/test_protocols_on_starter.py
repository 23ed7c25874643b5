"""All protocols on the starter model, with a template that opens thinking: prefixes are reused.

The model is small, and held to what is asked for; tiers change no word.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from semantic.application.prompt.renderer import render
from semantic.domain.chat import ChatRequest, Message, Role
from tests.http_server import RunningServer, make_settings, run_server
from tests.integration.test_anthropic_sdk import prompt_tokens
from tests.integration.test_direct_api import (
    events_of,
    first_text,
    get,
    going_on,
    make,
    post,
    say,
)
from tests.waiting import await_that

pytestmark = pytest.mark.integration

MODEL = "thinker"
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
# Tokens that the model hardly knows stand for those that mark a prefix and a suffix.
RENAMED = {
    "<issue_start>": "<fim_prefix>",
    "<issue_comment>": "<fim_suffix>",
    "<issue_closed>": "<fim_middle>",
}
PARIS = "What is the capital of France? Answer in one sentence."


def renamed(tokenizer: str) -> str:
    for old, new in RENAMED.items():
        tokenizer = tokenizer.replace(json.dumps(old), json.dumps(new))
    return tokenizer


@pytest.fixture(scope="module")
def running(
    starter_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    home = tmp_path_factory.mktemp("home")
    model = home / MODEL
    model.mkdir()
    for file in starter_model_dir.iterdir():
        if file.name == "tokenizer.json":
            (model / file.name).write_text(renamed(file.read_text()))
        elif file.name != "tokenizer_config.json":
            (model / file.name).symlink_to(file)
    config = json.loads((starter_model_dir / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    with run_server(make_settings(home, backend="torch", model=str(model))) as server:
        yield server


# -- OpenAI -----------------------------------------------------------------------------------


def test_a_conversation_by_response_ids(openai_client: openai.OpenAI) -> None:
    usual: Any = {"model": MODEL, "temperature": 0}
    first: Any = openai_client.responses.create(input=PARIS, **usual)
    assert "Paris" in first.output_text
    more = "And of Italy? Answer in one sentence."
    second: Any = openai_client.responses.create(input=more, previous_response_id=first.id, **usual)
    assert "Rome" in second.output_text
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens - 1


def test_items_by_reference_continue_from_what_was_computed(openai_client: openai.OpenAI) -> None:
    usual: Any = {"model": MODEL, "temperature": 0}
    first: Any = openai_client.responses.create(input=PARIS, **usual)
    question = openai_client.responses.input_items.list(first.id).data[0]
    more: Any = {"role": "user", "content": "And of Italy? Answer in one sentence."}
    items: Any = [{"type": "item_reference", "id": item.id} for item in (question, *first.output)]
    second: Any = openai_client.responses.create(input=[*items, more], **usual)
    assert "Rome" in second.output_text
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens - 1


def test_the_middle_of_a_text_is_filled_in(
    openai_client: openai.OpenAI, running: RunningServer
) -> None:
    before, after = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))  # <|endoftext|>\n"
    asked: Any = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    ask = openai_client.completions.create
    first: Any = ask(prompt=before, suffix=after, **asked)
    again: Any = ask(prompt=before, suffix=after, **asked)
    model = running.server.device.model
    assert model is not None
    special, plain = model.tokenizer.special_ids, model.tokenizer.encode_plain
    ids = [special["<fim_prefix>"], *plain(before), special["<fim_suffix>"], *plain(after)]
    by_ids: Any = ask(prompt=[*ids, special["<fim_middle>"]], **asked)
    assert first.choices[0].text == again.choices[0].text == by_ids.choices[0].text
    assert again.usage.prompt_tokens == len(ids) + 1
    assert again.usage.prompt_tokens_details.cached_tokens == len(ids)


def test_a_reply_that_was_begun_is_the_same_prompts_and_is_replayed(
    openai_client: openai.OpenAI, running: RunningServer
) -> None:
    begun: Any = [
        {"role": "user", "content": PARIS},
        {"role": "assistant", "content": "The capital of France is the"},
    ]
    usual: Any = {"model": MODEL, "temperature": 0, "max_tokens": 6}
    first: Any = openai_client.chat.completions.create(messages=begun, **usual)
    text = first.choices[0].message.content
    assert text
    model = running.server.device.ready_model()
    asked = ChatRequest(model.id, (Message.of(Role.USER, PARIS),))
    written = model.tokenizer.encode_plain(begun[1]["content"])
    tokens = [*render(asked, model.tokenizer).tokens, *written]
    fresh = openai_client.completions.create(prompt=tokens, **usual)
    assert fresh.choices[0].text == text
    begun[1]["content"] += text
    begun.append({"role": "user", "content": "And of Italy?"})
    second: Any = openai_client.chat.completions.create(messages=begun, **usual)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 1


def test_it_is_sampled_as_its_authors_advise(openai_client: openai.OpenAI) -> None:
    made = openai_client.responses.create(model=MODEL, input=PARIS, max_output_tokens=1)
    assert (made.temperature, made.top_p) == (0.2, 0.9)


# -- Ollama -----------------------------------------------------------------------------------


def ask_ollama(http: httpx.Client, messages: Any, **fields: Any) -> dict[str, Any]:
    options = {"temperature": 0, "num_predict": 24, **fields.pop("options", {})}
    body = {"model": MODEL, "messages": messages, "stream": False, "options": options, **fields}
    made: dict[str, Any] = http.post("/api/chat", json=body).raise_for_status().json()
    return made


def test_a_conversation_goes_from_ollama_to_openai_and_back(
    http: httpx.Client, openai_client: openai.OpenAI
) -> None:
    said: list[Any] = [{"role": "user", "content": PARIS}]
    first = ask_ollama(http, said, think=True)
    assert first["message"]["thinking"]
    said += [first["message"], {"role": "user", "content": "And of Italy?"}]
    usual: Any = {"model": MODEL, "temperature": 0, "max_tokens": 24}
    with_thinking: Any = {**first["message"], "reasoning_content": first["message"]["thinking"]}
    second: Any = openai_client.chat.completions.create(
        messages=[said[0], with_thinking, said[2]], reasoning_effort="high", **usual
    )
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first["prompt_eval_count"] + first["eval_count"] - 1
    said += [
        {
            "role": "assistant",
            "content": second.choices[0].message.content,
            "thinking": getattr(second.choices[0].message, "reasoning_content", ""),
        },
        {"role": "user", "content": "And of Spain?"},
    ]
    third = ask_ollama(http, said, think="high")
    assert third["cached_tokens"] >= second.usage.total_tokens - 1


def test_a_shortened_conversation_is_answered_as_if_it_were_new(
    http: httpx.Client, openai_client: openai.OpenAI
) -> None:
    said: list[Any] = [{"role": "system", "content": "Answer briefly."}]
    for city in ("Rome", "Oslo", "Bern", "Kyiv"):
        said += [
            {"role": "user", "content": f"Is {city} a capital? " * 3},
            {"role": "assistant", "content": "Yes."},
        ]
    said.append({"role": "user", "content": PARIS})
    made = ask_ollama(http, said, options={"num_ctx": 120})
    assert made["prompt_eval_count"] <= 120
    usual: Any = {"model": MODEL, "temperature": 0, "max_tokens": 24}
    fresh = [
        openai_client.chat.completions.create(messages=[said[0], *said[start:]], **usual)
        for start in range(1, len(said), 2)
    ]
    same: Any = [one for one in fresh if one.usage.prompt_tokens == made["prompt_eval_count"]]
    assert [one.choices[0].message.content for one in same] == [made["message"]["content"]]


def test_a_model_that_thinks_and_fills_in_says_so(http: httpx.Client) -> None:
    shown = http.post("/api/show", json={"model": MODEL}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking", "insert"]
    assert shown["details"]["parameter_size"] == "134.52M"
    assert shown["model_info"]["llama.context_length"] == 8192
    body = {"model": MODEL, "prompt": "def f(", "suffix": "):", "stream": False}
    made = http.post("/api/generate", json={**body, "options": {"num_predict": 4}}).json()
    assert made["done"]
    assert "context" not in made


# -- Anthropic --------------------------------------------------------------------------------


def create(client: anthropic.Anthropic, messages: Any, **changes: Any) -> Any:
    given = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0}, **changes}
    with client.messages.stream(messages=messages, **given) as stream:
        return stream.get_final_message()


def goes_on(client: anthropic.Anthropic, asked: str, more: str, **changes: Any) -> Any:
    """A first reply, and one to what follows it."""
    said: list[Any] = [{"role": "user", "content": asked}]
    first = create(client, said, **changes)
    said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": more}]
    second = create(client, said, **changes)
    changes.pop("max_tokens", None)
    count = client.messages.count_tokens(model=MODEL, messages=said, **changes)
    assert count.input_tokens == prompt_tokens(second)
    return first, second


def test_a_conversation_continues_where_it_ended(anthropic_client: anthropic.Anthropic) -> None:
    first, second = goes_on(anthropic_client, PARIS, "And of Spain?", system="You are terse.")
    assert first.content[0].text
    reused = prompt_tokens(first) + first.usage.output_tokens - 1
    assert second.usage.cache_read_input_tokens >= reused


def test_thinking_ends_with_its_budget_and_comes_back(
    anthropic_client: anthropic.Anthropic,
) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 12}
    asked = "Tell me a long story about a dog."
    first, second = goes_on(
        anthropic_client, asked, "Are you sure?", thinking=thinking, max_tokens=60
    )
    thought, said = first.content
    assert (thought.type, said.type) == ("thinking", "text")
    assert "</think>" not in thought.thinking
    # The marker is no token of its own in this vocabulary.
    num_thought = first.usage.output_tokens_details.thinking_tokens
    assert 12 < num_thought <= 12 + len("\n</think>")
    assert second.usage.cache_read_input_tokens >= prompt_tokens(first)


# -- the agent API ----------------------------------------------------------------------------

SYSTEM = "You are a helpful assistant. You know about geography and answer in one sentence. " * 6
SECOND = "And which river runs through it?"


def test_replies_from_disk_from_scratch_and_from_memory_are_the_same(http: httpx.Client) -> None:
    make(http, id="a", system=SYSTEM)
    first = say(http, "a", PARIS, max_tokens=12, ignore_eos=False)
    assert "Paris" in first["text"]
    num_tokens = get(http, "/v1/agents/a")["tokens"]
    states, replies = [], []
    for place in ("disk", "cold"):
        evicted = post(http, "/v1/agents/a/evict", to=place)["state"]
        states.append((evicted["tier"], evicted["memory_tokens"]))
        replies.append(say(http, "a", SECOND))
        post(http, "/v1/agents/a/rewind", turn_id=first["turn_id"])
    replies.append(say(http, "a", SECOND))
    assert [tier for tier, _ in states] == ["warm", "cold"]
    assert states[0][1] == 0
    assert states[1][1] < 10  # other conversations begin with the same marker and words
    assert len({reply["text"] for reply in replies}) == 1
    assert replies[0]["reuse"]["disk"] + replies[0]["reuse"]["pool"] >= num_tokens - 1
    assert replies[0]["reuse"]["hot"] == 0
    assert events_of(http.post("/v1/cache/verify"))[-1]["bad"] == 0


def test_after_a_stopped_reply_the_next_is_that_of_the_same_prompt_from_scratch(
    http: httpx.Client,
) -> None:
    make(http, id="stopped")
    with going_on(http, "stopped", message="Count from one to ten thousand, in words.") as lines:
        first_text(lines)
    await_that(lambda: get(http, "/v1/agents/stopped")["turns"] == 1)
    stopped = get(http, "/v1/agents/stopped")["head"]
    hot = say(http, "stopped", PARIS)
    post(http, "/v1/agents/stopped/rewind", turn_id=stopped)
    post(http, "/v1/agents/stopped/evict", to="cold")
    cold = say(http, "stopped", PARIS)
    assert hot["text"] == cold["text"]
    assert cold["reuse"]["computed"] > hot["reuse"]["computed"]
