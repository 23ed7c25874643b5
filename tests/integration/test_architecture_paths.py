"""The files that `docs/architecture.md` lists are those that run, no more and no fewer."""

import threading
from pathlib import Path

import pytest

from semantic.adapters.outbound.backends.fake import FakeBackend, fake_spec
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.blocks.format import KVCodec, KVFormat
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.domain.pool import BlockPool
from tests.call_profile import CallProfile, listed_files
from tests.http_server import make_settings, run_server
from tests.unit.application.engine_rig import EngineRig, make_job

pytestmark = pytest.mark.integration

MAX_BLOCK_FILES = 12
MAX_REQUEST_FILES = 30
BLOCK_TOKENS = 64
SPEC = fake_spec(block_tokens=BLOCK_TOKENS)
# What the document leaves out: values, the request that a block belongs to, and ledger tables.
LEFT_OUT = ("domain/", "ports/", "application/engine/", "adapters/outbound/ledger/")
BACKENDS, BACKEND = "adapters/outbound/backends/", "adapters/outbound/backends/fake.py"
COUNTED = ("domain/pool.py", "application/engine/kv_reuse.py", "application/engine/restore.py")


class WaitingRig(EngineRig[FakeBackend]):
    """An engine that waits for the files it reads."""

    def __init__(self, store: AgentCacheStore) -> None:
        self.has_read = threading.Event()
        super().__init__(FakeBackend(SPEC), store, tick=1.0, on_ready=self.has_read.set)

    def wait(self) -> None:
        assert self.has_read.wait(30)
        self.has_read.clear()


def live(directory: Path, kv_format: KVFormat, profile: CallProfile) -> None:
    """Take a block from sealing to restoring: memory, disk, eviction, and back."""
    ledger = SqliteLedger(directory)
    ledger.load()
    files = SafetensorsCache(directory, KVCodec(kv_format))
    disk = DiskTier(files, ledger, DiskLimits(2**30, 2**28))
    store = AgentCacheStore(BlockPool(SPEC, 2**20), disk)
    disk.start(store.is_on_disk)
    rig = WaitingRig(store)
    profile.clear()  # the rest is the block's
    prompt = "x" * BLOCK_TOKENS
    rig.serve(make_job("first", prompt + "a", max_tokens=1))
    assert disk.flush(30)
    room = store.usage().available + store.usage().idle
    store.reserve(room)
    store.unreserve(room)
    assert store.usage().num_blocks == 0
    rig.serve(make_job("second", prompt + "b", max_tokens=1))
    assert rig.reply_state("second").reuse.disk == BLOCK_TOKENS
    assert disk.close(30)


def files_of_a_block(directory: Path, kv_format: KVFormat = "raw") -> set[str]:
    with CallProfile(under=["application/engine/kv_reuse.py", "application/cache/"]) as profile:
        live(directory, kv_format, profile)
    # The backend counts as one file.
    files = [BACKEND if file.startswith(BACKENDS) else file for file in profile.files]
    return {file for file in files if file in COUNTED or not file.startswith(LEFT_OUT)}


def test_a_block_passes_the_files_that_the_document_lists(tmp_path: Path) -> None:
    listed = listed_files("A block")
    assert sorted(listed) == sorted(files_of_a_block(tmp_path))
    assert len(listed) <= MAX_BLOCK_FILES


def test_a_quantised_block_passes_one_more_file(tmp_path: Path) -> None:
    more = files_of_a_block(tmp_path, "q8g64") - set(listed_files("A block"))
    assert more == {"adapters/outbound/blocks/quantisation.py"}


# What the document leaves out of a request besides the files of a block.
REQUEST_LEFT_OUT = (
    "domain/",
    "ports/",
    "application/cache/",
    "adapters/outbound/blocks/",
    "adapters/outbound/ledger/",
    "adapters/outbound/telemetry/",
    "application/agents/feed.py",
    "application/agents/running_turns.py",
    "application/engine/speculative/",
)


def second_turn(home: Path, profile: CallProfile) -> set[str]:
    """The files that run for the second turn of a conversation, which reuses the first."""
    messages = [{"role": "user", "content": "Tell me a story about a dog. " * 10}]
    with run_server(make_settings(home)) as running, running.client() as http:
        body = {"model": running.model, "max_tokens": 8, "messages": messages}
        first = http.post("/v1/messages", json=body).raise_for_status().json()
        messages += [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": "Go on."},
        ]
        profile.clear()
        with http.stream("POST", "/v1/messages", json={**body, "stream": True}) as reply:
            events = "".join(reply.iter_text())
        assert '"cache_read_input_tokens":0' not in events
        return set(profile.files)


def test_a_request_passes_the_files_that_the_document_lists(tmp_path: Path) -> None:
    starts = ["adapters/inbound/", "application/requests/", "application/engine/"]
    with CallProfile(under=starts) as profile:
        passed = second_turn(tmp_path, profile)
    files = {BACKEND if file.startswith(BACKENDS) else file for file in passed}
    files -= set(listed_files("A block")) - {BACKEND}
    listed = listed_files("A request")
    assert sorted(listed) == sorted(f for f in files if not f.startswith(REQUEST_LEFT_OUT))
    assert len(listed) <= MAX_REQUEST_FILES
