"""Replies with a draft model, by the engine on real backends, equal those of plain decoding."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from semantic.adapters.outbound.backends.fake import FakeTokenizer
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.request import Job
from semantic.application.settings import EngineLimits
from semantic.domain.pool import BlockPool
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.ports.backend import Chunk, ModelBackendPort, Step, Ticket
from tests.contract.conftest import Alone, Subject
from tests.contract.driver import prompt
from tests.unit.application.engine_rig import GREEDY, ROOT, EngineRig

pytestmark = pytest.mark.contract

NUM_REPLY = 24
SEEDED = SamplingParams(temperature=0.9, seed=11)
# Full attention and windows; with a step launched ahead of the one before.
SUBJECTS = (
    "fake",
    "fake-window",
    "fake-pipelined",
    "torch-llama",
    "torch-gemma3",
    "mlx-llama",
)


class Distracted:
    """A backend that samples something else at every third position."""

    def __init__(self, backend: ModelBackendPort) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def launch(self, step: Step) -> Ticket:
        return self._backend.launch(Step(tuple(map(self._distracted, step.chunks))))

    def _distracted(self, chunk: Chunk) -> Chunk:
        position = chunk.start + chunk.num_tokens
        if chunk.draw is None or position % 3:
            return chunk
        return replace(chunk, draw=replace(chunk.draw, params=replace(SEEDED, seed=position)))


@pytest.fixture
def draft(subject: Subject) -> Iterator[ModelBackendPort]:
    made = subject.make()
    yield cast("ModelBackendPort", Distracted(made))
    if not isinstance(made, TorchBackend):
        made.shutdown()


def make_job(name: str, tokens: list[int], params: SamplingParams, num_reply: int) -> Job:
    stop = StopRules(ignore_eos=True)
    return Job(name, name, ROOT, tuple(tokens), params, stop, max_tokens=num_reply)


def make_rig(
    backend: ModelBackendPort, draft: ModelBackendPort, nbytes: int, max_idle: int
) -> EngineRig[ModelBackendPort]:
    store = AgentCacheStore(BlockPool(backend.spec, nbytes))
    limits = EngineLimits(max_idle=max_idle)
    rig = EngineRig(backend, store, limits, tokenizer=FakeTokenizer())
    rig.engine.add_draft_model(draft)
    return rig


@pytest.mark.parametrize("subject", SUBJECTS, indirect=True)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_replies_are_those_of_plain_decoding(
    backend: ModelBackendPort, draft: ModelBackendPort, alone: Alone, params: SamplingParams
) -> None:
    rig = make_rig(backend, draft, backend.bytes_for([500] * 64), max_idle=8)

    def expect(*jobs: Job) -> None:
        rig.serve(*jobs)
        for job in jobs:
            assert list(rig.reply_state(job.id).tokens) == alone(job.tokens, params, job.max_tokens)

    first = prompt(40)
    jobs = [make_job(f"batched {i}", [*first, *prompt(9, i)], params, NUM_REPLY) for i in range(3)]
    expect(*jobs)
    said = [*jobs[0].tokens, *rig.reply_state(jobs[0].id).tokens]
    expect(make_job("forked", [*said, *prompt(5, 7)], params, NUM_REPLY))
    for job in jobs:
        rig.engine.close_idle(job.agent)
    rig.engine.close_idle("forked")
    restored = make_job("restored", [*said, *prompt(5, 8)], params, NUM_REPLY)
    expect(restored)
    assert rig.num_reused("restored") >= len(jobs[0].tokens)
    usages = [rig.finished(job.id).usage for job in (*jobs, restored)]
    assert sum(usage.accepted_by_source.get("draft_model", 0) for usage in usages) > 8
    assert sum(usage.rejected_prediction_tokens for usage in usages) > 0


@pytest.mark.parametrize("subject", ["fake", "torch-llama", "mlx-llama"], indirect=True)
def test_preempted_replies_are_those_of_plain_decoding(
    backend: ModelBackendPort, draft: ModelBackendPort, alone: Alone
) -> None:
    # Both fit until their arrays grow; the draft model gives its memory up before that.
    rig = make_rig(backend, draft, backend.bytes_for([300, 210]), max_idle=0)
    jobs = [make_job(f"{i}", prompt(236, i), GREEDY, 40) for i in range(2)]
    rig.serve(*jobs)
    assert rig.store.telemetry.counts.engine.preemptions
    for job in jobs:
        assert list(rig.reply_state(job.id).tokens) == alone(job.tokens, GREEDY, 40)
