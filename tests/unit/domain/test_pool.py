import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from semantic.domain.blocks import BlockName, BlockNamespace, KVBlock
from semantic.domain.errors import PoolExhaustedError
from semantic.domain.pool import BlockPool, PoolUsage, Pressure
from semantic.domain.sampling import uniform
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec

pytestmark = pytest.mark.unit

ROOT = BlockNamespace("model@1", "bf16").root()
ABSENT = KVBlock.of(ROOT, (99,), 10).name


def spec_of(block_tokens: int) -> ModelCacheSpec:
    layer = LayerSpec(LayerKind.FULL, num_kv_heads=1, key_dim=8, value_dim=8)
    return ModelCacheSpec("tiny", (layer,), 100, 10_000, block_tokens=block_tokens)


def chain_of(num_blocks: int, nbytes: int = 10, first_token: int = 0) -> tuple[KVBlock, ...]:
    chain: list[KVBlock] = []
    for index in range(num_blocks):
        parent = chain[-1].name if chain else ROOT
        chain.append(KVBlock.of(parent, (first_token + index,), nbytes))
    return tuple(chain)


def names(blocks: tuple[KVBlock, ...]) -> list[BlockName]:
    return [block.name for block in blocks]


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    pool = BlockPool(spec_of(4), budget_bytes=100)
    yield pool
    pool.check_integrity()


def put_idle(pool: BlockPool, *blocks: KVBlock) -> None:
    """Make blocks idle one by one: the first given is the least recently used."""
    for block in blocks:
        pool.allocate((block,))
        pool.free((block.name,))


def idle_order(pool: BlockPool) -> tuple[KVBlock, ...]:
    """Empty the idle list, and return it with what would have gone first in front."""
    return pool.evict(sys.maxsize)


# -- construction and readings ----------------------------------------------------------------


def test_a_new_pool_is_empty(pool: BlockPool) -> None:
    assert pool.usage() == PoolUsage(total=100, held=0, idle=0, working=0, num_blocks=0)
    assert pool.spec == spec_of(4)


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget_bytes must not be negative, got -1"):
        BlockPool(spec_of(4), -1)


def test_get_does_not_reference(pool: BlockPool) -> None:
    (block,) = chain_of(1)
    put_idle(pool, block)

    assert pool.get(block.name) is block
    assert pool.get(ABSENT) is None
    assert pool.num_refs(block.name) == 0
    assert pool.num_refs(ABSENT) == 0
    assert pool.usage().idle == 10


@pytest.mark.parametrize(
    "percent, level",
    [
        (0, Pressure.LOW),
        (79, Pressure.LOW),
        (80, Pressure.ELEVATED),
        (89, Pressure.ELEVATED),
        (90, Pressure.HIGH),
        (99, Pressure.HIGH),
        (100, Pressure.FULL),
    ],
)
def test_pressure_levels(pool: BlockPool, percent: int, level: Pressure) -> None:
    pool.reserve(percent)
    assert pool.usage().pressure is level
    pool.release(percent)

    pool.allocate((KVBlock.of(ROOT, (1,), percent),))
    assert pool.usage().pressure is level


def test_pressure_levels_are_not_rounded_up() -> None:
    usage = PoolUsage(total=1000, held=500, idle=0, working=299, num_blocks=1)

    assert usage.pressure is Pressure.LOW


def test_idle_blocks_are_no_pressure(pool: BlockPool) -> None:
    put_idle(pool, *chain_of(10))

    usage = pool.usage()
    assert (usage.used, usage.available) == (100, 0)
    assert usage.pressure is Pressure.LOW


def test_a_pool_without_budget_is_full() -> None:
    pool = BlockPool(spec_of(4), 0)

    assert pool.usage().pressure is Pressure.FULL
    with pytest.raises(PoolExhaustedError):
        pool.reserve(1)
    pool.check_integrity()


# -- allocate and free ------------------------------------------------------------------------


def test_allocate_counts_a_block_once_and_every_reference(pool: BlockPool) -> None:
    first, second = chain_of(2)

    assert pool.allocate((first, second)) == ()
    assert pool.allocate((first, first)) == ()

    assert (pool.num_refs(first.name), pool.num_refs(second.name)) == (3, 1)
    assert pool.usage() == PoolUsage(total=100, held=20, idle=0, working=0, num_blocks=2)


def test_allocate_nothing(pool: BlockPool) -> None:
    assert pool.allocate(()) == ()
    assert pool.usage().used == 0


def test_a_block_is_idle_when_the_last_reference_is_gone(pool: BlockPool) -> None:
    (block,) = chain_of(1)
    pool.allocate((block, block))

    pool.free((block.name,))
    assert pool.usage() == PoolUsage(total=100, held=10, idle=0, working=0, num_blocks=1)
    pool.free((block.name,))
    assert pool.usage() == PoolUsage(total=100, held=0, idle=10, working=0, num_blocks=1)


def test_a_block_longer_than_the_spec_allows_is_refused(pool: BlockPool) -> None:
    fits = KVBlock.of(ROOT, range(4), 10)
    too_long = KVBlock.of(ROOT, range(5), 10)

    with pytest.raises(ValueError, match=f"at most 4 tokens, {too_long.name.short} has 5"):
        pool.allocate((fits, too_long))

    assert pool.usage().num_blocks == 0


def test_allocate_evicts_no_more_than_it_must(pool: BlockPool) -> None:
    old = chain_of(10)
    put_idle(pool, *old)

    assert pool.allocate((KVBlock.of(ROOT, (50,), 11),)) == old[:2]
    assert pool.usage() == PoolUsage(total=100, held=11, idle=80, working=0, num_blocks=9)


def test_allocate_spares_the_idle_blocks_it_was_given(pool: BlockPool) -> None:
    old = chain_of(10)
    new = KVBlock.of(ROOT, (50,), 10)
    put_idle(pool, *old)

    assert pool.allocate((old[0], new)) == (old[1],)
    assert pool.num_refs(old[0].name) == 1


def test_a_refused_allocation_changes_nothing(pool: BlockPool) -> None:
    old = chain_of(4)
    put_idle(pool, *old)
    pool.reserve(55)
    before = pool.usage()

    # 45 bytes could be had, but 10 of them are the known block's own.
    with pytest.raises(PoolExhaustedError, match="55 of 100 are in use") as refused:
        pool.allocate((old[0], KVBlock.of(ROOT, (50,), 36)))

    assert refused.value.retry_after_s == 1.0
    assert pool.usage() == before
    assert pool.num_refs(old[0].name) == 0
    assert idle_order(pool) == old


def test_the_last_byte_can_be_had(pool: BlockPool) -> None:
    put_idle(pool, *chain_of(10))
    whole = KVBlock.of(ROOT, (50,), 100)

    assert len(pool.allocate((whole,))) == 10
    assert pool.usage().available == 0


def test_double_free_is_refused(pool: BlockPool) -> None:
    first, second = chain_of(2)
    pool.allocate((first, second))
    pool.free((first.name,))
    before = pool.usage()

    for freed in [(first.name,), (second.name, second.name), (second.name, ABSENT)]:
        with pytest.raises(ValueError, match="no reference to give back"):
            pool.free(freed)

    assert pool.usage() == before
    assert pool.num_refs(second.name) == 1


# -- acquire ----------------------------------------------------------------------------------


def test_acquire_takes_the_leading_run(pool: BlockPool) -> None:
    chain = chain_of(4)
    put_idle(pool, chain[0], chain[1], chain[3])

    assert pool.acquire(names(chain)) == chain[:2]

    assert [pool.num_refs(name) for name in names(chain)] == [1, 1, 0, 0]
    assert pool.usage() == PoolUsage(total=100, held=20, idle=10, working=0, num_blocks=3)
    assert pool.acquire(names(chain[2:])) == ()


def test_acquire_asks_for_no_name_past_the_gap(pool: BlockPool) -> None:
    chain = chain_of(3)
    put_idle(pool, chain[0])
    asked: list[BlockName] = []

    def lazily() -> Iterator[BlockName]:
        for name in names(chain):
            asked.append(name)
            yield name

    pool.acquire(lazily())

    assert asked == names(chain[:2])


def test_acquire_references_nothing_if_the_names_fail(pool: BlockPool) -> None:
    (block,) = chain_of(1)
    put_idle(pool, block)

    def broken() -> Iterator[BlockName]:
        yield block.name
        raise KeyError("no more names")

    with pytest.raises(KeyError):
        pool.acquire(broken())

    assert pool.num_refs(block.name) == 0


# -- eviction order ---------------------------------------------------------------------------


def test_the_least_recently_used_goes_first(pool: BlockPool) -> None:
    a, b, c, d = chain_of(4)
    put_idle(pool, a, b, c, d)
    pool.touch((b.name,))
    pool.acquire((a.name,))
    pool.free((a.name,))

    assert [pool.evict(10) for _ in range(5)] == [(c,), (d,), (b,), (a,), ()]


def test_touch_passes_over_what_is_held_or_absent(pool: BlockPool) -> None:
    a, b, c = chain_of(3)
    put_idle(pool, a, b)
    pool.allocate((c,))
    before = pool.usage()

    pool.touch((c.name, ABSENT, a.name))

    assert pool.usage() == before
    assert idle_order(pool) == (b, a)


def freed(pool: BlockPool, chain: list[BlockName]) -> None:
    pool.acquire(chain)
    pool.free(chain)


def touched(pool: BlockPool, chain: list[BlockName]) -> None:
    pool.touch(chain)


@pytest.mark.parametrize("use", [freed, touched])
def test_tails_go_before_heads(
    pool: BlockPool, use: Callable[[BlockPool, list[BlockName]], None]
) -> None:
    chain, other = chain_of(4), chain_of(2, first_token=50)
    put_idle(pool, *chain, *other)

    use(pool, names(chain))

    assert idle_order(pool) == (*other, *reversed(chain))


def test_referenced_blocks_are_not_evicted(pool: BlockPool) -> None:
    referenced, idle = chain_of(2)
    put_idle(pool, idle)
    pool.allocate((referenced,))

    assert pool.evict(1000) == (idle,)
    with pytest.raises(PoolExhaustedError):
        pool.reserve(91)
    assert pool.usage() == PoolUsage(total=100, held=10, idle=0, working=0, num_blocks=1)


def test_evict_takes_whole_blocks(pool: BlockPool) -> None:
    a, b, c = chain_of(3)
    put_idle(pool, a, b, c)

    assert pool.evict(0) == ()
    assert pool.evict(-5) == ()
    assert pool.evict(1) == (a,)
    assert pool.evict(11) == (b, c)


def test_evict_takes_blocks_without_bytes_too(pool: BlockPool) -> None:
    chain = chain_of(3, nbytes=0)
    put_idle(pool, *chain)

    assert pool.evict(1) == chain


# -- working bytes ----------------------------------------------------------------------------


def test_reserve_evicts_and_release_gives_back(pool: BlockPool) -> None:
    old = chain_of(10)
    put_idle(pool, *old)

    assert pool.reserve(15) == old[:2]
    assert pool.usage() == PoolUsage(total=100, held=0, idle=80, working=15, num_blocks=8)
    pool.release(15)
    assert pool.usage() == PoolUsage(total=100, held=0, idle=80, working=0, num_blocks=8)


def test_refused_reservations_change_nothing(pool: BlockPool) -> None:
    a, b = chain_of(2)
    put_idle(pool, a, b)
    pool.reserve(30)
    before = pool.usage()

    with pytest.raises(PoolExhaustedError):
        pool.reserve(71)
    with pytest.raises(ValueError, match="nbytes must not be negative, got -1"):
        pool.reserve(-1)
    for nbytes in (31, -1):
        with pytest.raises(ValueError, match=f"cannot release {nbytes} of 30 bytes"):
            pool.release(nbytes)

    assert pool.usage() == before
    assert idle_order(pool) == (a, b)


# -- the integrity check itself ---------------------------------------------------------------


def lose_a_reference(pool: BlockPool) -> None:
    for entry in pool._entries.values():
        entry.num_refs -= 1


def swap_blocks(pool: BlockPool) -> None:
    one, other = pool._entries.values()
    one.block, other.block = other.block, one.block


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
        (lose_a_reference, "counts are not negative"),
        (swap_blocks, "names match"),
    ],
)
def test_the_integrity_check_can_fail(corrupt: Callable[[BlockPool], None], said: str) -> None:
    held, idle = chain_of(2)
    pool = BlockPool(spec_of(4), 100)
    put_idle(pool, idle)
    pool.allocate((held,))
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
    """Use the pool in every way, give everything back, and count the blocks evicted."""
    shared, own = chain_of(4), chain_of(4, first_token=100 * (worker + 1))
    num_evicted = 0
    start.wait()
    for step in range(NUM_STEPS):
        length = 1 + int(4 * uniform(worker, step))
        blocks = (shared if step % 2 else own)[:length]
        num_evicted += len(pool.allocate(blocks))
        num_evicted += len(pool.reserve(length))
        found = pool.acquire(names(blocks))
        assert found == blocks, "held blocks stay"
        usage = pool.usage()
        assert usage.used + usage.available == usage.total
        assert min(usage.held, usage.idle, usage.working, usage.available) >= 0
        pool.free(names(found))
        pool.touch(names(own))
        pool.release(length)
        pool.free(names(blocks))
        num_evicted += len(pool.evict(7 * (step % 3)))
    pool.allocate(shared[:1])
    return num_evicted


@pytest.mark.usefixtures("hectic_threads")
def test_eight_threads_on_one_pool() -> None:
    # Room for what eight threads hold at most, but not for all that was ever idle.
    pool = BlockPool(spec_of(4), budget_bytes=NUM_THREADS * 40 + NUM_THREADS * 4)
    start = threading.Barrier(NUM_THREADS)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        workers = [threads.submit(hammer, pool, worker, start) for worker in range(NUM_THREADS)]
        num_evicted = sum(worker.result(timeout=60) for worker in workers)

    pool.check_integrity()
    (kept,) = chain_of(1)
    usage = pool.usage()
    assert num_evicted > 0
    assert pool.num_refs(kept.name) == NUM_THREADS
    assert (usage.held, usage.working) == (10, 0)
    assert usage.idle == 10 * (usage.num_blocks - 1)
    pool.free([kept.name] * NUM_THREADS)
    assert pool.usage().held == 0
    assert len(idle_order(pool)) == usage.num_blocks
