"""Constrained decoding with llguidance: JSON schemas, patterns, choices and tool calls.

llguidance never raises for a bad grammar or token, so every state is checked here.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from llguidance import LLMatcher, regex_to_lark

from semantic.adapters.outbound.grammar.constraint import Closing, GrammarConstraint
from semantic.adapters.outbound.grammar.tool_calls import (
    Lark,
    call_exits,
    call_grammar,
    unanchored,
)
from semantic.adapters.outbound.grammar.trial import EXCEEDED, GrammarTrials
from semantic.adapters.outbound.grammar.vocabulary import TokenTable, Vocabulary
from semantic.domain.chat import (
    ChoiceFormat,
    JsonFormat,
    JsonObject,
    JsonValue,
    OutputFormat,
    RegexFormat,
    ToolMode,
    ToolSpec,
    require_whole_characters,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.reply_format import (
    ANALYSIS_HEADER,
    FINAL_HEADER,
    HARMONY,
    Harmony,
    ReplyShape,
)
from semantic.ports.text import TokenConstraint, TokenizerPort

_GAP = '("\\n\\n" | "\\n")?'


def shape_grammar(shape: ReplyShape, special_tokens: Mapping[str, int]) -> str:
    """Write the grammar of a shape that is constrained."""
    lark = Lark(special_tokens)
    body = _body(lark, shape)
    lark.rule("start", f"{_thinking(lark, shape)} {body}".strip())
    return lark.text()


def exits(shape: ReplyShape) -> tuple[str, ...]:
    """Texts that end a free text which a reply of this shape may contain."""
    thinking = shape.format.thinking
    ends = (thinking.end,) if thinking is not None else ()
    tools = shape.allowed_tools
    return ends + (call_exits(shape.format.tools, tools) if tools else ())


def _output(lark: Lark, output: OutputFormat) -> str:
    match output:
        case JsonFormat(schema, is_strict):
            wanted: JsonObject = {"type": "object"} if schema is None else schema
            return lark.json(wanted, is_lenient=not is_strict)
        case RegexFormat(pattern):
            return f"/{regex_to_lark(unanchored(pattern), 'dw')}/"
        case ChoiceFormat(choices):
            return "(" + " | ".join(lark.quoted(choice) for choice in choices) + ")"


def _body(lark: Lark, shape: ReplyShape) -> str:
    tools, output = shape.allowed_tools, shape.output
    if not tools:
        return _answer(lark, shape, output)
    grammar = call_grammar(shape.format.tools, lark, tools)
    calls = grammar.several() if shape.may_repeat_calls else grammar.one()
    if shape.must_call:
        return calls
    if output is not None:
        return f"({calls} | {_answer(lark, shape, output)})"
    return grammar.among_text()


def _answer(lark: Lark, shape: ReplyShape, output: OutputFormat | None) -> str:
    rule = "TEXT" if output is None else _output(lark, output)
    if shape.format.tools == HARMONY:
        return f"{lark.markers(*FINAL_HEADER)} {rule}"
    return f"{lark.literal(shape.format.tools.before_text)} {rule}".lstrip()


def _thinking(lark: Lark, shape: ReplyShape) -> str:
    if shape.format.tools == HARMONY:
        return _analysis(lark) if shape.may_think else ""
    markers = shape.format.thinking
    if markers is None or not (shape.may_think or shape.is_thinking_open):
        return ""
    thought = lark.text_until(markers.end)
    if shape.is_thinking_open:
        return f"{thought} {_GAP}"
    return f"({lark.marker(markers.start)} {thought} {_GAP})?"


def _analysis(lark: Lark) -> str:
    thought = f"{lark.markers(*ANALYSIS_HEADER)} {lark.text_until(Harmony.END)}"
    return f"({thought} {lark.markers(Harmony.START, 'assistant')})?"


def tool_names(tools: Sequence[ToolSpec]) -> str:
    """List tool names for an error message."""
    return ", ".join(json.dumps(tool.name) for tool in tools) or "none"


_MAX_COMPILED = 64
_MAX_COMPILED_S = 5.0  # compile time of all cached grammars, a measure of their size
_DEFINITIONS = ("$defs", "definitions")
_MAX_TRIALS = 100


class LLGuidanceGrammar:
    """`GrammarPort` for one tokenizer.

    The vocabulary is laid out on first use, because that takes a while.
    """

    def __init__(self, tokenizer: TokenizerPort) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._parts: tuple[_Compiler, GrammarTrials] | None = None

    def constrain(self, shape: ReplyShape, max_tokens: int) -> TokenConstraint | None:
        if shape.is_free:
            return None
        _check_shape(shape)
        compiler, trials = self._laid_out()
        try:
            text = shape_grammar(shape, self._tokenizer.special_ids)
            fault = trials.fault(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"the reply format cannot be enforced: {error}.", param="response_format"
            ) from error
        if fault:
            raise _refusal(shape, fault, trials)
        closing = Closing(compiler.vocabulary, [self._tokenizer.encode(t) for t in exits(shape)])
        return GrammarConstraint(
            compiler.matcher(text), closing, max_tokens, lambda: compiler.renewed(text)
        )

    def _laid_out(self) -> "tuple[_Compiler, GrammarTrials]":
        with self._lock:
            if self._parts is None:
                table = TokenTable.of(self._tokenizer)
                vocabulary = Vocabulary(table, self._tokenizer.encode)
                self._parts = _Compiler(vocabulary), GrammarTrials(table)
            return self._parts


class _Compiler:
    """Compiles grammars that passed their trial, and caches some. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[LLMatcher, float]] = OrderedDict()

    def matcher(self, text: str) -> LLMatcher:
        """Return a matcher for one reply; it shares its lexer with others of the same grammar."""
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
                return self._kept[text][0].deep_copy()
        started = time.thread_time()
        matcher = self.vocabulary.compile(text)
        self._keep(text, matcher, time.thread_time() - started)
        return matcher.deep_copy()

    def renewed(self, text: str) -> LLMatcher:
        """Return a matcher with a new lexer, and drop the cached matcher, whose lexer is full."""
        with self._lock:
            self._kept.pop(text, None)
        return self.vocabulary.compile(text)

    def _keep(self, text: str, matcher: LLMatcher, took_s: float) -> None:
        with self._lock:
            self._kept[text] = matcher, took_s
            while (
                len(self._kept) > _MAX_COMPILED
                or sum(seconds for _, seconds in self._kept.values()) > _MAX_COMPILED_S
            ):
                self._kept.popitem(last=False)


def _refusal(shape: ReplyShape, fault: str, trials: GrammarTrials) -> InvalidRequestError:
    output = shape.output
    named: list[tuple[str, str, JsonObject, bool]] = [
        (f"the schema of tool {tool.name!r}", f"tools[{i}].parameters", tool.parameters,
         tool.is_strict)
        for i, tool in enumerate(shape.tools)
        if tool in shape.allowed_tools
    ]  # fmt: skip
    if isinstance(output, JsonFormat):
        named.insert(0, ("the schema", "response_format", output.schema or {}, output.is_strict))
    for name, param, schema, is_strict in named:
        found = _schema_fault(trials.fault, schema, is_lenient=not is_strict)
        if found:
            return InvalidRequestError(f"{name} {found}", param=param)
    what = f"the pattern {output.pattern!r}" if isinstance(output, RegexFormat) else "its form"
    return InvalidRequestError(
        f"{what} cannot be enforced: {_fault_line(fault)}.", param="response_format"
    )


def _check_shape(shape: ReplyShape) -> None:
    match shape.output:
        case RegexFormat(pattern):
            require_whole_characters(pattern, param="response_format")
        case ChoiceFormat(choices):
            if not choices:
                raise InvalidRequestError("it needs at least one choice.", param="response_format")
            require_whole_characters("\n".join(choices), param="response_format")
    if not shape.must_call or shape.allowed_tools:
        return
    if shape.tool_choice.mode is ToolMode.NAMED:
        raise InvalidRequestError(
            f"tool_choice names {shape.tool_choice.name!r}, but the tools are "
            f"{tool_names(shape.tools)}.",
            param="tool_choice",
        )
    raise InvalidRequestError("tool_choice requires a tool, but none is offered.", param="tools")


# -- locating a schema's fault: llguidance reports only the reason ----------------------------


def _schema_fault(
    fault_of: Callable[[str], str], schema: JsonObject, *, is_lenient: bool
) -> str | None:
    """Describe where and why a schema cannot be enforced; None if it can.

    Tries its parts separately, up to `_MAX_TRIALS`. `is_lenient` ignores keywords that cannot be
    enforced.
    """
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    num_trials = 0

    def fault(part: JsonObject) -> str:
        nonlocal num_trials
        num_trials += 1
        lark = Lark({})
        lark.rule("start", lark.json({**shared, **part}, is_lenient=is_lenient))
        return fault_of(lark.text()) if num_trials <= _MAX_TRIALS else ""

    reason, path, part = fault(schema), "", schema
    if not reason:
        return None
    while True:
        # The fault is in the innermost part that fails by itself.
        parts = _parts(part) if reason != EXCEEDED else []
        faulty = next(((p, s, e) for p, s in parts if (e := fault(s))), None)
        if faulty is None:
            where = f"at {path}" if path else "at its root"
            return f"cannot be enforced {where}: {_fault_line(reason)}."
        path, part, reason = path + faulty[0], faulty[1], faulty[2]


def _fault_line(reason: str) -> str:
    """The message of llguidance without its listing of the grammar."""
    _, is_pattern, detail = reason.partition("\nerror: ")  # a pattern's error follows a drawing
    if is_pattern:
        return detail.split("\n", 1)[0]
    if reason.startswith("NoExtension"):
        return "no reply can satisfy it"
    return re.sub(
        r"^(at )?\d+\(\d+\): |failed to compile JSON schema: ", "", reason.split("\n", 1)[0]
    )


def _parts(schema: JsonObject) -> list[tuple[str, JsonObject]]:
    parts: list[tuple[str, JsonValue]] = []
    for key, value in schema.items():
        if key in ("properties", "patternProperties", *_DEFINITIONS) and isinstance(value, dict):
            parts += [(f"/{key}/{name}", inner) for name, inner in value.items()]
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            parts += [(f"/{key}/{index}", inner) for index, inner in enumerate(value)]
        elif key in ("items", "additionalProperties", "not"):
            parts.append((f"/{key}", value))
    return [(path, part) for path, part in parts if isinstance(part, dict) and _is_whole(part)]


def _is_whole(part: JsonObject) -> bool:
    """Whether a part is self-contained: its `$ref` points only to definitions."""
    return str(part.get("$ref", "#/$defs/")).startswith(tuple(f"#/{key}/" for key in _DEFINITIONS))
