"""Texts that are embedded beside replies, on the fake backend."""

from collections.abc import Sequence

import pytest

from semantic.adapters.outbound.backends.fake import FakeTokenizer, fake_spec
from semantic.application.engine.model import LoadedModel
from semantic.application.engine.request import EmbeddingJob
from semantic.domain.errors import (
    BackendError,
    DrainingError,
    InvalidRequestError,
    PoolExhaustedError,
    SemanticError,
)
from semantic.ports.backend import SequenceId
from tests.unit.application.device_rig import ready_device
from tests.unit.application.engine_rig import FaultyBackend, make_job, make_rig

pytestmark = pytest.mark.unit

TEXT = tuple(range(200))


class PiecesBackend(FaultyBackend):
    """Keeps how many tokens it was given at a time, and fails when told to."""

    def __init__(self) -> None:
        super().__init__(fake_spec(block_tokens=8))
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


class TextRig:
    """An engine, and the texts it was given."""

    def __init__(
        self, backend: PiecesBackend, budget_tokens: int = 100_000, max_idle: int = 0
    ) -> None:
        self.backend = backend
        self.engine_rig = make_rig(backend=backend, budget_tokens=budget_tokens, max_idle=max_idle)
        self.engine = self.engine_rig.engine

    def add(self, *texts: Sequence[int]) -> list[EmbeddingJob]:
        jobs = [EmbeddingJob(tuple(text)) for text in texts]
        for job in jobs:
            self.engine.submit(job)
        return jobs

    def finish(self) -> None:
        self.engine_rig.run()
        assert self.backend.num_open == 0
        assert self.engine_rig.store.usage().available == self.engine_rig.store.usage().total


def test_texts_come_in_pieces_that_are_small_beside_others(backend: PiecesBackend) -> None:
    rig = make_rig(backend=backend)
    alone, beside = EmbeddingJob(TEXT), EmbeddingJob(TEXT)
    rig.engine.submit(alone)
    rig.run()
    rig.submit(make_job("reply", max_tokens=50))
    rig.engine.submit(beside)
    rig.run()
    assert backend.pieces == [128, 72, *[32] * 6, 8]
    assert alone.result.result(0) == pytest.approx(beside.result.result(0))


def test_a_cancelled_text_is_not_computed_further(backend: PiecesBackend) -> None:
    rig = TextRig(backend)
    left, kept = rig.add(TEXT, TEXT[:5])
    rig.engine_rig.step()
    left.result.cancel()
    rig.finish()
    assert backend.pieces == [128, 5]
    assert kept.result.done()


@pytest.mark.parametrize(
    "error", [BackendError("broken"), InvalidRequestError("no"), RuntimeError("a defect")]
)
def test_a_failed_embedding_does_not_affect_others_or_replies(
    error: Exception, backend: PiecesBackend
) -> None:
    rig, reply = TextRig(backend), make_job("reply", max_tokens=50)
    rig.engine_rig.submit(reply)
    first, second = rig.add(TEXT, TEXT)
    backend.error = error
    rig.engine_rig.step()
    backend.error = None
    rig.engine_rig.run()
    failure = first.result.exception(0)
    assert isinstance(failure, SemanticError)
    assert str(error) in failure.message
    assert len(second.result.result(0)) == 16
    rig.engine_rig.expect_alone(reply)


def test_a_text_lies_within_the_memory_budget(backend: PiecesBackend) -> None:
    rig = TextRig(backend)
    store = rig.engine_rig.store
    rig.add(TEXT)
    rig.engine_rig.step()
    taken = store.usage().total - store.usage().available
    assert taken == backend.bytes_for([len(TEXT)])
    rig.finish()


def test_a_text_has_a_sequence_of_its_own(backend: PiecesBackend) -> None:
    """A request that waits has none: its end must not close the text's."""
    rig = TextRig(backend, budget_tokens=210)
    (text,) = rig.add(TEXT)
    rig.engine_rig.step()
    rig.engine_rig.submit(make_job("waiting", "w" * 100))
    rig.engine_rig.step()
    rig.engine.cancel("waiting")
    rig.engine_rig.run()
    assert len(text.result.result(0)) == 16


def test_texts_and_replies_wait_for_room_and_all_get_it(backend: PiecesBackend) -> None:
    rig = TextRig(backend, budget_tokens=260)
    replies = [make_job(f"j{i}", f"prompt {i} " * 6, max_tokens=40) for i in range(4)]
    rig.engine_rig.submit(*replies[:2])
    rig.engine_rig.step(3)
    texts = rig.add(TEXT, TEXT)
    rig.engine_rig.submit(*replies[2:])
    rig.engine_rig.run()
    rig.engine_rig.expect_alone(*replies)
    for text in texts:
        assert len(text.result.result(0)) == 16


def test_a_reply_that_needs_room_waits_for_a_text_to_end(backend: PiecesBackend) -> None:
    rig, reply = TextRig(backend, budget_tokens=300), make_job("reply", "r" * 60, max_tokens=120)
    rig.engine_rig.submit(reply)
    rig.engine_rig.step()
    (text,) = rig.add(TEXT)
    rig.engine_rig.run()
    rig.engine_rig.expect_alone(reply)
    assert len(text.result.result(0)) == 16


def test_a_text_for_which_no_room_can_come_is_refused(backend: PiecesBackend) -> None:
    rig, reply = TextRig(backend, budget_tokens=100), make_job("reply")
    (text,) = rig.add(TEXT)
    rig.engine_rig.submit(reply)
    rig.engine_rig.run()
    assert isinstance(text.result.exception(0), PoolExhaustedError)
    rig.engine_rig.expect_alone(reply)


def test_idle_copies_make_way_for_a_text(backend: PiecesBackend) -> None:
    rig = TextRig(backend, budget_tokens=250, max_idle=4)
    rig.engine_rig.serve(make_job("a", "x" * 30), make_job("b", "y" * 30))
    (text,) = rig.add(TEXT)
    rig.engine_rig.run()
    assert len(text.result.result(0)) == 16


def test_all_texts_are_failed_when_the_engine_is_abandoned(backend: PiecesBackend) -> None:
    rig = TextRig(backend)
    jobs = rig.add(TEXT, TEXT)
    rig.engine_rig.step()
    rig.engine.abandon(DrainingError("over"))
    rig.finish()
    for job in jobs:
        assert isinstance(job.result.exception(0), DrainingError)
        rig.engine_rig.finished(job.id)
    assert backend.pieces == [128]


def test_waiting_embeddings_fail_when_the_device_stops(backend: PiecesBackend) -> None:
    model, jobs = LoadedModel("fake", backend, FakeTokenizer()), [EmbeddingJob(TEXT * 50)]
    with ready_device(model) as (device, _):
        for job in jobs:
            device.submit(job)
    for job in jobs:
        assert job.result.done()
