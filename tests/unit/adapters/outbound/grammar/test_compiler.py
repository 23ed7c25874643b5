"""Constraints over the byte vocabulary of the fake model, which every server has."""

import json
import re

import numpy as np
import pytest

from semantic.adapters.outbound.backends.fake import END_TOKEN, FakeTokenizer
from semantic.adapters.outbound.grammar.bounds import pattern_growth, schema_growth
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
from semantic.domain.reply_format import ReplyShape
from tests.grammar_rig import (
    PERSON,
    PLAIN,
    SHAPES,
    TOOLS,
    WEATHER,
    check_reply,
    write_at_random,
)

pytestmark = pytest.mark.unit

TOKENIZER = FakeTokenizer()


@pytest.fixture(scope="module")
def grammar() -> LLGuidanceGrammar:
    return LLGuidanceGrammar(TOKENIZER)


def shortest(grammar: LLGuidanceGrammar, shape: ReplyShape) -> int:
    """The fewest tokens a shape takes, as its refusal says."""
    for num_tokens in range(1, 200):
        try:
            grammar.constrain(shape, num_tokens)
        except InvalidRequestError as error:
            assert error.param == "max_tokens"  # noqa: PT017 - the loop needs the number
            continue
        return num_tokens
    raise AssertionError("nothing is long enough")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("spare", [0, 1, 5, 40, 150])
def test_a_random_reply_has_its_shape_within_its_budget(
    grammar: LLGuidanceGrammar, name: str, spare: int
) -> None:
    shape = SHAPES[name]
    max_tokens = shortest(grammar, shape) + spare
    for seed in range(3):
        constraint = grammar.constrain(shape, max_tokens)
        assert constraint is not None
        reply = write_at_random(constraint, TOKENIZER, max_tokens, seed)
        assert reply.is_ended or not spare
        check_reply(reply.text, shape)


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
        grammar.constrain(ReplyShape(PLAIN, JsonFormat(schema)), 100)
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
        (ReplyShape(PLAIN, ChoiceFormat(("a long answer",))), "takes 13 tokens", "max_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    grammar: LLGuidanceGrammar, shape: ReplyShape, message: str, param: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        grammar.constrain(shape, 5)
    assert caught.value.param == param


def test_a_single_call_where_several_are_not_wanted(grammar: LLGuidanceGrammar) -> None:
    choice = ToolChoice(ToolMode.REQUIRED, is_parallel=False)
    shape = ReplyShape(PLAIN, tools=TOOLS, tool_choice=choice)
    for seed in range(5):
        constraint = grammar.constrain(shape, 300)
        assert constraint is not None
        reply = write_at_random(constraint, TOKENIZER, 300, seed)
        assert reply.text.endswith("</tool_call>")
        assert reply.text.count("</tool_call>\n<tool_call>") == 0


def test_several_calls_are_complete_within_the_budget(grammar: LLGuidanceGrammar) -> None:
    shape = ReplyShape(PLAIN, tools=TOOLS, tool_choice=ToolChoice(ToolMode.REQUIRED))
    for max_tokens in (150, 200, 260):
        for seed in range(4):
            constraint = grammar.constrain(shape, max_tokens)
            assert constraint is not None
            reply = write_at_random(constraint, TOKENIZER, max_tokens, seed)
            assert reply.text.endswith("</tool_call>")


def test_a_model_without_an_end_token_cannot_be_constrained() -> None:
    class Endless(FakeTokenizer):
        eos_ids = frozenset()

    with pytest.raises(InvalidRequestError, match="no end token"):
        LLGuidanceGrammar(Endless()).constrain(SHAPES["object"], 10)


def test_the_shortest_reply_leaves_out_what_is_optional(grammar: LLGuidanceGrammar) -> None:
    names = ["zeta", "name", "kind", "alpha", "mid", "beta", "omega", "total", "rho", "end"]
    properties: JsonObject = {name: {"type": "string"} for name in names}
    schema: JsonObject = {
        "type": "object",
        "properties": {**properties, "count": {"type": "integer", "minimum": 7}},
        "required": ["mid", "count"],
        "additionalProperties": False,
    }
    shape = ReplyShape(PLAIN, JsonFormat(schema))
    assert shortest(grammar, shape) == len('{"mid": "", "count": 9}')


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
    for max_tokens in (least, least + 5, least + 60):
        for seed in range(3):
            constraint = grammar.constrain(shape, max_tokens)
            assert constraint is not None
            value = json.loads(write_at_random(constraint, TOKENIZER, max_tokens, seed).text)
            assert re.fullmatch("[A-Z]{3}-[0-9]{4}", value["id"])
            assert 5 <= len(value["text"]) <= 20
            assert re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", value["day"])


@pytest.mark.parametrize(
    "pattern, growth",
    [(r"\d{4}-\d{2}", 13), ("(ab|cd){3}", 15), ("[]a-z]+x", 4), ("[^]]{9,}", 9), ("a{,2}", 5)],
)
def test_growth_of_patterns(pattern: str, growth: int) -> None:
    assert pattern_growth(pattern) == growth


def test_growth_of_a_schema_covers_what_a_key_commits_to() -> None:
    needed = len('{"value": 0.000000000000000000001, "children": []}')
    inner: JsonObject = {
        "type": "object",
        "properties": {"value": {"type": "number"}, "children": {"type": "array"}},
        "required": ["value", "children"],
    }
    assert schema_growth({"properties": {"x": inner}}) >= needed
    assert schema_growth({"items": {"$ref": "#/$defs/x"}, "$defs": {"x": inner}}) >= needed
    long: JsonObject = {"type": "array", "minItems": 30, "items": {"type": "string"}}
    assert schema_growth({"properties": {"x": long}}) >= 30 * len('"", ')
    needed_anyway: JsonObject = {"properties": {"x": long}, "required": ["x"]}
    assert schema_growth(needed_anyway) < 100
    assert schema_growth({"anyOf": [{"type": "null"}, needed_anyway]}) >= 30 * len('"", ')


def test_a_long_list_that_must_be_there_is_completed(grammar: LLGuidanceGrammar) -> None:
    entry: JsonObject = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "note": {"type": "string"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    entries: JsonObject = {"type": "array", "minItems": 12, "items": entry}
    schema: JsonObject = {"type": "object", "properties": {"e": entries}, "required": ["e"]}
    shape = ReplyShape(PLAIN, JsonFormat(schema))
    least = len('{"e": [') + 12 * len('{"name": ""}, ') - 2 + len("]}")
    for max_tokens in (least, least + 1, least + 30, least + 200):
        for seed in range(3):
            constraint = grammar.constrain(shape, max_tokens)
            assert constraint is not None
            reply = write_at_random(constraint, TOKENIZER, max_tokens, seed)
            assert len(json.loads(reply.text)["e"]) >= 12
