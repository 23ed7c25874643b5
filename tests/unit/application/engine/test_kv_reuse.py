"""State that one request computed and another uses: waited for, forked, recalled, stored once."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.adapters.outbound.backends.fake import FakeTokenizer, fake_spec
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.cache.restore_plan import RestorePlan
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.request import EventBatch, ReplyState
from semantic.application.engine.scheduler import EngineLimits
from semantic.domain.blocks import BlockName
from semantic.domain.chat import ServiceClass
from semantic.domain.events import TextDelta
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec
from semantic.ports.backend import SequenceId
from tests.unit.application.engine_rig import FaultyBackend, alone, make_job, make_rig

pytestmark = pytest.mark.unit

NUM_SYSTEM, NUM_OWN, NUM_AGENTS = 2048, 200, 10
SYSTEM = "".join(itertools.islice(itertools.cycle("You are a helpful agent. "), NUM_SYSTEM))
BYTES_PER_TOKEN = 4  # what the fake model's payloads hold of a token


class CountingStore(AgentCacheStore):
    """Counts how often it plans."""

    num_plans = 0

    def plan(self, root: BlockName, tokens: Sequence[int], *, is_used: bool = True) -> RestorePlan:
        self.num_plans += 1
        return super().plan(root, tokens, is_used=is_used)


class Sharing:
    """An engine on real files."""

    def __init__(self, directory: Path, spec: ModelCacheSpec) -> None:
        self.backend = FaultyBackend(spec)
        self.directory = directory
        self.disk = DiskTier(
            SafetensorsCache(directory), SqliteLedger.in_memory(), DiskLimits(2**30, 2**28)
        )
        self.store = CountingStore(BlockPool(spec, 2**28), self.disk)
        self.disk.start(self.store.is_on_disk)
        self.text: dict[str, str] = {}
        self.engine = BlockPoolBatchEngine(
            self.backend,
            FakeTokenizer(),
            self.store,
            EngineLimits(max_idle=0),
            self._keep,
        )

    def _keep(self, batch: EventBatch) -> None:
        for name, event in batch:
            if isinstance(event, TextDelta):
                self.text[name] = self.text.get(name, "") + event.text

    def run(self) -> None:
        for _ in range(20_000):
            if not self.engine.has_work:
                return
            self.engine.step()
        raise AssertionError("the engine did not come to rest")

    def file_bytes(self) -> int:
        """Bytes of all files, once they are written."""
        assert self.disk.flush(30)
        paths = list(self.directory.rglob("*.safetensors"))
        return sum(path.stat().st_size for path in paths)


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Sharing]:
    layer = LayerSpec(LayerKind.FULL, num_kv_heads=1, key_dim=1, value_dim=1)
    spec = ModelCacheSpec("fake", (layer,), fake_spec().vocab_size, max_context=131_072)
    made = Sharing(tmp_path, spec)
    yield made
    assert made.disk.close(30)


def own(index: int) -> str:
    return "".join(itertools.islice(itertools.cycle(f"agent {index} says {index * 7}. "), NUM_OWN))


def test_ten_agents_store_what_they_share_once(sharing: Sharing) -> None:
    for index in range(NUM_AGENTS):
        job = make_job(f"a{index}", SYSTEM + own(index), boundaries=(NUM_SYSTEM,), max_tokens=1)
        sharing.engine.submit(job)
        sharing.run()
    unique = (NUM_SYSTEM + NUM_AGENTS * NUM_OWN) * BYTES_PER_TOKEN
    assert sharing.store.usage().used <= 1.15 * unique
    one = Sharing(sharing.directory / "alone", sharing.backend.spec)
    one.engine.submit(make_job("alone", SYSTEM + own(0), boundaries=(NUM_SYSTEM,), max_tokens=1))
    one.run()
    alone_bytes = one.file_bytes()
    assert one.disk.close(30)
    all_bytes = sharing.file_bytes() - alone_bytes
    # A file's header and ids count too: one agent's files are the measure of its share.
    num_files = sum(1 for _ in (sharing.directory / "blocks").rglob("*.safetensors"))
    assert num_files == NUM_SYSTEM // 256 + NUM_AGENTS
    own_file = max(p.stat().st_size for p in sharing.directory.rglob("*.safetensors"))
    assert all_bytes <= 1.15 * (alone_bytes + (NUM_AGENTS - 1) * own_file)


def test_five_that_start_at_once_compute_it_once(sharing: Sharing) -> None:
    jobs = [
        make_job(f"a{index}", SYSTEM + own(index), boundaries=(NUM_SYSTEM,), max_tokens=2)
        for index in range(5)
    ]
    for job in jobs:
        sharing.engine.submit(job)
    sharing.run()
    computed = sum(step.num_tokens for step in sharing.backend.steps)
    assert computed == NUM_SYSTEM + 5 * (NUM_OWN + 1)
    for job in jobs:
        assert sharing.text[job.id] == alone(job, sharing.backend.spec)


# -- plans --------------------------------------------------------------------------------------


def test_a_request_is_planned_once_as_long_as_the_index_stays_as_it_is(sharing: Sharing) -> None:
    for num_plans, name in enumerate(("first", "second"), 1):
        sharing.engine.submit(make_job(name, SYSTEM + name, max_tokens=1))
        sharing.run()
        assert sharing.store.num_plans == num_plans
        assert sharing.disk.flush(30)


def test_a_request_that_waited_is_planned_again_with_what_was_sealed_meanwhile() -> None:
    rig = make_rig(limits=EngineLimits(max_batch_size=1))
    first, second = make_job("a", "x" * 40, max_tokens=2), make_job("b", "x" * 40 + "yz")
    rig.submit(first)
    rig.submit(second)
    rig.run()
    assert rig.finished("b").usage.cache_read_tokens == 40
    assert rig.text("b") == alone(second)


def test_a_request_that_waited_is_planned_again_without_what_was_evicted_meanwhile() -> None:
    rig = make_rig(limits=EngineLimits(max_batch_size=1))
    rig.submit(make_job("a", "x" * 40, max_tokens=2))
    rig.run()
    rig.submit(make_job("other", "o" * 40, max_tokens=2))
    second = make_job("b", "x" * 40 + "yz")
    rig.submit(second)
    rig.step()
    room = rig.store.usage().available + rig.store.usage().idle
    rig.store.reserve(room)
    rig.store.release(room)
    rig.run()
    assert rig.finished("b").usage.cache_read_tokens == 0
    assert rig.text("b") == alone(second)


# -- single flight ------------------------------------------------------------------------------


def test_the_older_does_not_wait_for_the_younger() -> None:
    rig = make_rig(limits=EngineLimits(prefill_step_size=8))
    rig.submit(make_job("old", "c" * 64 + "o", service_class=ServiceClass.BACKGROUND))
    rig.submit(make_job("young", "c" * 64 + "y"))
    rig.step()
    assert rig.backend.num_open == 2


def test_less_than_a_block_in_common_is_not_waited_for() -> None:
    rig = make_rig(limits=EngineLimits(prefill_step_size=4))
    rig.submit(make_job("a", "c" * 7 + "a" * 30))
    rig.submit(make_job("b", "c" * 7 + "b" * 30))
    rig.step()
    assert rig.backend.num_open == 2


# -- fork ---------------------------------------------------------------------------------------


def test_a_fork_computes_only_what_is_new() -> None:
    rig = make_rig()
    rig.submit(make_job("a", "x" * 4, max_tokens=30))
    rig.step()
    before = len(rig.backend.steps)
    second = make_job("b", "x" * 4 + "yz")
    rig.submit(second)
    rig.run()
    chunks = [c for step in rig.backend.steps[before:] for c in step.chunks if c.seq == 1]
    assert chunks[0].start == 4
    assert rig.text("b") == alone(second)


def test_a_twin_of_a_running_prompt_still_computes_its_last_token() -> None:
    rig = make_rig()
    rig.submit(make_job("a", "x" * 20, max_tokens=30))
    rig.step()
    rig.submit(make_job("twin", "x" * 20))
    rig.run(max_steps=500)
    assert rig.text("twin") == alone(make_job("twin", "x" * 20))


def test_a_forked_request_is_kept_for_its_next_turn() -> None:
    rig = make_rig()
    rig.submit(make_job("a", "x" * 12, max_tokens=30))
    rig.step()
    rig.submit(make_job("b", "x" * 12 + "y" * 40))
    rig.run()
    rig.submit(make_job("b, turn 2", "x" * 12 + "y" * 40 + rig.text("b") + " and more"))
    rig.run()
    assert rig.finished("b, turn 2").usage.cache_read_tokens >= 52


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
    rig.store.release(rig.store.usage().working - rig.backend.bytes_for([60]))
    rig.engine.reconfigure(EngineLimits(prefill_step_size=8))
    rig.submit(make_job("b", second, max_tokens=2, service_class=ServiceClass.BACKGROUND))
    rig.step()
    # The blocks of "a" come back before "b" is as long as what they cover.
    rig.submit(make_job("a again", first, max_tokens=1))
    rig.run()
    mixed = make_job("m", first[:48] + second[48:] + "tail")
    rig.submit(mixed)
    rig.run()
    assert rig.text("m") == alone(mixed)


# -- idle copies --------------------------------------------------------------------------------


def test_a_request_refused_an_idle_copy_leaves_it_to_others() -> None:
    rig = make_rig(budget_tokens=200, max_idle=1)
    rig.submit(make_job("turn 1", "c" * 40, agent="a", max_tokens=2))
    rig.run()
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
    rig.submit(third)
    rig.run()
    assert rig.text("turn 3") == alone(third)
    assert rig.finished("turn 3").usage.cache_read_tokens == 40


# -- layers that cannot be cut ------------------------------------------------------------------


def test_a_boundary_can_be_resumed_at_where_layers_cannot_be_cut() -> None:
    rig = make_rig(spec=fake_spec(block_tokens=8, has_state=True))
    rig.submit(make_job("a", "s" * 20 + "first", boundaries=(20,)))
    rig.run()
    rig.submit(make_job("b", "s" * 20 + "other", boundaries=(20,)))
    rig.run()
    assert rig.finished("b").usage.cache_read_tokens == 20


def test_one_step_ahead_still_keeps_each_block_of_layers_that_cannot_be_cut() -> None:
    spec = fake_spec(block_tokens=8, has_state=True)
    rig = make_rig(spec=spec, pipeline_depth=1, limits=EngineLimits(prefill_step_size=8))
    rig.submit(make_job("a", "x" * 40))
    rig.run()
    rig.submit(make_job("b", "x" * 40 + "y"))
    rig.run()
    assert rig.finished("b").usage.cache_read_tokens == 40


def test_a_reply_that_ends_where_a_block_does_is_resumed_there() -> None:
    rig = make_rig(spec=fake_spec(block_tokens=8, has_state=True))
    rig.submit(make_job("a", "x" * 12, max_tokens=5))
    rig.run()
    rig.submit(make_job("b", "x" * 12 + rig.text("a") + "more"))
    rig.run()
    assert rig.finished("b").usage.cache_read_tokens == 16


def test_a_shared_head_is_waited_for_to_its_end_where_layers_cannot_be_cut() -> None:
    rig = make_rig(
        spec=fake_spec(block_tokens=8, has_state=True), limits=EngineLimits(prefill_step_size=8)
    )
    for name in ("a", "b"):
        rig.submit(make_job(name, "s" * 20 + name * 9, boundaries=(20,)))
    rig.run()
    assert rig.finished("b").usage.cache_read_tokens == 20
    assert rig.text("b") == alone(
        make_job("b", "s" * 20 + "b" * 9), fake_spec(block_tokens=8, has_state=True)
    )


def test_a_quota_ends_sealing_and_not_the_reply() -> None:
    rig = make_rig()
    job = replace(make_job("a", "x" * 40), max_kept=20)
    rig.submit(job)
    rig.run()
    assert rig.text("a") == alone(job)
    assert rig.store.usage().num_blocks == 2
    (left,) = [event for event in rig.events["a"] if isinstance(event, ReplyState)]
    assert left.num_sealed == 16
