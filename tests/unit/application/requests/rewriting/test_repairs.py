"""Requests before and after rules: what repeats, what is shown, and what errors name."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.prompt.replay import ReplayStore
from semantic.application.requests.rewriting.repairs import (
    CALLING_CLIENT,
    PromptRepairs,
    RepairedRequest,
)
from semantic.domain.chat import (
    AgentHint,
    ChatRequest,
    Message,
    RawPrompt,
    Role,
    TextPart,
    ToolResultPart,
    ToolSpec,
    ToolUsePart,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.volatile.rules import (
    AppliedRepairs,
    CallingClient,
    RepairAction,
    RepairPlace,
    RepairRule,
)

pytestmark = pytest.mark.unit

ROOT = b"root"
HINTS = [AgentHint(agent_id="a"), AgentHint(client_key="session"), AgentHint()]


def rule(action: str, place: str = "system", pattern: str = r"(?m)^Date: .*$", **more: Any) -> Any:
    def find(text: str) -> Sequence[tuple[int, int]]:
        return [match.span() for match in re.finditer(pattern, text)]

    on = {"is_enabled": True, **more}
    return RepairRule(action, RepairAction(action), RepairPlace(place), find, **on)


def conversation(*days: int, hint: AgentHint | None = None) -> Iterator[ChatRequest]:
    """The requests of a client that shows the date of the day in its system prompt."""
    history: list[Message] = []
    for number, day in enumerate(days):
        history.append(Message.of(Role.USER, f"question {number}"))
        system = Message.of(Role.SYSTEM, f"You are a coder.\nDate: {day}\nBe terse.")
        yield ChatRequest("m", (system, *history), agent=hint or AgentHint())
        history.append(Message.of(Role.ASSISTANT, f"answer {number}"))


def repaired(repairs: PromptRepairs, requests: Iterator[ChatRequest]) -> list[RepairedRequest]:
    """Repair requests one after another, as if each were answered."""
    made = []
    for request in requests:
        made.append(repairs.repair(request, ROOT))
        repairs.keep(made[-1].applied)
    return made


@given(
    st.sampled_from(["freeze", "move_to_end", "drop"]),
    st.lists(st.integers(0, 3), min_size=2, max_size=6),
    st.sampled_from(HINTS),
)
def test_each_repaired_prompt_continues_the_one_before(
    action: str, days: list[int], hint: AgentHint
) -> None:
    repairs = PromptRepairs([rule(action)], ReplayStore())
    made = [one.request.messages for one in repaired(repairs, conversation(*days, hint=hint))]
    for before, after in itertools.pairwise(made):
        assert after[: len(before)] == before


def test_freeze_repeats_the_text_of_the_first_turn() -> None:
    repairs = PromptRepairs([rule("freeze")], ReplayStore())
    first, second = repaired(repairs, conversation(1, 2))
    assert "Date: 1\n" in second.request.messages[0].text
    assert first.applied.rules == ()  # nothing was changed
    assert second.applied.rules == ("freeze",)


def test_texts_outlive_the_rules() -> None:
    store = ReplayStore()
    first, second = conversation(1, 2)
    repaired(PromptRepairs([rule("freeze")], store), iter([first]))
    again = PromptRepairs([rule("freeze")], store).repair(second, ROOT)
    assert "Date: 1\n" in again.request.messages[0].text


def test_a_request_that_is_not_answered_keeps_nothing() -> None:
    repairs = PromptRepairs([rule("freeze")], ReplayStore())
    first, second = conversation(1, 2)
    repairs.repair(first, ROOT)
    assert "Date: 2\n" in repairs.repair(second, ROOT).request.messages[0].text


def test_agents_and_tenants_do_not_share_texts() -> None:
    repairs = PromptRepairs([rule("freeze")], ReplayStore())
    repaired(repairs, conversation(1, hint=AgentHint(agent_id="a")))
    other = list(conversation(1, 2, hint=AgentHint(agent_id="b")))[1]
    assert "Date: 2\n" in repairs.repair(other, ROOT).request.messages[0].text
    own = replace(other, agent=AgentHint(agent_id="a"))
    assert "Date: 1\n" in repairs.repair(own, ROOT).request.messages[0].text
    assert "Date: 2\n" in repairs.repair(own, b"other tenant").request.messages[0].text


def test_a_new_conversation_shows_its_own_date() -> None:
    repairs = PromptRepairs([rule("freeze")], ReplayStore())
    repaired(repairs, conversation(1))
    first, second = repaired(repairs, conversation(2, 3))
    assert "Date: 2\n" in first.request.messages[0].text
    assert "Date: 2\n" in second.request.messages[0].text


def test_moved_text_is_a_note_in_the_last_question() -> None:
    repairs = PromptRepairs([rule("move_to_end")], ReplayStore())
    _, second = repaired(repairs, conversation(1, 2))
    system, first, _, last = second.request.messages
    assert system.text == "You are a coder.\nBe terse."
    note = TextPart("<system-reminder>\nDate: 1\n</system-reminder>")
    assert first.parts == (TextPart("question 0"), note)
    assert last.parts[1] == TextPart("<system-reminder>\nDate: 2\n</system-reminder>")


def test_a_note_is_not_added_to_tool_results() -> None:
    call = Message(Role.ASSISTANT, (ToolUsePart("1", "f", {}),))
    result = Message(Role.USER, (ToolResultPart("1", (TextPart("found"),)), TextPart("go on")))
    (first,) = conversation(1)
    loop = replace(
        first, messages=(Message.of(Role.SYSTEM, "Date: 2"), first.messages[1], call, result)
    )
    repairs = PromptRepairs([rule("move_to_end")], ReplayStore())
    made = repairs.repair(loop, ROOT).request.messages
    assert made[-1] == result
    assert "Date: 2" in made[0].text
    assert len(made) == 3  # nothing is left of the system prompt


def test_move_to_start_puts_a_system_message_before_the_question() -> None:
    head, question = next(conversation(1)).messages
    place, later = Message.of(Role.SYSTEM, "# Place\nhere"), Message.of(Role.SYSTEM, "# Place")
    first = (head, question, place)
    more = (Message.of(Role.ASSISTANT, "Yes."), later, Message.of(Role.USER, "And?"))
    repairs = PromptRepairs([rule("move_to_start", pattern=r"(?m)^# Place$")], ReplayStore())

    one, two = repaired(repairs, (ChatRequest("m", said) for said in (first, first + more)))

    assert one.request.messages == (head, place, question)
    assert two.request.messages == (head, place, question, *more)
    assert one.applied.rules == two.applied.rules == ("move_to_start",)
    with pytest.raises(InvalidRequestError) as caught, one.original_params():
        raise InvalidRequestError("no.", param="messages[1].content")
    assert caught.value.param == "messages[2].content"


def test_drop_leaves_no_empty_message_and_moves_marks() -> None:
    header = Message.of(Role.SYSTEM, "Date: 1")
    request = ChatRequest("m", (header, *next(conversation(1)).messages), num_marked=2)
    made = PromptRepairs([rule("drop")], ReplayStore()).repair(request, ROOT)
    assert [m.text for m in made.request.messages] == ["You are a coder.\nBe terse.", "question 0"]
    assert made.request.num_marked == 1
    with pytest.raises(InvalidRequestError) as caught, made.original_params():
        raise InvalidRequestError("no.", param="messages[1].content")
    assert caught.value.param == "messages[2].content"


def test_drop_in_user_messages_and_tool_results() -> None:
    text = "see\nDate: 7\nthat"
    result = ToolResultPart("1", (TextPart(text),))
    messages = (
        Message.of(Role.USER, text),
        Message(Role.ASSISTANT, (TextPart(text), ToolUsePart("1", "f", {}))),
        Message(Role.TOOL, (result,)),
    )
    rules = [rule("drop", "user"), rule("drop", "tool_result")]
    made = PromptRepairs(rules, ReplayStore()).repair(ChatRequest("m", messages), ROOT)
    asked, replied, found = made.request.messages
    assert asked.text == "see\nthat"
    assert replied == messages[1]  # replies are repeated as the model wrote them
    assert found.parts == (ToolResultPart("1", (TextPart("see\nthat"),)),)


def test_sorted_tools_and_the_index_that_errors_name() -> None:
    tools = tuple(ToolSpec(name, "", {}) for name in "cab")
    request = replace(next(conversation(1)), tools=tools)
    made = PromptRepairs([rule("sort_tools", "tools")], ReplayStore()).repair(request, ROOT)
    assert [tool.name for tool in made.request.tools] == ["a", "b", "c"]
    assert made.applied.rules == ("sort_tools",)
    with pytest.raises(InvalidRequestError) as caught, made.original_params():
        raise InvalidRequestError("no.", param="tools[0].parameters")
    assert caught.value.param == "tools[1].parameters"
    again = PromptRepairs([rule("sort_tools", "tools")], ReplayStore()).repair(made.request, ROOT)
    assert again.applied.rules == ()


@pytest.mark.parametrize(
    "changed",
    [
        {"is_enabled": False},
        {"is_client": lambda user_agent: user_agent == "other"},
        {"protocol": "openai"},
    ],
)
def test_a_rule_that_is_off_or_for_others_changes_nothing(changed: dict[str, Any]) -> None:
    token = CALLING_CLIENT.set(CallingClient("claude-cli", "anthropic"))
    request = next(conversation(1))
    made = PromptRepairs([rule("drop", **changed)], ReplayStore()).repair(request, ROOT)
    CALLING_CLIENT.reset(token)
    assert made.request is request
    assert made.applied == AppliedRepairs()


def test_a_raw_prompt_is_not_changed() -> None:
    request = ChatRequest("m", (), raw_prompt=RawPrompt("Date: 1"))
    made = PromptRepairs([rule("drop")], ReplayStore()).repair(request, ROOT)
    assert made.request is request
