"""A head of the served model: replies stay the same, and it is asked where it pays."""

from collections.abc import Sequence
from typing import Literal

import pytest

from semantic.adapters.outbound.backends.common import StepTicket
from semantic.adapters.outbound.backends.fake import FakeBackend
from semantic.domain.errors import BackendError
from semantic.domain.sampling import SamplingParams
from semantic.ports.backend import Chunk, Sampled, SequenceId, Step
from tests.unit.application.engine.test_draft_model import WITHOUT
from tests.unit.application.engine.test_speculation import SlowBackend
from tests.unit.application.engine_rig import Rig, make_job, make_rig

pytestmark = pytest.mark.unit

COPY = SequenceId(-1)


class Headed(SlowBackend):
    """A backend whose head goes on with a fork, and is wrong at every so many positions.

    Attributes:
        num_asked: Calls of the head.
        fails_after: Calls after which the head fails.
    """

    def __init__(self, now: list[float], every: int = 0, pass_s: float = 0.0) -> None:
        super().__init__(now, token_s=0.1)
        self._every, self._pass_s = every, pass_s
        self.num_asked, self.fails_after = 0, 1000

    @property
    def head(self) -> "Headed":
        return self

    def draft(self, rows: Sequence[Chunk], count: int) -> list[tuple[int, ...]]:
        self.num_asked += 1
        if self.num_asked > self.fails_after:
            raise BackendError("out of order")
        self._now[0] += count * self._pass_s
        return [self._draft_one(row, count) for row in rows]

    def _draft_one(self, chunk: Chunk, count: int) -> tuple[int, ...]:
        assert self.fork(chunk.seq, COPY, chunk.start)
        tokens, drafted = chunk.tokens, []
        for start in range(chunk.start, chunk.start + count):
            step = Step((Chunk(COPY, start, tokens, chunk.draw),))
            ticket = FakeBackend.launch(self, step)
            assert isinstance(ticket, StepTicket)
            (row,) = ticket.output.rows
            assert isinstance(row, Sampled)
            tokens = (row.token,)
            is_wrong = bool(self._every) and start % self._every == 0
            drafted.append(row.token ^ is_wrong)
        self.close_sequence(COPY)
        return tuple(drafted)


def headed_rig(every: int = 0, pass_s: float = 0.0, budget_tokens: int = 100_000) -> Rig:
    now = [0.0]
    backend = Headed(now, every, pass_s)
    rig = make_rig(backend=backend, budget_tokens=budget_tokens)
    rig.now = now
    return rig


@pytest.mark.parametrize("every", [0, 2, 5])
@pytest.mark.parametrize("budget_tokens", [110, 100_000])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_head_changes_no_reply(every: int, budget_tokens: int, temperature: float) -> None:
    rig = headed_rig(every, budget_tokens=budget_tokens)
    sampling = SamplingParams(temperature=temperature, seed=5)
    jobs = [make_job(f"{i}", f"say {i}", max_tokens=40, sampling=sampling) for i in range(3)]
    rig.serve(*jobs)
    for job in jobs:
        rig.expect_alone(job)
    assert sum(rig.finished(job.id).usage.accepted_by_source.get("mtp", 0) for job in jobs) > 8
    assert rig.backend.num_open == 0


def test_a_head_that_agrees_saves_steps() -> None:
    rig, plain = headed_rig(), make_rig(limits=WITHOUT)
    for each in (rig, plain):
        for temperature in (0.0, 0.8):
            sampling = SamplingParams(temperature=temperature, seed=5)
            each.serve(make_job(f"{temperature}", "tell", max_tokens=80, sampling=sampling))
    assert len(rig.backend.steps) < 0.5 * len(plain.backend.steps)
    for name in ("0.0", "0.8"):
        usage = rig.finished(name).usage
        assert usage.accepted_by_source["mtp"] > 40
        assert sum(usage.accepted_by_source.values()) == usage.accepted_prediction_tokens


@pytest.mark.parametrize("every, pass_s, most", [(1, 0.3, 1.02), (2, 1.0, 1.02), (0, 0.1, 0.5)])
def test_a_head_that_does_not_pay_is_not_asked(
    every: Literal[0, 1, 2], pass_s: float, most: float
) -> None:
    """A step takes a second and a tenth for each further token; what a draft takes varies."""
    took = []
    plain = make_rig(backend=SlowBackend(now := [0.0], token_s=0.1))
    plain.now = now
    for rig in (headed_rig(every, pass_s), plain):
        for number in range(5):
            sampling = SamplingParams(temperature=1, seed=number)
            rig.serve(make_job(f"{number}", f"say {number}", max_tokens=120, sampling=sampling))
        took.append(rig.now[0])
    assert took[0] < most * took[1]


def test_a_head_that_fails_is_not_used_any_more(caplog: pytest.LogCaptureFixture) -> None:
    rig = headed_rig()
    assert isinstance(rig.backend, Headed)
    rig.backend.fails_after = 2
    for name in ("a", "b"):
        rig.serve(job := make_job(name, f"say {name}", max_tokens=40))
        rig.expect_alone(job)
    assert rig.backend.num_asked == 3
    assert "MTP head failed" in caplog.text
