"""Requests of which the engine keeps nothing, and which change nothing of others."""

from dataclasses import replace

import pytest

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.application.engine.request import Job
from semantic.application.engine.speculative.planner import AdaptiveDraftPlanner
from semantic.application.settings import EngineLimits
from tests.unit.application.engine_rig import Rig, make_job, make_rig

pytestmark = pytest.mark.unit

SHARED = "a prompt of some length, which fills a few blocks of eight tokens. "
SPECS = {
    "full": fake_spec(block_tokens=8),
    "window": fake_spec(block_tokens=8, window=12),
    "state": fake_spec(block_tokens=8, has_state=True),
}


def _ephemeral(name: str, prompt: str, max_tokens: int = 12) -> Job:
    return replace(make_job(name, prompt, max_tokens=max_tokens), is_ephemeral=True)


def _blocks(rig: Rig) -> list[tuple[object, ...]]:
    """The blocks in the index, and when each was used last."""
    return [(node.name, node.last_used, set(node.payloads)) for node in rig.store.nodes()]


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("max_idle", [0, 4])
def test_it_reads_shared_blocks_and_leaves_none(kind: str, max_idle: int) -> None:
    rig = make_rig(spec=SPECS[kind], max_idle=max_idle)
    rig.serve(known := make_job("known", SHARED, agent="coder", max_tokens=4))
    before, num_open = _blocks(rig), rig.backend.num_open
    jobs = [_ephemeral(str(n), f"{SHARED}secret {n}") for n in range(2)]
    jobs.append(replace(_ephemeral("own", f"{SHARED}secret"), agent="coder"))
    rig.serve(*jobs)
    assert all(rig.num_reused(job.id) >= 64 for job in jobs)
    assert all(rig.finished(job.id).usage.cache_creation_tokens == 0 for job in jobs)
    assert all(rig.reply_state(job.id).block is None for job in jobs)
    assert [name for name, *_ in _blocks(rig)] == [name for name, *_ in before]
    assert _blocks(rig) == before
    assert rig.backend.num_open == num_open  # the agent's own copy is still there
    rig.serve(again := _ephemeral("again", f"{SHARED}secret 0"))
    assert rig.num_reused("again") <= len(SHARED) + 4
    rig.expect_alone(known, *jobs, again)


def test_preempted_ones_begin_again() -> None:
    rig = make_rig(budget_tokens=330, limits=EngineLimits(prefill_step_size=64))
    jobs = [_ephemeral(str(n), f"{n} {SHARED * 2}", max_tokens=40) for n in range(4)]
    rig.serve(*jobs)
    assert rig.store.telemetry.counts.engine.preemptions
    assert not rig.store.nodes()
    rig.expect_alone(*jobs)


def test_another_request_computes_its_own_prompt() -> None:
    """One that waits for an ephemeral one would find nothing."""
    rig = make_rig()
    first, second = _ephemeral("first", SHARED, max_tokens=1), make_job("second", SHARED)
    rig.serve(first, second)
    rig.expect_alone(first, second)
    assert rig.store.nodes()


def test_its_tokens_are_no_source_of_drafts() -> None:
    rig = make_rig(max_idle=0)
    planner = AdaptiveDraftPlanner(rig.backend.traits, frozenset())
    rig.engine.draft_with(planner)
    size = planner.memory.nbytes
    predicted = replace(_ephemeral("secret", SHARED, 60), prediction=tuple(b"secret words" * 9))
    rig.serve(predicted)
    assert (planner.memory.num_unread, planner.memory.nbytes) == (0, size)
    rig.serve(known := make_job("known", SHARED, max_tokens=60))
    assert planner.memory.num_unread or planner.memory.nbytes > size  # as for other requests
    rig.expect_alone(predicted, known)
