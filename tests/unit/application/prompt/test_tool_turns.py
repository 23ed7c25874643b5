"""The prompt after a tool call: what is certain of it, and which results are predicted."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from semantic.application.prompt.renderer import Prompt, Renderer
from semantic.application.prompt.tool_turns import calls_of, next_prompt
from semantic.domain.chat import (
    ChatRequest,
    JsonObject,
    Message,
    Part,
    Role,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    ToolSpec,
    ToolUsePart,
)
from tests.template_rig import PUBLISHED

pytestmark = pytest.mark.unit

READ = ToolSpec("read", "Reads.", {"type": "object", "properties": {"path": {"type": "string"}}})
ASKED = ChatRequest("m", (Message.of(Role.USER, "What does the file say?"),), (READ,))
RESULTS = ("It rains.", "Wet.")
# Templates that show ids, join results, quote them, change the prompt before a reply, or refuse
# parallel calls, which then are in the text.
NAMES = ("Command R7B", "DeepSeek V3.2", "Kimi K2", "Llama 3", "Mistral Nemo", "Qwen 2.5, 3")


@pytest.fixture(scope="module", params=NAMES)
def render(request: pytest.FixtureRequest) -> Callable[[ChatRequest], Prompt]:
    return Renderer(PUBLISHED[request.param].tokenizer).render


def call(call_id: str, path: str = "a.txt") -> ToolUsePart:
    arguments: JsonObject = {"path": path}
    return ToolUsePart(call_id, "read", arguments)


def said(*parts: Part) -> Message:
    return Message(Role.ASSISTANT, parts)


def result(call_id: str, text: str) -> ToolResultPart:
    return ToolResultPart(call_id, (TextPart(text),))


def told(request: ChatRequest, *messages: Message) -> ChatRequest:
    return replace(request, messages=(*request.messages, *messages))


def in_chat(*results: ToolResultPart) -> tuple[Message, ...]:
    """As OpenAI's protocols send results."""
    return tuple(Message(Role.TOOL, (each,)) for each in results)


def in_messages(*results: ToolResultPart) -> tuple[Message, ...]:
    """As Anthropic's protocol sends results."""
    return (Message(Role.USER, results),)


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("send", [in_chat, in_messages])
def test_it_ends_where_the_result_begins(
    render: Callable[[ChatRequest], Prompt],
    num_calls: int,
    send: Callable[..., tuple[Message, ...]],
) -> None:
    reply = said(*(call(f"abcdefgh{n}", f"{n}.txt") for n in range(num_calls)))
    certain = next_prompt(ASKED, reply, render).tokens
    answers = [result(f"abcdefgh{n}", RESULTS[n]) for n in range(num_calls)]
    whole = render(told(ASKED, reply, *send(*answers))).tokens
    assert whole[: len(certain)] == certain
    rest = bytes(token for token in whole[len(certain) :] if token < 256).decode()
    assert rest.lstrip('"').startswith(RESULTS[0])
    assert len(certain) > len(render(ASKED).tokens)


def test_the_same_call_again_is_predicted_whole(render: Callable[[ChatRequest], Prompt]) -> None:
    before = told(ASKED, said(call("abcdefgh0")), *in_chat(result("abcdefgh0", RESULTS[0])))
    reply = said(call("abcdefgh1"))
    whole = render(told(before, reply, *in_chat(result("abcdefgh1", RESULTS[0])))).tokens
    assert next_prompt(before, reply, render).tokens == whole[:-1]


def test_of_parallel_calls_those_before_the_first_new_one_are_predicted(
    render: Callable[[ChatRequest], Prompt],
) -> None:
    before = told(ASKED, said(call("abcdefgh0")), *in_chat(result("abcdefgh0", RESULTS[0])))
    reply = said(call("abcdefgh1"), call("abcdefgh2", "b.txt"))
    answers = [result("abcdefgh1", RESULTS[0]), result("abcdefgh2", RESULTS[1])]
    whole = render(told(before, reply, *in_chat(*answers))).tokens
    certain = next_prompt(before, reply, render).tokens
    assert whole[: len(certain)] == certain
    rest = bytes(token for token in whole[len(certain) :] if token < 256).decode()
    assert rest.lstrip('"').startswith(RESULTS[1])


@pytest.fixture(scope="module")
def qwen() -> Callable[[ChatRequest], Prompt]:
    return Renderer(PUBLISHED["Qwen 2.5, 3"].tokenizer).render


def test_the_latest_result_is_predicted_as_it_was(qwen: Callable[[ChatRequest], Prompt]) -> None:
    failed = replace(result("2", "no such file"), is_error=True)
    before = told(ASKED, said(call("1")), *in_chat(result("1", RESULTS[0])))
    before = told(before, said(call("2")), *in_messages(failed))
    reply = said(call("3"))
    whole = qwen(told(before, reply, *in_messages(replace(failed, tool_use_id="3")))).tokens
    assert next_prompt(before, reply, qwen).tokens == whole[:-1]
    other = said(call("3", "b.txt"))
    assert len(next_prompt(before, other, qwen).tokens) < len(whole) - len("no such file")


@pytest.mark.parametrize("is_sent", [False, True])
def test_thinking_is_left_out_if_the_client_leaves_it_out(
    qwen: Callable[[ChatRequest], Prompt], is_sent: bool
) -> None:
    thinking = (ThinkingPart("Hm."),)
    earlier = said(*(thinking if is_sent else ()), call("1", "other.txt"))
    before = told(ASKED, earlier, *in_chat(result("1", RESULTS[0])))
    reply = said(*thinking, call("2"))
    sent = reply if is_sent else said(call("2"))
    whole = qwen(told(before, sent, *in_chat(result("2", RESULTS[1])))).tokens
    certain = next_prompt(before, reply, qwen).tokens
    assert whole[: len(certain)] == certain


def test_calls_that_were_cut_off_are_not_answered() -> None:
    cut = ToolUsePart.cut("2", "read", '{"pa')
    assert calls_of(said(call("1"))) == [call("1")]
    assert calls_of(said(call("1"), cut)) == []
