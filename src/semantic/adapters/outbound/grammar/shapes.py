"""What a reply must look like, written as a grammar in llguidance's dialect of Lark."""

import json
from collections.abc import Mapping, Sequence

from llguidance import regex_to_lark

from semantic.adapters.outbound.grammar.tool_calls import CALLS, Lark
from semantic.domain.chat import (
    ChoiceFormat,
    JsonFormat,
    JsonObject,
    OutputFormat,
    RegexFormat,
    ToolSpec,
)
from semantic.domain.reply_format import (
    ANALYSIS_HEADER,
    FINAL_HEADER,
    Harmony,
    ReplyShape,
    ToolFormat,
)

_GAP = '("\\n\\n" | "\\n")?'


def shape_grammar(shape: ReplyShape, special_tokens: Mapping[str, int]) -> str:
    """Write the grammar of a shape that is not free."""
    lark = Lark(special_tokens)
    body = _body(lark, shape)
    lark.rule("start", f"{_thinking(lark, shape)} {body}".strip())
    return lark.text()


def exits(shape: ReplyShape) -> tuple[str, ...]:
    """Texts that lead out of the free text a reply of this shape may hold."""
    thinking = shape.format.thinking
    ends = (thinking.end,) if thinking is not None else ()
    return ends + (CALLS[shape.format.tools].exits if shape.allowed_tools else ())


def _output(lark: Lark, output: OutputFormat) -> str:
    """Add the rule for a reply's text and return how to refer to it."""
    match output:
        case JsonFormat(schema, is_strict):
            wanted: JsonObject = {"type": "object"} if schema is None else schema
            return lark.json(wanted, is_lenient=not is_strict)
        case RegexFormat(pattern):
            return f"/{regex_to_lark(_unanchored(pattern), 'dw')}/"
        case ChoiceFormat(choices):
            return "(" + " | ".join(lark.quoted(choice) for choice in choices) + ")"


def _unanchored(pattern: str) -> str:
    """A reply matches as a whole, so anchors around the pattern say nothing."""
    pattern = pattern.removeprefix("^")
    num_slashes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    is_anchor = pattern.endswith("$") and num_slashes % 2 == 0
    return pattern[:-1] if is_anchor else pattern


def _body(lark: Lark, shape: ReplyShape) -> str:
    tools, output = shape.allowed_tools, shape.output
    if not tools:
        return _answer(lark, shape, output)
    call_format = CALLS[shape.format.tools]
    one = call_format.call(lark, tools)
    calls = call_format.several(lark, one) if shape.may_repeat_calls else one
    if shape.must_call:
        return calls
    if output is not None:
        return f"({calls} | {_answer(lark, shape, output)})"
    return call_format.among_text(lark, one)


def _answer(lark: Lark, shape: ReplyShape, output: OutputFormat | None) -> str:
    rule = "TEXT" if output is None else _output(lark, output)
    if shape.format.tools is not ToolFormat.HARMONY:
        return rule
    return f"{lark.markers(*FINAL_HEADER)} {rule}"


def _thinking(lark: Lark, shape: ReplyShape) -> str:
    """What may, or must, come before the answer."""
    if shape.format.tools is ToolFormat.HARMONY:
        return _analysis(lark) if shape.may_think else ""
    markers = shape.format.thinking
    if markers is None or not (shape.may_think or shape.is_thinking_open):
        return ""
    thought = lark.text_until("thought", markers.end)
    if shape.is_thinking_open:
        return f"{thought} {_GAP}"
    return f"({lark.marker(markers.start)} {thought} {_GAP})?"


def _analysis(lark: Lark) -> str:
    thought = f"{lark.markers(*ANALYSIS_HEADER)} {lark.text_until('analysis', Harmony.END)}"
    return f"({thought} {lark.markers(Harmony.START, 'assistant')})?"


def tool_names(tools: Sequence[ToolSpec]) -> str:
    """Name tools for an error message."""
    return ", ".join(json.dumps(tool.name) for tool in tools) or "none"
