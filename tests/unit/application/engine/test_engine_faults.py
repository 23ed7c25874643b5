"""Steps, rows and loads that fail: who is harmed, and what is kept."""

from collections.abc import Sequence
from typing import Literal

import pytest

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.application.engine.scheduler import EngineLimits
from semantic.domain.errors import BackendError, CacheCorruptionError
from semantic.domain.events import Failed
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
from tests.unit.application.engine_rig import FaultyBackend, alone, make_job, make_rig
from tests.unit.application.memory_rig import fetch

pytestmark = pytest.mark.unit

SPEC = fake_spec(block_tokens=8)


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

    def close(self, seq: SequenceId) -> None:
        if any(chunk.seq == seq for step in self._flying for chunk in step.chunks):
            self.violations.append(f"closed {seq} with a row in flight")
        super().close(seq)

    def _spoil(self, failed: Step) -> None:
        for step in (failed, *self._flying):
            self._spoilt |= {chunk.seq for chunk in step.chunks}
        self._flying.clear()


class RefusingBackend(FaultyBackend):
    """Refuses every row of the first sequence."""

    def collect(self, ticket: Ticket) -> StepOutput:
        rows = super().collect(ticket).rows
        return StepOutput(tuple(RowFailed(r.seq, "bad row") if r.seq == 0 else r for r in rows))


class CorruptBackend(FaultyBackend):
    """Finds sealed blocks unreadable, once told so."""

    is_corrupt = False

    def load(self, seq: SequenceId, parts: Sequence[KVPayload], end: int) -> None:
        if self.is_corrupt:
            raise CacheCorruptionError("bad checksum")
        super().load(seq, parts, end)


def is_poisoned(step: Step) -> bool:
    """Whether the step has an exclamation mark in a prompt."""
    return any(c.tokens is not LAST_SAMPLED and ord("!") in c.tokens for c in step.chunks)


# -- what a real device cannot do ---------------------------------------------------------------


def test_a_sequence_is_not_closed_while_its_row_is_on_the_device() -> None:
    backend = StrictBackend(pipeline_depth=1)
    rig = make_rig(backend=backend, budget_tokens=140)
    for i in range(4):
        rig.submit(make_job(f"j{i}", f"prompt number {i} " * 2, max_tokens=50))
    rig.submit(make_job("stop", "s", max_tokens=40, stop=StopRules(strings=("a", "e", "o"))))
    rig.submit(make_job("gone", "g" * 20, max_tokens=40))
    for _ in range(5):
        rig.step()
    rig.engine.cancel("gone")
    rig.run()
    assert backend.violations == []


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_what_a_failed_step_left_behind_is_never_kept(where: str) -> None:
    backend = StrictBackend(pipeline_depth=1)
    rig = make_rig(backend=backend)
    failures = iter([False] * 3 + [True] * 30)
    if where == "launch":
        backend.fail_launch = lambda _: next(failures, False)
    else:
        backend.fail_collect = lambda: next(failures, False)
    for i in range(3):
        rig.submit(make_job(f"j{i}", f"prompt {i}" * 3, max_tokens=30))
    rig.run()
    assert backend.violations == []


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_request_that_was_done_when_its_step_failed_does_not_stay_open(where: str) -> None:
    backend = StrictBackend(pipeline_depth=1)
    rig = make_rig(backend=backend, max_idle=4)
    first = make_job("a", "x" * 20, agent="a", max_tokens=40)
    rig.submit(first)
    rig.submit(make_job("other", "o" * 20, max_tokens=60))
    for _ in range(8):
        rig.step()
    rig.engine.cancel("a")  # its last row is still on the device
    failures = iter([True])
    if where == "launch":
        backend.fail_launch = lambda _: next(failures, False)
    else:
        backend.fail_collect = lambda: next(failures, False)
    rig.step()
    assert rig.finished("a").reason is FinishReason.CANCELLED
    second = make_job("a, turn 2", "x" * 20 + rig.text("a") + "more", agent="a")
    rig.submit(second)
    rig.run()
    assert backend.violations == []
    assert rig.text("a, turn 2") == alone(second)


def test_a_request_that_fails_in_its_retry_keeps_nothing_of_it() -> None:
    backend = StrictBackend()
    rig = make_rig(backend=backend, limits=EngineLimits(prefill_step_size=3))
    backend.fail_launch = is_poisoned
    rig.submit(make_job("bad", "x" * 13 + "!"))
    rig.run(max_steps=200)
    assert isinstance(rig.final("bad"), Failed)
    assert backend.violations == []


# -- isolation ----------------------------------------------------------------------------------


def test_after_a_failed_step_everyone_is_batched_again() -> None:
    rig = make_rig()
    for i in range(4):
        rig.submit(make_job(f"j{i}", f"prompt {i}", max_tokens=30))
    rig.step()
    failures = iter([True])
    rig.backend.fail_launch = lambda _: next(failures, False)
    for _ in range(10):
        rig.step()
    assert len(rig.backend.steps[-1].chunks) == 4


@pytest.mark.parametrize("depth", [0, 1])
def test_a_suspect_stays_alone_up_to_where_it_failed(depth: Literal[0, 1]) -> None:
    # One block holds the whole prompt, so the retry starts at its first token.
    spec = fake_spec(block_tokens=64)
    rig = make_rig(spec=spec, pipeline_depth=depth, limits=EngineLimits(prefill_step_size=8))
    rig.backend.fail_launch = is_poisoned
    good = make_job("good", "fine", max_tokens=60)
    rig.submit(good)
    rig.submit(make_job("bad", "x" * 40 + "!"))
    rig.run(max_steps=500)
    assert isinstance(rig.final("bad"), Failed)
    assert rig.text("good") == alone(good, spec)


def test_a_request_that_was_retried_is_kept_for_its_next_turn() -> None:
    rig = make_rig()
    failures = iter([True])
    rig.backend.fail_launch = lambda _: next(failures, False)
    rig.submit(make_job("a", "x" * 40))
    rig.run()
    rig.submit(make_job("a, turn 2", "x" * 40 + rig.text("a") + " and more"))
    rig.run()
    assert rig.finished("a, turn 2").usage.cache_read_tokens >= 40


# -- one row, one load --------------------------------------------------------------------------


def test_a_row_the_backend_refuses_ends_its_own_request() -> None:
    rig = make_rig(backend=RefusingBackend(SPEC))
    good = make_job("good", "two")
    rig.submit(make_job("bad", "one"))
    rig.submit(good)
    rig.run(max_steps=200)
    final = rig.final("bad")
    assert isinstance(final, Failed)
    assert isinstance(final.error, BackendError)
    assert "bad row" in final.error.message
    assert rig.text("good") == alone(good)


def test_blocks_that_cannot_be_loaded_are_computed_again() -> None:
    backend = CorruptBackend(SPEC)
    rig = make_rig(backend=backend)
    rig.submit(make_job("a", "x" * 30))
    rig.run()
    backend.is_corrupt = True
    second = make_job("b", "x" * 30 + "y")
    rig.submit(second)
    rig.run(max_steps=200)
    assert rig.text("b") == alone(second)
    assert rig.finished("b").usage.cache_read_tokens == 0


def test_blocks_that_cannot_be_loaded_are_replaced() -> None:
    backend = CorruptBackend(SPEC)
    rig = make_rig(backend=backend)
    job = make_job("a", "x" * 30)
    rig.submit(job)
    rig.run()
    bad = fetch(rig.store, rig.store.plan(job.root, job.tokens).parts[0]).result()
    backend.is_corrupt = True
    rig.submit(make_job("b", "x" * 30 + "y"))
    rig.run(max_steps=200)
    good = fetch(rig.store, rig.store.plan(job.root, job.tokens).parts[0]).result()
    assert good is not bad


# -- abandon ------------------------------------------------------------------------------------


def test_abandon_in_flight_leaves_an_engine_that_works() -> None:
    rig = make_rig(pipeline_depth=1)
    rig.submit(make_job("a", max_tokens=50))
    rig.step()
    rig.engine.abandon(BackendError("gone"))
    assert not rig.engine.has_work
    rig.submit(make_job("b"))
    rig.run(max_steps=200)
    assert rig.text("b") == alone(make_job("b"))
