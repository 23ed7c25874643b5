"""Chat Completions and Completions by the official client, every answer checked by it."""

import contextlib
import json
import re
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.http_server import RunningServer
from tests.waiting import await_that

pytestmark = pytest.mark.integration

SDK = openai.OpenAI
SETTINGS = {"default_max_tokens": 400}
HELLO: Any = [{"role": "user", "content": "hello"}]
ENDLESS: Any = {"extra_body": {"ignore_eos": True}}
STREAM: Any = {"stream": True, "stream_options": {"include_usage": True}}
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
CALLING: Any = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}


def chat(client: openai.OpenAI, messages: Any = HELLO, **given: Any) -> Any:
    """Sampled, and always alike."""
    return client.chat.completions.create(model="fake", messages=messages, **{"seed": 1, **given})


def complete(client: openai.OpenAI, prompt: Any, **given: Any) -> Any:
    return client.completions.create(model="fake", prompt=prompt, **{"seed": 1, **given})


def agents_of(running: RunningServer) -> dict[str, int]:
    return {agent.id: agent.num_turns for agent in running.server.memory.agents.agents("local")}


def test_whole_and_streamed_replies_agree(client: openai.OpenAI) -> None:
    whole = chat(client, temperature=0, max_tokens=12)
    chunks = list(chat(client, temperature=0, max_tokens=12, **STREAM))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    # The stream came second and found everything but the last token computed.
    cached = chunks[-1].usage.prompt_tokens_details.cached_tokens
    assert cached == whole.usage.prompt_tokens - 1


def test_a_prediction_is_used_and_its_accepted_tokens_are_reported(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> Any:
        reply = chat(client, temperature=0, max_tokens=80, **more)
        details = reply.usage.completion_tokens_details
        told = details.accepted_prediction_tokens, details.rejected_prediction_tokens
        return reply.choices[0].message.content, told

    def is_taken(content: object) -> bool:
        again, (accepted, _) = ask(prediction={"type": "content", "content": content})
        assert again == text
        return bool(accepted)

    text, _ = ask()
    # The server measures whether drafts save time; where they do not, it tries again later.
    await_that(lambda: is_taken(text))
    await_that(lambda: is_taken([{"type": "text", "text": text}]))
    wrong, _ = ask(prediction={"type": "content", "content": "nothing of the kind"})
    assert wrong == text
    with pytest.raises(openai.BadRequestError, match="prediction"):
        ask(prediction={"type": "guess"})


def test_a_stream_without_usage_has_none(client: openai.OpenAI) -> None:
    assert all(chunk.usage is None and chunk.choices for chunk in chat(client, stream=True))


def test_seed_and_logprobs(client: openai.OpenAI) -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}]
    wanted: Any = {"seed": 7, "logprobs": True, "top_logprobs": 3, "max_tokens": 6}
    first, second = (chat(client, messages, **wanted).choices[0] for _ in range(2))
    assert first.message.content == second.message.content
    scored = first.logprobs.content
    assert "".join(token.token for token in scored) == first.message.content
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in scored)


def test_stop_strings_are_not_shown(client: openai.OpenAI) -> None:
    asked: Any = {"temperature": 0, "max_tokens": 20, **ENDLESS}
    text = chat(client, **asked).choices[0].message.content
    stopped = chat(client, stop=text[5:8], **asked).choices[0]
    assert stopped.message.content == text[: text.index(text[5:8])]
    assert stopped.finish_reason == "stop"


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "fake-2"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.models.retrieve("gpt-9")
    listed = http.get("/v1/models").json()
    assert http.get("/v1/models/").json() == listed
    model = listed["data"][0]
    assert model["max_model_len"] == model["max_context"] == 131_072  # the former is vLLM's


def test_several_replies_share_one_prompt(client: openai.OpenAI, running: RunningServer) -> None:
    messages = [{"role": "user", "content": "several, please " * 200}]
    whole = chat(client, messages, n=3, seed=5, max_tokens=8)
    agents = running.server.memory.agents
    turns = [agents.turn("local", agent.head or "") for agent in agents.recent(3)]
    computed = sorted(turn.reuse.computed for turn in turns if turn is not None)
    first = chat(client, messages, seed=5, max_tokens=8)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    assert texts[0] == first.choices[0].message.content
    num_prompt = whole.usage.prompt_tokens
    assert num_prompt == first.usage.prompt_tokens
    assert whole.usage.completion_tokens == 24
    assert computed[2] <= num_prompt
    assert computed[0] + computed[1] <= 2 * running.server.device.limits.prefill_step_size
    assert computed[0] + computed[1] < num_prompt


def test_several_replies_are_streamed_together(client: openai.OpenAI) -> None:
    texts, ends, usages = {0: "", 1: ""}, {}, []
    for chunk in chat(client, n=2, seed=5, max_tokens=8, **STREAM, **ENDLESS):
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
    reply = chat(client, **{**CALLING, "tool_choice": choice}).choices[0]
    assert reply.finish_reason == "tool_calls"
    assert reply.message.content is None
    (call,) = reply.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"days"}
    assert call.id.startswith("call_")


def test_calls_are_streamed_with_their_index_and_no_text(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="fake", messages=HELLO, tools=[WEATHER], tool_choice="required", seed=1
    ) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    assert [delta.content for delta in deltas] == ["", *[None] * (len(deltas) - 1)]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    starts = [call.index for call in calls if call.id]
    assert starts == list(range(len(final.message.tool_calls or [])))
    assert [call.index for call in calls] == sorted(call.index for call in calls)


def test_a_tool_loop_goes_on_from_what_was_computed(
    client: openai.OpenAI, running: RunningServer
) -> None:
    messages = [{"role": "developer", "content": "Use tools."}, *HELLO]
    cached = []
    for _ in range(3):
        reply = chat(client, messages, **CALLING, extra_body={"session_id": "loop"})
        message = reply.choices[0].message
        cached.append(reply.usage.prompt_tokens_details.cached_tokens)
        # As clients do it: through JSON and back, with the ids they were given.
        messages.append(json.loads(message.to_json()))
        (call,) = message.tool_calls
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "22 degrees"})
    assert cached[0] < cached[1] < cached[2]
    assert agents_of(running)["loop"] == 3


@pytest.mark.parametrize("limit", [{"max_tokens": n} for n in range(1, 90, 8)] + [{"stop": "ys"}])
def test_a_call_that_was_cut_off_is_no_call_and_is_recognised_when_it_comes_back(
    client: openai.OpenAI, limit: Any
) -> None:
    session: Any = {"extra_body": {"session_id": f"cut-{limit}"}}
    whole = chat(client, **CALLING, **limit, **session)
    choice = whole.choices[0]
    calls = choice.message.tool_calls or []
    if choice.finish_reason == "tool_calls":
        assert [set(json.loads(call.function.arguments)) for call in calls] == [{"days"}]
        return
    assert choice.finish_reason == ("length" if "max_tokens" in limit else "stop")
    assert not choice.message.content
    for call in calls:
        with contextlib.suppress(ValueError):  # what ends the call may be all that is missing
            assert set(json.loads(call.function.arguments)) == {"days"}
    chunks = list(chat(client, **CALLING, **limit, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert not any(delta.content for delta in deltas)
    pieces = [call.function.arguments for d in deltas for call in d.tool_calls or []]
    assert "".join(pieces) == "".join(call.function.arguments for call in calls)
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    again = [*HELLO, json.loads(choice.message.to_json()), *HELLO]
    used = chat(client, again, **CALLING, **session).usage
    assert used.prompt_tokens_details.cached_tokens >= whole.usage.total_tokens - 4


def test_a_schema_is_parsed(client: openai.OpenAI) -> None:
    class Answer(pydantic.BaseModel):
        is_right: bool
        score: int

    reply = client.chat.completions.parse(
        model="fake", messages=HELLO, response_format=Answer, seed=1
    )
    assert isinstance(reply.choices[0].message.parsed, Answer)
    response = client.responses.parse(model="fake", input="x", text_format=Answer, temperature=0)
    assert isinstance(response.output_parsed, Answer)


def test_any_object_and_its_logprobs(client: openai.OpenAI) -> None:
    form = {"type": "json_object"}
    reply = chat(client, response_format=form, logprobs=True, top_logprobs=20, max_tokens=60)
    assert isinstance(json.loads(reply.choices[0].message.content), dict)


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
    extra: Any = {"extra_body": {"structured_outputs": wanted}}
    reply = chat(client, max_tokens=60, **extra)
    raw = complete(client, "x", max_tokens=60, **extra)
    response = client.responses.create(
        model="fake", input="x", max_output_tokens=60, temperature=0, **extra
    )
    for text in (reply.choices[0].message.content, raw.choices[0].text, response.output_text):
        assert re.fullmatch(form, text or "", re.DOTALL), text


def test_a_client_key_is_one_agent(client: openai.OpenAI, running: RunningServer) -> None:
    before = agents_of(running)
    messages = [{"role": "user", "content": "who am I?"}]
    for given in (
        {"extra_headers": {"session-id": "s", "thread-id": "t"}},
        {"extra_headers": {"x-session-affinity": "u"}},
        {"extra_body": {"prompt_cache_key": "t"}},
    ):
        chat(client, messages, max_tokens=4, **given)
    made = agents_of(running).keys() - before.keys()
    assert len(made) == 2
    assert all(name.startswith("client-") for name in made)


# -- completions ------------------------------------------------------------------------------


def test_prompts_as_text_and_as_ids_are_the_same(client: openai.OpenAI) -> None:
    by_text, by_ids, both = (
        complete(client, prompt, temperature=0)
        for prompt in ("Hello", list(b"Hello"), [list(b"Hello"), list(b"Bye")])
    )
    assert by_text.choices[0].text == by_ids.choices[0].text == both.choices[0].text
    assert both.choices[1].text != both.choices[0].text
    assert by_text.usage.prompt_tokens == 5
    assert by_text.usage.completion_tokens <= 16


def test_completions_echo_and_several(client: openai.OpenAI) -> None:
    asked: Any = {"echo": True, "seed": 3, "max_tokens": 5}
    reply = complete(client, ["One ", "Two "], n=2, **asked)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text[:4] for choice in reply.choices] == ["One ", "One ", "Two ", "Two "]
    by_ids = complete(client, list(b"One "), **asked)
    assert by_ids.choices[0].text == reply.choices[0].text


def test_completions_with_logprobs(client: openai.OpenAI) -> None:
    wanted: Any = {"logprobs": 2, "seed": 1, "max_tokens": 6, "logit_bias": {"120": 50}}
    reply = complete(client, "abc", **wanted).choices[0]
    assert "".join(reply.logprobs.tokens) == reply.text
    assert reply.logprobs.text_offset == list(range(len(reply.text)))
    # A character of several tokens stands where its first one does.
    form: Any = {"structured_outputs": {"choice": ["aé🙂b"]}}
    spread = complete(client, "abc", logprobs=1, extra_body=form).choices[0]
    assert spread.logprobs.text_offset[:8] == [0, 1, 1, 2, 2, 2, 2, 3]
    # The two likeliest, and the chosen one if it is not among them.
    for token, top in zip(reply.logprobs.tokens, reply.logprobs.top_logprobs, strict=True):
        assert token in top
        assert len(top) <= 3


def test_completions_are_streamed(client: openai.OpenAI) -> None:
    # The client's own type of a chunk wants a finish_reason where OpenAI sends none.
    client = client.with_options(_extra_kwargs={"_strict_response_validation": False})
    asked: Any = {"temperature": 0, "max_tokens": 6, "echo": True}
    whole = complete(client, ["a", "b"], **asked)
    texts = ["", ""]
    for chunk in complete(client, ["a", "b"], **asked, **STREAM):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_special_tokens_in_a_raw_prompt_count(client: openai.OpenAI) -> None:
    written = "<|start|>user\nhello<|end|><|start|>assistant\n"
    raw = complete(client, written, temperature=0, max_tokens=12)
    reply = chat(client, temperature=0, max_tokens=12)
    assert raw.choices[0].text == reply.choices[0].message.content


def test_broken_arguments_and_thinking_in_the_history_are_taken(client: openai.OpenAI) -> None:
    broken = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
    called = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "no"}]}
    history = [*HELLO, {**called, "tool_calls": [broken]}, result]
    assert chat(client, history, max_tokens=2, reasoning_effort="low").usage.completion_tokens


@pytest.mark.parametrize(
    "path", ["moderations", "audio/speech", "audio/transcriptions", "images/generations"]
)
def test_unsupported_endpoints_are_refused_as_openai_errors(
    client: openai.OpenAI, path: str
) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.post(f"/{path}", cast_to=httpx.Response, body={"model": "fake", "input": "x"})
    assert caught.value.code == "unsupported_endpoint"
