"""Stored conversations that are restored while no request runs."""

import pytest

from semantic.application.engine.request import AheadJob, Job
from semantic.application.engine.speculative import reopening
from semantic.domain.errors import BackendError
from semantic.domain.spec import LayerKind, ModelCacheSpec
from tests.unit.application.engine.test_ahead import SPECS, first_turn, next_turn
from tests.unit.application.engine_rig import ROOT, Rig, make_job, make_rig

pytestmark = pytest.mark.unit

each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def stored_turn(rig: Rig, agent: str) -> Job:
    """Serve an agent's first turn, and close its sequence, as a restart does."""
    first = first_turn(rig, agent)
    rig.engine.close_idle(agent)
    return first


def reopen(rig: Rig, *firsts: Job, steps: int = 1000) -> None:
    for first in firsts:
        tokens = (*first.tokens, *rig.reply_state(first.id).tokens)
        rig.engine.compute_ahead(AheadJob(first.agent, ROOT, tokens, is_stored=True))
    while rig.engine.has_ahead and steps:
        rig.engine.step_ahead()
        rig.check()
        assert rig.backend.memory() <= rig.store.usage().working
        steps -= 1


@each_spec
@pytest.mark.parametrize("depth", [0, 1])
def test_a_turn_goes_on_as_if_its_sequence_had_stayed_open(
    spec: ModelCacheSpec, depth: int
) -> None:
    rig = make_rig(spec=spec, max_idle=4, pipeline_depth=1 if depth else 0)
    firsts = [stored_turn(rig, agent) for agent in ("one", "two")]
    before = rig.backend.num_computed
    reopen(rig, *firsts)
    assert rig.backend.num_computed == before
    for first in firsts:
        rig.serve(job := next_turn(rig, first, name=f"next {first.agent}"))
        rig.expect_alone(job)
        reuse = rig.reply_state(job.id).reuse
        assert reuse.hot == rig.num_reused(job.id) > len(first.tokens)
        assert reuse.pool == reuse.disk == 0


def test_the_copies_are_older_than_those_of_turns_that_ended() -> None:
    rig = make_rig(max_idle=2)
    firsts = [stored_turn(rig, agent) for agent in ("newest", "older", "oldest")]
    rig.serve(make_job("now", agent="now"))
    reopen(rig, *firsts)
    assert rig.backend.num_open == 2  # the third finds no room
    rig.serve(make_job("later", agent="later"))
    rig.serve(job := next_turn(rig, firsts[0]))
    assert rig.reply_state(job.id).reuse.hot == 0  # made room for the turns


@each_spec
def test_a_request_interrupts_a_restore_and_it_begins_again(
    spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reopening, "_PIECE_BYTES", 1)
    rig = make_rig(spec=spec, max_idle=4)
    firsts = [stored_turn(rig, agent) for agent in ("one", "two")]
    reopen(rig, *firsts, steps=2)
    assert rig.backend.num_open == 1
    rig.serve(other := make_job("other", agent="other"))
    assert rig.engine.has_ahead
    reopen(rig)
    jobs = [next_turn(rig, first, name=f"next {first.agent}") for first in firsts]
    rig.serve(*jobs)
    rig.expect_alone(other, *jobs)
    assert all(rig.reply_state(job.id).reuse.hot for job in jobs)


def test_an_agents_own_request_does_not_wait_for_its_restore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reopening, "_PIECE_BYTES", 1)
    rig = make_rig(max_idle=4)
    reopen(rig, first := stored_turn(rig, "one"), steps=2)
    rig.serve(job := next_turn(rig, first))
    rig.expect_alone(job)
    assert rig.reply_state(job.id).reuse.pool > 0
    assert not rig.engine.has_ahead


def test_nothing_is_evicted_and_no_copy_closed_for_it() -> None:
    rig = make_rig(max_idle=0)
    reopen(rig, stored_turn(rig, "one"))
    assert rig.backend.num_open == 0
    rig = make_rig(max_idle=4, budget_tokens=300)
    first = stored_turn(rig, "one")
    blocks = len(list(rig.store.nodes()))
    reopen(rig, first)  # one conversation takes more than the share of idle copies
    assert rig.backend.num_open == 0
    assert len(list(rig.store.nodes())) == blocks


def test_evicted_blocks_are_left_out() -> None:
    rig = make_rig(max_idle=4)
    first = stored_turn(rig, "one")
    rig.store.drop_memory()
    reopen(rig, first)
    assert rig.backend.num_open == 0
    rig.serve(job := next_turn(rig, first))
    rig.expect_alone(job)


@pytest.mark.parametrize("how", ["abandon", "end", "resize"])
def test_a_restore_ends_with_the_engine_and_leaves_nothing(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reopening, "_PIECE_BYTES", 1)
    rig = make_rig(max_idle=4)
    reopen(rig, stored_turn(rig, "one"), steps=2)
    assert rig.backend.num_open == 1
    if how == "resize":
        rig.engine.resize(rig.store.usage().total // 2)
    elif how == "end":
        rig.engine.end_all(BackendError("the end"))
    else:
        rig.engine.abandon(BackendError("the end"))
    assert rig.backend.num_open == 0
    assert rig.store.usage().working == 0
    assert all(node.num_leases == 0 for node in rig.store.nodes())


def test_a_device_that_fails_costs_a_prefill_at_most(caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig(max_idle=4)
    first = stored_turn(rig, "one")
    payload = next(iter(next(iter(rig.store.nodes())).payloads.values()))
    assert payload.kind is LayerKind.FULL
    for node in rig.store.nodes():
        for kind, whole in list(node.payloads.items()):
            node.payloads[kind] = type(whole)(whole.abi, whole.kind, whole.start, whole.end, ())
    reopen(rig, first)
    assert "cannot restore a conversation" in caplog.text
    assert rig.backend.num_open == 0
    rig.serve(job := next_turn(rig, first))
    rig.expect_alone(job)
