"""Texts that are embedded beside replies, on the fake backend."""

from collections.abc import Sequence

import pytest

from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer, fake_spec
from semantic.application.engine.embedding import EmbeddingJob, EmbeddingQueue
from semantic.application.engine.model import LoadedModel
from semantic.domain.errors import BackendError, DrainingError, InvalidRequestError
from semantic.ports.backend import SequenceId
from tests.unit.application.device_rig import ready_device

pytestmark = pytest.mark.unit

TEXT = tuple(range(200))


class PiecesBackend(FakeBackend):
    """Keeps how many tokens it was given at a time, and fails when told to."""

    def __init__(self) -> None:
        super().__init__(fake_spec())
        self.pieces: list[int] = []
        self.error: Exception | None = None

    def embed(self, seq: SequenceId, start: int, tokens: Sequence[int]) -> tuple[float, ...]:
        if self.error is not None:
            raise self.error
        self.pieces.append(len(tokens))
        return super().embed(seq, start, tokens)


@pytest.fixture
def backend() -> PiecesBackend:
    return PiecesBackend()


def finish(queue: EmbeddingQueue, backend: FakeBackend, *, is_alone: bool = True) -> None:
    while queue:
        queue.step(backend, is_alone=is_alone)
    assert backend.num_open == 0


def test_texts_come_in_pieces_that_are_small_beside_others(backend: PiecesBackend) -> None:
    queue, results = EmbeddingQueue(), []
    for is_alone in (True, False):
        job = EmbeddingJob(TEXT)
        queue.add(job)
        finish(queue, backend, is_alone=is_alone)
        results.append(job.result.result(0))
    assert backend.pieces == [128, 72, *[32] * 6, 8]
    assert results[0] == pytest.approx(results[1])


def test_a_cancelled_text_is_not_computed_further(backend: PiecesBackend) -> None:
    queue, left, kept = EmbeddingQueue(), EmbeddingJob(TEXT), EmbeddingJob(TEXT[:5])
    queue.add(left)
    queue.add(kept)
    queue.step(backend, is_alone=True)
    left.result.cancel()
    finish(queue, backend)
    assert backend.pieces == [128, 5]
    assert kept.result.done()


@pytest.mark.parametrize(
    "error", [BackendError("broken"), InvalidRequestError("no", param="input")]
)
def test_a_failed_text_does_not_fail_the_next(error: Exception, backend: PiecesBackend) -> None:
    queue, first, second = EmbeddingQueue(), EmbeddingJob(TEXT), EmbeddingJob(TEXT)
    queue.add(first)
    queue.add(second)
    backend.error = error
    queue.step(backend, is_alone=True)
    backend.error = None
    finish(queue, backend)
    assert first.result.exception(0) is error
    assert len(second.result.result(0)) == 16


def test_everyone_who_waits_can_be_answered(backend: PiecesBackend) -> None:
    queue, job = EmbeddingQueue(), EmbeddingJob(TEXT)
    queue.add(job)
    queue.step(backend, is_alone=True)
    ends = queue.fail(DrainingError("over"), backend)
    assert [name for name, _ in ends] == [job.id]
    finish(queue, backend)
    assert isinstance(job.result.exception(0), DrainingError)
    assert backend.pieces == [128]


def test_who_waits_when_the_device_stops_is_told(backend: PiecesBackend) -> None:
    model, jobs = LoadedModel("fake", backend, FakeTokenizer()), [EmbeddingJob(TEXT * 50)]
    with ready_device(model) as (device, _):
        for job in jobs:
            device.submit(job)
    for job in jobs:
        assert job.result.done()
