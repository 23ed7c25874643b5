"""A store with a disk, files and a ledger in memory, and payloads that tell what they stand for."""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from semantic.adapters.outbound.backends.common import sort_parts
from semantic.adapters.outbound.backends.fake import FakeBackend, fake_spec
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.upkeep import Upkeep
from semantic.application.cache.restore_plan import RestorePlan, WantedPart
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.application.engine.restore import Restore
from semantic.domain.agents import LOCAL_TENANT, Pointer, Reuse, Turn
from semantic.domain.blocks import BlockName, BlockOrigin, BlockPart, PartKey, block_end
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import HostBuffer, KVPayload, SequenceId
from semantic.ports.storage import (
    DropPart,
    LedgerChange,
    LedgerState,
    MarkIndexWhole,
    PutPart,
    TouchParts,
)
from tests.unit.adapters.outbound.ledger.ledger_values import LedgerModel
from tests.unit.application.engine_rig import ROOT
from tests.unit.application.ledger_rig import exchange_of
from tests.waiting import await_that

ENTRY_BYTES = 8
HEADER_BYTES = 1000
ABI = "rig.v1"


def _entry(kind: LayerKind, tokens: Sequence[int]) -> bytes:
    """What a layer keeps of the last of `tokens`: it depends on all of them."""
    text = f"{kind.value}:{','.join(map(str, tokens))}"
    return hashlib.sha256(text.encode()).digest()[:ENTRY_BYTES]


def make_payload(
    spec: ModelCacheSpec, tokens: Sequence[int], start: int, end: int, kind: LayerKind
) -> KVPayload:
    """What a model would keep of positions ``[start, end)`` of `tokens`."""
    if kind is LayerKind.WINDOW:
        start = max(start, end - spec.window)
    places = [end] if kind is LayerKind.STATE else range(start + 1, end + 1)
    data = b"".join(_entry(kind, tokens[:place]) for place in places)
    buffer = HostBuffer(kind.value, (len(data),), "u8", data)
    return KVPayload(ABI, kind, start, end, (buffer,))


class MemoryFiles:
    """`BlockFilesPort` over a dictionary; files can be spoilt, and the disk can be full."""

    def __init__(self) -> None:
        self.files: dict[PartKey, tuple[BlockPart, KVPayload]] = {}
        self.bad: set[PartKey] = set()
        self.is_full = False
        self.other = 0
        self.quarantined = 0
        self.gate = threading.Event()
        self.gate.set()
        self.write_gate = threading.Event()
        self.write_gate.set()
        self.write_begun = threading.Event()

    def write(self, part: BlockPart, payload: KVPayload, *, is_synced: bool) -> BlockPart:
        del is_synced
        self.write_begun.set()
        assert self.write_gate.wait(60)
        if self.is_full:
            raise CachePersistenceError("No space left on device")
        written = replace(part, nbytes=payload.nbytes + len(part.tokens) + HEADER_BYTES)
        self.files[part.key] = (written, payload)
        self.bad.discard(part.key)
        return written

    def read(self, part: BlockPart) -> KVPayload:
        assert self.gate.wait(60)
        found = self.files.get(part.key)
        if found is None or part.key in self.bad or found[0].key != part.key:
            raise CacheCorruptionError("the file is missing, damaged or another")
        return found[1]

    def content(self, part: BlockPart) -> memoryview:
        return memoryview(self.read(part).buffers[0].data)

    def parse(self, part: BlockPart, content: memoryview) -> KVPayload:
        del content
        return self.read(part)

    def room_for(self, part: BlockPart) -> int:
        return part.nbytes - len(part.tokens) - HEADER_BYTES

    def delete(self, part: BlockPart) -> None:
        self.files.pop(part.key, None)
        self.bad.discard(part.key)

    def quarantine(self, part: BlockPart) -> None:
        found = self.files.pop(part.key, None)
        self.quarantined += found[0].nbytes if found else 0
        self.bad.discard(part.key)

    def empty_quarantine(self, *, before: float) -> int:
        del before
        freed, self.quarantined = self.quarantined, 0
        return freed

    def scan(self) -> Iterator[BlockPart]:
        for key, (part, _) in list(self.files.items()):
            if key not in self.bad:
                yield part

    def origins(self, parts: Sequence[BlockPart] | None = None) -> list[BlockOrigin]:
        del parts
        numbers = Counter((part.root, payload.abi) for part, payload in self.files.values())
        return [BlockOrigin(root, "", abi, "raw", n) for (root, abi), n in numbers.most_common()]

    def other_bytes(self) -> int:
        return self.other

    def count(self, pause: Callable[[], bool]) -> None:
        """Do nothing: `used_bytes` always counts."""

    def used_bytes(self) -> int:
        files = list(self.files.values())
        return self.other + self.quarantined + sum(part.nbytes for part, _ in files)


def fetch(store: AgentCacheStore, wanted: WantedPart) -> Future[KVPayload]:
    """Read a part into memory, where there is room for it."""
    held = store.tiers.acquire(wanted)
    assert held is not None
    held.future.add_done_callback(lambda _: store.tiers.release(held))
    return held.future


class Loader(FakeBackend):
    """A backend that shows what was loaded."""

    def __init__(self, spec: ModelCacheSpec) -> None:
        super().__init__(spec)
        self.loaded: list[KVPayload] = []

    def load(self, seq: SequenceId, parts: Sequence[KVPayload], end: int) -> None:
        del seq, end
        self.loaded += parts


class IndexedLedger(SqliteLedger):
    """A ledger in memory that keeps the index of parts too, and can be busy or refuse a row.

    Attributes:
        ended: What was done to it at the end.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.index = LedgerModel()
        self.is_busy = False
        self.unstorable: LedgerChange | None = None
        self.ended: list[str] = []
        self.load()

    @property
    def parts(self) -> dict[PartKey, BlockPart]:
        return self.index.parts

    def load(self) -> LedgerState:
        parts = tuple(self.parts.values())
        return replace(super().load(), parts=parts, is_index_lost=self.index.is_index_lost)

    def back_up(self) -> None:
        self.ended.append("backed up")

    def close(self) -> None:
        """Stay open, as a file would: a rig that starts again goes on from here."""
        self.ended.append("closed")

    def apply(self, changes: Sequence[LedgerChange], *, is_synced: bool) -> None:
        if self.is_busy:
            raise CachePersistenceError("the ledger is busy.")
        if self.unstorable in changes:
            raise ValueError("a change cannot be stored")
        super().apply(changes, is_synced=is_synced)
        for change in changes:
            if isinstance(change, PutPart | DropPart | TouchParts | MarkIndexWhole):
                self.index.change_index(change)


@dataclass(frozen=True, slots=True)
class RigLimits:
    """How large a rig is, in bytes."""

    memory: int = 10**6
    disk: DiskLimits = field(default_factory=lambda: DiskLimits(10**7, 10**6))


class MemoryRig:
    """Everything that keeps agents but the engine, whose part `talk` plays."""

    def __init__(
        self,
        *,
        spec: ModelCacheSpec | None = None,
        limits: RigLimits | None = None,
        has_disk: bool = True,
        ledger: IndexedLedger | None = None,
    ) -> None:
        self.spec = spec or fake_spec(block_tokens=4)
        self.limits = limits or RigLimits()
        self.files = MemoryFiles()
        self.ledger = ledger or IndexedLedger()
        self.now = [1000.0]
        self._has_disk = has_disk
        self._start()

    def _start(self) -> None:
        state = self.ledger.load()
        self.disk = DiskTier(self.files, self.ledger, self.limits.disk)
        self.pool = BlockPool(self.spec, self.limits.memory)
        self.agents = AgentLedger(self.ledger, state, self.disk.change, now=self.clock)
        self.store = AgentCacheStore(
            self.pool,
            self.disk if self._has_disk else None,
            on_moved=self.agents.log.move,
            now=self.clock,
        )
        self.store.restore_index(state.parts)
        self.store.roots.add(ROOT)
        self.disk.start(self.store.is_on_disk)
        self.upkeep = Upkeep(
            self.store,
            self.agents,
            self.ledger,
            self.disk if self._has_disk else None,
            files=self.files,
            orphan_ttl_s=100,
            now=self.clock,
        )

    def clock(self) -> float:
        return self.now[0]

    def flush(self) -> None:
        assert self.disk.flush(60)

    def settle(self) -> None:
        """Wait until nothing is read any more, and all that came of it is written."""
        await_that(lambda: not self.store.tiers.is_reading)
        self.flush()

    def close(self) -> None:
        self.files.gate.set()
        self.files.write_gate.set()
        assert self.disk.close(60)

    def restart(self, limits: RigLimits | None = None) -> None:
        """Close, forget what was in memory, and start again."""
        self.close()
        self.limits = limits or self.limits
        self._start()

    def pin(self, name: str, *, is_pinned: bool = True) -> None:
        """Pin an agent, or let it go again."""
        self.agents.update(LOCAL_TENANT, name, lambda agent: replace(agent, is_pinned=is_pinned))
        self.upkeep.refresh_pins()

    # -- what an engine does --------------------------------------------------------------------

    def recall(self, tokens: Sequence[int]) -> tuple[int, BlockName, int]:
        """Restore what is known of a prompt and check every payload.

        Returns:
            Positions restored, and the chain to seal from: its name and length.
        """
        for _ in range(20):
            plan = self.store.plan(ROOT, tokens[:-1])
            payloads = self._load(plan)
            if payloads is not None:
                break
        else:
            raise AssertionError("a bad part comes back for ever")
        if len(payloads) < len(plan.parts):
            return 0, ROOT, 0  # there was no room to read into
        position = 0
        for wanted, found in zip(plan.parts, payloads, strict=True):
            node, kind = wanted.node, wanted.kind
            expected = make_payload(self.spec, tokens, node.start, node.end, kind)
            if node.end > plan.end:  # a block that is sliced
                payload = make_payload(self.spec, tokens, node.start, plan.end, kind)
                data = bytes(payload.buffers[0].data)
                assert bytes(found.buffers[0].data).startswith(data)
            else:
                assert found == expected, f"a wrong payload for {node.start}..{node.end}"
            if kind is LayerKind.FULL:
                assert node.start == position, "the chain has a gap"
                position = node.end
        assert position >= plan.end
        parts = sort_parts(payloads, 0, plan.end, self.spec, ABI)  # as a backend would
        assert bool(parts.window) == bool(plan.end and self.spec.num_window)
        assert (parts.state is not None) == bool(plan.end and self.spec.num_state)
        last = self.store.get(plan.chain)
        assert (last.end if last else 0) == plan.num_whole, "sealing would leave a gap"
        assert plan.num_whole <= plan.end < len(tokens) or not plan.end
        return plan.end, plan.chain, plan.num_whole

    def _load(self, plan: RestorePlan) -> list[KVPayload] | None:
        """Load the parts of a plan as an engine does; None if one was bad and is gone now."""
        loader, news = Loader(self.spec), threading.Event()
        restore = Restore(SequenceId(0), plan, self.store.tiers, on_ready=news.set)
        try:
            while not restore.advance(loader, 1):
                if restore.is_ready:
                    continue
                if not restore.is_starved:
                    assert news.wait(60)
                    news.clear()
                elif self.store.is_busy:
                    self.flush()
                else:
                    usage = self.store.usage()
                    assert usage.total - usage.working - usage.held < 64, "there is room"
                    break
        except CacheCorruptionError:
            restore.close()
            self.store.discard(restore.suspect_parts[:1])
            return None
        restore.close()
        return loader.loaded

    def seal(
        self,
        tokens: Sequence[int],
        chain: BlockName = ROOT,
        start: int = 0,
        boundaries: Sequence[int] = (),
    ) -> tuple[BlockName | None, int]:
        """Seal the blocks of a conversation from `start` on; returns where its state ends."""
        names: list[BlockName] = []
        ends = {*boundaries, len(tokens)}
        pointer: BlockName | None = chain if start else None
        while start < len(tokens):
            end = min(block_end(start, self.spec.block_tokens, boundaries), len(tokens))
            kinds = [k for k in self.spec.kinds if k is not LayerKind.STATE or end in ends]
            payloads = [make_payload(self.spec, tokens, start, end, kind) for kind in kinds]
            name = self.store.seal(ROOT, chain, tokens[start:end], payloads)
            if name is None:
                break
            names.append(name)
            chain, start, pointer = name, end, name
        if self.spec.num_window:
            self.store.settle_windows(names, pointer or chain, sorted(ends))
        return pointer, start

    def talk(
        self, agent: str, tokens: Sequence[int], num_reply: int = 1, boundaries: Sequence[int] = ()
    ) -> Turn:
        """One turn that ends with `tokens`: recall, compute, seal, log."""
        end, chain, num_whole = self.recall(tokens)
        pointer, num_sealed = self.seal(tokens, chain, num_whole, boundaries)
        num_prompt = len(tokens) - num_reply
        exchange = exchange_of(
            tokens[:num_prompt],
            tokens[num_prompt:],
            (),
            pointer=Pointer(ROOT, pointer, num_sealed) if pointer else None,
        )
        turn, _ = self.agents.commit(LOCAL_TENANT, agent, replace(exchange, reuse=Reuse(pool=end)))
        return turn


MakeRig: TypeAlias = Callable[..., MemoryRig]
