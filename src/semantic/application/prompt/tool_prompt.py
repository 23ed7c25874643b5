"""Tools for models whose template has no place for them, and how a tool is written down.

The markup is the one open models have seen most: a call is a JSON object within `<tool_call>`, a
result is text within `<tool_response>`.
"""

import json
from collections.abc import Sequence

from semantic.application.prompt.normalising import in_schema_order
from semantic.domain.chat import JsonObject, JsonValue, ToolSpec

_INTRODUCTION = """\
# Tools

You may call functions to help with the user's request. These are available:
<tools>
{tools}
</tools>

To call one, write its name and arguments as JSON:
<tool_call>
{{"name": "<name>", "arguments": {{<arguments>}}}}
</tool_call>
Each result comes back within <tool_response></tool_response>."""


def function_of(tool: ToolSpec) -> JsonObject:
    """Describe a tool as templates expect it; the order of its schema's keys does not matter."""
    empty: JsonObject = {"type": "object", "properties": {}}
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": in_schema_order(tool.parameters or empty),
    }


def introduction(functions: Sequence[JsonObject]) -> str:
    """Tell a model which functions there are and how to call them."""
    return _INTRODUCTION.format(tools="\n".join(map(_line, functions)))


def announcement(function: JsonObject) -> str:
    """Tell a model of one more function in the midst of a conversation."""
    return f"<tools>\n{_line(function)}\n</tools>"


def call_text(name: str, arguments: JsonValue) -> str:
    """Write a call the model made."""
    return f"<tool_call>\n{_line({'name': name, 'arguments': arguments})}\n</tool_call>"


def result_text(text: str) -> str:
    """Write what a call returned."""
    return f"<tool_response>\n{text}\n</tool_response>"


def _line(value: JsonObject) -> str:
    return json.dumps(value, ensure_ascii=False)
