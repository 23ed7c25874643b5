"""Replies in every format, and what the tests of parsing do with them."""

import itertools
from collections.abc import Sequence

from semantic.application.parsing import ReplyParser
from semantic.domain.chat import ToolSpec
from semantic.domain.events import (
    Event,
    Failed,
    Finished,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    Usage,
)
from semantic.domain.reply_format import Markers, ReplyFormat, ToolFormat
from semantic.domain.sampling import FinishReason

THINK = Markers("<think>", "</think>")
WEATHER = ToolSpec(
    "get_weather",
    "",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
SEND = ToolSpec("send", "", {"type": "object", "properties": {}})
TOOLS = (WEATHER, SEND)
END = Finished(FinishReason.END_TURN, Usage(1))

# Each reply calls get_weather for Zürich, 2 days, and then send without arguments.
TWO_CALLS = {
    ToolFormat.HERMES: (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n'
        '</tool_call>\n<tool_call>{"arguments": {}, "name": "send"}</tool_call>'
    ),
    ToolFormat.QWEN_XML: (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=send>\n</function>\n</tool_call>"
    ),
    ToolFormat.LLAMA_JSON: (
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}; '
        '{"type": "function", "name": "send", "parameters": {}}'
    ),
    ToolFormat.PYTHONIC: '[get_weather(city="Zürich", days=2), send()]',
    ToolFormat.MISTRAL: (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}, '
        '{"name": "send", "arguments": {}}]'
    ),
    ToolFormat.MISTRAL_ARGS: (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich", "days": 2}[TOOL_CALLS]send[ARGS]{}'
    ),
    ToolFormat.GEMMA_CODE: ("```tool_code\nget_weather(city='Zürich', days=2)\nprint(send())\n```"),
    ToolFormat.FUNCTION_GEMMA: (
        "<start_function_call>call:get_weather{city:<escape>Zürich<escape>,days:2}"
        "<end_function_call><start_function_call>call:send{}<end_function_call>"
    ),
    ToolFormat.GEMMA_4: (
        '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|>'
        "<|tool_call>call:send{}<tool_call|>"
    ),
    ToolFormat.HARMONY: (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Zürich", "days": 2}<|call|><|start|>assistant to=functions.send'
        "<|channel|>commentary json<|message|>{}"
    ),
}
# What calls look like when a model gets them wrong.
MISHAPS = (
    '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "send", "arguments": {"a": "cut off',
    '<tool_call>{"name": "send", "arguments": {"a": 1, oops}}</tool_call> more',
    "<tool_call>not JSON at all</tool_call> and on",
    "<tool_call><function=send><parameter=a>x</function></tool_call>",
    '{"name": "send", "parameters": 5} rest',
    "[send(1)] [send(",
    "[TOOL_CALLS]nobody[ARGS]{} [TOOL_CALLS]",
    "```tool_code\nimport os\n``` text",
    "<start_function_call>call:send{a:}<end_function_call>",
    '<|tool_call>call:send{a:<|"|>x}<tool_call|>',
    "<|channel|>commentary to=functions.send<|message|>print(1)<|call|>",
    "<|channel|>final<|message|>done<|return|><|channel|>analysis",
)
FORMATS = [ReplyFormat(tools, thinking) for tools in ToolFormat for thinking in (None, THINK)]


def parse(
    text: str,
    reply_format: ReplyFormat,
    tools: Sequence[ToolSpec] = TOOLS,
    cuts: Sequence[int] = (),
    *,
    is_thinking_open: bool = False,
    must_call: bool = False,
    end: Finished | Failed = END,
) -> list[Event]:
    """A reply's events, adjacent pieces joined; the text is fed in pieces that end at `cuts`."""
    ids = (str(number) for number in itertools.count())
    parser = ReplyParser(
        reply_format,
        tools,
        is_thinking_open=is_thinking_open,
        must_call=must_call,
        new_id=lambda: next(ids),
        sign=lambda: "signed",
    )
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    events: list[Event] = []
    fed: list[Event] = [TextDelta(piece) for piece in pieces if piece]
    for event in [*fed, end]:
        for made in parser.push(event):
            _join(events, made)
    return events


def _join(events: list[Event], event: Event) -> None:
    last = events[-1] if events else None
    match last, event:
        case TextDelta(), TextDelta():
            events[-1] = TextDelta(last.text + event.text)
        case ThinkingDelta(), ThinkingDelta():
            events[-1] = ThinkingDelta(last.text + event.text)
        case ToolCallDelta(), ToolCallDelta():
            events[-1] = ToolCallDelta(event.index, last.arguments + event.arguments)
        case _:
            events.append(event)


def text_of(events: Sequence[Event]) -> str:
    """All text of a reply."""
    return "".join(event.text for event in events if isinstance(event, TextDelta))
