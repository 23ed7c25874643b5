"""Replies in every format, and what the tests of parsing do with them."""

import itertools
import json
from collections.abc import Sequence

from semantic.application.parsing import ReplyParser, fold_message
from semantic.domain.chat import ToolSpec, ToolUsePart
from semantic.domain.events import (
    Event,
    Failed,
    Finished,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from semantic.domain.reply_format import (
    FUNCTION_GEMMA,
    GEMMA_4,
    GEMMA_CODE,
    GRANITE_3,
    HARMONY,
    HERMES,
    LFM,
    LLAMA_JSON,
    MISTRAL,
    MISTRAL_ARGS,
    PHI_4,
    PYTHONIC,
    QWEN_XML,
    Markers,
    ReplyFormat,
)
from semantic.domain.sampling import FinishReason
from tests.notations import APERTUS, DEEPSEEK, FUNCTIONARY, GLM, KIMI, NOTATIONS

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
    HERMES: (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n'
        '</tool_call>\n<tool_call>{"arguments": {}, "name": "send"}</tool_call>'
    ),
    QWEN_XML: (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=send>\n</function>\n</tool_call>"
    ),
    LLAMA_JSON: (
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}; '
        '{"type": "function", "name": "send", "parameters": {}}'
    ),
    PYTHONIC: '[get_weather(city="Zürich", days=2), send()]',
    MISTRAL: (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}, '
        '{"name": "send", "arguments": {}}]'
    ),
    MISTRAL_ARGS: (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich", "days": 2}[TOOL_CALLS]send[ARGS]{}'
    ),
    GEMMA_CODE: ("```tool_code\nget_weather(city='Zürich', days=2)\nprint(send())\n```"),
    FUNCTION_GEMMA: (
        "<start_function_call>call:get_weather{city:<escape>Zürich<escape>,days:2}"
        "<end_function_call><start_function_call>call:send{}<end_function_call>"
    ),
    GEMMA_4: (
        '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|>'
        "<|tool_call>call:send{}<tool_call|>"
    ),
    LFM: "<|tool_call_start|>[get_weather(city='Zürich', days=2), send()]<|tool_call_end|>",
    PHI_4: (
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}, '
        '{"name": "send", "arguments": {}}]<|/tool_call|>'
    ),
    GRANITE_3: (
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}, '
        '"id": 1}, {"name": "send", "arguments": {}, "id": "2"}]'
    ),
    GLM: (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call><tool_call>send</tool_call>"
    ),
    KIMI: (
        '<|calls|><|call|>functions.get_weather:0<|arguments|>{"city": "Zürich", "days": 2}'
        "<|end call|>\n<|call|>functions.send:1<|arguments|>{}<|end call|><|end calls|>"
    ),
    DEEPSEEK: (
        '<DSML calls>\n<DSML invoke name="get_weather">\n<DSML parameter name="city" string="true">'
        'Zürich</DSML parameter>\n<DSML parameter name="days" string="false">2</DSML parameter>\n'
        '</DSML invoke>\n<DSML invoke name="send">\n</DSML invoke>\n</DSML calls>'
    ),
    APERTUS: (
        '<|tools_prefix|>[{"get_weather": {"city": "Zürich", "days": 2}}, {"send": {}}]'
        "<|tools_suffix|>"
    ),
    FUNCTIONARY: 'get_weather\n{"city": "Zürich", "days": 2}>>>send\n{}',
    HARMONY: (
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
    "hi >>>send\n[1]",
    "[send(a=[1, f], b=2)] ok",
    "<|channel|>commentary to=functions.send<|message|>print(1)<|call|>",
    "<|channel|>final<|message|>done<|return|><|channel|>analysis",
)
FORMATS = [
    *(ReplyFormat(tools) for tools in NOTATIONS.values()),
    *(ReplyFormat(tools, THINK) for tools in (HERMES, LLAMA_JSON, GLM)),
]


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


def calls_of(events: Sequence[Event]) -> list[tuple[str, object]]:
    """The calls of a reply."""
    message = fold_message(events)
    return [(p.name, p.arguments) for p in message.parts if isinstance(p, ToolUsePart)]


def check_calls(events: Sequence[Event]) -> None:
    """Every call starts, gives one JSON object and ends, before anything else comes."""
    arguments: str | None = None
    num_calls = 0
    for event in events:
        match event:
            case ToolCallStarted(index):
                assert arguments is None
                assert index == num_calls
                arguments, num_calls = "", num_calls + 1
            case ToolCallDelta(index, more):
                assert arguments is not None
                assert index == num_calls - 1
                arguments += more
            case ToolCallEnded(index):
                assert arguments is not None
                assert index == num_calls - 1
                assert isinstance(json.loads(arguments), dict)
                arguments = None
            case _:
                assert arguments is None
    assert arguments is None
