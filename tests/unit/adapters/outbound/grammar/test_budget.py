"""What stays open, and how seldom a reply is planned, while its budget is tight."""

import json

import numpy as np
import pytest
from llguidance import LLMatcher

from semantic.adapters.outbound.backends.fake import VOCAB_SIZE, FakeTokenizer
from semantic.adapters.outbound.grammar.bounds import schema_growth
from semantic.adapters.outbound.grammar.budget import BudgetedConstraint
from semantic.adapters.outbound.grammar.compiler import LLGuidanceGrammar, lay_out
from semantic.adapters.outbound.grammar.detour import Detours
from semantic.adapters.outbound.grammar.planner import Closing, Planner
from semantic.adapters.outbound.grammar.shapes import shape_grammar
from semantic.domain.chat import JsonFormat, JsonObject
from semantic.domain.errors import InvalidRequestError
from semantic.domain.reply_format import ReplyShape
from tests.grammar_rig import PLAIN, write_at_random

pytestmark = pytest.mark.unit

NUM_ENTRIES = 12
SCHEMA: JsonObject = {
    "type": "array",
    "minItems": NUM_ENTRIES,
    "items": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["bay", "lake", "river mouth"]},
            "name": {"type": "string"},
            "notes": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["kind", "name"],
        "additionalProperties": False,
    },
}
SHAPE = ReplyShape(PLAIN, JsonFormat(SCHEMA))
ENTRY = '{"kind": "bay", "name": ""}'
LEAST = len("[]") + NUM_ENTRIES * len(ENTRY) + (NUM_ENTRIES - 1) * len(", ")


class WordyTokenizer(FakeTokenizer):
    """Bytes, and a few tokens of several."""

    words = (b'[{"', b'kind": "', b"bay", b"lake", b'", "', b'", "name": ""}')
    vocab_size = VOCAB_SIZE + len(words)

    def token_bytes(self, token: int) -> bytes:
        return self.words[token - VOCAB_SIZE] if token >= VOCAB_SIZE else super().token_bytes(token)


class CountingPlanner(Planner):
    """Counts how often it plans."""

    num_plans = 0

    def plan(self, matcher: LLMatcher, limit: int = 10_000) -> list[int] | None:
        self.num_plans += 1
        return super().plan(matcher, limit)


class CluelessPlanner(CountingPlanner):
    """Finds no plan."""

    def plan(self, matcher: LLMatcher, limit: int = 0) -> None:  # noqa: ARG002
        self.num_plans += 1


def start(
    tokenizer: FakeTokenizer, kind: type[CountingPlanner] = CountingPlanner
) -> tuple[LLMatcher, CountingPlanner]:
    vocabulary = lay_out(tokenizer)
    text = shape_grammar(SHAPE, tokenizer.special_ids)
    planner = kind(vocabulary, Closing(growth=schema_growth(SCHEMA)))
    return LLMatcher(vocabulary.tokenizer, text, log_level=0), planner


def allowed(constraint: BudgetedConstraint) -> set[int]:
    bits = np.unpackbits(np.frombuffer(constraint.allowed(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.parametrize("spare", [0, 1, 6, 30, 90, 400])
@pytest.mark.parametrize("tokenizer", [FakeTokenizer(), WordyTokenizer()])
def test_a_long_reply_is_planned_once(tokenizer: FakeTokenizer, spare: int) -> None:
    for seed in range(3):
        matcher, planner = start(tokenizer)
        constraint = BudgetedConstraint(matcher, planner, LEAST + spare)
        reply = write_at_random(constraint, tokenizer, LEAST + spare, seed)
        assert len(json.loads(reply.text)) >= NUM_ENTRIES
        assert planner.num_plans == 1


def test_choices_stay_open_as_far_as_they_fit() -> None:
    matcher, planner = start(FakeTokenizer())
    num_spare = len("lake") - len("bay")
    constraint = BudgetedConstraint(matcher, planner, LEAST + num_spare + len(["end"]))
    for byte in b'[{"kind": "':
        constraint.accept(byte)
    assert allowed(constraint) == {ord("b"), ord("l")}
    for byte in b"lake":
        constraint.accept(byte)
    for byte in b'", "name": "':  # nothing is left for a name
        assert allowed(constraint) == {byte}
        constraint.accept(byte)
    assert allowed(constraint) == {ord('"')}


def test_a_reply_may_spell_its_plan_in_other_tokens() -> None:
    tokenizer = WordyTokenizer()
    matcher, planner = start(tokenizer)
    shortest = BudgetedConstraint(matcher.deep_copy(), planner, LEAST).shortest
    assert shortest is not None
    exact = BudgetedConstraint(matcher.deep_copy(), planner, shortest + 1)
    assert allowed(exact) == {VOCAB_SIZE}
    roomy = BudgetedConstraint(matcher, planner, shortest + 3)
    assert {VOCAB_SIZE, ord("[")} <= allowed(roomy)
    roomy.accept(ord("["))
    assert roomy.shortest == shortest + 1  # the brace and the quote are tokens of their own now


def test_a_detour_leads_back_to_the_plan() -> None:
    matcher, planner = start(FakeTokenizer())
    plan = planner.plan(matcher)
    assert plan is not None
    begun = b'[{"kind": "bay", "name": "'
    matcher.consume_tokens(list(begun + b'x", "notes": [1'))
    detours = Detours(planner)
    detours.effort = 10_000
    found = detours.rejoin(matcher, plan[len(begun) :], limit=LEAST)
    assert found is not None
    assert bytes(found) == b"]" + bytes(plan[len(begun + b'"') :])
    assert detours.rejoin(matcher, plan[len(begun) :], limit=len(found) - 1) is None
    detours.effort = 0
    assert detours.rejoin(matcher, plan[len(begun) :], limit=LEAST) is None


def test_without_a_plan_all_that_is_valid_is_allowed_and_a_plan_seldom_looked_for() -> None:
    matcher, planner = start(FakeTokenizer(), CluelessPlanner)
    constraint = BudgetedConstraint(matcher, planner, 200)
    assert constraint.shortest is None
    for byte in b'[{"kind": "':
        assert byte in allowed(constraint)
        constraint.accept(byte)
    assert allowed(constraint) == {ord("b"), ord("l"), ord("r")}
    for byte in b'bay", "name": "' + 100 * b"x":
        assert byte in allowed(constraint)
        constraint.accept(byte)
    assert planner.num_plans == 2


def test_a_budget_is_refused_if_it_is_one_token_too_small() -> None:
    grammar = LLGuidanceGrammar(FakeTokenizer())
    assert grammar.constrain(SHAPE, LEAST) is not None
    with pytest.raises(InvalidRequestError, match=f"takes {LEAST} tokens"):
        grammar.constrain(SHAPE, LEAST - 1)
