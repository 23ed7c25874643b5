"""Prefetched parts stay within the memory budget, and no request waits for room for ever."""

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.adapters.outbound.backends.fake import FakeBackend, fake_spec
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.cache.restore_plan import WantedPart
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.application.engine import restore
from semantic.application.engine.request import Job
from semantic.application.settings import EngineLimits
from semantic.domain.blocks import BlockPart
from semantic.domain.errors import CacheCorruptionError
from semantic.domain.events import TextDelta
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import KVPayload
from tests.unit.application.engine_rig import ROOT, EngineRig, FaultyBackend, make_job

pytestmark = pytest.mark.unit

BLOCK_TOKENS = 512
BLOCK_BYTES = 4 * BLOCK_TOKENS
HEAD_BYTES = 512  # what a file's header may have beyond the least
PART_BYTES = BLOCK_BYTES + HEAD_BYTES
SPEC = fake_spec(block_tokens=BLOCK_TOKENS)


class WatchedFiles(SafetensorsCache):
    """Files that know which of the payloads they gave are still alive."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._given: list[weakref.ref[memoryview]] = []

    def read(self, part: BlockPart) -> KVPayload:
        payload = super().read(part)
        assert payload.nbytes <= self.room_for(part)
        for buffer in payload.buffers:
            assert isinstance(buffer.data, memoryview)
            self._given.append(weakref.ref(buffer.data))
        return payload

    def alive(self) -> list[memoryview]:
        return [data for ref in self._given if (data := ref()) is not None]

    @property
    def num_reads(self) -> int:
        return len(self._given)


class SteppedDisk(DiskTier):
    """Reads files when it is told to, in any order, on the thread that tells it."""

    def __init__(self, files: WatchedFiles) -> None:
        super().__init__(files, SqliteLedger.in_memory(), DiskLimits(2**30, 2**28))
        self.pending: list[tuple[BlockPart, Future[KVPayload]]] = []

    def read(self, part: BlockPart) -> Future[KVPayload]:
        future: Future[KVPayload] = Future()
        self.pending.append((part, future))
        return future

    def finish(self, index: int = 0) -> None:
        part, future = self.pending.pop(index)
        try:
            future.set_result(self._read(part))
        except CacheCorruptionError as error:
            future.set_exception(error)


class Bench(EngineRig[FaultyBackend]):
    """One start of an engine on a directory, with memory for so many bytes."""

    def __init__(
        self, directory: Path, spec: ModelCacheSpec, budget: int, max_idle: int = 0
    ) -> None:
        self.files = WatchedFiles(directory)
        self.disk = SteppedDisk(self.files)
        store = AgentCacheStore(BlockPool(spec, budget), self.disk)
        store.restore_index(self.files.scan())
        self.disk.start(store.is_on_disk)
        self.most_outside = 0
        self.choose: Callable[[range], int] = min  # says which read ends next
        limits = EngineLimits(prefill_step_size=10**6, target_step_ms=10**9, max_idle=max_idle)
        super().__init__(FaultyBackend(spec), store, limits, tick=1.0)

    def wait(self) -> None:
        if self.disk.pending:
            self.disk.finish(self.choose(range(len(self.disk.pending))))
        else:
            assert self.disk.flush(60)  # what is being written is in the way
        self.check()

    def run(self) -> None:
        super().run()
        self.finish_reads()
        assert self.disk.flush(60)
        self.check()
        assert self.store.usage().held == self.store.tiers.reading_bytes == 0
        assert not any(node.num_leases for node in self.store.nodes())

    def finish_reads(self) -> None:
        while self.disk.pending:
            self.disk.finish()
            self.check()

    def check(self) -> None:
        """All that was read is in the pool, or in room that was reserved for it."""
        super().check()
        with self.store._lock:
            usage = self.store.usage()
            resident = {
                id(buffer.data)
                for node in self.store.nodes()
                for payload in node.payloads.values()
                for buffer in payload.buffers
            }
            outside = sum(data.nbytes for data in self.files.alive() if id(data) not in resident)
            assert outside <= self.store.tiers.reading_bytes
            assert usage.used <= usage.total
            self.most_outside = max(self.most_outside, outside)

    def num_read(self, job_id: str) -> int:
        """Tokens of a job's prompt that came from disk."""
        return self.reply_state(job_id).reuse.disk

    def limit_room(self, monkeypatch: pytest.MonkeyPatch, start: int) -> None:
        """Let files from a position on seem larger than any memory."""
        room_for = self.files.room_for
        monkeypatch.setattr(
            self.files, "room_for", lambda part: 2**60 if part.start >= start else room_for(part)
        )

    def close(self) -> None:
        assert self.disk.close(60)


Start = Callable[..., Bench]


@pytest.fixture(autouse=True)
def _little_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with blocks of many megabytes: a restore holds two parts at a time."""
    monkeypatch.setattr(restore, "_AHEAD_BYTES", 1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts engines on one directory, one after the other."""
    made: list[Bench] = []

    def make(budget: int = 2**28, *, spec: ModelCacheSpec = SPEC, max_idle: int = 0) -> Bench:
        if made:
            made[-1].close()
        made.append(Bench(tmp_path, spec, budget, max_idle))
        return made[-1]

    yield make
    made[-1].close()


def talk(name: str, num_blocks: int, *, num_reply: int = 3, head: str = "") -> Job:
    """A job of so many blocks, and a token that is computed in any case."""
    prompt = (head + name * (num_blocks * BLOCK_TOKENS))[: num_blocks * BLOCK_TOKENS] + "a"
    return make_job(name, prompt, max_tokens=num_reply)


def live_bytes(*jobs: Job) -> int:
    """What jobs reserve when they are admitted."""
    return FakeBackend(SPEC).bytes_for([len(job.tokens) + BLOCK_TOKENS for job in jobs])


# -- within the budget --------------------------------------------------------------------------


@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_many_at_once_with_room_for_a_few_parts(start: Start, num_parts: int) -> None:
    jobs = [talk(name, 6) for name in "pqrs"]
    start().serve(*jobs)
    bench = start(live_bytes(*jobs) + num_parts * PART_BYTES)
    bench.submit(*jobs)
    bench.step()
    assert bench.backend.num_open >= 3
    assert len(bench.disk.pending) >= bench.backend.num_open
    bench.run()
    bench.expect_alone(*jobs)
    for job in jobs:
        assert bench.num_read(job.id) == 6 * BLOCK_TOKENS
    assert bench.most_outside == 0  # between steps there is nothing that was read and not taken


def test_a_shared_part_is_read_once_and_pinned_until_the_last_request_has_it(start: Start) -> None:
    jobs = [talk(name, 6, head="h" * (5 * BLOCK_TOKENS)) for name in "pqrs"]
    start().serve(*jobs)
    bench = start(live_bytes(*jobs) + 12 * PART_BYTES)
    bench.serve(*jobs)
    bench.expect_alone(*jobs)
    assert bench.files.num_reads == 5 + 4


def test_running_sequences_come_before_what_is_read_ahead(start: Start) -> None:
    old, young = talk("p", 6, num_reply=40), talk("q", 6)
    start().serve(young)
    bench = start(live_bytes(old, young) + 2 * PART_BYTES)
    bench.submit(old)
    bench.step()
    bench.serve(young)
    bench.expect_alone(old, young)
    assert bench.num_read("q") == 6 * BLOCK_TOKENS


def test_a_conversation_longer_than_half_of_memory_is_kept_on_disk(start: Start) -> None:
    longest = talk("p", 8)
    bench = start(live_bytes(longest) + 4 * PART_BYTES)
    for num_blocks in range(1, 9):
        job = replace(talk("p", num_blocks), id=f"turn {num_blocks}")
        bench.serve(job)
        assert bench.num_reused(job.id) == (num_blocks - 1) * BLOCK_TOKENS


# -- without room -------------------------------------------------------------------------------


def test_a_request_alone_without_room_for_one_part_is_computed(start: Start) -> None:
    job = talk("p", 4)
    start().serve(job)
    bench = start(FakeBackend(SPEC).bytes_for([len(job.tokens) + 3]) + BLOCK_BYTES // 2)
    bench.serve(job)
    bench.expect_alone(job)
    assert bench.num_reused("p") == 0
    assert bench.files.num_reads <= 2  # before it was admitted, while there was room


@pytest.mark.parametrize("room", [PART_BYTES, live_bytes(talk("p", 1))])
def test_a_request_alone_restores_into_the_room_it_decodes_in(start: Start, room: int) -> None:
    job = talk("p", 4)
    start().serve(job)
    bench = start(FakeBackend(SPEC).bytes_for([len(job.tokens)]) + room)
    bench.serve(job)
    bench.expect_alone(job)
    assert bench.num_read("p") == 4 * BLOCK_TOKENS


def test_a_restore_that_runs_out_of_room_continues_from_the_loaded_parts(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = talk("p", 4)
    start().serve(job)
    bench = start(live_bytes(job) + 2 * PART_BYTES)
    bench.limit_room(monkeypatch, 2 * BLOCK_TOKENS)
    bench.serve(job)
    bench.expect_alone(job)
    assert bench.num_read("p") == 2 * BLOCK_TOKENS


def test_a_restore_without_room_waits_for_others_to_end(start: Start) -> None:
    old, young = talk("p", 4, num_reply=20), talk("q", 4)
    start().serve(young)
    bench = start(live_bytes(old, young) + BLOCK_BYTES // 2)
    bench.submit(old)
    bench.step()
    bench.submit(young)
    for _ in range(10):
        bench.step()
        bench.finish_reads()  # for the one that is still queued
    assert bench.backend.num_open == 1  # it holds no memory while it waits
    bench.run()
    bench.expect_alone(old, young)
    assert bench.num_read("q") == 4 * BLOCK_TOKENS


def test_idle_copies_give_way_to_what_is_to_be_read(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = talk("p", 2), talk("q", 4)
    start().serve(second)
    bench = start(3 * live_bytes(first) + live_bytes(second), max_idle=4)
    bench.serve(first)
    assert bench.backend.num_open == 1
    free = bench.store.usage().total - bench.backend.bytes_for([len(first.tokens) + 2])
    taken = free - live_bytes(second) - BLOCK_BYTES // 2
    bench.store.reserve(taken)
    monkeypatch.setattr(bench.store, "prefetch", lambda _: [])  # it would be in the way
    bench.submit(second)
    bench.step()
    assert (bench.backend.num_open, len(bench.disk.pending)) == (1, 2)
    bench.run()
    bench.expect_alone(first, second)
    assert bench.num_read("q") == 4 * BLOCK_TOKENS
    bench.store.unreserve(taken)


def test_two_restores_that_starve_each_other_run_one_after_the_other(start: Start) -> None:
    spec = fake_spec(block_tokens=BLOCK_TOKENS, window=3 * BLOCK_TOKENS)
    jobs = [talk(name, 6) for name in "pq"]
    start(spec=spec).serve(*jobs)
    working = FakeBackend(spec).bytes_for([len(job.tokens) + BLOCK_TOKENS for job in jobs])
    # The window's three parts are loaded together: there is room for those of one, not of two.
    bench = start(working + 4 * PART_BYTES, spec=spec)
    bench.choose = max
    bench.serve(*jobs)
    bench.expect_alone(*jobs)
    assert bench.store.telemetry.counts.engine.preemptions == 1
    assert all(bench.num_read(job.id) == 6 * BLOCK_TOKENS for job in jobs)


def test_the_only_running_request_waits_while_others_are_read(start: Start) -> None:
    grown, queued = talk("p", 2, num_reply=4 * BLOCK_TOKENS), talk("q", 2)
    start().serve(queued)
    most = FakeBackend(SPEC).bytes_for([len(grown.tokens) + 4 * BLOCK_TOKENS + 1])
    bench = start(most)
    bench.submit(grown)
    bench.step()
    assert bench.disk.flush(60)
    bench.submit(queued)
    assert bench.disk.pending  # for the one that waits
    bench.step(5 * BLOCK_TOKENS)
    assert isinstance(bench.events["p"][-1], TextDelta)  # it waits too
    bench.run()
    bench.expect_alone(grown, queued)


def test_a_restore_retried_alone_does_not_wait_for_its_waiters(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [talk("p", 4, num_reply=8), talk("q", 4, num_reply=8)]
    start().serve(jobs[0])
    bench = start()
    bench.submit(*jobs)
    while not all(bench.text(job.id) for job in jobs):
        if not bench.step():
            bench.wait()
    # A step of both fails: each is restored and tried alone. For one there is no room any more.
    bench.backend.fail_next("launch")
    assert bench.disk.flush(60)
    bench.step()
    bench.store.drop_payloads([WantedPart(n, LayerKind.FULL) for n in bench.store.nodes()])
    bench.limit_room(monkeypatch, 2 * BLOCK_TOKENS)
    jobs.append(talk("r", 1))
    bench.serve(jobs[-1])
    bench.expect_alone(*jobs)


# -- ahead of time ------------------------------------------------------------------------------


def test_a_prefetch_reads_as_much_as_can_stay_from_the_beginning(start: Start) -> None:
    job = talk("p", 6)
    start().serve(job)
    bench = start(3 * PART_BYTES)
    parts = bench.store.plan(ROOT, job.tokens).parts
    chosen = bench.store.prefetch(parts)
    assert chosen == list(parts[:3])
    assert len(bench.disk.pending) == 2
    bench.finish_reads()
    assert [len(part.node.payloads) for part in parts[:6]] == [1, 1, 1, 0, 0, 0]


def test_a_prefetch_that_finds_no_room_is_left_out(start: Start) -> None:
    job = talk("p", 6)
    start().serve(job)
    bench = start(4 * PART_BYTES)
    bench.store.prefetch(bench.store.plan(ROOT, job.tokens).parts)
    bench.store.reserve(2 * PART_BYTES)
    bench.disk.finish()
    bench.disk.finish()
    assert not bench.disk.pending or bench.store.usage().used <= 4 * PART_BYTES
    bench.finish_reads()
    bench.store.unreserve(2 * PART_BYTES)


def test_a_part_released_while_it_is_read_can_be_evicted(start: Start) -> None:
    job = talk("p", 1)
    start().serve(job)
    bench = start(2 * PART_BYTES)
    wanted = bench.store.plan(ROOT, job.tokens).parts[0]
    held = bench.store.tiers.acquire(wanted)
    assert held is not None
    bench.store.tiers.release(held)
    bench.disk.finish()
    assert held.future.done() is False
    assert bench.store.usage().held == 0
    assert bench.store.drop_payloads([wanted]) == 1
    bench.check()


def test_a_part_that_was_sealed_while_it_was_read_is_there_once(start: Start) -> None:
    job = talk("p", 1)
    start().serve(job)
    bench = start()
    wanted = bench.store.plan(ROOT, job.tokens).parts[0]
    held = bench.store.tiers.acquire(wanted)
    assert held is not None
    part = bench.disk.pending[0][0]
    bench.store.seal(ROOT, ROOT, job.tokens[:BLOCK_TOKENS], [bench.files.read(part)])
    bench.disk.finish()
    assert held.future.result() is wanted.node.payloads[LayerKind.FULL]
    bench.check()
    bench.store.tiers.release(held)
    assert bench.store.usage().held == 0


def test_a_bad_part_fails_for_all_waiters_and_pins_nothing(start: Start, tmp_path: Path) -> None:
    job = talk("p", 1)
    start().serve(job)
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    bench = start()
    wanted = bench.store.plan(ROOT, job.tokens).parts[0]
    helds = [bench.store.tiers.acquire(wanted) for _ in range(2)]
    assert len(bench.disk.pending) == 1
    bench.disk.finish()
    for held in helds:
        assert held is not None
        assert isinstance(held.future.exception(), CacheCorruptionError)
        bench.store.tiers.release(held)
    assert bench.store.counts.corrupt == 1
    assert bench.store.usage().used == 0
    assert WantedPart(wanted.node, LayerKind.FULL).node.files == {}


def test_a_cancelled_read_ends_for_all_waiters(start: Start) -> None:
    """An executor that is shut down cancels the reads that it has not begun."""
    job = talk("p", 1)
    start().serve(job)
    bench = start()
    wanted = bench.store.plan(ROOT, job.tokens).parts[0]
    held = bench.store.tiers.acquire(wanted)
    assert held is not None
    assert bench.disk.pending.pop()[1].cancel()
    assert isinstance(held.future.exception(0), CacheCorruptionError)
    bench.store.tiers.release(held)
    assert bench.store.usage().used == 0
    assert wanted.node.num_leases == 0
    assert LayerKind.FULL in wanted.node.files  # it is sound


def test_a_part_that_cannot_be_kept_fails_for_all_waiters(start: Start) -> None:
    job = talk("p", 1)
    start().serve(job)
    bench = start()
    wanted = bench.store.plan(ROOT, job.tokens).parts[0]
    held = bench.store.tiers.acquire(wanted)
    assert held is not None
    _, future = bench.disk.pending.pop()
    future.set_result(None)  # type: ignore[arg-type] # a defect of the reader
    assert held.future.exception(0) is not None
    bench.store.tiers.release(held)
    assert bench.store.usage().used == 0
    assert wanted.node.num_leases == 0
