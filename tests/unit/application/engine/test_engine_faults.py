"""Steps, rows and loads that fail: which requests fail, and what is kept."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.application.settings import EngineLimits
from semantic.domain.errors import BackendError, CacheCorruptionError, InvalidRequestError
from semantic.domain.sampling import FinishReason, StopRules
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import (
    LAST_SAMPLED,
    KVPayload,
    RowFailed,
    SequenceId,
    Step,
    StepOutput,
    Ticket,
)
from tests.unit.application.engine_rig import FaultyBackend, make_job, make_rig
from tests.unit.application.memory_rig import fetch

pytestmark = pytest.mark.unit

SPEC = fake_spec(block_tokens=8)
STATEFUL = fake_spec(block_tokens=8, has_state=True)


class StrictBackend(FaultyBackend):
    """Notes what a real device cannot do.

    That is: to close a sequence whose rows it has not given back, or to keep or go on with state
    that a failed step left behind.
    """

    def __init__(self, spec: ModelCacheSpec = SPEC, *, pipeline_depth: Literal[0, 1] = 0) -> None:
        super().__init__(spec, pipeline_depth=pipeline_depth)
        self.violations: list[str] = []
        self._flying: list[Step] = []
        self._spoilt: set[SequenceId] = set()

    def launch(self, step: Step) -> Ticket:
        try:
            ticket = super().launch(step)
        except RuntimeError:
            self._spoil(step)
            raise
        self._flying.append(step)
        return ticket

    def collect(self, ticket: Ticket) -> StepOutput:
        step = self._flying.pop(0)
        try:
            return super().collect(ticket)
        except RuntimeError:
            self._spoil(step)
            raise

    def snapshot(self, seq: SequenceId, start: int, end: int, kind: LayerKind) -> Ticket:
        if seq in self._spoilt:
            self.violations.append(f"sealed {seq} after its step failed")
        return super().snapshot(seq, start, end, kind)

    def fork(self, src: SequenceId, dst: SequenceId, num_tokens: int) -> bool:
        if src in self._spoilt:
            self.violations.append(f"forked {src} after its step failed")
        return super().fork(src, dst, num_tokens)

    def truncate(self, seq: SequenceId, num_tokens: int) -> int:
        if seq in self._spoilt:
            self.violations.append(f"went on with {seq} after its step failed")
        return super().truncate(seq, num_tokens)

    def close_sequence(self, seq: SequenceId) -> None:
        if any(chunk.seq == seq for step in self._flying for chunk in step.chunks):
            self.violations.append(f"closed {seq} with a row in flight")
        super().close_sequence(seq)

    def _spoil(self, failed: Step) -> None:
        for step in (failed, *self._flying):
            self._spoilt |= {chunk.seq for chunk in step.chunks}
        self._flying.clear()


class RefusingBackend(FaultyBackend):
    """Refuses every row of the first sequence."""

    def collect(self, ticket: Ticket) -> StepOutput:
        rows = super().collect(ticket).rows
        return StepOutput(tuple(RowFailed(r.seq, "bad row") if r.seq == 0 else r for r in rows))


class UnloadingBackend(FaultyBackend):
    """Fails to load sealed blocks while it has an error to raise."""

    load_error: Exception | None = None

    def load(self, seq: SequenceId, parts: Sequence[KVPayload], end: int) -> None:
        if self.load_error is not None:
            raise self.load_error
        super().load(seq, parts, end)


class UnsealingBackend(FaultyBackend):
    """Fails to copy blocks to the host while it has an error to raise."""

    copy_error: Exception | None = None

    def payload(self, ticket: Ticket) -> KVPayload:
        if self.copy_error is not None:
            raise self.copy_error
        return super().payload(ticket)


class UncuttableBackend(FaultyBackend):
    """Fails to truncate sequences."""

    def truncate(self, seq: SequenceId, num_tokens: int) -> int:
        raise RuntimeError(f"cannot truncate {seq} to {num_tokens}")


def is_poisoned(step: Step) -> bool:
    """Whether the step has an exclamation mark in a prompt."""
    return any(c.tokens is not LAST_SAMPLED and ord("!") in c.tokens for c in step.chunks)


# -- what a real device cannot do ---------------------------------------------------------------


def test_a_sequence_is_not_closed_while_its_row_is_on_the_device() -> None:
    backend = StrictBackend(pipeline_depth=1)
    rig = make_rig(backend=backend, budget_tokens=140)
    rig.submit(*(make_job(f"j{i}", f"prompt number {i} " * 2, max_tokens=50) for i in range(4)))
    rig.submit(make_job("stop", "s", max_tokens=40, stop=StopRules(strings=("a", "e", "o"))))
    rig.submit(make_job("gone", "g" * 20, max_tokens=40))
    rig.step(5)
    rig.engine.cancel("gone")
    rig.run()
    assert backend.violations == []


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_what_a_failed_step_left_behind_is_never_kept(where: str) -> None:
    backend = StrictBackend(pipeline_depth=1)
    rig = make_rig(backend=backend)
    backend.fail_next(where, after=3, times=30)
    rig.serve(*(make_job(f"j{i}", f"prompt {i}" * 3, max_tokens=30) for i in range(3)))
    assert backend.violations == []


@pytest.mark.parametrize("spec", [SPEC, STATEFUL])
@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_request_that_was_done_when_its_step_failed_does_not_stay_open(
    where: str, spec: ModelCacheSpec
) -> None:
    backend = StrictBackend(spec, pipeline_depth=1)
    rig = make_rig(backend=backend, max_idle=4)
    rig.submit(make_job("a", "x" * 20, max_tokens=40), make_job("other", "o" * 20, max_tokens=60))
    rig.step(8)
    rig.engine.cancel("a")  # its last row is still on the device
    backend.fail_next(where)
    rig.step()
    assert rig.finished("a").reason is FinishReason.CANCELLED
    second = make_job("a, turn 2", "x" * 20 + rig.text("a") + "more", agent="a")
    rig.serve(second)
    assert backend.violations == []
    rig.expect_alone(second)


def test_a_request_that_fails_in_its_retry_keeps_nothing_of_it() -> None:
    backend = StrictBackend()
    rig = make_rig(backend=backend, limits=EngineLimits(prefill_step_size=3))
    backend.fail_launch = is_poisoned
    rig.serve(make_job("bad", "x" * 13 + "!"))
    rig.error("bad")
    assert backend.violations == []


# -- isolation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("where", ["launch", "collect"])
def test_after_a_failed_step_all_requests_are_batched_again(
    depth: Literal[0, 1], where: str
) -> None:
    rig = make_rig(pipeline_depth=depth)
    jobs = [make_job(f"j{i}", f"prompt {i}" * 3, max_tokens=30) for i in range(4)]
    rig.submit(*jobs)
    rig.step(4)
    rig.backend.fail_next(where)
    rig.step(20)
    assert len(rig.backend.steps[-1].chunks) == 4
    rig.run()
    rig.expect_alone(*jobs)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("poison", ["poison!", "x" * 40 + "!"])
def test_a_request_that_breaks_its_steps_ends_alone(depth: Literal[0, 1], poison: str) -> None:
    # One block holds the whole prompt: the retry starts at its first token, and the suspect stays
    # alone up to where it failed.
    spec = fake_spec(block_tokens=64)
    rig = make_rig(spec=spec, pipeline_depth=depth, limits=EngineLimits(prefill_step_size=8))
    rig.backend.fail_launch = is_poisoned
    good = [make_job(f"j{i}", f"prompt {i}", max_tokens=60) for i in range(3)]
    rig.serve(*good, make_job("bad", poison))
    rig.error("bad", BackendError)
    rig.expect_alone(*good)
    assert rig.backend.num_open == 0


def test_a_request_that_was_retried_is_kept_for_its_next_turn() -> None:
    rig = make_rig()
    rig.backend.fail_next("launch")
    rig.serve(make_job("a", "x" * 40))
    rig.serve(make_job("a, turn 2", "x" * 40 + rig.text("a") + " and more"))
    assert rig.num_reused("a, turn 2") >= 40


# -- one row, one load --------------------------------------------------------------------------


def test_an_id_out_of_range_ends_its_own_request() -> None:
    rig, good = make_rig(), make_job("good", "two")
    rig.serve(replace(make_job("bad"), tokens=(1, 10**6)), good)
    rig.error("bad", InvalidRequestError)
    rig.expect_alone(good)


def test_a_row_the_backend_refuses_ends_its_own_request() -> None:
    rig = make_rig(backend=RefusingBackend(SPEC))
    good = make_job("good", "two")
    rig.serve(make_job("bad", "one"), good)
    assert "bad row" in rig.error("bad", BackendError)
    rig.expect_alone(good)


def test_blocks_that_cannot_be_loaded_are_computed_again_and_replaced() -> None:
    backend = UnloadingBackend(SPEC)
    rig = make_rig(backend=backend)
    job, second = make_job("a", "x" * 30), make_job("b", "x" * 30 + "y")

    def first_block() -> KVPayload:
        return fetch(rig.store, rig.store.plan(job.root, job.tokens).parts[0]).result()

    rig.serve(job)
    bad = first_block()
    backend.load_error = CacheCorruptionError("bad checksum")
    rig.serve(second)
    rig.expect_alone(second)
    assert rig.num_reused("b") == 0
    assert rig.reply_state("b").is_damaged
    assert first_block() is not bad


@pytest.mark.parametrize("error", [BackendError("invalid argument"), RuntimeError("no such page")])
def test_a_copy_to_the_device_that_fails_costs_its_request_a_prefill(error: Exception) -> None:
    backend = UnloadingBackend(SPEC)
    rig = make_rig(backend=backend)
    first, other = make_job("a", "x" * 30), make_job("other", "o" * 30)
    second, third = make_job("b", "x" * 30 + "y"), make_job("c", "x" * 30 + "z")
    rig.serve(first)
    backend.load_error = error
    rig.serve(second, other)
    rig.expect_alone(second, other)
    assert rig.num_reused("b") == 0
    backend.load_error = None
    rig.serve(third)
    rig.expect_alone(third)
    assert rig.num_reused("c") >= 24  # the blocks are sound, and stay
    states = [rig.reply_state(name) for name in "abc"]
    assert [state.is_damaged for state in states] == [False, True, False]
    assert [state.num_stored >= 24 for state in states] == [False, True, True]


@pytest.mark.parametrize("error", [BackendError("invalid argument"), RuntimeError("no such page")])
def test_a_copy_from_the_device_that_fails_costs_the_next_turn_a_prefill(error: Exception) -> None:
    backend = UnsealingBackend(SPEC)
    rig = make_rig(backend=backend)
    first, second = make_job("a", "x" * 30), make_job("b", "x" * 30 + "y")
    backend.copy_error = error
    rig.serve(first)
    rig.expect_alone(first)
    backend.copy_error = None
    rig.serve(second)
    rig.expect_alone(second)
    assert rig.num_reused("b") == 0


def test_a_reply_whose_state_cannot_be_cut_ends_and_is_not_kept() -> None:
    backend = UncuttableBackend(STATEFUL)
    rig = make_rig(backend=backend, max_idle=4)
    first = make_job("a", "x" * 30)
    rig.serve(first)
    rig.expect_alone(first)
    second = make_job("a, turn 2", "x" * 30 + rig.text("a") + "more", agent="a")
    rig.serve(second)
    rig.expect_alone(second)
