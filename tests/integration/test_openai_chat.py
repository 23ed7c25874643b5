"""Chat Completions and Completions by the official client, every answer checked by it."""

import json
import re
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.http_server import RunningServer

pytestmark = pytest.mark.integration

SDK = openai.OpenAI
SETTINGS = {"default_max_tokens": 400}
HELLO: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer"}},
            "required": ["days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def agents_of(running: RunningServer) -> dict[str, int]:
    return {agent.id: agent.num_turns for agent in running.server.memory.agents.agents("local")}


def test_whole_and_streamed_replies_agree(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(
        model="fake", messages=messages, temperature=0, max_tokens=12
    )
    stream = client.chat.completions.create(
        model="fake",
        messages=messages,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    # The stream came second and found everything but the last token computed.
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1


def test_a_prediction_is_taken_and_what_came_of_it_is_told(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> Any:
        reply = client.chat.completions.create(
            model="fake", messages=HELLO, temperature=0, max_tokens=80, **more
        )
        assert reply.usage
        details = reply.usage.completion_tokens_details
        assert details
        told = details.accepted_prediction_tokens, details.rejected_prediction_tokens
        return reply.choices[0].message.content, told

    text, _ = ask()
    for content in (text, [{"type": "text", "text": text}]):
        again, (accepted, _) = ask(prediction={"type": "content", "content": content})
        assert again == text
        assert accepted > 0
    wrong, _ = ask(prediction={"type": "content", "content": "nothing of the kind"})
    assert wrong == text
    with pytest.raises(openai.BadRequestError, match="prediction"):
        ask(prediction={"type": "guess"})


def test_a_stream_without_usage_has_none(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    stream = client.chat.completions.create(model="fake", messages=messages, stream=True)
    assert all(chunk.usage is None and chunk.choices for chunk in stream)


def test_seed_and_logprobs(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}]
    replies = [
        client.chat.completions.create(
            model="fake", messages=messages, seed=7, logprobs=True, top_logprobs=3, max_tokens=6
        )
        for _ in range(2)
    ]
    first, second = (r.choices[0] for r in replies)
    assert first.message.content == second.message.content
    assert first.logprobs is not None
    assert first.logprobs.content is not None
    scored = first.logprobs.content
    assert "".join(token.token for token in scored) == first.message.content
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in scored)


def test_stop_strings_are_not_shown(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "stop me"}]
    free = client.chat.completions.create(
        model="fake",
        messages=messages,
        temperature=0,
        max_tokens=20,
        extra_body={"ignore_eos": True},
    )
    text = free.choices[0].message.content or ""
    stopped = client.chat.completions.create(
        model="fake",
        messages=messages,
        temperature=0,
        max_tokens=20,
        stop=text[5:8],
        extra_body={"ignore_eos": True},
    )
    assert stopped.choices[0].message.content == text[: text.index(text[5:8])]
    assert stopped.choices[0].finish_reason == "stop"


def test_models(client: openai.OpenAI, running: RunningServer) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "fake-2"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.models.retrieve("gpt-9")
    with running.client() as http:
        assert http.get("/v1/models").json()["data"][0]["max_context"] > 0


def test_several_replies_share_one_prompt(client: openai.OpenAI, running: RunningServer) -> None:
    messages: Any = [{"role": "user", "content": "several, please " * 200}]
    whole = client.chat.completions.create(
        model="fake", messages=messages, n=3, seed=5, max_tokens=8
    )
    agents = running.server.memory.agents
    turns = [agents.turn("local", agent.head or "") for agent in agents.recent(3)]
    computed = sorted(turn.reuse.computed for turn in turns if turn is not None)
    first = client.chat.completions.create(model="fake", messages=messages, seed=5, max_tokens=8)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    assert texts[0] == first.choices[0].message.content
    assert whole.usage is not None
    assert first.usage is not None
    assert whole.usage.prompt_tokens == first.usage.prompt_tokens
    assert whole.usage.completion_tokens == 24
    num_prompt = whole.usage.prompt_tokens
    assert computed[2] <= num_prompt
    assert computed[0] + computed[1] <= 2 * running.server.device.limits.prefill_step_size
    assert computed[0] + computed[1] < num_prompt


def test_several_replies_are_streamed_together(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=HELLO,
        n=2,
        seed=5,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    texts = {0: "", 1: ""}
    ends = {}
    usages = []
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
        if chunk.usage:
            usages.append(chunk.usage.completion_tokens)
    assert ends == {0: "length", 1: "length"}
    assert texts[0] != texts[1]
    assert usages == [16]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_call_that_must_be_is(client: openai.OpenAI, choice: Any) -> None:
    reply = client.chat.completions.create(
        model="fake",
        messages=HELLO,
        tools=[WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
    )
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].message.content is None
    calls = reply.choices[0].message.tool_calls or []
    assert len(calls) == 1
    assert calls[0].type == "function"
    assert calls[0].function.name == "get_weather"
    assert set(json.loads(calls[0].function.arguments)) == {"days"}
    assert calls[0].id.startswith("call_")


def test_calls_are_streamed_with_their_index(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="fake", messages=HELLO, tools=[WEATHER], tool_choice="required"
    ) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    deltas = [
        call
        for chunk in chunks
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    starts = [call.index for call in deltas if call.id]
    assert starts == list(range(len(final.message.tool_calls or [])))
    assert [call.index for call in deltas] == sorted(call.index for call in deltas)


def test_a_tool_loop_goes_on_from_what_was_computed(
    client: openai.OpenAI, running: RunningServer
) -> None:
    messages: Any = [{"role": "developer", "content": "Use tools."}, *HELLO]
    cached = []
    for _ in range(3):
        reply = client.chat.completions.create(
            model="fake",
            messages=messages,
            tools=[WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
            extra_body={"session_id": "loop"},
        )
        message = reply.choices[0].message
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        cached.append(reply.usage.prompt_tokens_details.cached_tokens or 0)
        # As clients do it: through JSON and back, with the ids they were given.
        messages.append(json.loads(message.to_json()))
        call = (message.tool_calls or [])[0]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "22 degrees"})
    assert cached[0] < cached[1] < cached[2]
    assert agents_of(running)["loop"] == 3


def test_a_schema_is_parsed(client: openai.OpenAI) -> None:
    class Answer(pydantic.BaseModel):
        is_right: bool
        score: int

    reply = client.chat.completions.parse(model="fake", messages=HELLO, response_format=Answer)
    assert isinstance(reply.choices[0].message.parsed, Answer)


def test_any_object_and_its_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="fake",
        messages=HELLO,
        response_format={"type": "json_object"},
        logprobs=True,
        top_logprobs=20,
        max_tokens=60,
    )
    assert isinstance(json.loads(reply.choices[0].message.content or ""), dict)


CODE = r"[A-Z]{2}-\d{3}"


@pytest.mark.parametrize(
    "wanted, form",
    [
        ({"regex": CODE}, CODE),
        ({"regex": f"^{CODE}$", "choice": None}, CODE),
        ({"choice": ["yes", "no", "at 100 %"]}, "yes|no|at 100 %"),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"json": '{"type": "boolean"}', "disable_any_whitespace": True}, "true|false"),
        ({"json_object": True}, r"\{.*\}"),
    ],
)
def test_the_form_that_vllms_clients_ask_for_is_kept(
    client: openai.OpenAI, wanted: dict[str, Any], form: str
) -> None:
    extra: Any = {"structured_outputs": wanted}
    chat = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=60, extra_body=extra
    )
    raw = client.completions.create(model="fake", prompt="x", max_tokens=60, extra_body=extra)
    response = client.responses.create(
        model="fake", input="x", max_output_tokens=60, extra_body=extra
    )
    for text in (chat.choices[0].message.content, raw.choices[0].text, response.output_text):
        assert re.fullmatch(form, text or "", re.DOTALL), text


def test_a_client_key_is_one_agent(client: openai.OpenAI, running: RunningServer) -> None:
    before = agents_of(running)
    messages: Any = [{"role": "user", "content": "who am I?"}]
    key: Any = {"prompt_cache_key": "t"}
    headers: list[dict[str, str]] = [
        {"session-id": "s", "thread-id": "t"},
        {"x-session-affinity": "u"},
        {},
    ]
    for given in headers:
        client.chat.completions.create(
            model="fake",
            messages=messages,
            max_tokens=4,
            extra_headers=given,
            extra_body={} if given else key,
        )
    made = {name: turns for name, turns in agents_of(running).items() if name not in before}
    assert len(made) == 2
    assert all(name.startswith("client-") for name in made)


# -- completions ------------------------------------------------------------------------------


def test_prompts_as_text_and_as_ids_are_the_same(client: openai.OpenAI) -> None:
    by_text = client.completions.create(model="fake", prompt="Hello", temperature=0)
    by_ids = client.completions.create(model="fake", prompt=list(b"Hello"), temperature=0)
    both = client.completions.create(
        model="fake", prompt=[list(b"Hello"), list(b"Bye")], temperature=0
    )
    assert by_text.choices[0].text == by_ids.choices[0].text == both.choices[0].text
    assert both.choices[1].text != both.choices[0].text
    assert by_text.usage is not None
    assert by_text.usage.prompt_tokens == 5
    assert by_text.usage.completion_tokens <= 16


def test_completions_echo_and_several(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="fake", prompt=["One ", "Two "], n=2, echo=True, seed=3, max_tokens=5
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text[:4] for choice in reply.choices] == ["One ", "One ", "Two ", "Two "]
    by_ids = client.completions.create(
        model="fake", prompt=list(b"One "), echo=True, seed=3, max_tokens=5
    )
    assert by_ids.choices[0].text == reply.choices[0].text


def test_completions_with_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="fake", prompt="abc", logprobs=2, seed=1, max_tokens=6, logit_bias={"120": 50}
    )
    scored = reply.choices[0].logprobs
    assert scored is not None
    assert "".join(scored.tokens or []) == reply.choices[0].text
    assert scored.text_offset == list(range(len(reply.choices[0].text)))
    assert all(len(top) <= 2 for top in scored.top_logprobs or [])


def test_completions_are_streamed(client: openai.OpenAI) -> None:
    # The client's own type of a chunk wants a finish_reason where OpenAI sends none.
    client = client.with_options(_extra_kwargs={"_strict_response_validation": False})
    whole = client.completions.create(
        model="fake", prompt=["a", "b"], temperature=0, max_tokens=6, echo=True
    )
    texts = ["", ""]
    for chunk in client.completions.create(
        model="fake",
        prompt=["a", "b"],
        temperature=0,
        max_tokens=6,
        echo=True,
        stream=True,
        stream_options={"include_usage": True},
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_special_tokens_in_a_raw_prompt_count(client: openai.OpenAI) -> None:
    written = "<|start|>user\nhello<|end|><|start|>assistant\n"
    raw = client.completions.create(model="fake", prompt=written, temperature=0, max_tokens=12)
    chat = client.chat.completions.create(
        model="fake", messages=HELLO, temperature=0, max_tokens=12
    )
    assert raw.choices[0].text == chat.choices[0].message.content


def test_broken_arguments_and_thinking_in_the_history_are_taken(running: RunningServer) -> None:
    history = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "no"}]},
    ]
    with running.client() as http:
        body = {"model": "fake", "messages": history, "max_tokens": 2, "reasoning_effort": "low"}
        assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "path", ["moderations", "audio/speech", "audio/transcriptions", "images/generations"]
)
def test_what_is_not_served_says_so_in_shape(client: openai.OpenAI, path: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.post(f"/{path}", cast_to=httpx.Response, body={"model": "fake", "input": "x"})
    assert caught.value.code == "unsupported_endpoint"
