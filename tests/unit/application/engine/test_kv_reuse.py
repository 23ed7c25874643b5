"""Agents with one system prompt store it once, in memory and on disk, and compute it once."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from semantic.adapters.outbound.backends.fake import FakeTokenizer, fake_spec
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.request import EventBatch
from semantic.application.engine.scheduler import EngineLimits
from semantic.domain.chat import TextDelta
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec
from tests.unit.application.engine_rig import FaultyBackend, alone, make_job

pytestmark = pytest.mark.unit

NUM_SYSTEM, NUM_OWN, NUM_AGENTS = 2048, 200, 10
SYSTEM = "".join(itertools.islice(itertools.cycle("You are a helpful agent. "), NUM_SYSTEM))
BYTES_PER_TOKEN = 4  # what the fake model's payloads hold of a token


class Sharing:
    """An engine on real files."""

    def __init__(self, directory: Path, spec: ModelCacheSpec) -> None:
        self.backend = FaultyBackend(spec)
        self.directory = directory
        self.disk = DiskTier(
            SafetensorsCache(directory), SqliteLedger.in_memory(), DiskLimits(2**30, 2**28)
        )
        self.store = AgentCacheStore(BlockPool(spec, 2**28), self.disk)
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
