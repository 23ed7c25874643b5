"""Grammars in llguidance's dialect of Lark, with each model family's syntax of tool calls."""

import json
from collections.abc import Mapping, Sequence

from llguidance import regex_to_lark

from semantic.domain.chat import JsonObject, JsonValue, ToolSpec
from semantic.domain.reply_format import (
    CALL_MARKERS,
    FINAL_HEADER,
    Harmony,
    QwenTag,
    ToolFormat,
)

# JSON as chat templates write it. No other white space is allowed, because a model could otherwise
# generate white space endlessly.
_JSON_STYLE: JsonObject = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_LENIENT: JsonObject = {**_JSON_STYLE, "lenient": True}


class Lark:
    """Builds a grammar in llguidance's dialect of Lark."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        self._rules: dict[str, str] = {"TEXT": "/(.|\\n)*/"}

    def text(self) -> str:
        return "%llguidance {}\n" + "\n".join(f"{n}: {b}" for n, b in self._rules.items())

    def rule(self, name: str, body: str) -> str:
        """Add a rule; returns its name."""
        self._rules[name] = body
        return name.removesuffix("[lazy]")

    def json(self, schema: JsonObject, *, is_lenient: bool = False) -> str:
        styled = {**schema, "x-guidance": _LENIENT if is_lenient else _JSON_STYLE}
        return self.rule(f"json_{len(self._rules)}", f"%json {json.dumps(styled)}")

    def quoted(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def marker(self, text: str) -> str:
        """A reference to the special token with that text, or a literal if there is none."""
        token = self._special_tokens.get(text)
        return self.quoted(text) if token is None else f"<[{token}]>"

    def markers(self, *texts: str) -> str:
        return " ".join(self.marker(text) for text in texts)

    def text_until(self, name: str, end: str, schema: JsonObject | None = None) -> str:
        """A rule for text up to and including `end`: free, or as the pattern of a schema wants."""
        text, pattern = "TEXT", (schema or {}).get("pattern")
        if isinstance(pattern, str):
            number = len(self._rules)
            text = self.rule(f"PATTERN_{number}", f"/{regex_to_lark(_searched(pattern), 'dw')}/")
            name = f"{name}_{number}"
        if end in self._special_tokens:
            return f"{text} {self.marker(end)}"
        return self.rule(f"{name}[lazy]", f"{text} {self.quoted(end)}")


def unanchored(pattern: str) -> str:
    """Remove outer anchors, which are redundant where the whole text must match."""
    pattern = pattern.removeprefix("^")
    num_slashes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    is_anchor = pattern.endswith("$") and num_slashes % 2 == 0
    return pattern[:-1] if is_anchor else pattern


def _searched(pattern: str) -> str:
    """Extend a schema's pattern, which may match anywhere in a text, to match the whole text."""
    inner = unanchored(pattern)
    before = "" if pattern.startswith("^") else r"(.|\n)*"
    after = "" if pattern.removeprefix("^") != inner else r"(.|\n)*"
    return f"{before}({inner}){after}"


class CallGrammar:
    """The call syntax of one model family.

    `exits` are texts that end the free text inside a call, or lead to the call itself.
    """

    exits: tuple[str, ...] = ()

    def call(self, lark: Lark, tools: Sequence[ToolSpec]) -> str:
        """A rule for one call of any of the tools."""
        raise NotImplementedError

    def several(self, lark: Lark, call: str) -> str:  # noqa: ARG002 - for families that can
        """A rule for one or more calls; only one if the family's replies have at most one."""
        return call

    def among_text(self, lark: Lark, call: str) -> str:
        """A rule for free text that may contain calls."""
        raise NotImplementedError


def _arguments(lark: Lark, tool: ToolSpec) -> str:
    schema: JsonObject = {**tool.parameters, "type": "object"}
    return lark.json(schema, is_lenient=not tool.is_strict)


def _any_of(rules: Sequence[str]) -> str:
    return "(" + " | ".join(rules) + ")"


class _MarkedCall(CallGrammar):
    """Calls between markers; the opening marker distinguishes a call from text."""

    def __init__(self, tool_format: ToolFormat, separator: str = "\n") -> None:
        self._markers = CALL_MARKERS[tool_format]
        self._separator = separator

    def call(self, lark: Lark, tools: Sequence[ToolSpec]) -> str:
        inner = lark.rule("call_body", _any_of([self.body(lark, tool) for tool in tools]))
        end = lark.marker(self._markers.end) if self._markers.end else ""
        lark.rule("call_rest", f"{inner} {end}".strip())
        return lark.rule("call", f"{lark.marker(self._markers.start)} call_rest")

    def several(self, lark: Lark, call: str) -> str:
        between = f"{lark.quoted(self._separator)} " if self._separator else ""
        return f"{call} ({between}{call})*"

    def among_text(self, lark: Lark, call: str) -> str:
        return f"({lark.text_until('until_call', self._markers.start)} {call}_rest)* TEXT"

    def body(self, lark: Lark, tool: ToolSpec) -> str:
        raise NotImplementedError


def _json_call(lark: Lark, tool: ToolSpec, key: str) -> str:
    head = lark.quoted(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
    return f'{head} {_arguments(lark, tool)} "}}"'


class _Hermes(_MarkedCall):
    def body(self, lark: Lark, tool: ToolSpec) -> str:
        return f'"\\n" {_json_call(lark, tool, "arguments")} "\\n"'


class _MistralList(_MarkedCall):
    """One list of calls after the marker; several calls are several entries."""

    def call(self, lark: Lark, tools: Sequence[ToolSpec]) -> str:
        one = _any_of([_json_call(lark, tool, "arguments") for tool in tools])
        entry = lark.rule("entry", one)
        lark.rule("call_rest", f'"[" {entry} "]"')
        lark.rule("call_list", f'"[" {entry} (", " {entry})* "]"')
        return lark.rule("call", f"{lark.marker(self._markers.start)} call_rest")

    def several(self, lark: Lark, call: str) -> str:
        return f"{lark.marker(self._markers.start)} {call}_list"

    def among_text(self, lark: Lark, call: str) -> str:
        return f"({lark.text_until('until_call', self._markers.start)} {call}_list | TEXT)"


class _MistralArgs(_MarkedCall):
    def body(self, lark: Lark, tool: ToolSpec) -> str:
        return f"{lark.markers(tool.name, self._markers.arguments)} {_arguments(lark, tool)}"


class _QwenXml(_MarkedCall):
    exits = (f"\n{QwenTag.PARAMETER_END}\n",)

    def body(self, lark: Lark, tool: ToolSpec) -> str:
        parameters = [
            (self._parameter(lark, name, schema, tool), is_required)
            for name, schema, is_required in _parameters_of(tool)
        ]
        inner = " ".join(rule if is_required else f"({rule})?" for rule, is_required in parameters)
        head = lark.quoted(f"\n{QwenTag.FUNCTION}{tool.name}>\n")
        end = lark.quoted(f"{QwenTag.FUNCTION_END}\n")
        return f"{head} {inner} {end}"

    def _parameter(self, lark: Lark, name: str, schema: JsonObject, tool: ToolSpec) -> str:
        head, end = lark.quoted(f"{QwenTag.PARAMETER}{name}>\n"), self.exits[0]
        if schema.get("type") != "string" or "enum" in schema:
            return f"{head} {_bare_value(lark, schema, tool)} {lark.quoted(end)}"
        return f"{head} {lark.text_until('value', end, schema)}"


class _Gemma(_MarkedCall):
    """``call:name{key:value}``; strings are enclosed in a special marker."""

    def __init__(self, tool_format: ToolFormat) -> None:
        super().__init__(tool_format, separator="")
        self._quote = self._markers.quote
        self.exits = (self._quote,)

    def body(self, lark: Lark, tool: ToolSpec) -> str:
        parameters = [
            (f"{lark.quoted(name + ':')} {self._value(lark, schema, tool)}", is_required)
            for name, schema, is_required in _parameters_of(tool)
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
        string = f"{quote} {lark.text_until('quoted', self._quote, schema)}"
        return string if schema.get("type") == "string" else self._any_value(lark, string)

    def _any_value(self, lark: Lark, string: str) -> str:
        """Any well-formed object, list or scalar; nested schemas are not enforced."""
        number = lark.json({"type": ["number", "boolean", "null"]})
        key = "/[A-Za-z_][A-Za-z0-9_]*/"
        lark.rule("gemma_pair", f'{key} ":" gemma_value')
        lark.rule("gemma_object", '"{" (gemma_pair ("," gemma_pair)*)? "}"')
        lark.rule("gemma_list", '"[" (gemma_value ("," gemma_value)*)? "]"')
        return lark.rule("gemma_value", f"{string} | {number} | gemma_object | gemma_list")


class _LlamaJson(CallGrammar):
    """The call is the whole reply; text must not start like a call."""

    def call(self, lark: Lark, tools: Sequence[ToolSpec]) -> str:
        return lark.rule("call", _any_of([_json_call(lark, t, "parameters") for t in tools]))

    def among_text(self, lark: Lark, call: str) -> str:
        answer = lark.rule("ANSWER", r"/[^{\[<\s](.|\n)*/")
        return f"({call} | {answer})"


class _Pythonic(_LlamaJson):
    """A list of calls with keyword arguments, whose values are JSON."""

    def call(self, lark: Lark, tools: Sequence[ToolSpec]) -> str:
        lark.rule("entry", _any_of([_python_call(lark, tool) for tool in tools]))
        return lark.rule("call", '"[" entry "]"')

    def several(self, lark: Lark, call: str) -> str:
        return lark.rule(f"{call}_list", '"[" entry (", " entry)* "]"')

    def among_text(self, lark: Lark, call: str) -> str:
        return super().among_text(lark, self.several(lark, call))


class _GemmaCode(_MarkedCall):
    def body(self, lark: Lark, tool: ToolSpec) -> str:
        return f'"\\n" {_python_call(lark, tool)} "\\n"'


class _Harmony(CallGrammar):
    """Calls are messages to a function on the commentary channel."""

    exits = (Harmony.END,)

    def call(self, lark: Lark, tools: Sequence[ToolSpec]) -> str:
        bodies = [self._body(lark, tool) for tool in tools]
        return lark.rule("call", f"{lark.marker(Harmony.CHANNEL)} {_any_of(bodies)}")

    def among_text(self, lark: Lark, call: str) -> str:
        preamble = lark.markers(Harmony.CHANNEL, "commentary", Harmony.MESSAGE)
        next_message = lark.markers(Harmony.END, Harmony.START, "assistant")
        final = lark.markers(*FINAL_HEADER)
        return f"({preamble} TEXT {next_message})? ({call} | {final} TEXT)"

    def _body(self, lark: Lark, tool: ToolSpec) -> str:
        head = lark.quoted(f"commentary to=functions.{tool.name} ")
        rest = lark.markers(Harmony.CONSTRAIN, "json", Harmony.MESSAGE)
        return f"{head} {rest} {_arguments(lark, tool)}"


def _parameters_of(tool: ToolSpec) -> list[tuple[str, JsonObject, bool]]:
    """Name, schema and required flag of each parameter, required ones first."""
    known, required = tool.parameters.get("properties"), tool.parameters.get("required")
    properties = known if isinstance(known, dict) else {}
    needed = required if isinstance(required, list) else []
    listed = [
        (name, schema if isinstance(schema, dict) else {}, name in needed)
        for name, schema in properties.items()
    ]
    return sorted(listed, key=lambda entry: not entry[2])


def _python_call(lark: Lark, tool: ToolSpec) -> str:
    parameters = [
        (f"{lark.quoted(name + '=')} {_bare_value(lark, schema, tool)}", is_required)
        for name, schema, is_required in _parameters_of(tool)
    ]
    return f'{lark.quoted(tool.name + "(")} {_in_order(lark, parameters, ", ")} ")"'


def _bare_value(lark: Lark, schema: JsonObject, tool: ToolSpec) -> str:
    """One parameter's value as JSON; its schema may refer to the tool's definitions."""
    shared: dict[str, JsonValue] = {
        key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters
    }
    return lark.json({**shared, **schema}, is_lenient=not tool.is_strict)


def _in_order(lark: Lark, parameters: Sequence[tuple[str, bool]], separator: str) -> str:
    """Required parameters, then any of the optional ones, with separators between them."""
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


CALLS: Mapping[ToolFormat, CallGrammar] = {
    ToolFormat.HERMES: _Hermes(ToolFormat.HERMES),
    ToolFormat.QWEN_XML: _QwenXml(ToolFormat.QWEN_XML),
    ToolFormat.LLAMA_JSON: _LlamaJson(),
    ToolFormat.PYTHONIC: _Pythonic(),
    ToolFormat.MISTRAL: _MistralList(ToolFormat.MISTRAL),
    ToolFormat.MISTRAL_ARGS: _MistralArgs(ToolFormat.MISTRAL_ARGS, separator=""),
    ToolFormat.GEMMA_CODE: _GemmaCode(ToolFormat.GEMMA_CODE),
    ToolFormat.FUNCTION_GEMMA: _Gemma(ToolFormat.FUNCTION_GEMMA),
    ToolFormat.GEMMA_4: _Gemma(ToolFormat.GEMMA_4),
    ToolFormat.HARMONY: _Harmony(),
}
