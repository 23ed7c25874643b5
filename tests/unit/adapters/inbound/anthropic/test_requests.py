"""Translation of Anthropic's requests to the domain's."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from semantic.adapters.inbound.anthropic.requests import (
    CountRequest,
    MessagesRequest,
    system_parts,
)
from semantic.domain.chat import (
    AgentHint,
    ChatRequest,
    JsonFormat,
    Message,
    Role,
    TextPart,
    Thinking,
    ThinkingPart,
    ToolChoice,
    ToolMode,
    ToolReferencePart,
    ToolResultPart,
    ToolUsePart,
)
from semantic.domain.errors import InvalidRequestError

pytestmark = pytest.mark.unit

SESSION = "97858200-a072-462a-8534-47e9c8bdf255"
BASE: dict[str, Any] = {
    "model": "claude-x",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hi"}],
}


def translated(headers: dict[str, str] | None = None, **changes: Any) -> ChatRequest:
    body = MessagesRequest.model_validate({**BASE, **changes})
    return body.to_domain(headers or {})


def test_a_request_as_claude_code_sends_it() -> None:
    request = translated(
        {"x-claude-code-session-id": SESSION, "x-claude-code-agent-id": "a1"},
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0;"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s1"},
                    {"type": "thinking", "thinking": "", "signature": "s2"},
                    {"type": "redacted_thinking", "data": "s3"},
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "toolu_c1", "name": "search", "input": {"q": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_c1",
                        "content": [{"type": "tool_reference", "tool_name": "late"}],
                    },
                    {"type": "text", "text": "Go on."},
                ],
            },
            {"role": "system", "content": "A reminder."},
            {"role": "user", "content": "now"},
        ],
        tools=[
            {"name": "late", "input_schema": {}, "defer_loading": True},
            {"name": "never", "input_schema": {}, "defer_loading": True},
            {"name": "search", "input_schema": {"type": "object"}, "strict": True},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        thinking={"type": "adaptive"},
        context_management={"edits": []},
        output_config={"effort": "high"},
        stop_sequences=["END"],
        top_k=3,
        stream=True,
    )
    result = ToolResultPart("c1", (ToolReferencePart("late"),))
    assert request.messages == (
        Message.of(Role.SYSTEM, "You are an agent."),
        Message.of(Role.USER, "hi"),
        Message(
            Role.ASSISTANT,
            (
                ThinkingPart("Hm.", "s1"),
                ThinkingPart("", "s2", is_redacted=True),
                ThinkingPart("", "s3", is_redacted=True),
                TextPart("Looking."),
                ToolUsePart("c1", "search", {"q": 1}),
            ),
        ),
        Message(Role.USER, (result, TextPart("Go on."))),
        Message.of(Role.SYSTEM, "A reminder."),
        Message.of(Role.USER, "now"),
    )
    assert [tool.name for tool in request.tools] == ["late", "never", "search"]
    assert [tool.name for tool in request.known_tools] == ["late", "search"]
    assert request.tools[2].is_strict
    assert request.thinking == Thinking(is_enabled=True)
    assert request.stop.max_tokens == 9
    assert request.stop.strings == ("END",)
    assert request.sampling.top_k == 3
    assert request.agent == AgentHint(client_key=f"{SESSION}/a1")


@pytest.mark.parametrize(
    "given,expected",
    [
        (None, None),
        ("someone", None),
        (f"user_1f_account__session_{SESSION}", SESSION),
        (json.dumps({"device_id": "d", "session_id": SESSION}), SESSION),
        (json.dumps({"session_id": 5}), None),
        (json.dumps([SESSION]), None),
        ("{", None),
    ],
)
def test_sessions_are_read_off_the_user_id(given: str | None, expected: str | None) -> None:
    assert translated(metadata={"user_id": given}).agent.client_key == expected
    affine = translated({"x-session-affinity": "s"}, metadata={"user_id": given})
    assert affine.agent.client_key == (expected or "s")


@pytest.mark.parametrize(
    "given,expected",
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice(ToolMode.REQUIRED)),
        ({"type": "tool", "name": "f"}, ToolChoice(ToolMode.NAMED, "f")),
        ({"type": "none"}, ToolChoice(ToolMode.NONE)),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            ToolChoice(ToolMode.AUTO, is_parallel=False),
        ),
    ],
)
def test_tool_choices(given: Any, expected: ToolChoice) -> None:
    assert translated(tool_choice=given).tool_choice == expected


@pytest.mark.parametrize(
    "given,expected",
    [
        (None, Thinking(is_enabled=False)),
        ({"type": "disabled"}, Thinking(is_enabled=False)),
        ({"type": "adaptive", "display": "omitted"}, Thinking(is_enabled=True)),
        ({"type": "enabled", "budget_tokens": 2000}, Thinking(is_enabled=True, budget=2000)),
    ],
)
def test_thinking(given: Any, expected: Thinking) -> None:
    assert translated(thinking=given).thinking == expected


def test_formats_by_their_newer_and_older_name() -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    expected = JsonFormat({"type": "object"})
    assert translated(output_config={"format": wanted}).output_format == expected
    assert translated(output_format=wanted).output_format == expected


def test_counting_needs_no_length_and_takes_any_end() -> None:
    body = {"model": "m", "messages": [{"role": "assistant", "content": "So"}], "tools": []}
    request = CountRequest.model_validate(body).to_domain({})
    assert request.messages == (Message.of(Role.ASSISTANT, "So"),)


KEYS = ["type", "text", "role", "content", "name", "id", "input", "source", "data", "title"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(["", "text", "user", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "document", "tool_use", "tool_result", "thinking",
                              "search_result", "redacted_thinking", "tool_reference", "other"])},
    optional={"text": JSON, "content": JSON, "source": JSON, "input": JSON, "id": JSON,
              "tool_use_id": st.just("t"), "thinking": st.just("t"), "tool_name": JSON},
)  # fmt: skip
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.lists(BLOCKS | JSON, max_size=3) | JSON,
    }
)
FIELDS = (
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "metadata",
    "output_config",
    "stream",
    "stop_sequences",
    "temperature",
    "max_tokens",
    "session_id",
)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, max_size=3)}, optional=dict.fromkeys(FIELDS, JSON)
)


@given(BODIES)
def test_whatever_comes_is_translated_or_refused(body: dict[str, Any]) -> None:
    try:
        translated(**body)
    except (ValidationError, InvalidRequestError):
        return


@pytest.mark.parametrize(
    "text,left",
    [
        ("x-anthropic-billing-header: cc_version=2.1; cch=00000;", ""),
        ("x-anthropic-billing-header: a=1\n\nYou are terse.", "You are terse."),
        ("Terse.\nx-anthropic-billing-header: a", "Terse.\nx-anthropic-billing-header: a"),
        ("", ""),
    ],
)
def test_the_billing_line_is_left_out(text: str, left: str) -> None:
    assert system_parts(text) == ((TextPart(left),) if left else ())
