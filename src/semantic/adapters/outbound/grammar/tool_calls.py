"""Each family's notation of tool calls, as rules of llguidance's dialect of Lark."""

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

from semantic.adapters.outbound.grammar.lark import Lark
from semantic.domain.chat import JsonObject, JsonValue, ToolSpec
from semantic.domain.reply_format import ToolFormat


class CallGrammar(Protocol):
    """One family's rules."""

    def call(self, lark: Lark, tools: Sequence[ToolSpec]) -> str:
        """One call of any of the tools."""
        ...

    def several(self, lark: Lark, call: str) -> str:
        """One call or more."""
        ...

    def among_text(self, lark: Lark, call: str) -> str:
        """Free text that may hold calls."""
        ...


def _arguments(lark: Lark, tool: ToolSpec) -> str:
    schema: JsonObject = {**tool.parameters, "type": "object"}
    return lark.json(schema, is_lenient=not tool.is_strict)


def _any_of(rules: Sequence[str]) -> str:
    return "(" + " | ".join(rules) + ")"


class _MarkedCall:
    """Calls between markers: the opening one tells a call from text."""

    def __init__(self, start: str, end: str, separator: str = "\n") -> None:
        self._start, self._end, self._separator = start, end, separator

    def call(self, lark: Lark, tools: Sequence[ToolSpec]) -> str:
        inner = lark.rule("call_body", _any_of([self.body(lark, tool) for tool in tools]))
        lark.rule("call_rest", f"{inner} {self._after(lark)}".strip())
        return lark.rule("call", f"{lark.marker(self._start)} call_rest")

    def several(self, lark: Lark, call: str) -> str:
        between = f"{lark.quoted(self._separator)} " if self._separator else ""
        return f"{call} ({between}{call})*"

    def among_text(self, lark: Lark, call: str) -> str:
        return f"({lark.text_until('until_call', self._start)} {call}_rest)* TEXT"

    def body(self, lark: Lark, tool: ToolSpec) -> str:
        raise NotImplementedError

    def _after(self, lark: Lark) -> str:
        return lark.marker(self._end) if self._end else ""


def _json_call(lark: Lark, tool: ToolSpec, key: str) -> str:
    head = lark.quoted(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
    return f'{head} {_arguments(lark, tool)} "}}"'


class _Hermes(_MarkedCall):
    def body(self, lark: Lark, tool: ToolSpec) -> str:
        return f'"\\n" {_json_call(lark, tool, "arguments")} "\\n"'


class _MistralList(_MarkedCall):
    """One list of calls after the marker, so several calls are several entries."""

    def call(self, lark: Lark, tools: Sequence[ToolSpec]) -> str:
        one = _any_of([_json_call(lark, tool, "arguments") for tool in tools])
        entry = lark.rule("entry", one)
        lark.rule("call_rest", f'"[" {entry} "]"')
        lark.rule("call_list", f'"[" {entry} (", " {entry})* "]"')
        return lark.rule("call", f"{lark.marker(self._start)} call_rest")

    def several(self, lark: Lark, call: str) -> str:
        return f"{lark.marker(self._start)} {call}_list"

    def among_text(self, lark: Lark, call: str) -> str:
        return f"({lark.text_until('until_call', self._start)} {call}_list | TEXT)"


class _MistralArgs(_MarkedCall):
    def body(self, lark: Lark, tool: ToolSpec) -> str:
        return f"{lark.markers(tool.name, '[ARGS]')} {_arguments(lark, tool)}"


class _QwenXml(_MarkedCall):
    def body(self, lark: Lark, tool: ToolSpec) -> str:
        parameters = [
            (self._parameter(lark, name, schema, tool), is_required)
            for name, schema, is_required in parameters_of(tool)
        ]
        inner = " ".join(rule if is_required else f"({rule})?" for rule, is_required in parameters)
        head = lark.quoted(f"\n<function={tool.name}>\n")
        return f'{head} {inner} "</function>\\n"'

    def _parameter(self, lark: Lark, name: str, schema: JsonObject, tool: ToolSpec) -> str:
        head, end = lark.quoted(f"<parameter={name}>\n"), "\n</parameter>\n"
        if schema.get("type") != "string" or "enum" in schema:
            return f"{head} {_bare_value(lark, schema, tool)} {lark.quoted(end)}"
        return f"{head} {lark.text_until('value', end)}"


class _Gemma(_MarkedCall):
    """``call:name{key:value}``, strings between a marker of their own."""

    def __init__(self, start: str, end: str, quote: str) -> None:
        super().__init__(start, end, separator="")
        self._quote = quote

    def body(self, lark: Lark, tool: ToolSpec) -> str:
        parameters = [
            (f"{lark.quoted(name + ':')} {self._value(lark, schema, tool)}", is_required)
            for name, schema, is_required in parameters_of(tool)
        ]
        head = lark.quoted(f"call:{tool.name}{{")
        return f'{head} {_in_order(lark, parameters, ",")} "}}"'

    def _value(self, lark: Lark, schema: JsonObject, tool: ToolSpec) -> str:
        if schema.get("type") in ("integer", "number", "boolean", "null"):
            return _bare_value(lark, schema, tool)
        quote = lark.marker(self._quote)
        choices = schema.get("enum")
        if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
            literals = _any_of([lark.quoted(str(choice)) for choice in choices])
            return f"{quote} {literals} {quote}"
        string = f"{quote} {lark.text_until('quoted', self._quote)}"
        return string if schema.get("type") == "string" else self._any_value(lark, string)

    def _any_value(self, lark: Lark, string: str) -> str:
        """Objects and lists: well-formed, their own schema is left to the model."""
        number = lark.json({"type": ["number", "boolean", "null"]})
        key = "/[A-Za-z_][A-Za-z0-9_]*/"
        lark.rule("gemma_pair", f'{key} ":" gemma_value')
        lark.rule("gemma_object", '"{" (gemma_pair ("," gemma_pair)*)? "}"')
        lark.rule("gemma_list", '"[" (gemma_value ("," gemma_value)*)? "]"')
        return lark.rule("gemma_value", f"{string} | {number} | gemma_object | gemma_list")


class _LlamaJson:
    """The call is the whole reply; text is what does not begin like one."""

    def call(self, lark: Lark, tools: Sequence[ToolSpec]) -> str:
        return lark.rule("call", _any_of([_json_call(lark, t, "parameters") for t in tools]))

    def several(self, lark: Lark, call: str) -> str:  # noqa: ARG002 - it writes one call a reply
        return call

    def among_text(self, lark: Lark, call: str) -> str:
        answer = lark.rule("ANSWER", r"/[^{\[<\s](.|\n)*/")
        return f"({call} | {answer})"


class _Pythonic(_LlamaJson):
    """A list of calls with keyword arguments, written as JSON values."""

    def call(self, lark: Lark, tools: Sequence[ToolSpec]) -> str:
        lark.rule("entry", _any_of([python_call(lark, tool) for tool in tools]))
        return lark.rule("call", '"[" entry "]"')

    def several(self, lark: Lark, call: str) -> str:
        return lark.rule(f"{call}_list", '"[" entry (", " entry)* "]"')

    def among_text(self, lark: Lark, call: str) -> str:
        return super().among_text(lark, self.several(lark, call))


class _GemmaCode(_MarkedCall):
    def body(self, lark: Lark, tool: ToolSpec) -> str:
        return f'"\\n" {python_call(lark, tool)} "\\n"'


class _Harmony:
    """Calls are messages to a function on the commentary channel."""

    def call(self, lark: Lark, tools: Sequence[ToolSpec]) -> str:
        bodies = [self._body(lark, tool) for tool in tools]
        return lark.rule("call", f"{lark.marker('<|channel|>')} {_any_of(bodies)}")

    def several(self, lark: Lark, call: str) -> str:  # noqa: ARG002 - a call ends the reply
        return call

    def among_text(self, lark: Lark, call: str) -> str:
        preamble = lark.markers("<|channel|>", "commentary", "<|message|>")
        next_message = lark.markers("<|end|>", "<|start|>", "assistant")
        final = lark.markers("<|channel|>", "final", "<|message|>")
        return f"({preamble} TEXT {next_message})? ({call} | {final} TEXT)"

    def _body(self, lark: Lark, tool: ToolSpec) -> str:
        head = lark.quoted(f"commentary to=functions.{tool.name} ")
        rest = lark.markers("<|constrain|>", "json", "<|message|>")
        return f"{head} {rest} {_arguments(lark, tool)}"


def parameters_of(tool: ToolSpec) -> list[tuple[str, JsonObject, bool]]:
    """Name, schema and whether required of each parameter; required ones first."""
    known, required = tool.parameters.get("properties"), tool.parameters.get("required")
    properties = known if isinstance(known, dict) else {}
    needed = required if isinstance(required, list) else []
    listed = [
        (name, schema if isinstance(schema, dict) else {}, name in needed)
        for name, schema in properties.items()
    ]
    return sorted(listed, key=lambda entry: not entry[2])


def python_call(lark: Lark, tool: ToolSpec) -> str:
    """A call with keyword arguments."""
    parameters = [
        (f"{lark.quoted(name + '=')} {_bare_value(lark, schema, tool)}", is_required)
        for name, schema, is_required in parameters_of(tool)
    ]
    return f'{lark.quoted(tool.name + "(")} {_in_order(lark, parameters, ", ")} ")"'


def _bare_value(lark: Lark, schema: JsonObject, tool: ToolSpec) -> str:
    """One parameter's value as JSON; it may refer to the tool's definitions."""
    shared: dict[str, JsonValue] = {
        key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters
    }
    return lark.json({**shared, **schema}, is_lenient=not tool.is_strict)


def _in_order(lark: Lark, parameters: Sequence[tuple[str, bool]], separator: str) -> str:
    """Required parameters, then any of the optional ones, with separators between."""
    comma = lark.quoted(separator)
    required = [rule for rule, is_required in parameters if is_required]
    optional = [rule for rule, is_required in parameters if not is_required]
    if required:
        head = f" {comma} ".join(required)
        return " ".join([head, *(f"({comma} {rule})?" for rule in optional)])
    firsts = [
        " ".join([rule, *(f"({comma} {later})?" for later in optional[index + 1 :])])
        for index, rule in enumerate(optional)
    ]
    return f"{_any_of(firsts)}?" if firsts else ""


def free_text_exits(tools: ToolFormat) -> tuple[str, ...]:
    """Texts that end the free text inside a call, or lead to the call itself."""
    return _EXITS.get(tools, ())


_EXITS: Mapping[ToolFormat, tuple[str, ...]] = {
    ToolFormat.QWEN_XML: ("\n</parameter>\n",),
    ToolFormat.FUNCTION_GEMMA: ("<escape>",),
    ToolFormat.GEMMA_4: ('<|"|>',),
    ToolFormat.HARMONY: ("<|end|>",),
}

CALLS: Mapping[ToolFormat, CallGrammar] = {
    ToolFormat.HERMES: _Hermes("<tool_call>", "</tool_call>"),
    ToolFormat.QWEN_XML: _QwenXml("<tool_call>", "</tool_call>"),
    ToolFormat.LLAMA_JSON: _LlamaJson(),
    ToolFormat.PYTHONIC: _Pythonic(),
    ToolFormat.MISTRAL: _MistralList("[TOOL_CALLS]", ""),
    ToolFormat.MISTRAL_ARGS: _MistralArgs("[TOOL_CALLS]", "", separator=""),
    ToolFormat.GEMMA_CODE: _GemmaCode("```tool_code", "```"),
    ToolFormat.FUNCTION_GEMMA: _Gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    ToolFormat.GEMMA_4: _Gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    ToolFormat.HARMONY: _Harmony(),
}
