import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from semantic.domain.blocks import BlockNamespace, PartKey, block_name
from semantic.domain.errors import PoolExhaustedError
from semantic.domain.pool import BlockPool, PoolUsage, Pressure
from semantic.domain.sampling import uniform
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec

pytestmark = pytest.mark.unit

ROOT = BlockNamespace("model@1", "bf16").root()
SPEC = ModelCacheSpec("tiny", (LayerSpec(LayerKind.FULL, 1, 8, 8),), 100, 10_000, block_tokens=4)


def key(token: int) -> PartKey:
    return block_name(ROOT, (token,)), LayerKind.FULL


A, B, C, D = map(key, range(4))
OLD = [key(index) for index in range(10)]
NEW = key(50)
ABSENT = key(99)


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    pool = BlockPool(SPEC, budget_bytes=100)
    yield pool
    pool.check_integrity()


def put_each(pool: BlockPool, *keys: PartKey) -> None:
    """Put parts of ten bytes one by one: the first is the least recently used."""
    for one in keys:
        pool.put({one: 10})


def idle_order(pool: BlockPool) -> list[PartKey]:
    return pool.oldest(sys.maxsize)


# -- construction and readings ----------------------------------------------------------------


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget_bytes must not be negative, got -1"):
        BlockPool(SPEC, -1)


@pytest.mark.parametrize(
    "total, held, working, level",
    [
        (100, 0, 0, Pressure.LOW),  # what is idle can go
        (100, 40, 39, Pressure.LOW),
        (1000, 500, 299, Pressure.LOW),  # not rounded up
        (100, 40, 40, Pressure.ELEVATED),
        (100, 89, 0, Pressure.ELEVATED),
        (100, 90, 0, Pressure.HIGH),
        (100, 0, 99, Pressure.HIGH),
        (100, 50, 50, Pressure.FULL),
        (0, 0, 0, Pressure.FULL),
    ],
)
def test_pressure_is_what_cannot_be_had_by_evicting(
    total: int, held: int, working: int, level: Pressure
) -> None:
    idle = total - held - working
    usage = PoolUsage(total, held, idle, working, num_blocks=1)
    assert usage.pressure is level
    assert (usage.used, usage.available) == (total, 0)


def test_what_is_idle_is_not_needed() -> None:
    assert PoolUsage(100, held=30, idle=50, working=10, num_blocks=3).needed_share == 0.4
    assert PoolUsage(0, held=0, idle=0, working=0, num_blocks=0).needed_share == 0.0


# -- parts and working bytes: what `test_pool_machine` does at random, once in words ------------


def test_what_is_refused_says_why_and_changes_nothing(pool: BlockPool) -> None:
    put_each(pool, A, B, C, D)
    pool.reserve(55)
    before = pool.usage()
    # 45 bytes could be had, but 10 of them are what it follows.
    with pytest.raises(PoolExhaustedError, match="55 of 100 are in use") as refused:
        pool.put({NEW: 36}, chain=[A])
    assert refused.value.retry_after_s == 1.0
    mistakes: list[tuple[Callable[[], object], str]] = [
        (lambda: pool.acquire(ABSENT), "is not in the pool"),
        (lambda: pool.release(ABSENT), "is not held"),
        (lambda: pool.release(A), "is not held"),
        (lambda: pool.reserve(-1), "nbytes must not be negative, got -1"),
        (lambda: pool.unreserve(56), "cannot unreserve 56 of 55 bytes"),
        (lambda: pool.unreserve(-1), "cannot unreserve -1 of 55 bytes"),
    ]
    for mistake, said in mistakes:
        with pytest.raises(ValueError, match=said):
            mistake()
    assert pool.usage() == before
    assert idle_order(pool) == [A, B, C, D]


# -- the integrity check itself ---------------------------------------------------------------


def lose_a_hold(pool: BlockPool) -> None:
    for entry in pool._entries.values():
        entry.num_holds -= 1


def add(counter: str, amount: int) -> Callable[[BlockPool], None]:
    def corrupt(pool: BlockPool) -> None:
        setattr(pool, counter, getattr(pool, counter) + amount)

    return corrupt


@pytest.mark.parametrize(
    "corrupt, said",
    [
        (add("_held_bytes", 1), "held bytes add up"),
        (add("_idle_bytes", -1), "idle bytes add up"),
        (add("_working_bytes", -1), "working bytes are not negative"),
        (add("_budget", -81), "the budget holds"),
        (lambda pool: pool._idle.clear(), "idle are exactly the unheld"),
        (lose_a_hold, "holds are not negative"),
    ],
)
def test_the_integrity_check_can_fail(corrupt: Callable[[BlockPool], None], said: str) -> None:
    pool = BlockPool(SPEC, 100)
    put_each(pool, A, B)
    pool.acquire(A)
    pool.check_integrity()
    corrupt(pool)
    with pytest.raises(AssertionError, match=said):
        pool.check_integrity()


# -- threads ----------------------------------------------------------------------------------

NUM_THREADS = 8
NUM_STEPS = 150


@pytest.fixture
def hectic_threads() -> Iterator[None]:
    """Let threads take turns after every few bytecodes."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def hammer(pool: BlockPool, worker: int, start: threading.Barrier) -> int:
    """Use the pool in every way, give everything back, and count what was evicted."""
    shared, own = OLD[:4], [key(100 * (worker + 1) + index) for index in range(4)]
    num_evicted = 0
    start.wait()
    for step in range(NUM_STEPS):
        length = 1 + int(4 * uniform(worker, step))
        held: list[PartKey] = []
        for one in (shared if step % 2 else own)[:length]:
            num_evicted += len(pool.put({one: 10}, chain=held))
            try:
                pool.acquire(one)
            except ValueError:
                continue  # another made it go since
            held.append(one)
        num_evicted += len(pool.reserve(length))
        assert set(held) <= pool.keys(), "what is held stays"
        usage = pool.usage()
        assert usage.used + usage.available == usage.total
        assert min(usage.held, usage.idle, usage.working, usage.available) >= 0
        pool.touch(own)
        pool.unreserve(length)
        for one in held:
            pool.release(one)
        num_evicted += len(pool.discard(own[: step % 3]))
    return num_evicted


@pytest.mark.usefixtures("hectic_threads")
def test_eight_threads_on_one_pool() -> None:
    # Room for what eight threads hold at most, but not for all that was ever idle.
    pool = BlockPool(SPEC, budget_bytes=NUM_THREADS * 40 + NUM_THREADS * 4)
    start = threading.Barrier(NUM_THREADS)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        workers = [threads.submit(hammer, pool, worker, start) for worker in range(NUM_THREADS)]
        num_evicted = sum(worker.result(timeout=60) for worker in workers)
    pool.check_integrity()
    usage = pool.usage()
    assert num_evicted > 0
    assert (usage.held, usage.working) == (0, 0)
    assert usage.idle == 10 * usage.num_blocks
