"""Constrained replies with the starter model's vocabulary, and from the model itself."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.grammar.compiler import LLGuidanceGrammar
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.engine import BlockPoolBatchEngine, EngineEvent, EventBatch
from semantic.application.engine.request import Job
from semantic.application.engine.scheduler import EngineLimits
from semantic.application.parsing import detect_reply_format
from semantic.domain.blocks import BlockNamespace
from semantic.domain.chat import Finished, JsonFormat, JsonObject, TextDelta
from semantic.domain.errors import InvalidRequestError
from semantic.domain.pool import BlockPool
from semantic.domain.reply_format import ReplyFormat, ReplyShape
from semantic.domain.sampling import FinishReason, SamplingParams, StopRules
from semantic.domain.spec import ModelCacheSpec
from tests.grammar_rig import PERSON, SHAPES, check_reply, tool_shapes, write_at_random

pytestmark = pytest.mark.integration

QUESTION = "Tell me about Ada Lovelace, who was 36, and about the weather in London."


class MarkedTokenizer(HFTokenizer):
    """The starter's vocabulary, with every marker of every format as a special token."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        formats = [shape.format for shape in tool_shapes().values()]
        texts = dict.fromkeys(m for f in formats for m in f.markers(has_tools=True))
        first = super().vocab_size
        self._added = {text: first + index for index, text in enumerate(texts)}

    @property
    def vocab_size(self) -> int:
        return super().vocab_size + len(self._added)

    @property
    def special_ids(self) -> Mapping[str, int]:
        return {**super().special_ids, **self._added}

    def encode(self, text: str) -> list[int]:
        for marker, token in self._added.items():
            before, found, after = text.partition(marker)
            if found:
                return [*self.encode(before), token, *self.encode(after)]
        return super().encode(text) if text else []


@pytest.fixture(scope="module")
def tokenizer(starter_model_dir: Path) -> HFTokenizer:
    return HFTokenizer(starter_model_dir)


@pytest.fixture(scope="module")
def grammar(tokenizer: HFTokenizer) -> LLGuidanceGrammar:
    return LLGuidanceGrammar(tokenizer)


@pytest.fixture(scope="module")
def marked(starter_model_dir: Path) -> tuple[MarkedTokenizer, LLGuidanceGrammar]:
    made = MarkedTokenizer(starter_model_dir)
    return made, LLGuidanceGrammar(made)


def shortest(grammar: LLGuidanceGrammar, shape: ReplyShape) -> int:
    for num_tokens in range(1, 200):
        try:
            grammar.constrain(shape, num_tokens)
        except InvalidRequestError:
            continue
        return num_tokens
    raise AssertionError("nothing is long enough")


def test_the_starter_writes_calls_as_we_explain_them(tokenizer: HFTokenizer) -> None:
    found = detect_reply_format(tokenizer.chat_template, tokenizer.special_ids)
    assert found == ReplyFormat()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("spare", [0, 2, 9, 80])
def test_a_random_reply_has_its_shape_within_its_budget(
    grammar: LLGuidanceGrammar, tokenizer: HFTokenizer, name: str, spare: int
) -> None:
    shape = SHAPES[name]
    max_tokens = shortest(grammar, shape) + spare
    for seed in range(3):
        constraint = grammar.constrain(shape, max_tokens)
        assert constraint is not None
        reply = write_at_random(constraint, tokenizer, max_tokens, seed)
        assert reply.is_ended or not spare
        check_reply(reply.text, shape)


@pytest.mark.parametrize("name", tool_shapes())
def test_every_format_with_its_markers_as_special_tokens(
    marked: tuple[MarkedTokenizer, LLGuidanceGrammar], name: str
) -> None:
    tokenizer, grammar = marked
    shape = tool_shapes()[name]
    visible = shape.format.visible_ids(tokenizer.special_ids, has_tools=True)
    for max_tokens in (60, 120):
        for seed in range(3):
            constraint = grammar.constrain(shape, max_tokens)
            assert constraint is not None
            reply = write_at_random(constraint, tokenizer, max_tokens, seed, visible)
            assert reply.is_ended
            check_reply(reply.text, shape)


@pytest.mark.parametrize("spare", [1, 8, 40, 200])
def test_a_long_list_is_complete_within_its_budget(
    grammar: LLGuidanceGrammar, tokenizer: HFTokenizer, spare: int
) -> None:
    schema: JsonObject = {"type": "array", "minItems": 15, "items": PERSON}
    shape = ReplyShape(ReplyFormat(), JsonFormat(schema))
    max_tokens = shortest(grammar, shape) + spare
    constraint = grammar.constrain(shape, max_tokens)
    assert constraint is not None
    reply = write_at_random(constraint, tokenizer, max_tokens, spare)
    assert reply.is_ended
    assert len(json.loads(reply.text)) >= 15
    check_reply(reply.text, shape)


# -- the model itself -------------------------------------------------------------------------


class Served:
    """The starter model in an engine."""

    def __init__(self, directory: Path, tokenizer: HFTokenizer) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.backend = TorchBackend(
            directory, ModelCacheSpec.from_config(config), TorchOptions(dtype="bfloat16")
        )
        self._tokenizer = tokenizer
        self._events: dict[str, list[EngineEvent]] = {}
        store = AgentCacheStore(BlockPool(self.backend.spec, 2**28))
        self._engine = BlockPoolBatchEngine(
            self.backend, tokenizer, store, EngineLimits(), self._take
        )

    def _take(self, batch: EventBatch) -> None:
        for name, event in batch:
            self._events.setdefault(name, []).append(event)

    def ask(self, jobs: Mapping[str, Job]) -> dict[str, tuple[str, FinishReason]]:
        self._events = {}
        for job in jobs.values():
            self._engine.submit(job)
        while self._engine.has_work:
            self._engine.step()
        return {name: self._reply(name) for name in jobs}

    def _reply(self, name: str) -> tuple[str, FinishReason]:
        *deltas, end = self._events[name]
        assert isinstance(end, Finished), end
        return "".join(d.text for d in deltas if isinstance(d, TextDelta)), end.reason


@pytest.fixture(scope="module")
def served(starter_model_dir: Path, tokenizer: HFTokenizer) -> Iterator[Served]:
    made = Served(starter_model_dir, tokenizer)
    yield made
    made.backend.shutdown()


def job_of(
    name: str,
    shape: ReplyShape,
    sampling: SamplingParams,
    max_tokens: int,
    parts: tuple[HFTokenizer, LLGuidanceGrammar],
) -> Job:
    tokenizer, grammar = parts
    text = tokenizer.render_chat([{"role": "user", "content": QUESTION}])
    return Job(
        id=name,
        agent=name,
        root=BlockNamespace("starter", "torch").root(),
        tokens=tuple(tokenizer.encode(text)),
        sampling=sampling,
        stop=StopRules(),
        max_tokens=max_tokens,
        constraint=grammar.constrain(shape, max_tokens),
    )


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, seed=0),
    **{f"seed {seed}": SamplingParams(temperature=1, seed=seed) for seed in range(3)},
}


@pytest.mark.parametrize(
    "name", ["schema", "object", "date", "choice", "forced tool", "required tool", "strict tools"]
)
def test_the_model_answers_in_shape(
    served: Served, tokenizer: HFTokenizer, grammar: LLGuidanceGrammar, name: str
) -> None:
    """Greedily and at temperature 1, with room and with hardly any, all side by side."""
    shape = SHAPES[name]
    least = shortest(grammar, shape)
    jobs = {
        f"{how}, {max_tokens} tokens": job_of(
            f"{how}, {max_tokens} tokens", shape, sampling, max_tokens, (tokenizer, grammar)
        )
        for how, sampling in SAMPLINGS.items()
        for max_tokens in (least + 1, least + 6, least + 40)
    }
    for text, reason in served.ask(jobs).values():
        check_reply(text, shape)
        assert reason is FinishReason.END_TURN
