"""Prompts computed ahead of requests, by the engine on real backends."""

from dataclasses import replace

import pytest

from semantic.adapters.outbound.backends.fake import FakeTokenizer
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.request import AheadJob, Job
from semantic.application.settings import EngineLimits
from semantic.domain.pool import BlockPool
from semantic.domain.sampling import StopRules
from semantic.ports.backend import ModelBackendPort
from tests.contract.conftest import Alone, Subject
from tests.contract.driver import NUM_REPLY, prompt
from tests.unit.application.engine_rig import GREEDY, ROOT, EngineRig

pytestmark = pytest.mark.contract

# Full attention, windows and recurrent state; with a step launched ahead of the one before.
SUBJECTS = (
    "fake",
    "fake-window",
    "fake-pipelined",
    "torch-llama",
    "torch-gemma3",
    "torch-qwen3-next",
    "mlx-llama",
    "mlx-gemma3",
    "mlx-qwen3-next",
)


def make_job(name: str, agent: str, tokens: list[int]) -> Job:
    stop = StopRules(ignore_eos=True)
    return Job(name, agent, ROOT, tuple(tokens), GREEDY, stop, max_tokens=NUM_REPLY)


@pytest.mark.parametrize("subject", SUBJECTS, indirect=True)
def test_replies_are_those_of_the_prompt_fresh_and_alone(
    subject: Subject, backend: ModelBackendPort, alone: Alone
) -> None:
    store = AgentCacheStore(BlockPool(backend.spec, backend.bytes_for([500] * 64)))
    rig = EngineRig(backend, store, EngineLimits(max_idle=8), tokenizer=FakeTokenizer())
    result = prompt(90, seed=7)
    cases = {"right": result, "partly": [*result[:40], *prompt(30, seed=8)], "wrong": prompt(50)}
    jobs: list[Job] = []
    for number, (agent, actual) in enumerate(cases.items()):
        first = prompt(40, seed=number)
        rig.serve(make_job(f"first-{agent}", agent, first))
        said = rig.reply_state(f"first-{agent}").tokens
        assert list(said) == alone(first)
        expected = (*first, *said, *result)
        rig.engine.compute_ahead(AheadJob(agent, ROOT, expected[:-1]))
        jobs.append(make_job(agent, agent, [*first, *said, *actual]))
    # One job is interrupted by a request of another agent, and goes on after it.
    rig.engine.step_ahead()
    rig.serve(other := make_job("other", "other", prompt(30, seed=9)))
    while rig.engine.has_ahead:
        rig.engine.step_ahead()
        rig.check()
    branch = replace(jobs[0], id="branch", agent="branch")
    rig.serve(*jobs, branch)
    for job in (*jobs, other, branch):
        assert list(rig.reply_state(job.id).tokens) == alone(job.tokens), job.id
    assert rig.num_reused("right") == len(jobs[0].tokens) - 1
    assert rig.reply_state("partly").reuse.ahead == (41 if subject.cuts_anywhere else 0)
    # Restored from what these requests sealed.
    for agent in (*cases, "branch"):
        rig.engine.close_idle(agent)
    tokens = [*jobs[0].tokens, *rig.reply_state("right").tokens, *prompt(9)]
    rig.serve(last := make_job("last", "right", tokens))
    assert rig.reply_state("last").reuse.pool >= len(jobs[0].tokens)
    assert list(rig.reply_state("last").tokens) == alone(last.tokens)
