"""Replies of every format, whole, in pieces, and gone wrong."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.parsing import ReplyParser, fold_message
from semantic.domain.chat import Message, Role, TextPart, ThinkingPart, ToolUsePart
from semantic.domain.errors import BackendError
from semantic.domain.events import (
    Failed,
    Finished,
    PrefillProgress,
    ScoredToken,
    TextDelta,
    ThinkingDelta,
    ThinkingEnded,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from semantic.domain.reply_format import (
    FUNCTION_GEMMA,
    GEMMA_CODE,
    HARMONY,
    HERMES,
    LLAMA_JSON,
    MISTRAL,
    PYTHONIC,
    QWEN_XML,
    CallNotation,
    Harmony,
    ReplyFormat,
)
from semantic.domain.sampling import FinishReason
from tests.notations import FUNCTIONARY, NOTATIONS
from tests.unit.application.parsing.parsing_rig import (
    END,
    FORMATS,
    MISHAPS,
    THINK,
    TOOLS,
    TWO_CALLS,
    calls_of,
    check_calls,
    parse,
    text_of,
)

pytestmark = pytest.mark.unit

THINKING = ReplyFormat(thinking=THINK)
CHANNELS = ReplyFormat(HARMONY)
MARKED = [notation for notation in NOTATIONS.values() if notation != HARMONY]
FRAGMENTS = [
    *TWO_CALLS.values(),
    *MISHAPS,
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "```",
    ">>>", "all\n", "send\n", "print(", "call:send{", "a=", "<escape>", ", ", "]", "'",
    "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "analysis", "final", "\n",
    '{"name": "send"', '"arguments": {', "hello ", "[send(", "<function=send>", "\\", '"',
    " ", "{", "}", "é",
]  # fmt: skip
replies = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=8), max_size=8).map("".join)


@pytest.mark.parametrize("tools", NOTATIONS.values(), ids=NOTATIONS)
def test_two_calls_are_found_and_nothing_else(tools: CallNotation) -> None:
    events = parse(TWO_CALLS[tools], ReplyFormat(tools))
    assert calls_of(events) == [("get_weather", {"city": "Zürich", "days": 2}), ("send", {})]
    assert text_of(events) == ""
    assert events[-1] == Finished(FinishReason.TOOL_USE, Usage(1))


@pytest.mark.parametrize("tools", MARKED)
def test_without_tools_on_offer_markup_is_text(tools: CallNotation) -> None:
    events = parse(TWO_CALLS[tools], ReplyFormat(tools), tools=())
    assert events == [TextDelta(TWO_CALLS[tools]), END]


@pytest.mark.parametrize("reply_format", FORMATS, ids=str)
@given(text=replies, data=st.data())
def test_however_the_text_is_cut_the_events_are_the_same(
    reply_format: ReplyFormat, text: str, data: st.DataObject
) -> None:
    tools = data.draw(st.sampled_from([TOOLS, ()]))
    is_open = data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12) | st.just(range(len(text))))
    whole = parse(text, reply_format, tools, is_thinking_open=is_open)
    assert parse(text, reply_format, tools, cuts, is_thinking_open=is_open) == whole
    check_calls(whole)


@given(replies)
def test_without_tools_no_text_is_lost(text: str) -> None:
    for tools in MARKED:
        # `before_text` at the beginning is markup: the prompt ends with the rest of it.
        expected = text.removeprefix(tools.before_text)
        assert text_of(parse(text, ReplyFormat(tools), tools=())) == expected


@given(replies)
def test_thinking_and_text_add_up_to_the_whole_reply(text: str) -> None:
    events = parse(text, THINKING, tools=())
    thought = "".join(event.text for event in events if isinstance(event, ThinkingDelta))
    said = "".join((thought + text_of(events)).split())
    spoken = "".join(text.split())
    for marker in (THINK.start, THINK.end):
        said, spoken = said.replace(marker, ""), spoken.replace(marker, "")
    assert said == spoken


@pytest.mark.parametrize("mishap", [m for m in MISHAPS if "|channel|" not in m and "cut" not in m])
@pytest.mark.parametrize("tools", MARKED)
def test_markup_that_is_no_call_is_returned_unchanged(tools: CallNotation, mishap: str) -> None:
    events = parse(mishap, ReplyFormat(tools))
    if not calls_of(events):
        assert events == [TextDelta(mishap), END]


def test_an_unknown_tool_is_text() -> None:
    text = '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'
    assert parse(text, ReplyFormat()) == [TextDelta(text), END]


def test_a_call_is_announced_before_its_arguments_are_complete() -> None:
    parser = ReplyParser(ReplyFormat(), TOOLS, new_id=lambda: "7")
    events = parser.push(TextDelta('<tool_call>{"name": "send", "arguments": {"a": "x'))
    assert events == [ToolCallStarted(0, "7", "send"), ToolCallDelta(0, '{"a": "x')]


@pytest.mark.parametrize(
    "written, arguments",
    [
        ('{"a": "x', {"a": "x"}),
        ('{"a": {"b": [1, 2', {"a": {"b": [1]}}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1, "b": ', {"a": 1}),
        ('{"a": tru', {}),
        ('{"a": "\\u00', {"a": ""}),
        ('{"a": "\\ud83d', {"a": "\ufffd"}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
        ('{"a": "\\ude00"}', {"a": "\ufffd"}),
        ('{"a": "line\nbreak\tand \\d"}', {"a": "line\nbreak\tand \\d"}),
        ('{"a": True, "b": None, "c": [1, ], }', {"a": True, "b": None, "c": [1]}),
        ('{"a": NaN}', {}),
        ('{"a": 01}', {}),
        ("{", {}),
        ('{"a": ' + "[" * 500, {"a": None}),
    ],
)
def test_announced_arguments_are_always_json(written: str, arguments: dict[str, object]) -> None:
    events = parse(f'<tool_call>{{"name": "send", "arguments": {written}', ReplyFormat())
    check_calls(events)
    ((_, found),) = calls_of(events)
    if arguments == {"a": None}:
        assert isinstance(found, dict)
        assert json.dumps(found).count("[") == 127
    else:
        assert found == arguments


def test_what_follows_broken_arguments_is_text() -> None:
    text = '<tool_call>{"name": "send", "arguments": {"a": 1, oops}}</tool_call>'
    events = parse(text, ReplyFormat())
    assert calls_of(events) == [("send", {"a": 1})]
    assert text_of(events) == "oops}}</tool_call>"


def test_a_marker_inside_an_argument_does_not_end_the_call() -> None:
    written = {"text": "say </tool_call> and <tool_call>"}
    text = f'<tool_call>{{"name": "send", "arguments": {json.dumps(written)}}}</tool_call>'
    assert calls_of(parse(text, ReplyFormat())) == [("send", written)]


def test_a_reply_cut_off_in_a_call_keeps_its_reason() -> None:
    parser = ReplyParser(ReplyFormat(), TOOLS)
    parser.push(TextDelta('<tool_call>{"name": "send", "arguments": {"a'))
    *_, last = parser.push(Finished(FinishReason.MAX_TOKENS, Usage(1)))
    assert last == Finished(FinishReason.MAX_TOKENS, Usage(1))


def test_a_reply_cut_off_in_what_ends_a_call_has_no_text() -> None:
    whole = '<tool_call>\n{"name": "send", "arguments": {"a": 1}}\n</tool_call>'
    for size in range(1, len("</tool_call>")):
        events = parse(whole[:-size], ReplyFormat())
        assert calls_of(events) == [("send", {"a": 1})]
        assert text_of(events) == ""


@pytest.mark.parametrize("tools", NOTATIONS.values(), ids=NOTATIONS)
def test_only_the_first_call_counts_where_several_are_not_wanted(tools: CallNotation) -> None:
    parser = ReplyParser(ReplyFormat(tools), TOOLS, is_parallel=False)
    events = [*parser.push(TextDelta(TWO_CALLS[tools])), *parser.push(END)]
    assert len(calls_of(events)) == 1
    assert text_of(events) == ""
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.TOOL_USE


def test_a_failure_leaves_the_open_call_incomplete() -> None:
    parser = ReplyParser(ReplyFormat(), TOOLS)
    parser.push(TextDelta('<tool_call>{"name": "send", "arguments": {"a": "b'))
    failed = Failed(BackendError("gone"))
    assert parser.push(failed) == [failed]


ZURICH = {"city": "Zürich", "days": 2}
CUT: list[Finished | Failed] = [
    *(Finished(reason, Usage(1)) for reason in FinishReason if reason is not FinishReason.END_TURN),
    Failed(BackendError("gone")),
]


@pytest.mark.parametrize("must_call", [True, False])
@pytest.mark.parametrize("tools", NOTATIONS.values(), ids=NOTATIONS)
def test_a_call_that_was_cut_off_is_never_complete_and_never_text(
    tools: CallNotation, must_call: bool
) -> None:
    text = TWO_CALLS[tools]
    expected = [("get_weather", ZURICH), ("send", {})]
    for size in range(len(text)):
        end = CUT[size % len(CUT)]
        events = parse(text[:size], ReplyFormat(tools), must_call=must_call, end=end)
        assert events[-1] == end
        ended = [event.index for event in events if isinstance(event, ToolCallEnded)]
        parts = fold_message(events).parts
        calls = [part for part in parts if isinstance(part, ToolUsePart)]
        whole = [(call.name, call.arguments) for call in calls if not call.is_cut]
        assert whole == expected[: len(ended)]
        for call in calls[len(ended) :]:
            name, arguments = expected[len(ended)]
            written = json.dumps(arguments, ensure_ascii=False)
            assert call.name == name
            assert written.startswith(call.written)
            assert call.written != written
        assert len(calls) <= len(ended) + 1
        said = text_of(events)
        assert "Z" not in said
        # Harmony's markers are special tokens, of which no reply holds a part.
        is_marker = tools == HARMONY and any(m.startswith(said) for m in Harmony)
        assert not must_call or said == "" or is_marker


@pytest.mark.parametrize(
    "tools,text,written",
    [
        (HERMES, '<tool_call>{"name": "send", "arguments": {"a": "x, y', '{"a": "x, y'),
        (HERMES, '<tool_call>{"name": "send", "arguments": {"a": 1, "b', '{"a": 1'),
        (
            QWEN_XML,
            "<tool_call><function=send><parameter=a>\n1\n</parameter><parameter=b>\n<p>2",
            '{"a": 1',
        ),
        (PYTHONIC, "[send(a=[1, 2], b='x, y", '{"a": [1, 2], "b": "x, y'),
        (PYTHONIC, "[send(a=[1, 2", '{"a": [1'),
        (GEMMA_CODE, "```tool_code\nprint(send(a=1, b=", '{"a": 1'),
        (
            FUNCTION_GEMMA,
            "<start_function_call>call:send{a:{b:1,c:2},d:<escape>x,y<esc",
            '{"a": {"b": 1, "c": 2}, "d": "x,y',
        ),
        (FUNCTIONARY, 'send\n{"a": "x', '{"a": "x'),
        (
            HARMONY,
            '<|channel|>commentary to=functions.send<|message|>{"a": "b',
            '{"a": "b',
        ),
    ],
)
def test_the_complete_part_of_a_truncated_call_is_kept(
    tools: CallNotation, text: str, written: str
) -> None:
    events = parse(text, ReplyFormat(tools), end=CUT[0])
    assert fold_message(events).parts == (ToolUsePart.cut("0", "send", written),)


@pytest.mark.parametrize(
    "tools,text",
    [
        (LLAMA_JSON, '{"name": "Ada", "age": 3'),
        (LLAMA_JSON, '{"na'),
        (PYTHONIC, "[1, 2"),
        (HERMES, "Write <tool_call> and then the call, as in this long example"),
        (GEMMA_CODE, "```tool_code\nimport os"),
    ],
)
def test_an_answer_that_was_cut_off_stays_text(tools: CallNotation, text: str) -> None:
    assert text_of(parse(text, ReplyFormat(tools), end=CUT[0])) == text


def test_events_that_are_no_text_pass_through() -> None:
    progress = PrefillProgress(1, 2)
    assert ReplyParser(THINKING, TOOLS).push(progress) == [progress]


def test_text_around_calls_has_no_stray_whitespace() -> None:
    text = 'Let me see.\n\n<tool_call>{"name": "send"}</tool_call>\n\nDone.'
    events = parse(text, ReplyFormat())
    assert [e.text for e in events if isinstance(e, TextDelta)] == ["Let me see.", "Done."]
    assert calls_of(events) == [("send", {})]


@pytest.mark.parametrize(
    "text", ['{"name": "Bob", "age": 3}', "[1, 2, 3]", "[see (a)]", "{", "[", " plain"]
)
@pytest.mark.parametrize("tools", [LLAMA_JSON, PYTHONIC])
def test_an_answer_that_only_looks_like_a_call_is_text(tools: CallNotation, text: str) -> None:
    assert parse(text, ReplyFormat(tools)) == [TextDelta(text), END]


def test_qwens_values_are_typed_by_the_schema_and_may_hold_tags() -> None:
    code = "<a>\n</parameter> is no end</a>\n</function> neither"
    text = (
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{code}\n</parameter>\n"
        "<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
    )
    events = parse(text, ReplyFormat(QWEN_XML))
    assert calls_of(events) == [("get_weather", {"city": code, "days": [1, 2]})]


def test_a_string_between_tags_streams() -> None:
    parser = ReplyParser(ReplyFormat(QWEN_XML), TOOLS, new_id=lambda: "7")
    events = parser.push(TextDelta("<tool_call><function=get_weather><parameter=city>\nZür"))
    assert events == [ToolCallStarted(0, "7", "get_weather"), ToolCallDelta(0, '{"city": "Zür')]
    assert parser.push(TextDelta('"ich\n</param')) == [ToolCallDelta(0, '\\"ich')]
    rest = "eter><parameter=days>True</parameter></function>"
    assert parser.push(TextDelta(rest)) == [ToolCallDelta(0, '", "days": true}'), ToolCallEnded(0)]


def test_a_value_in_cdata_is_unwrapped() -> None:
    notation = replace(QWEN_XML, has_cdata=True)
    text = "<tool_call><function=get_weather><parameter=city><![CDATA[a</parameter>b]]></parameter>"
    events = parse(f"{text}</function></tool_call>", ReplyFormat(notation))
    assert calls_of(events) == [("get_weather", {"city": "a</parameter>b"})]


@pytest.mark.parametrize("more", ['"id": "abc123xyz"', '"index": 0, "type": "function"'])
def test_members_after_the_arguments_are_not_text(more: str) -> None:
    call = f'{{"name": "send", "arguments": {{}}, {more}}}'
    events = parse(f"[TOOL_CALLS][{call}, {call}] ok", ReplyFormat(MISTRAL))
    assert calls_of(events) == [("send", {})] * 2
    assert text_of(events) == "ok"


def test_python_values_of_all_kinds() -> None:
    text = "[send(a=-1.5, b=[True, null], c={'d': (1, 'x')}, e=\"]\\\")\")]"
    events = parse(text, ReplyFormat(PYTHONIC))
    assert calls_of(events) == [
        ("send", {"a": -1.5, "b": [True, None], "c": {"d": [1, "x"]}, "e": ']")'})
    ]


@pytest.mark.parametrize("name", ['"send"', '["send"]', "{}", "null"])
def test_a_name_after_the_arguments_must_be_that_of_a_tool(name: str) -> None:
    text = f'<tool_call>{{"arguments": {{"a": 1}}, "name": {name}}}</tool_call>'
    events = parse(text, ReplyFormat())
    assert calls_of(events) == ([("send", {"a": 1})] if name == '"send"' else [])


# -- text with markup as calls have -----------------------------------------------------------

ADDRESSED = ReplyFormat(FUNCTIONARY)


@pytest.mark.parametrize(
    "text, said, calls",
    [
        ("all\nHello", "Hello", []),
        (">>>all\nHello", "Hello", []),
        ("all\nHello >>> 1 + 1\n>>>nobody\n{}", "Hello >>> 1 + 1\n>>>nobody\n{}", []),
        ("Hello, all\n", "Hello, all\n", []),
        ("al", "al", []),
        ('all\nLet me look.\n>>>send\n{"a": 1}', "Let me look.", [("send", {"a": 1})]),
        ('send\n{"a": 1}\n>>>all\nDone.', "Done.", [("send", {"a": 1})]),
        ("send\n{}>>>send\n{}", "", [("send", {}), ("send", {})]),
        ("send\nprint(1)", "send\nprint(1)", []),
    ],
)
def test_text_and_calls_are_addressed(text: str, said: str, calls: list[object]) -> None:
    for cuts in ((), range(len(text))):
        events = parse(text, ADDRESSED, cuts=cuts)
        assert text_of(events) == said
        assert calls_of(events) == calls


def test_the_address_of_text_is_markup_without_tools_too() -> None:
    assert parse("all\nHello >>>all", ADDRESSED, tools=()) == [TextDelta("Hello >>>all"), END]


# -- thinking ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, is_open",
    [
        ("<think>\nhm, so\n</think>\n\nYes.", False),
        ("hm, so\n</think>\n\nYes.", True),
        ("<think>\nhm, so</think>Yes.", True),
    ],
)
def test_thinking_is_split_off(text: str, is_open: bool) -> None:
    events = parse(text, THINKING, tools=(), is_thinking_open=is_open)
    assert events == [ThinkingDelta("hm, so"), ThinkingEnded("signed"), TextDelta("Yes."), END]


def test_empty_thinking_leaves_no_trace() -> None:
    assert parse("<think>\n\n</think>\n\nYes.", THINKING) == [TextDelta("Yes."), END]


def test_thinking_that_never_ends_is_thinking() -> None:
    events = parse("hm, </thin", THINKING, is_thinking_open=True)
    assert events == [ThinkingDelta("hm, </thin"), ThinkingEnded("signed"), END]


def test_an_answer_may_talk_about_the_markers() -> None:
    text = "Use <think> and </think>."
    assert parse(text, THINKING, tools=()) == [TextDelta(text), END]


def test_calls_follow_thinking() -> None:
    events = parse("<think>a</think>\n" + TWO_CALLS[HERMES], THINKING)
    assert events[:2] == [ThinkingDelta("a"), ThinkingEnded("signed")]
    assert len(calls_of(events)) == 2
    assert text_of(events) == ""


def test_harmonys_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>Let me look.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    )
    assert parse(text, CHANNELS) == [
        ThinkingDelta("hm"),
        ThinkingEnded("signed"),
        TextDelta("Let me look.Yes."),
        END,
    ]


@pytest.mark.parametrize("tools", [TOOLS, ()])
def test_harmonys_messages_to_others_are_text(tools: tuple[()]) -> None:
    text = "<|channel|>commentary to=functions.nobody<|message|>{}<|call|>"
    assert parse(text, CHANNELS, tools) == [TextDelta("{}"), END]
    text = "<|channel|>commentary to=functions.send<|message|>print()<|call|>"
    assert parse(text, CHANNELS, tools) == [TextDelta("print()"), END]


def test_a_harmony_reply_may_begin_with_its_recipient() -> None:
    text = ' to=functions.send<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    assert calls_of(parse(text, CHANNELS, cuts=range(len(text)))) == [("send", {"a": 1})]
    assert parse(" to be", CHANNELS) == [TextDelta(" to be"), END]


def test_a_harmony_call_cut_off_is_closed() -> None:
    text = '<|channel|>commentary to=functions.send<|message|>{"a": "b'
    assert calls_of(parse(text, CHANNELS)) == [("send", {"a": "b"})]
    assert calls_of(parse(text[: text.index("{")], CHANNELS)) == [("send", {})]


# -- log-probabilities, and the message -------------------------------------------------------


def test_logprobs_stay_with_their_text() -> None:
    tokens = [ScoredToken(bytes((65 + i,)), -float(i)) for i in range(4)]
    parser = ReplyParser(THINKING, TOOLS)
    pieces = ["<think>a", "</think>", "Hi <to", "ol>"]
    events = [
        event
        for piece, token in zip(pieces, tokens, strict=True)
        for event in parser.push(TextDelta(piece, (token,)))
    ]
    texts = [event for event in [*events, *parser.push(END)] if isinstance(event, TextDelta)]
    assert text_of(texts) == "Hi <tool>"
    assert [token for event in texts for token in event.logprobs] == tokens[2:]


def test_folding_gives_the_message() -> None:
    text = '<think>hm</think>On it. <tool_call>{"name": "send", "arguments": {"a": 1}}</tool_call>'
    assert fold_message(parse(text, THINKING)) == Message(
        Role.ASSISTANT,
        (ThinkingPart("hm", "signed"), TextPart("On it."), ToolUsePart("0", "send", {"a": 1})),
    )
    open_thinking = fold_message([ThinkingDelta("a"), ThinkingDelta("b")])
    assert open_thinking.parts == (ThinkingPart("ab"),)
    assert fold_message([TextDelta("a"), ThinkingDelta("b"), TextDelta("c")]).parts == (
        TextPart("a"),
        ThinkingPart("b"),
        TextPart("c"),
    )


# -- the message a reply amounts to -----------------------------------------------------------


def test_pieces_are_joined_in_their_order() -> None:
    made = fold_message(
        (
            PrefillProgress(1, 2),
            ThinkingDelta("h"),
            ThinkingDelta("m"),
            ThinkingEnded("sig"),
            TextDelta("Let me "),
            TextDelta("look."),
            ToolCallStarted(0, "c0", "read"),
            ToolCallDelta(0, '{"path":'),
            ToolCallStarted(1, "c1", "list"),
            ToolCallDelta(0, ' "a.py"}'),
            ToolCallEnded(0),
            ToolCallEnded(1),
        )
    )

    assert made == Message(
        Role.ASSISTANT,
        (
            ThinkingPart("hm", "sig"),
            TextPart("Let me look."),
            ToolUsePart("c0", "read", {"path": "a.py"}),
            ToolUsePart("c1", "list", {}),
        ),
    )


def test_a_call_that_did_not_end_is_marked() -> None:
    made = fold_message((ToolCallStarted(0, "c0", "read"), ToolCallDelta(0, '{"path": "a')))

    assert made.parts == (ToolUsePart("c0", "read", {"arguments": '{"path": "a'}, is_cut=True),)
