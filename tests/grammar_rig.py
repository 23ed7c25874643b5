"""Reply shapes, a check that a reply has its shape, and random decoding under a constraint."""

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

import jsonschema_rs
import numpy as np

from semantic.application.parsing import ReplyParser, fold_message
from semantic.domain.chat import (
    ChoiceFormat,
    JsonFormat,
    JsonObject,
    Message,
    RegexFormat,
    ToolChoice,
    ToolMode,
    ToolSpec,
    ToolUsePart,
)
from semantic.domain.events import Finished, TextDelta, Usage
from semantic.domain.reply_format import Markers, ReplyFormat, ReplyShape
from semantic.domain.sampling import FinishReason
from semantic.ports.text import TokenConstraint, TokenizerPort
from tests.notations import FUNCTIONARY, NOTATIONS

PERSON: JsonObject = {
    "type": "object",
    "properties": {
        "notes": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"kind": {"enum": ["good", "bad"]}, "text": {"type": "string"}},
                "required": ["kind", "text"],
                "additionalProperties": False,
            },
        },
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE: JsonObject = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "additionalProperties": False,
}
DATE = r"^\d{4}-\d{2}-\d{2}$"
WORDS = r"[a-z ]+\."
CHOICES = ("yes", "no", "maybe later", "yesterday")
WEATHER = ToolSpec(
    "get_weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
SEND = ToolSpec(
    "send",
    "Send a message.",
    {
        "type": "object",
        "properties": {"to": {"type": "string"}, "urgent": {"type": "boolean"}},
        "additionalProperties": False,
    },
    is_strict=True,
)
TOOLS = (WEATHER, SEND)
NAMED = ToolChoice(ToolMode.NAMED, "get_weather")
REQUIRED = ToolChoice(ToolMode.REQUIRED)
PLAIN = ReplyFormat()
THINKING = ReplyFormat(thinking=Markers("<think>", "</think>"))
ADDRESSED = ReplyFormat(FUNCTIONARY)

SHAPES: Mapping[str, ReplyShape] = {
    "schema": ReplyShape(PLAIN, JsonFormat(PERSON)),
    "recursive schema": ReplyShape(PLAIN, JsonFormat(TREE)),
    "object": ReplyShape(PLAIN, JsonFormat()),
    "date": ReplyShape(PLAIN, RegexFormat(DATE)),
    "words": ReplyShape(PLAIN, RegexFormat(WORDS)),
    "choice": ReplyShape(PLAIN, ChoiceFormat(CHOICES)),
    "forced tool": ReplyShape(PLAIN, tools=TOOLS, tool_choice=NAMED),
    "required tool": ReplyShape(PLAIN, tools=TOOLS, tool_choice=REQUIRED),
    "strict tools": ReplyShape(PLAIN, tools=TOOLS),
    "tools or JSON": ReplyShape(PLAIN, JsonFormat(PERSON), tools=TOOLS),
    "JSON after thinking": ReplyShape(THINKING, JsonFormat(PERSON), is_thinking_open=True),
    "JSON, maybe after thinking": ReplyShape(THINKING, JsonFormat(PERSON)),
    "addressed JSON": ReplyShape(ADDRESSED, JsonFormat(PERSON)),
    "addressed tools or JSON": ReplyShape(ADDRESSED, JsonFormat(PERSON), tools=TOOLS),
}


def tool_shapes() -> dict[str, ReplyShape]:
    """Shapes with named, required and optional tool calls, in every tool format."""
    return {
        f"{name} {choice.mode.value}": ReplyShape(
            ReplyFormat(tools), tools=TOOLS, tool_choice=choice
        )
        for name, tools in NOTATIONS.items()
        for choice in (NAMED, REQUIRED, ToolChoice())
    }


def _parsed(text: str, shape: ReplyShape) -> Message:
    parser = ReplyParser(shape.format, shape.allowed_tools, is_thinking_open=shape.is_thinking_open)
    end = Finished(FinishReason.END_TURN, Usage(1))
    return fold_message([*parser.push(TextDelta(text)), *parser.push(end)])


def calls_in(text: str, shape: ReplyShape) -> list[ToolUsePart]:
    """The tool calls of a reply."""
    return [part for part in _parsed(text, shape).parts if isinstance(part, ToolUsePart)]


def check_reply(text: str, shape: ReplyShape) -> None:
    """Fail if a reply does not have the required shape."""
    message = _parsed(text, shape)
    calls = calls_in(text, shape)
    if shape.must_call:
        assert calls, text
        assert message.text == "", text
    for call in calls:
        parameters = next(tool.parameters for tool in TOOLS if tool.name == call.name)
        jsonschema_rs.validate(parameters, call.arguments)
        assert shape.tool_choice.name in (None, call.name)
    if shape.output is not None and not calls:
        _check_output(message.text, shape)


def _check_output(text: str, shape: ReplyShape) -> None:
    match shape.output:
        case JsonFormat(schema):
            # A number above the range of floats parses as infinity, which validators reject.
            value = json.loads(text, parse_float=lambda _: 0.5)
            jsonschema_rs.validate(schema or {"type": "object"}, value)
        case RegexFormat(pattern):
            assert re.fullmatch(pattern, text), text
        case ChoiceFormat(choices):
            assert text in choices


@dataclass
class Reply:
    """A reply of randomly chosen tokens."""

    text: str
    num_tokens: int
    is_ended: bool


def write_at_random(
    constraint: TokenConstraint, tokenizer: TokenizerPort, max_tokens: int, seed: int,
    visible: Mapping[int, bytes] | None = None,
) -> Reply:  # fmt: skip
    """Write a reply by picking each token at random among the allowed ones."""
    rng = random.Random(seed)  # noqa: S311 - not a secret
    raw = b""
    for count in range(max_tokens):
        mask = constraint.allowed()
        assert mask is not None
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        token = int(rng.choice(np.flatnonzero(bits).tolist()))
        constraint.accept(token)
        if token in tokenizer.eos_ids:
            return Reply(raw.decode(), count + 1, is_ended=True)
        raw += (visible or {}).get(token) or tokenizer.token_bytes(token)
    return Reply(raw.decode("utf-8", "replace"), max_tokens, is_ended=False)
