"""Calls in the notations of Python and Gemma, whose arguments stream as JSON."""

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.parsing import ReplyParser
from semantic.domain.events import TextDelta, ToolCallDelta, ToolCallEnded, ToolCallStarted
from semantic.domain.reply_format import (
    FUNCTION_GEMMA,
    GEMMA_CODE,
    PYTHONIC,
    CallNotation,
    ReplyFormat,
)
from tests.unit.application.parsing.parsing_rig import (
    END,
    TOOLS,
    calls_of,
    check_calls,
    parse,
    text_of,
)

pytestmark = pytest.mark.unit

LITERALS = (
    r"'it\'s'",
    r'"\x41\u00e9\U0001F600\101\n\\"',
    r"r'\d+\''",
    r"'\ud83d\ude00'",
    "''",
    '""',
    """'''a 'b' "c"\\n'''""",
    '"""two\nlines"""',
    "u'x'",
    """'a' "b" r'\\c' '''d''' ''""",
    "['a'\n 'b', 'c']",
    """{'a' "b": 1}""",
    "0x1F",
    "1_000",
    "-2",
    "1e3",
    "+4",
    "()",
    "{}",
    "[]",
    "[[], {'a': {}}]",
    "(1, (2,))",
    "('a')",
    """('a'\n 'b')""",
    "((1), ((2)), ((3),), ([4]))",
    "{'k': ('v'), 'w': ('x',)}",
    "{'k': [None, False]}",
    "{1: 'a', 0x10: {True: 2, None: []}, -1.5: 3}",
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
keywords = st.dictionaries(st.sampled_from(["city", "days", "x_1", "é"]), json_values)


def in_gemma(value: object) -> str:
    match value:
        case str():
            return f"<escape>{value}<escape>"
        case list():
            return f"[{','.join(map(in_gemma, value))}]"
        case dict():
            return f"{{{','.join(f'{in_gemma(k)}:{in_gemma(v)}' for k, v in value.items())}}}"
        case _:
            return json.dumps(value)


@pytest.mark.parametrize("literal", LITERALS)
def test_python_literals_are_read_as_python_reads_them(literal: str) -> None:
    written = json.dumps(ast.literal_eval(literal))
    text = f"[send(a={literal}, b = {literal} ,), send()]"
    for cuts in ((), range(len(text))):
        first, second = calls_of(parse(text, ReplyFormat(PYTHONIC), cuts=cuts))
        assert first == ("send", {"a": json.loads(written), "b": json.loads(written)})
        assert second == ("send", {})


@pytest.mark.parametrize("tools", [PYTHONIC, GEMMA_CODE, FUNCTION_GEMMA])
@given(arguments=keywords, data=st.data())
def test_arguments_in_pieces_are_those_of_the_whole(
    tools: CallNotation, arguments: dict[str, object], data: st.DataObject
) -> None:
    pairs = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    members = ",".join(f"{key}:{in_gemma(value)}" for key, value in arguments.items())
    text = {
        PYTHONIC: f"[get_weather({pairs}), send()]",
        GEMMA_CODE: f"```tool_code\nget_weather({pairs})\nprint(send())\n```",
        FUNCTION_GEMMA: (
            f"<start_function_call>call:get_weather{{{members}}}<end_function_call>"
            "<start_function_call>call:send{}<end_function_call>"
        ),
    }[tools]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12) | st.just(range(len(text))))
    events = parse(text, ReplyFormat(tools), cuts=cuts)
    assert calls_of(events) == [("get_weather", arguments), ("send", {})]
    assert text_of(events) == ""
    check_calls(events)


@pytest.mark.parametrize(
    "tools, pieces",
    [
        (PYTHONIC, ("[send(a='Zü", "rich', b=[1, ", "2", "])")),
        (GEMMA_CODE, ("```tool_code\nprint(send(a='Zü", "rich', b=[1, ", "2", "]))")),
        (
            FUNCTION_GEMMA,
            (
                "<start_function_call>call:send{a:<escape>Zü",
                "rich<escape>,b:[1, ",
                "2",
                "]}<end_function_call>",
            ),
        ),
    ],
)
def test_a_call_is_announced_with_its_first_value_and_streams(
    tools: CallNotation, pieces: tuple[str, ...]
) -> None:
    parser = ReplyParser(ReplyFormat(tools), TOOLS, new_id=lambda: "7")
    assert [parser.push(TextDelta(piece)) for piece in pieces] == [
        [ToolCallStarted(0, "7", "send"), ToolCallDelta(0, '{"a": "Zü')],
        [ToolCallDelta(0, 'rich", "b": [1')],
        [],
        [ToolCallDelta(0, ", 2]}"), ToolCallEnded(0)],
    ]


@pytest.mark.parametrize("value", ["f()", "1e999", "b'x'", "x + y", "-1e999", "...", ""])
def test_python_whose_first_value_is_no_literal_is_text(value: str) -> None:
    text = f"[send(a={value})]"
    assert parse(text, ReplyFormat(PYTHONIC)) == [TextDelta(text), END]


@pytest.mark.parametrize(
    "rest, arguments, said",
    [
        ("a=1, b=f(x))] ok", {"a": 1}, "f(x))] ok"),
        ("a={b: 2})]", {"a": {}}, "b: 2})]"),
        ("a=1, 'b')]", {"a": 1}, ")]"),
        ("a=1 + 2)]", {"a": 1}, "+ 2)]"),
        ("a='never ends)]", {"a": "never ends)]"}, ""),
    ],
)
def test_what_follows_a_value_that_is_no_literal_is_text(
    rest: str, arguments: dict[str, object], said: str
) -> None:
    events = parse(f"[send({rest}", ReplyFormat(PYTHONIC))
    assert calls_of(events) == [("send", arguments)]
    assert text_of(events) == said


def test_a_list_of_calls_needs_no_brackets_after_a_marker() -> None:
    events = parse("<|python_tag|>send(a=1); send (b=2)", ReplyFormat(PYTHONIC))
    assert calls_of(events) == [("send", {"a": 1}), ("send", {"b": 2})]


def test_gemmas_nested_values() -> None:
    text = (
        "<start_function_call>call:send{a:{b:[1,<escape>x, y}<escape>,true]},c:word, d :2,}"
        "<end_function_call>"
    )
    events = parse(text, ReplyFormat(FUNCTION_GEMMA))
    expected = {"a": {"b": [1, "x, y}", True]}, "c": "word", "d": 2}
    assert calls_of(events) == [("send", expected)]
