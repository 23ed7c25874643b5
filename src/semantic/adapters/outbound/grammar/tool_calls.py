"""Grammars in llguidance's dialect of Lark, with the notations of tool calls."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llguidance import regex_to_lark

from semantic.domain.chat import JsonObject, JsonValue, ToolSpec
from semantic.domain.reply_format import (
    FINAL_HEADER,
    SLOT,
    ArgumentStyle,
    CallNotation,
    Harmony,
)

# JSON as chat templates write it. No other white space is allowed, because a model could otherwise
# generate white space endlessly.
_JSON_STYLE: JsonObject = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_SPACED_JSON_STYLE: JsonObject = {"whitespace_flexible": True}
_ANY_TEXT = r"(.|\n)*"
_ID = "/[A-Za-z0-9_\\-]{1,40}/"


class Lark:
    """Builds a grammar in llguidance's dialect of Lark."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        longest_first = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._special_pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._rules: dict[str, str] = {"TEXT": f"/{_ANY_TEXT}/"}

    def text(self) -> str:
        return "%llguidance {}\n" + "\n".join(f"{n}: {b}" for n, b in self._rules.items())

    def rule(self, name: str, body: str) -> str:
        """Add a rule; returns its name."""
        self._rules[name] = body
        return name.removesuffix("[lazy]")

    def json(self, schema: JsonObject, *, is_lenient: bool = False, is_spaced: bool = False) -> str:
        style = {**(_SPACED_JSON_STYLE if is_spaced else _JSON_STYLE), "lenient": is_lenient}
        styled = {**schema, "x-guidance": style}
        return self.rule(f"json_{len(self._rules)}", f"%json {json.dumps(styled)}")

    def quoted(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def marker(self, text: str) -> str:
        """A reference to the special token with that text, or a literal if there is none."""
        token = self._special_tokens.get(text)
        return self.quoted(text) if token is None else f"<[{token}]>"

    def markers(self, *texts: str) -> str:
        return " ".join(self.marker(text) for text in texts)

    def literal(self, text: str) -> str:
        """A text that may contain special tokens, and slots for ids."""
        pieces = re.split(f"({SLOT}|{self._special_pattern})", text)
        return " ".join(_ID if p == SLOT else self.marker(p) for p in pieces if p)

    def text_until(self, end: str, schema: JsonObject | None = None) -> str:
        """A rule for text up to and including `end`: free, or as the pattern of a schema wants."""
        pattern, number = (schema or {}).get("pattern"), len(self._rules)
        wanted = regex_to_lark(_searched(pattern), "dw") if isinstance(pattern, str) else _ANY_TEXT
        special = re.search(self._special_pattern, end)
        if special is None:
            text = self.rule(f"TEXT_{number}", f"/{wanted}/")
            return self.rule(f"until_{number}[lazy]", f"{text} {self.quoted(end)}")
        # A special token ends a text by itself.
        before = "".join(f"\\x{{{ord(char):x}}}" for char in end[: special.start()])
        text = self.rule(f"TEXT_{number}", f"/{wanted}{before}/")
        return f"{text} {self.literal(end[special.start() :])}"


def unanchored(pattern: str) -> str:
    """Remove outer anchors, which are redundant where the whole text must match."""
    pattern = pattern.removeprefix("^")
    num_slashes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    is_anchor = pattern.endswith("$") and num_slashes % 2 == 0
    return pattern[:-1] if is_anchor else pattern


def _searched(pattern: str) -> str:
    """Extend a schema's pattern, which may match anywhere in a text, to match the whole text."""
    inner = unanchored(pattern)
    before = "" if pattern.startswith("^") else _ANY_TEXT
    after = "" if pattern.removeprefix("^") != inner else _ANY_TEXT
    return f"{before}({inner}){after}"


def _any_of(rules: Sequence[str]) -> str:
    return "(" + " | ".join(rules) + ")"


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter of a tool."""

    name: str
    schema: JsonObject
    is_required: bool

    @property
    def is_string(self) -> bool:
        return self.schema.get("type") == "string" and "enum" not in self.schema

    @property
    def is_free_string(self) -> bool:
        return self.is_string and not {"pattern", "format", "minLength", "maxLength"} & {
            *self.schema
        }

    @property
    def choices(self) -> list[str]:
        """The strings of an enumeration; empty if it is none, or has other values."""
        listed = self.schema.get("enum")
        texts = (
            [choice for choice in listed if isinstance(choice, str)]
            if isinstance(listed, list)
            else []
        )
        return texts if isinstance(listed, list) and len(texts) == len(listed) else []


class CallGrammar:
    """The grammar of calls in one notation, for the tools that may be called."""

    def __init__(self, notation: CallNotation, lark: Lark, tools: Sequence[ToolSpec]) -> None:
        self._notation = notation
        self._lark = lark
        lark.rule("call_rest", _any_of([self._from_name(tool) for tool in tools]))
        lark.rule("call", f"{lark.literal(notation.before_name)} call_rest")

    def one(self) -> str:
        """A rule for one call."""
        return f"{self._lark.literal(self._notation.start)} call {self._end}"

    def several(self) -> str:
        """A rule for one or more calls; only one if the notation has no more."""
        return f"{self._lark.literal(self._notation.start)} {self._repeated} {self._end}"

    def among_text(self) -> str:
        """A rule for free text that may contain calls."""
        lark, opener = self._lark, self._notation.opener
        if not opener:  # the call is the whole reply, and text must not start like a call
            answer = lark.rule("ANSWER", r"/[^{\[<\s](.|\n)*/")
            return f"({self.several()} | {answer})"
        if start := self._notation.start:
            rest = f"{lark.literal(start.removeprefix(opener))} {self._repeated} {self._end}"
        else:
            rest = f"{lark.literal(self._notation.before_name.removeprefix(opener))} call_rest"
        return f"({lark.text_until(opener)} {rest})* TEXT"

    @property
    def _repeated(self) -> str:
        separator = self._lark.literal(self._notation.separator)
        return f"call ({separator} call)*" if self._notation.is_parallel else "call"

    @property
    def _end(self) -> str:
        return self._lark.literal(self._notation.end)

    # -- one call, from its name on -------------------------------------------------------------

    def _from_name(self, tool: ToolSpec) -> str:
        notation, lark = self._notation, self._lark
        name = json.dumps(tool.name)[1:-1] if notation.is_json_object else tool.name
        head = lark.literal(name + notation.after_name)
        return f"{head} {self._arguments(tool)} {lark.literal(notation.after_arguments)}"

    def _arguments(self, tool: ToolSpec) -> str:
        match self._notation.style:
            case ArgumentStyle.TAGS:
                return " ".join(_optional(self._tag(p, tool), p) for p in _parameters_of(tool))
            case ArgumentStyle.PYTHON:
                pairs = [(self._keyword(p, tool), p) for p in _parameters_of(tool)]
                return f'"(" {_in_order(self._lark, pairs, ", ")} ")"'
            case ArgumentStyle.GEMMA:
                pairs = [(self._member(p, tool), p) for p in _parameters_of(tool)]
                return _in_order(self._lark, pairs, ",")
            case _:
                schema: JsonObject = {**tool.parameters, "type": "object"}
                return self._lark.json(
                    schema, is_lenient=not tool.is_strict, is_spaced=self._notation.is_json_spaced
                )

    def _tag(self, parameter: _Parameter, tool: ToolSpec) -> str:
        notation, lark, name = self._notation, self._lark, parameter.name
        end = notation.after_value.replace(SLOT, name)
        if parameter.is_string or parameter.choices:
            head = lark.literal(notation.before_key + name + notation.before_value)
            if parameter.is_string:
                return f"{head} {lark.text_until(end, parameter.schema)}"
            return f"{head} {_choices(lark, parameter)} {lark.literal(end)}"
        head = lark.literal(notation.before_key + name + notation.before_other)
        return f"{head} {_bare_value(lark, parameter.schema, tool)} {lark.literal(end)}"

    def _keyword(self, parameter: _Parameter, tool: ToolSpec) -> str:
        head = self._lark.quoted(f"{parameter.name}=")
        if self._notation.quote == "'" and parameter.is_free_string:
            return f"{head} /'([^'\\\\\\n]|\\\\.)*'/"
        return f"{head} {_bare_value(self._lark, parameter.schema, tool)}"

    def _member(self, parameter: _Parameter, tool: ToolSpec) -> str:
        return f"{self._lark.quoted(parameter.name + ':')} {self._gemma_value(parameter, tool)}"

    def _gemma_value(self, parameter: _Parameter, tool: ToolSpec) -> str:
        lark, schema = self._lark, parameter.schema
        if schema.get("type") in ("integer", "number", "boolean", "null"):
            return _bare_value(lark, schema, tool)
        quote = lark.marker(self._notation.quote)
        if parameter.choices:
            return f"{quote} {_choices(lark, parameter)} {quote}"
        string = f"{quote} {lark.text_until(self._notation.quote, schema)}"
        return string if parameter.is_string else self._any_gemma_value(string)

    def _any_gemma_value(self, string: str) -> str:
        """Any well-formed object, list or scalar; nested schemas are not enforced."""
        lark = self._lark
        number = lark.json({"type": ["number", "boolean", "null"]})
        lark.rule("gemma_pair", '/[A-Za-z_][A-Za-z0-9_]*/ ":" gemma_value')
        lark.rule("gemma_object", '"{" (gemma_pair ("," gemma_pair)*)? "}"')
        lark.rule("gemma_list", '"[" (gemma_value ("," gemma_value)*)? "]"')
        return lark.rule("gemma_value", f"{string} | {number} | gemma_object | gemma_list")


class AddressedGrammar(CallGrammar):
    """Text has markup as calls have, and the prompt ends with what precedes the first name."""

    def several(self) -> str:
        return "call_rest call*"

    def one(self) -> str:
        return "call_rest"

    def among_text(self) -> str:
        lark, notation = self._lark, self._notation
        calls = f"{lark.text_until(notation.before_name)} {self.several()}"
        return f"({self.several()} | {lark.literal(notation.before_text)} (TEXT | {calls}))"


class HarmonyGrammar(CallGrammar):
    """Calls are messages to a function on the commentary channel."""

    def several(self) -> str:
        return self.one()

    def one(self) -> str:
        return f"{self._lark.marker(Harmony.CHANNEL)} call_rest"

    def among_text(self) -> str:
        preamble = self._lark.markers(Harmony.CHANNEL, "commentary", Harmony.MESSAGE)
        next_message = self._lark.markers(Harmony.END, Harmony.START, "assistant")
        final = self._lark.markers(*FINAL_HEADER)
        return f"({preamble} TEXT {next_message})? ({self.one()} | {final} TEXT)"

    def _from_name(self, tool: ToolSpec) -> str:
        head = self._lark.quoted(f"commentary to=functions.{tool.name} ")
        rest = self._lark.markers(Harmony.CONSTRAIN, "json", Harmony.MESSAGE)
        return f"{head} {rest} {self._arguments(tool)}"


def call_grammar(notation: CallNotation, lark: Lark, tools: Sequence[ToolSpec]) -> CallGrammar:
    """Add the rules for calls of these tools to a grammar."""
    if notation.style is ArgumentStyle.CHANNELS:
        return HarmonyGrammar(notation, lark, tools)
    return (AddressedGrammar if notation.before_text else CallGrammar)(notation, lark, tools)


def call_exits(notation: CallNotation, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
    """Texts that end the free text inside a call, end all calls, or lead to the call itself."""
    end = (notation.end, notation.end.lstrip()) if notation.end.strip(" \n]") else ()
    match notation.style:
        case ArgumentStyle.TAGS:
            names = sorted({p.name for tool in tools for p in _parameters_of(tool)})
            return (*dict.fromkeys(notation.after_value.replace(SLOT, n) for n in names), *end)
        case ArgumentStyle.GEMMA:
            return (notation.quote,)
        case ArgumentStyle.CHANNELS:
            return (Harmony.END,)
        case _:
            return end


def _parameters_of(tool: ToolSpec) -> list[_Parameter]:
    """The parameters, required ones first."""
    known, required = tool.parameters.get("properties"), tool.parameters.get("required")
    properties = known if isinstance(known, dict) else {}
    needed = required if isinstance(required, list) else []
    listed = [
        _Parameter(name, schema if isinstance(schema, dict) else {}, name in needed)
        for name, schema in properties.items()
    ]
    return sorted(listed, key=lambda parameter: not parameter.is_required)


def _optional(rule: str, parameter: _Parameter) -> str:
    return rule if parameter.is_required else f"({rule})?"


def _choices(lark: Lark, parameter: _Parameter) -> str:
    return _any_of([lark.quoted(choice) for choice in parameter.choices])


def _bare_value(lark: Lark, schema: JsonObject, tool: ToolSpec) -> str:
    """One parameter's value as JSON; its schema may refer to the tool's definitions."""
    shared: dict[str, JsonValue] = {
        key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters
    }
    return lark.json({**shared, **schema}, is_lenient=not tool.is_strict)


def _in_order(lark: Lark, pairs: Sequence[tuple[str, _Parameter]], separator: str) -> str:
    """Required parameters, then any of the optional ones, with separators between them."""
    comma = lark.quoted(separator)
    required = [rule for rule, parameter in pairs if parameter.is_required]
    optional = [rule for rule, parameter in pairs if not parameter.is_required]
    if required:
        head = f" {comma} ".join(required)
        return " ".join([head, *(f"({comma} {rule})?" for rule in optional)])
    firsts = [
        " ".join([rule, *(f"({comma} {later})?" for later in optional[index + 1 :])])
        for index, rule in enumerate(optional)
    ]
    return f"{_any_of(firsts)}?" if firsts else ""
