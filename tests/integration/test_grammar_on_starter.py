"""Constrained replies with the starter model's vocabulary, and from the model itself."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.grammar.compiler import LLGuidanceGrammar
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.request import EngineEvent, EventBatch, Job
from semantic.application.prompt.format_probe import probe_reply_format
from semantic.application.settings import EngineLimits
from semantic.domain.blocks import BlockNamespace
from semantic.domain.events import Finished, TextDelta
from semantic.domain.pool import BlockPool
from semantic.domain.reply_format import Harmony, ReplyFormat, ReplyShape
from semantic.domain.sampling import FinishReason, SamplingParams, StopRules
from semantic.domain.spec import ModelCacheSpec
from tests.grammar_rig import SHAPES, check_reply, tool_shapes, write_at_random
from tests.notations import NOTATIONS

pytestmark = pytest.mark.integration

QUESTION = "Tell me about Ada Lovelace, who was 36, and about the weather in London."


_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]|```\w*")


class MarkedTokenizer(HFTokenizer):
    """The starter's vocabulary, with every marker of every format as a special token."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        notations = "\n".join(t for notation in NOTATIONS.values() for t in notation.texts)
        texts = dict.fromkeys((*_TAG.findall(notations), *Harmony))
        self._added = {text: self.vocab_size + index for index, text in enumerate(texts)}
        self.vocab_size += len(self._added)
        self.special_ids |= self._added

    def encode(self, text: str) -> list[int]:
        for marker, token in self._added.items():
            before, found, after = text.partition(marker)
            if found:
                return [*self.encode(before), token, *self.encode(after)]
        return super().encode(text) if text else []


@pytest.fixture(scope="module")
def grammar(tokenizer: HFTokenizer) -> LLGuidanceGrammar:
    return LLGuidanceGrammar(tokenizer)


@pytest.fixture(scope="module")
def marked(starter_model_dir: Path) -> tuple[MarkedTokenizer, LLGuidanceGrammar]:
    made = MarkedTokenizer(starter_model_dir)
    return made, LLGuidanceGrammar(made)


def test_the_starter_writes_calls_as_we_explain_them(tokenizer: HFTokenizer) -> None:
    assert probe_reply_format(tokenizer) == ReplyFormat()


@pytest.mark.parametrize("name", SHAPES)
def test_a_random_reply_has_its_shape_within_its_budget(
    grammar: LLGuidanceGrammar, tokenizer: HFTokenizer, name: str
) -> None:
    for seed in range(3):
        constraint = grammar.constrain(SHAPES[name], 80)
        assert constraint is not None
        reply = write_at_random(constraint, tokenizer, 80, seed)
        assert reply.is_ended or name == "strict tools"  # which may be any text, and long
        check_reply(reply.text, SHAPES[name])


@pytest.mark.parametrize("name", tool_shapes())
def test_every_format_with_its_markers_as_special_tokens(
    marked: tuple[MarkedTokenizer, LLGuidanceGrammar], name: str
) -> None:
    tokenizer, grammar = marked
    shape = tool_shapes()[name]
    visible = shape.format.visible_ids(tokenizer.special_ids, has_tools=True)
    for seed in range(3):
        constraint = grammar.constrain(shape, 150)
        assert constraint is not None
        reply = write_at_random(constraint, tokenizer, 150, seed, visible)
        assert reply.is_ended or not shape.must_call
        check_reply(reply.text, shape)


# -- the model itself -------------------------------------------------------------------------


class Served:
    """The starter model in an engine."""

    def __init__(self, directory: Path, tokenizer: HFTokenizer) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.backend = TorchBackend(directory, ModelCacheSpec.from_config(config), TorchOptions())
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


@pytest.mark.parametrize("name", ["schema", "forced tool", "choice"])
def test_the_model_answers_in_shape(
    served: Served, tokenizer: HFTokenizer, grammar: LLGuidanceGrammar, name: str
) -> None:
    """Greedily and at temperature 1, side by side."""
    shape = SHAPES[name]
    samplings = {
        "greedy": SamplingParams(temperature=0, seed=0),
        "sampled": SamplingParams(temperature=1, seed=1),
    }
    jobs = {
        how: job_of(how, shape, sampling, 48, (tokenizer, grammar))
        for how, sampling in samplings.items()
    }
    for text, reason in served.ask(jobs).values():
        check_reply(text, shape)
        assert reason is FinishReason.END_TURN
