"""The parts that store agents, wired over a real directory."""

import gc
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.model import LoadedModel
from semantic.application.settings import EngineLimits
from semantic.domain.access import KeyRing, TenantPolicy
from semantic.domain.agents import Agent, AgentProfile
from semantic.domain.blocks import BlockNamespace, BlockPart
from semantic.domain.errors import QuotaExceededError
from semantic.entrypoints.persistence import AgentMemory
from tests.http_server import make_settings
from tests.unit.application.engine_rig import make_job
from tests.waiting import await_that

pytestmark = pytest.mark.unit


def open_memory(directory: Path) -> tuple[AgentMemory, BlockPoolBatchEngine]:
    memory = AgentMemory(make_settings(directory))
    model = LoadedModel("fake", FakeBackend(), FakeTokenizer())
    return memory, memory.make_engine(model, EngineLimits(), lambda _: None, lambda: None)


def test_what_was_found_at_the_start_is_not_kept_beside_the_store(tmp_path: Path) -> None:
    memory, engine = open_memory(tmp_path)
    root = BlockNamespace(str(tmp_path), "fake").root()
    engine.submit(replace(make_job("a", "x" * 100), root=root))
    while engine.has_work:
        engine.step()
    assert memory.close(20)
    del memory, engine

    memory, _ = open_memory(tmp_path)
    assert "7 block files" in memory.summary
    memory.cache.upkeep.collect(orphan_age_s=-1)
    assert len(memory.cache.store.nodes()) == 0
    assert memory.close(20)
    gc.collect()
    known = [part for part in gc.get_objects() if type(part) is BlockPart]
    assert not [part for part in known if part.root == root]
    assert "7 block files" in memory.summary


def test_a_stop_says_what_it_had_no_time_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = AgentMemory(make_settings(tmp_path))
    model = LoadedModel("fake", FakeBackend(), FakeTokenizer())
    engine = memory.make_engine(model, EngineLimits(), lambda _: None, lambda: None)
    disk = memory.disk
    assert disk is not None
    write = SafetensorsCache.write

    def write_slowly(*given: Any, **options: Any) -> BlockPart:
        await_that(lambda: time.monotonic() > disk._deadline)
        return write(*given, **options)

    monkeypatch.setattr(SafetensorsCache, "write", write_slowly)
    engine.submit(replace(make_job("a", "x" * 100), root=BlockNamespace("", "fake").root()))
    while engine.has_work:
        engine.step()
    with structlog.testing.capture_logs() as lines:
        memory.close(0.4)
    assert memory.cache.store.tiers.unwritten_bytes > 0
    (line,) = [line for line in lines if "unwritten_mb" in line]
    assert line["unwritten_mb"] == 1
    assert "Raise shutdown_timeout_s" in line["event"]
    await_that(lambda: disk.is_closed)


def test_a_model_that_is_dropped_leaves_memory(tmp_path: Path) -> None:
    memory, backend = AgentMemory(make_settings(tmp_path)), FakeBackend()
    model = LoadedModel("fake", backend, FakeTokenizer())
    engine = memory.make_engine(model, EngineLimits(), lambda _: None, lambda: None)
    left = weakref.ref(backend)
    del engine, model, backend
    gc.collect()
    assert left() is None
    assert memory.close(20)


def test_storage_is_counted_once_a_tenant_has_a_quota(tmp_path: Path) -> None:
    memory = AgentMemory(make_settings(tmp_path))
    assert memory.agents.storage is None
    memory.limit_storage(KeyRing(tenants={"a": TenantPolicy(disk_bytes=1000)}))
    profile = AgentProfile(system="x" * 2000)
    with pytest.raises(QuotaExceededError):
        memory.agents.create(Agent("one", 1.0, tenant="a", profile=profile))
    memory.agents.create(Agent("one", 1.0, tenant="b", profile=profile))
    memory.limit_storage(KeyRing())
    memory.agents.create(Agent("one", 1.0, tenant="a", profile=profile))
    assert memory.close(20)
