"""An engine with a memory: real files and a real ledger in a directory, and what it answered."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from semantic.adapters.outbound.backends.fake import FakeTokenizer
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.cache.index import BlockNode
from semantic.application.cache.restore_plan import WantedPart
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.application.engine.request import Job
from semantic.application.engine.scheduler import EngineLimits
from semantic.domain.agents import Reuse
from semantic.domain.blocks import BlockNamespace, BlockPart
from semantic.domain.errors import DrainingError
from semantic.domain.pool import BlockPool
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.domain.spec import LayerKind
from semantic.ports.backend import KVPayload, ModelBackendPort
from tests.unit.application.engine_rig import GREEDY, EngineRig

NUM_REPLY = 6
HEAD = 21  # where the system prompt of all conversations ends: inside a block


class GatedFiles(SafetensorsCache):
    """Files that can be made to wait before they are read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gate = threading.Event()
        self.gate.set()

    def read(self, part: BlockPart) -> KVPayload:
        assert self.gate.wait(30)
        return super().read(part)


@dataclass(frozen=True, slots=True)
class BenchLimits:
    """How large a bench is.

    Attributes:
        budget_tokens: Sequences of so many tokens fit its memory.
        extra_bytes: Memory beyond that.
    """

    budget_tokens: tuple[int, ...] = (6000,)
    extra_bytes: int = 0
    max_idle: int = 0
    prefill_step_size: int = 16


class IdTokenizer(FakeTokenizer):
    """Writes each token as its id, so that text tells the tokens."""

    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def token_bytes(self, token: int) -> bytes:
        return f"{token} ".encode()


class MemoryBench(EngineRig[ModelBackendPort]):
    """One start of a server, without the server."""

    def __init__(
        self, directory: Path, backend: ModelBackendPort, limits: BenchLimits | None = None
    ) -> None:
        self._directory, self._limits = directory, limits or BenchLimits()
        self.files = GatedFiles(directory)
        self.ledger = SqliteLedger(directory)
        state = self.ledger.load()
        self.disk = DiskTier(self.files, self.ledger, DiskLimits(2**30, 2**26))
        budget = backend.bytes_for(self._limits.budget_tokens) + self._limits.extra_bytes
        store = AgentCacheStore(BlockPool(backend.spec, budget), self.disk)
        store.restore_index(state.parts)
        self.disk.start(store.is_on_disk)
        self._news = threading.Event()
        engine_limits = EngineLimits(
            prefill_step_size=self._limits.prefill_step_size,
            max_idle=self._limits.max_idle,
            target_step_ms=10**9,
        )
        tokenizer, on_ready = IdTokenizer(), self._news.set
        super().__init__(
            backend, store, engine_limits, tokenizer=tokenizer, tick=0.5, on_ready=on_ready
        )
        self.root = BlockNamespace("model", backend.traits.kv_abi).root()

    # -- requests -------------------------------------------------------------------------------

    def ask(
        self,
        name: str,
        tokens: Sequence[int],
        num_reply: int = NUM_REPLY,
        *,
        agent: str = "",
        params: SamplingParams = GREEDY,
    ) -> None:
        """Queue a prompt whose first tokens are a system prompt."""
        stop = StopRules(ignore_eos=True)
        job = Job(name, agent or name, self.root, tuple(tokens), params, stop, num_reply)
        self.submit(replace(job, boundaries=(HEAD,) if len(tokens) > HEAD else ()))

    def wait(self) -> None:
        self._news.wait(0.02)
        self._news.clear()

    def say(
        self, name: str, tokens: Sequence[int], num_reply: int = NUM_REPLY, *, agent: str = "a"
    ) -> list[int]:
        """Run one request to its end."""
        self.ask(name, tokens, num_reply, agent=agent)
        self.run()
        return self.reply(name)

    def reply(self, name: str) -> list[int]:
        """The tokens of a reply that must not have failed."""
        self.finished(name)
        return IdTokenizer().encode(self.text(name))

    def reuse(self, name: str) -> Reuse:
        """Where the tokens of a prompt came from."""
        reuse = self.reply_state(name).reuse
        assert self.num_reused(name) == reuse.reused
        return reuse

    # -- memory ---------------------------------------------------------------------------------

    def nodes(self) -> list[BlockNode]:
        """All blocks, from the beginning."""
        return sorted(self.store.nodes(), key=lambda node: node.start)

    def forget(self, nodes: Sequence[BlockNode] | None = None) -> None:
        """Wait until all is on disk, and drop blocks from memory."""
        assert self.disk.flush(30)
        parts = [WantedPart(node, kind) for node in nodes or self.nodes() for kind in LayerKind]
        self.store.drop_payloads(parts)

    def largest_file(self) -> int:
        """Bytes of the largest part, once all are written."""
        assert self.disk.flush(30)
        return max(path.stat().st_size for path in self._directory.rglob("*.safetensors"))

    def close(self) -> None:
        """End as a server does."""
        self.files.gate.set()
        self.engine.abandon(DrainingError("the end"))
        assert self.disk.close(30)

    def restart(
        self, backend: ModelBackendPort, limits: BenchLimits | None = None
    ) -> "MemoryBench":
        """End, and start again with another backend on the same directory."""
        self.close()
        return MemoryBench(self._directory, backend, limits or self._limits)
