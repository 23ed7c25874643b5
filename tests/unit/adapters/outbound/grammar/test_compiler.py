"""Constraints over the byte vocabulary of the fake model, which every server has."""

import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest

from semantic.adapters.outbound.backends.fake import END_TOKEN, FakeTokenizer
from semantic.adapters.outbound.grammar.compiler import LLGuidanceGrammar
from semantic.domain.chat import (
    ChoiceFormat,
    JsonFormat,
    JsonObject,
    RegexFormat,
    ToolChoice,
    ToolMode,
    ToolSpec,
)
from semantic.domain.errors import BackendError, InvalidRequestError
from semantic.domain.reply_format import CallNotation, ReplyFormat, ReplyShape
from tests.grammar_rig import (
    PERSON,
    PLAIN,
    SHAPES,
    TOOLS,
    WEATHER,
    calls_in,
    check_reply,
    write_at_random,
)
from tests.notations import NOTATIONS

pytestmark = pytest.mark.unit

TOKENIZER = FakeTokenizer()


@pytest.fixture(scope="module")
def grammar() -> LLGuidanceGrammar:
    return LLGuidanceGrammar(TOKENIZER)


@pytest.mark.parametrize("name", SHAPES)
def test_a_random_reply_has_its_shape_within_its_budget(
    grammar: LLGuidanceGrammar, name: str
) -> None:
    for seed in range(3):
        constraint = grammar.constrain(SHAPES[name], 160)
        assert constraint is not None
        reply = write_at_random(constraint, TOKENIZER, 160, seed)
        assert reply.is_ended or name == "strict tools"  # which may be any text, and long
        check_reply(reply.text, SHAPES[name])


@pytest.mark.parametrize("name", SHAPES)
def test_a_budget_that_is_too_small_cuts_the_reply(grammar: LLGuidanceGrammar, name: str) -> None:
    constraint = grammar.constrain(SHAPES[name], 2)
    assert constraint is not None
    assert write_at_random(constraint, TOKENIZER, 2, seed=1).num_tokens == 2


def test_nothing_is_constrained_where_nothing_is_asked(grammar: LLGuidanceGrammar) -> None:
    assert grammar.constrain(ReplyShape(PLAIN), 10) is None
    assert grammar.constrain(ReplyShape(PLAIN, tools=(WEATHER,)), 10) is None
    none = ToolChoice(ToolMode.NONE)
    assert grammar.constrain(ReplyShape(PLAIN, tools=TOOLS, tool_choice=none), 10) is None


def test_the_end_is_allowed_only_when_complete_and_then_nothing_else(
    grammar: LLGuidanceGrammar,
) -> None:
    constraint = grammar.constrain(ReplyShape(PLAIN, JsonFormat(PERSON)), 500)
    assert constraint is not None
    for byte in b'{"name": "Bo", "age": 3':
        assert END_TOKEN not in allowed(constraint.allowed())
        constraint.accept(byte)
    constraint.accept(ord("}"))
    assert allowed(constraint.allowed()) == [END_TOKEN]
    for _ in range(3):  # a reply that ignores its end stays complete
        constraint.accept(END_TOKEN)
        assert allowed(constraint.allowed()) == [END_TOKEN]


def test_asking_twice_gives_the_same_answer(grammar: LLGuidanceGrammar) -> None:
    constraint = grammar.constrain(SHAPES["schema"], 40)
    assert constraint is not None
    assert constraint.allowed() == constraint.allowed()


def test_a_token_that_was_not_allowed_is_an_error(grammar: LLGuidanceGrammar) -> None:
    constraint = grammar.constrain(SHAPES["object"], 40)
    assert constraint is not None
    with pytest.raises(BackendError, match="grammar"):
        constraint.accept(ord("x"))


def allowed(mask: bytes | None) -> list[int]:
    assert mask is not None
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


@pytest.mark.parametrize(
    "schema, where",
    [
        ({"type": "foo"}, "its root: Invalid type: foo"),
        ({"type": "object", "properties": {"a": {"type": "bar"}}}, "/properties/a: Invalid type"),
        ({"type": "array", "items": {"type": "string", "pattern": "(("}}, "/items: .*unclosed"),
        (
            {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"b": {"not": {}}}}]},
            "/anyOf/1/properties/b: Unimplemented keys",
        ),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}, "/properties/a: .*exist"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "its root: Unsatisfiable"),
    ],
)
def test_a_bad_schema_is_refused_with_its_place(
    grammar: LLGuidanceGrammar, schema: JsonObject, where: str
) -> None:
    with pytest.raises(InvalidRequestError, match=where) as caught:
        grammar.constrain(ReplyShape(PLAIN, JsonFormat(schema, is_strict=True)), 100)
    assert caught.value.param == "response_format"


def test_a_bad_tool_is_refused_by_its_place(grammar: LLGuidanceGrammar) -> None:
    bad = ToolSpec("bad", "", {"type": "object", "properties": {"x": {"type": "nix"}}})
    shape = ReplyShape(PLAIN, tools=(WEATHER, bad), tool_choice=ToolChoice(ToolMode.REQUIRED))
    with pytest.raises(InvalidRequestError, match=r"'bad'.*/properties/x") as caught:
        grammar.constrain(shape, 100)
    assert caught.value.param == "tools[1].parameters"


def test_only_strict_tools_must_be_enforceable_in_full(grammar: LLGuidanceGrammar) -> None:
    parameters: JsonObject = {"type": "object", "properties": {"x": {"not": {"type": "null"}}}}
    choice = ToolChoice(ToolMode.REQUIRED)
    loose = ReplyShape(PLAIN, tools=(ToolSpec("f", "", parameters),), tool_choice=choice)
    assert grammar.constrain(loose, 200) is not None
    strict = ReplyShape(PLAIN, tools=(ToolSpec("f", "", parameters, is_strict=True),))
    with pytest.raises(InvalidRequestError, match="/properties/x"):
        grammar.constrain(strict, 200)


@pytest.mark.parametrize(
    "shape, message, param",
    [
        (ReplyShape(PLAIN, RegexFormat("([")), "unclosed", "response_format"),
        (ReplyShape(PLAIN, ChoiceFormat(())), "at least one", "response_format"),
        (ReplyShape(PLAIN, ChoiceFormat(("\ud800",))), "surrogate", "response_format"),
        (ReplyShape(PLAIN, RegexFormat("a\ud800")), "surrogate", "response_format"),
        (
            ReplyShape(PLAIN, tools=TOOLS, tool_choice=ToolChoice(ToolMode.NAMED, "nobody")),
            "'nobody', but the tools are",
            "tool_choice",
        ),
        (ReplyShape(PLAIN, tool_choice=ToolChoice(ToolMode.REQUIRED)), "none is offered", "tools"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    grammar: LLGuidanceGrammar, shape: ReplyShape, message: str, param: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        grammar.constrain(shape, 5)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "choice",
    [ToolChoice(ToolMode.REQUIRED, is_parallel=False), ToolChoice(ToolMode.NAMED, "get_weather")],
)
@pytest.mark.parametrize("tools", NOTATIONS.values(), ids=NOTATIONS)
def test_a_named_tool_is_called_once_and_so_is_one_where_several_are_not_wanted(
    grammar: LLGuidanceGrammar, tools: CallNotation, choice: ToolChoice
) -> None:
    shape = ReplyShape(ReplyFormat(tools), tools=TOOLS, tool_choice=choice, may_think=False)
    for seed in range(3):
        constraint = grammar.constrain(shape, 1000)
        assert constraint is not None
        reply = write_at_random(constraint, TOKENIZER, 1000, seed)
        assert reply.is_ended
        assert len(calls_in(reply.text, shape)) == 1


def test_a_required_call_may_be_the_last_or_be_followed_by_another(
    grammar: LLGuidanceGrammar,
) -> None:
    shape = ReplyShape(PLAIN, tools=TOOLS, tool_choice=ToolChoice(ToolMode.REQUIRED))
    constraint = grammar.constrain(shape, 1000)
    assert constraint is not None
    call = b'<tool_call>\n{"name": "send", "arguments": {}}\n</tool_call>'
    for byte in call:
        assert END_TOKEN not in allowed(constraint.allowed())
        constraint.accept(byte)
    assert allowed(constraint.allowed()) == [ord("\n"), END_TOKEN]


def written_call(grammar: LLGuidanceGrammar, shape: ReplyShape, seed: int = 0) -> str:
    constraint = grammar.constrain(shape, 1000)
    assert constraint is not None
    reply = write_at_random(constraint, TOKENIZER, 1000, seed)
    assert reply.is_ended
    return reply.text


@pytest.mark.parametrize("tools", NOTATIONS.values(), ids=NOTATIONS)
def test_a_tool_that_is_not_allowed_cannot_be_called(
    grammar: LLGuidanceGrammar, tools: CallNotation
) -> None:
    free = ReplyShape(ReplyFormat(tools), tools=TOOLS, may_think=False)
    limited = ToolChoice(allowed=frozenset({"get_weather"}))
    is_written = {}
    for tool in TOOLS:
        named = replace(free, tool_choice=ToolChoice(ToolMode.NAMED, tool.name))
        constraint = grammar.constrain(replace(free, tool_choice=limited), 10_000)
        assert constraint is not None
        is_written[tool.name] = True
        for token in TOKENIZER.encode(written_call(grammar, named)):
            if token not in allowed(constraint.allowed()):
                is_written[tool.name] = False
                break
            constraint.accept(token)
    assert is_written == {"get_weather": True, "send": False}


@pytest.mark.parametrize("tools", NOTATIONS.values(), ids=NOTATIONS)
def test_a_pattern_is_enforced_in_every_notation(
    grammar: LLGuidanceGrammar, tools: CallNotation
) -> None:
    text: JsonObject = {"type": "string", "pattern": r'^(?:[a-z]{2,4} "<x>"\n.\\[0-9])$'}
    schema: JsonObject = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    tool = ToolSpec("patch", "", schema, is_strict=True)
    choice = ToolChoice(ToolMode.NAMED, "patch")
    shape = ReplyShape(ReplyFormat(tools), tools=(tool,), tool_choice=choice, may_think=False)
    for seed in range(2):
        (call,) = calls_in(written_call(grammar, shape, seed), shape)
        assert re.fullmatch(r'[a-z]{2,4} "<x>"\n.\\[0-9]', str(call.arguments["input"]))


def test_a_model_without_an_end_token_cannot_be_constrained() -> None:
    class Endless(FakeTokenizer):
        eos_ids = frozenset()

    with pytest.raises(InvalidRequestError, match="no end token"):
        LLGuidanceGrammar(Endless()).constrain(SHAPES["object"], 10)


def test_strings_with_patterns_and_lengths_are_completed_too(grammar: LLGuidanceGrammar) -> None:
    schema: JsonObject = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
            "text": {"type": "string", "minLength": 5, "maxLength": 20},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["id", "text", "day"],
        "additionalProperties": False,
    }
    shape = ReplyShape(PLAIN, JsonFormat(schema))
    least = len('{"id": "AAA-0000", "text": "aaaaa", "day": "2000-01-01"}')
    for max_tokens in (least + 1, least + 5, least + 60):
        for seed in range(3):
            constraint = grammar.constrain(shape, max_tokens)
            assert constraint is not None
            value = json.loads(write_at_random(constraint, TOKENIZER, max_tokens, seed).text)
            assert re.fullmatch("[A-Z]{3}-[0-9]{4}", value["id"])
            assert 5 <= len(value["text"]) <= 20
            assert re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", value["day"])


# -- schemas that are there to harm ------------------------------------------------------------


def self_referencing(keys: str) -> JsonObject:
    properties: JsonObject = {key: {"$ref": "#"} for key in keys}
    return {"type": "object", "properties": properties, "required": list(keys)}


HOSTILE: dict[str, JsonObject] = {
    "takes all memory": {
        "allOf": [
            {"type": "integer", "multipleOf": 99_999_989},
            {"multipleOf": 99_999_971},
            {"multipleOf": 1_000_003},
        ]
    },
    "takes all memory by itself": {"type": "integer", "multipleOf": 99_999_989},
    "a very small number": {"type": "integer", "minimum": -(10**300)},
    "a number too long to write": {"type": "integer", "minimum": -(10**5000)},
    "keys without an end": self_referencing("abcde"),
    "a very long value": {"enum": ["x" * 1_000_000]},
    "very many keys": {
        "type": "object",
        "properties": {f"key{index}": {"type": "string"} for index in range(5000)},
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_schema_that_takes_too_much_is_refused(grammar: LLGuidanceGrammar, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be enforced") as caught:
        grammar.constrain(ReplyShape(PLAIN, JsonFormat(HOSTILE[name])), 100)
    assert caught.value.param == "response_format"
    assert grammar.constrain(SHAPES["schema"], 100) is not None


def test_definitions_that_refer_to_each_other_are_no_trouble(grammar: LLGuidanceGrammar) -> None:
    names = [f"d{index}" for index in range(12)]
    properties: JsonObject = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    shared: JsonObject = {name: {"type": "object", "properties": properties} for name in names}
    shape = ReplyShape(PLAIN, JsonFormat({"$ref": "#/$defs/d0", "$defs": shared}))
    constraint = grammar.constrain(shape, 60)
    assert constraint is not None
    assert json.loads(write_at_random(constraint, TOKENIZER, 60, seed=1).text) is not None


def test_a_form_that_grows_too_complex_ends_its_reply_alone(grammar: LLGuidanceGrammar) -> None:
    """What a lexer has learnt is shared by all replies of a grammar, and it may learn so much."""
    shape = ReplyShape(PLAIN, RegexFormat("[a-z]*a[a-z]{20}!"))
    other, greedy = grammar.constrain(shape, 50_000), grammar.constrain(shape, 50_000)
    assert other is not None
    assert greedy is not None
    rng = random.Random(1)  # noqa: S311 - a test's choice

    def write_for_ever() -> None:
        for _ in range(50_000):
            greedy.allowed()
            greedy.accept(rng.choice(b"ac"))

    with pytest.raises(InvalidRequestError, match="too complex"):
        write_for_ever()
    another = grammar.constrain(shape, 100)
    assert another is not None
    for constraint in (other, another):
        for byte in b"a" * 21:
            assert byte in allowed(constraint.allowed())
            constraint.accept(byte)
        assert ord("!") in allowed(constraint.allowed())


# -- what generators of schemas write ----------------------------------------------------------

RELAXED: dict[str, JsonObject] = {
    "propertyNames": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "number"},
    },
    "uniqueItems": {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
    "not": {"type": "string", "not": {"const": "x"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
}


@pytest.mark.parametrize("keyword", RELAXED)
def test_keywords_that_cannot_be_enforced_are_refused_only_if_the_schema_is_strict(
    grammar: LLGuidanceGrammar, keyword: str
) -> None:
    schema = RELAXED[keyword]
    assert grammar.constrain(ReplyShape(PLAIN, JsonFormat(schema)), 100) is not None
    with pytest.raises(InvalidRequestError, match=keyword) as caught:
        grammar.constrain(ReplyShape(PLAIN, JsonFormat(schema, is_strict=True)), 100)
    assert caught.value.param == "response_format"
