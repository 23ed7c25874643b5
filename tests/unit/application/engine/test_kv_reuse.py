"""State that one request computed and another uses: waited for, forked, recalled, stored once."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.cache.restore_plan import RestorePlan
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.application.engine import restore
from semantic.application.engine.request import Job
from semantic.application.settings import EngineLimits
from semantic.domain.blocks import BlockName
from semantic.domain.chat import ServiceClass
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec
from semantic.ports.backend import KVPayload, SequenceId
from tests.unit.application.engine_rig import EngineRig, FaultyBackend, Rig, make_job, make_rig

pytestmark = pytest.mark.unit

NUM_SYSTEM, NUM_OWN, NUM_AGENTS = 2048, 200, 10
SYSTEM = "".join(itertools.islice(itertools.cycle("You are a helpful agent. "), NUM_SYSTEM))
BYTES_PER_TOKEN = 4  # what the fake model's payloads hold of a token
STATEFUL = fake_spec(block_tokens=8, has_state=True)


class CountingStore(AgentCacheStore):
    """Counts how often it plans."""

    num_plans = 0

    def plan(self, root: BlockName, tokens: Sequence[int], *, is_used: bool = True) -> RestorePlan:
        self.num_plans += 1
        return super().plan(root, tokens, is_used=is_used)


@contextlib.contextmanager
def rig_on(directory: Path) -> Iterator[tuple[Rig, CountingStore, DiskTier]]:
    """An engine on real files."""
    layer = LayerSpec(LayerKind.FULL, num_kv_heads=1, key_dim=1, value_dim=1)
    spec = ModelCacheSpec("fake", (layer,), fake_spec().vocab_size, max_context=131_072)
    limits = DiskLimits(2**30, 2**28)
    disk = DiskTier(SafetensorsCache(directory), SqliteLedger.in_memory(), limits)
    store = CountingStore(BlockPool(spec, 2**28), disk)
    disk.start(store.is_on_disk)
    yield EngineRig(FaultyBackend(spec), store), store, disk
    assert disk.close(30)


def own(index: int) -> Job:
    """The first turn of an agent that shares its system prompt with others."""
    words = itertools.cycle(f"agent {index} says {index * 7}. ")
    prompt = SYSTEM + "".join(itertools.islice(words, NUM_OWN))
    return make_job(f"a{index}", prompt, boundaries=(NUM_SYSTEM,), max_tokens=1)


def file_sizes(directory: Path) -> list[int]:
    return [path.stat().st_size for path in directory.rglob("*.safetensors")]


def test_ten_agents_store_what_they_share_once(tmp_path: Path) -> None:
    with rig_on(tmp_path / "alone") as (rig, _, _):
        rig.serve(own(0))
    with rig_on(tmp_path / "all") as (rig, store, _):
        for index in range(NUM_AGENTS):
            rig.serve(own(index))
        unique = (NUM_SYSTEM + NUM_AGENTS * NUM_OWN) * BYTES_PER_TOKEN
        assert store.usage().used <= 1.15 * unique
    sizes = file_sizes(tmp_path / "all")
    assert len(sizes) == NUM_SYSTEM // 256 + NUM_AGENTS
    # A file's header and ids count too: one agent's files are the measure of its share.
    alone_bytes = sum(file_sizes(tmp_path / "alone"))
    assert sum(sizes) <= 1.15 * (alone_bytes + (NUM_AGENTS - 1) * max(sizes))


# -- plans --------------------------------------------------------------------------------------


def test_a_request_is_planned_once_as_long_as_the_index_stays_as_it_is(tmp_path: Path) -> None:
    with rig_on(tmp_path) as (rig, store, disk):
        for num_plans in (1, 2):
            rig.serve(own(num_plans))
            assert store.num_plans == num_plans
            assert disk.flush(30)


def test_a_request_that_waited_is_planned_again_with_what_was_sealed_meanwhile() -> None:
    rig = make_rig(limits=EngineLimits(max_batch_size=1))
    second = make_job("b", "x" * 40 + "yz")
    rig.serve(make_job("a", "x" * 40, max_tokens=2), second)
    assert rig.num_reused("b") == 40
    rig.expect_alone(second)


def test_a_request_that_waited_is_planned_again_without_what_was_evicted_meanwhile() -> None:
    rig = make_rig(limits=EngineLimits(max_batch_size=1))
    rig.serve(make_job("a", "x" * 40, max_tokens=2))
    second = make_job("b", "x" * 40 + "yz")
    rig.submit(make_job("other", "o" * 40, max_tokens=2), second)
    rig.step()
    room = rig.store.usage().available + rig.store.usage().idle
    rig.store.reserve(room)
    rig.store.unreserve(room)
    rig.run()
    assert rig.num_reused("b") == 0
    rig.expect_alone(second)


# -- single flight ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "common, service_class",
    [
        (64, ServiceClass.BACKGROUND),  # the older does not wait for the younger
        (7, ServiceClass.INTERACTIVE),  # less than a block
    ],
)
def test_requests_do_not_wait_for_short_or_background_prefixes(
    common: int, service_class: ServiceClass
) -> None:
    rig = make_rig(limits=EngineLimits(prefill_step_size=4))
    rig.submit(make_job("old", "c" * common + "o" * 30, service_class=service_class))
    rig.submit(make_job("young", "c" * common + "y" * 30))
    rig.step()
    assert rig.backend.num_open == 2


def test_on_a_slow_device_a_request_waits_for_less_than_a_block() -> None:
    backend = FaultyBackend(fake_spec(block_tokens=8))
    store = AgentCacheStore(BlockPool(backend.spec, backend.bytes_for([100_000])))
    limits = EngineLimits(prefill_step_size=4, max_idle=0)
    rig = EngineRig(backend, store, limits, tick=0.5)
    rig.serve(make_job("first", "f" * 16, max_tokens=1))
    rig.submit(make_job("old", "c" * 7 + "o" * 30), young := make_job("young", "c" * 7 + "y" * 30))
    rig.step()
    assert rig.backend.num_open == 1
    rig.run()
    assert rig.num_reused("young") == 7
    rig.expect_alone(young)


# -- fork ---------------------------------------------------------------------------------------


def test_a_fork_computes_only_what_is_new() -> None:
    rig = make_rig()
    rig.submit(make_job("a", "x" * 4, max_tokens=30))
    rig.step()
    before = len(rig.backend.steps)
    second = make_job("b", "x" * 4 + "yz")
    rig.serve(second)
    chunks = [c for step in rig.backend.steps[before:] for c in step.chunks if c.seq == 1]
    assert chunks[0].start == 4
    rig.expect_alone(second)


def test_a_forked_request_is_kept_for_its_next_turn() -> None:
    rig = make_rig()
    rig.submit(make_job("a", "x" * 12, max_tokens=30))
    rig.step()
    rig.serve(make_job("b", "x" * 12 + "y" * 40))
    rig.serve(make_job("b, turn 2", "x" * 12 + "y" * 40 + rig.text("b") + " and more"))
    assert rig.num_reused("b, turn 2") >= 52


class ForksOnce(FaultyBackend):
    """Can fork a first time and never again."""

    num_forks = 0

    def fork(self, src: SequenceId, dst: SequenceId, num_tokens: int) -> bool:
        self.num_forks += 1
        return self.num_forks == 1 and super().fork(src, dst, num_tokens)


def test_what_is_sealed_after_a_fork_has_its_own_chain() -> None:
    rig = make_rig(backend=ForksOnce(fake_spec(block_tokens=8)))
    first, second = "c" * 12 + "a" * 40, "c" * 12 + "b" * 60
    rig.submit(make_job("a", first, max_tokens=40))
    rig.step()
    # All blocks go, so that "b" forks instead of recalling.
    rig.store.reserve(rig.store.usage().available + rig.store.usage().idle)
    rig.store.unreserve(rig.store.usage().working - rig.backend.bytes_for([60]))
    rig.engine.reconfigure(EngineLimits(prefill_step_size=8))
    rig.submit(make_job("b", second, max_tokens=2, service_class=ServiceClass.BACKGROUND))
    rig.step()
    # The blocks of "a" come back before "b" is as long as what they cover.
    rig.serve(make_job("a again", first, max_tokens=1))
    mixed = make_job("m", first[:48] + second[48:] + "tail")
    rig.serve(mixed)
    rig.expect_alone(mixed)


# -- idle copies --------------------------------------------------------------------------------


def test_a_request_refused_an_idle_copy_leaves_it_to_others() -> None:
    rig = make_rig(budget_tokens=200, max_idle=1)
    rig.serve(make_job("turn 1", "c" * 40, agent="a", max_tokens=2))
    rig.submit(make_job("other", "o" * 90, max_tokens=40))
    rig.step()
    # It would go on with the copy, but there is no memory for so long a prompt.
    rig.submit(make_job("turn 2", "c" * 40 + "d" * 100, agent="a"))
    rig.step()
    assert rig.backend.num_open == 2
    rig.engine.cancel("turn 2")
    rig.step()
    assert rig.backend.num_open == 2
    third = make_job("turn 3", "c" * 40 + "e" * 4, agent="a")
    rig.serve(third)
    rig.expect_alone(third)
    assert rig.num_reused("turn 3") == 40


# -- layers that cannot be cut ------------------------------------------------------------------


@pytest.mark.parametrize("is_together", [False, True])
def test_a_shared_head_is_resumed_at_its_end_where_layers_cannot_be_cut(is_together: bool) -> None:
    rig = make_rig(spec=STATEFUL, limits=EngineLimits(prefill_step_size=8))
    jobs = [make_job(name, "s" * 20 + name * 9, boundaries=(20,)) for name in "ab"]
    rig.submit(jobs[0])
    if not is_together:
        rig.run()
    rig.serve(jobs[1])
    assert rig.num_reused("b") == 20
    rig.expect_alone(*jobs)


def test_one_step_ahead_still_keeps_each_block_of_layers_that_cannot_be_cut() -> None:
    rig = make_rig(spec=STATEFUL, pipeline_depth=1, limits=EngineLimits(prefill_step_size=8))
    rig.serve(make_job("a", "x" * 40))
    rig.serve(make_job("b", "x" * 40 + "y"))
    assert rig.num_reused("b") == 40


def test_a_reply_that_ends_where_a_block_does_is_resumed_there() -> None:
    rig = make_rig(spec=STATEFUL)
    rig.serve(make_job("a", "x" * 12, max_tokens=5))
    rig.serve(make_job("b", "x" * 12 + rig.text("a") + "more"))
    assert rig.num_reused("b") == 16


class LoadingBackend(FaultyBackend):
    """Notes for which sequences state is loaded."""

    def __init__(self) -> None:
        super().__init__(fake_spec(block_tokens=8))
        self.loaded: list[SequenceId] = []

    def load(self, seq: SequenceId, parts: Sequence[KVPayload], end: int) -> None:
        self.loaded.append(seq)
        super().load(seq, parts, end)


def test_while_others_decode_restores_run_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block_bytes = 8 * BYTES_PER_TOKEN
    monkeypatch.setattr(restore, "_STEP_BYTES", (block_bytes, block_bytes))
    backend = LoadingBackend()
    rig = make_rig(backend=backend)
    before = [make_job(f"{n}", f"{n} was here before. " * 4) for n in range(3)]
    rig.serve(*before)
    neighbour = make_job("neighbour", "somebody else", max_tokens=60)
    rig.submit(neighbour)
    rig.step(2)
    again = [replace(job, id=f"again {job.id}") for job in before]
    rig.serve(*again)
    begun, rest = backend.loaded[:3], backend.loaded[3:]
    assert len(set(begun)) == 3
    assert set(rest) == set(begun)  # each in several steps
    assert rest == sorted(rest)
    rig.expect_alone(neighbour, *again)


def test_a_quota_ends_sealing_and_not_the_reply() -> None:
    rig = make_rig()
    job = replace(make_job("a", "x" * 40), max_kept=20)
    rig.serve(job)
    rig.expect_alone(job)
    assert rig.store.usage().num_blocks == 2
    assert rig.reply_state("a").num_sealed == 16
