"""Agent memory on every backend: wherever state was kept, a reply equals the one computed alone.

Each test also shows that state was reused: an engine that computes everything anew would be right
too.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from semantic.adapters.outbound.backends.fake import FakeTokenizer
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.cache import restore_plan, tiers
from semantic.application.cache.index import BlockNode
from semantic.application.cache.restore_plan import WantedPart
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.application.engine import restore
from semantic.application.engine.request import AheadJob, Job
from semantic.application.settings import EngineLimits
from semantic.domain.agents import Reuse
from semantic.domain.blocks import BlockNamespace, BlockPart
from semantic.domain.errors import DrainingError
from semantic.domain.events import PromptScored
from semantic.domain.pool import BlockPool
from semantic.domain.sampling import FinishReason, SamplingParams, StopRules
from semantic.domain.spec import LayerKind
from semantic.ports.backend import KVPayload, ModelBackendPort
from tests.contract.conftest import Alone, Subject, each_kind
from tests.contract.driver import prompt
from tests.contract.models import BLOCK_TOKENS, WINDOW
from tests.unit.application.engine_rig import GREEDY, EngineRig

pytestmark = [pytest.mark.contract, each_kind]

NUM_REPLY = 6
HEAD = 21  # where the system prompt of all conversations ends: inside a block


class GatedFiles(SafetensorsCache):
    """Files that can be made to wait before they are read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gate = threading.Event()
        self.gate.set()

    def read(self, part: BlockPart) -> KVPayload:
        assert self.gate.wait(120)
        return super().read(part)


@dataclass(frozen=True, slots=True)
class BenchLimits:
    """How large a bench is.

    Attributes:
        budget_tokens: Sequences of so many tokens fit its memory.
        extra_bytes: Memory beyond that.
        disk_bytes: Its budget on disk.
    """

    budget_tokens: tuple[int, ...] = (6000,)
    extra_bytes: int = 0
    disk_bytes: int = 2**30
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
        self.disk = DiskTier(self.files, self.ledger, DiskLimits(self._limits.disk_bytes, 2**26))
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
        **options: bool,
    ) -> None:
        """Queue a prompt whose first tokens are a system prompt."""
        stop = StopRules(ignore_eos=True)
        job = Job(name, agent or name, self.root, tuple(tokens), params, stop, num_reply)
        boundaries = (HEAD,) if len(tokens) > HEAD else ()
        self.submit(replace(job, boundaries=boundaries, **options))  # type: ignore[arg-type]

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


WARM = SamplingParams(temperature=0.8, seed=11, frequency_penalty=0.5)
SYSTEM = prompt(HEAD, 1000)
FIRST = [*SYSTEM, *prompt(24, 1)]
Benches = Callable[..., MemoryBench]


@pytest.fixture
def benches(tmp_path: Path, shared_backend: ModelBackendPort) -> Iterator[Benches]:
    """Makes benches on one directory, and ends the last one."""
    made: list[MemoryBench] = []

    def make(limits: BenchLimits | None = None, *, after: MemoryBench | None = None) -> MemoryBench:
        if after is None:
            made.append(MemoryBench(tmp_path, shared_backend, limits))
        else:
            made.append(after.restart(shared_backend, limits))
        return made[-1]

    yield make
    for bench in made[-1:]:
        bench.close()


def checked(bench: MemoryBench, alone: Alone, name: str, said: list[int], agent: str) -> list[int]:
    """Say something, compare the reply, and return the conversation so far."""
    reply = bench.say(name, said, agent=agent)
    assert reply == alone(said, GREEDY, NUM_REPLY)
    return [*said, *reply]


def talk(bench: MemoryBench, alone: Alone, num_turns: int = 1, agent: str = "a") -> list[int]:
    """Some turns of an agent; returns its conversation."""
    said = FIRST
    for turn in range(num_turns):
        question = prompt(3 + turn, 50 + turn) if turn else []
        said = checked(bench, alone, f"{agent}, turn {turn}", [*said, *question], agent)
    return said


def next_turn(bench: MemoryBench, alone: Alone, said: list[int], agent: str = "a") -> Reuse:
    """One more turn, with a reply that crosses blocks."""
    name, asked = f"{agent} again", [*said, *prompt(5, 99)]
    assert bench.say(name, asked, 10, agent=agent) == alone(asked, GREEDY, 10)
    return bench.reuse(name)


def ask_all(
    bench: MemoryBench, alone: Alone, asked: dict[str, list[int]], num_reply: int = NUM_REPLY
) -> None:
    """Let agents speak at once, and compare their replies."""
    for name, tokens in asked.items():
        bench.ask(name, tokens, num_reply)
    bench.run()
    for name, tokens in asked.items():
        assert bench.reply(name) == alone(tokens, GREEDY, num_reply), name


# -- tiers --------------------------------------------------------------------------------------


def test_hot(benches: Benches, alone: Alone) -> None:
    bench = benches(BenchLimits(max_idle=4))
    said = talk(bench, alone, 2)
    assert next_turn(bench, alone, said).hot >= len(said) - 1


def test_from_the_pool(benches: Benches, alone: Alone) -> None:
    bench = benches()
    said = talk(bench, alone, 2)
    assert next_turn(bench, alone, said).pool >= len(said) - 1


def test_from_disk(benches: Benches, alone: Alone) -> None:
    bench = benches()
    said = talk(bench, alone, 2)
    bench.forget()
    assert bench.store.usage().num_blocks == 0
    assert next_turn(bench, alone, said).disk >= len(said) - 1


def test_after_a_restart(benches: Benches, subject: Subject, alone: Alone, tmp_path: Path) -> None:
    said = talk(bench := benches(), alone, 2)
    bench.close()
    fresh = subject.make()
    again = MemoryBench(tmp_path, fresh)
    assert next_turn(again, alone, said).disk >= len(said) - 1
    again.close()
    fresh.shutdown()
    benches()  # for the fixture to end


def test_reopened_after_a_restart(
    benches: Benches, subject: Subject, alone: Alone, tmp_path: Path
) -> None:
    said = talk(bench := benches(), alone, 2)
    bench.close()
    fresh = subject.make()
    again = MemoryBench(tmp_path, fresh, BenchLimits(max_idle=2))
    again.engine.compute_ahead(AheadJob("a", again.root, tuple(said), is_stored=True))
    while again.engine.has_ahead or again.engine._ahead.sequences:
        again.engine.step_ahead()
        again.check()
        again.wait()
    assert next_turn(again, alone, said).hot >= len(said) - 1
    again.close()
    fresh.shutdown()
    benches()  # for the fixture to end


def test_every_second_block_left_memory(benches: Benches, alone: Alone) -> None:
    said = talk(bench := benches(), alone, 2)
    bench.forget(bench.nodes()[::2])
    reuse = next_turn(bench, alone, said)
    assert reuse.reused >= len(said) - 1
    assert reuse.pool
    assert reuse.disk


def test_the_later_half_is_gone_from_memory_and_disk(benches: Benches, alone: Alone) -> None:
    said = talk(bench := benches(), alone, 2)
    bench.forget()
    late = [node for node in bench.nodes() if node.end > len(said) // 2]
    bench.store.drop_files([WantedPart(node, kind) for node in late for kind in LayerKind])
    reuse = next_turn(bench, alone, said)
    # Where layers cannot be cut, the head is what is left.
    assert HEAD <= reuse.disk <= len(said) // 2


def test_a_bad_file_loses_the_blocks_that_follow_it(
    benches: Benches, alone: Alone, tmp_path: Path
) -> None:
    said = talk(bench := benches(), alone, 2)
    bench.forget()
    victim = next(node for node in bench.nodes() if node.start >= HEAD + BLOCK_TOKENS)
    (path,) = tmp_path.rglob(f"{victim.name.hex()}.full.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    reuse = next_turn(bench, alone, said)
    assert HEAD <= reuse.disk + reuse.pool <= victim.start
    assert bench.store.counts.corrupt == 1


# -- branches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_idle", [0, 4])
def test_rewound_to_an_earlier_turn(benches: Benches, alone: Alone, max_idle: int) -> None:
    bench = benches(BenchLimits(max_idle=max_idle))
    talk(bench, alone, 3)
    first = [*FIRST, *bench.reply("a, turn 0")]
    other = [*first, *prompt(7, 77)]
    assert bench.say("other", other) == alone(other, GREEDY, NUM_REPLY)
    assert bench.reuse("other").reused >= len(first) - 1


def test_forked_and_diverged(benches: Benches, alone: Alone) -> None:
    bench = benches(BenchLimits(max_idle=4))
    said = talk(bench, alone, 2)
    ways = {f"fork {i}": [*said, *prompt(4 + i, 200 + i)] for i in range(3)}
    for name, way in ways.items():
        ways[name] = checked(bench, alone, name, way, name)
    bench = benches(after=bench)
    for name, way in ways.items():
        assert next_turn(bench, alone, way, name).reused >= len(way) - 1
    assert next_turn(bench, alone, said).reused >= len(said) - 1


# -- many at once -------------------------------------------------------------------------------


def test_eight_agents_at_once_from_disk_in_small_portions(
    benches: Benches, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "_STEP_BYTES", (1, 1))
    bench = benches()
    said = {f"a{i}": [*SYSTEM, *prompt(9 + 5 * i, 300 + i)] for i in range(8)}
    for turn, num_reply in enumerate((5, 5, 9)):
        ask_all(bench, alone, {f"{n}.{turn}": tokens for n, tokens in said.items()}, num_reply)
        for name, tokens in said.items():
            said[name] = [*tokens, *bench.reply(f"{name}.{turn}"), *prompt(3, turn)]
        bench.forget()
    for name, tokens in said.items():
        reuse = bench.reuse(f"{name}.2")
        assert reuse.reused >= len(tokens) - 3 - 9 - 3 - 1
        assert reuse.disk or reuse.hot


def test_restored_in_small_portions_while_another_decodes(
    benches: Benches, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = talk(bench := benches(), alone, 2)
    bench.forget()
    monkeypatch.setattr(restore, "_STEP_BYTES", (1, 1))
    other = prompt(12, 7)
    bench.ask("decoding", other, 60)
    bench.step(3)
    asked = [*said, *prompt(5, 99)]
    bench.ask("restored", asked)
    bench.run()
    assert bench.reply("decoding") == alone(other, GREEDY, 60)
    assert bench.reply("restored") == alone(asked, GREEDY, NUM_REPLY)
    assert bench.reuse("restored").disk >= len(said) - 1


def test_a_mixed_batch_that_joins_and_leaves(benches: Benches, alone: Alone) -> None:
    bench = benches()
    lengths = {f"j{i}": 4 + 3 * (i % 3) for i in range(7)}
    for i, (name, num_reply) in enumerate(lengths.items()):
        bench.ask(name, prompt(3 + 7 * i, i), num_reply, params=(GREEDY, WARM)[i % 2])
        bench.step(2)
    bench.engine.cancel("j6")
    bench.run()
    for i in range(6):
        expected = alone(prompt(3 + 7 * i, i), (GREEDY, WARM)[i % 2], lengths[f"j{i}"])
        assert bench.reply(f"j{i}") == expected


def test_preempted_and_continued(benches: Benches, alone: Alone) -> None:
    # Two fit until they grow past 256 tokens; torch counts in allocations of that size.
    bench = benches(BenchLimits((3 * 256,), prefill_step_size=128))
    jobs = {f"j{i}": prompt(235 + i, i) for i in range(3)}
    for name, tokens in jobs.items():
        bench.ask(name, tokens, 30, params=WARM)
    bench.run()
    for name, tokens in jobs.items():
        assert bench.reply(name) == alone(tokens, WARM, 30)
    assert bench.store.telemetry.counts.engine.preemptions > 0


# -- in the middle of a restore -----------------------------------------------------------------


def test_cancelled_during_a_restore(benches: Benches, alone: Alone) -> None:
    said = talk(bench := benches(), alone, 2)
    bench.forget()
    bench.files.gate.clear()
    bench.ask("cancelled", [*said, *prompt(5, 99)])
    bench.step(2)
    bench.engine.cancel("cancelled")
    bench.run()
    assert bench.finished("cancelled").reason is FinishReason.CANCELLED
    bench.files.gate.set()
    assert next_turn(bench, alone, said).reused >= len(said) - 1


def test_preempted_during_a_restore(
    benches: Benches, alone: Alone, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not subject.is_quick:
        pytest.skip("the file is read before the older one has grown")
    monkeypatch.setattr(tiers, "_NUM_PREFETCHED", 2)  # more would fill the memory, and wait
    # The closed gate is no measured slow disk.
    monkeypatch.setattr(restore_plan, "_HALF_LIFE_S", 1e-6)
    # Memory comes in pieces of 256 tokens: two fit until the older grows past that.
    long = [*SYSTEM, *prompt(214, 1)]
    first = benches()
    said = [*long, *first.say("long", long)]
    limits = BenchLimits((256, 256), extra_bytes=2 * first.largest_file(), prefill_step_size=128)
    bench = benches(limits, after=first)
    older = prompt(200, 9)
    bench.ask("older", older, 70)
    bench.step(4)
    bench.files.gate.clear()
    assert bench.disk.flush(30)  # what is being written is in the way
    bench.ask("young", said)
    bench.step()
    assert bench.store.telemetry.counts.engine.preemptions == 0
    for _ in range(70):
        if bench.store.telemetry.counts.engine.preemptions:
            break
        bench.step()
    assert bench.store.telemetry.counts.engine.preemptions == 1
    bench.files.gate.set()
    bench.run()
    assert bench.reply("older") == alone(older, GREEDY, 70)
    assert bench.reply("young") == alone(said, GREEDY, NUM_REPLY)
    # A part that was read for the restore that was given up may be in memory for the next one.
    reuse = bench.reuse("young")
    assert reuse.disk > 0
    assert reuse.disk + reuse.pool >= len(long)


# -- with little memory -------------------------------------------------------------------------


# -- where layers cannot be cut -----------------------------------------------------------------


@pytest.mark.parametrize("around", [-BLOCK_TOKENS - 1, -1, 0, 1, WINDOW])
def test_resumed_around_a_boundary(benches: Benches, alone: Alone, around: int) -> None:
    said = talk(bench := benches(), alone, 2)
    bench.forget()
    for place in (HEAD, len(FIRST), len(said) - 1):
        asked = [*said[: place + around], *prompt(6, 800 + place)]
        name = f"at {place + around}"
        assert bench.say(name, asked, agent=name) == alone(asked, GREEDY, NUM_REPLY)
        if around >= 0:
            assert bench.reuse(name).reused >= place


# -- requests that keep nothing, or need more than was kept -------------------------------------


@pytest.mark.parametrize("max_idle", [0, 4])
def test_an_ephemeral_request_reads_state_and_leaves_none(
    benches: Benches, alone: Alone, tmp_path: Path, max_idle: int
) -> None:
    bench = benches(BenchLimits(max_idle=max_idle))
    said = talk(bench, alone, 2)
    bench.forget()
    names, files = {node.name for node in bench.nodes()}, sorted(tmp_path.rglob("*.safetensors"))
    asked = [*said, *prompt(30, 98)]
    bench.ask("ephemeral", asked, 10, agent="a", is_ephemeral=True)
    bench.run()
    assert bench.reply("ephemeral") == alone(asked, GREEDY, 10)
    assert bench.reuse("ephemeral").reused >= len(said) - 1
    assert bench.disk.flush(30)
    assert {node.name for node in bench.nodes()} == names
    assert sorted(tmp_path.rglob("*.safetensors")) == files
    assert next_turn(bench, alone, said).reused >= len(said) - 1


def test_a_scored_prompt_does_not_use_cached_state(benches: Benches, alone: Alone) -> None:
    bench = benches(BenchLimits(max_idle=4))
    params, scores = replace(GREEDY, top_logprobs=1), []
    for name in ("fresh", "cached"):
        bench.ask(name, FIRST, params=params, is_prompt_scored=True)
        bench.run()
        assert bench.reply(name) == alone(FIRST, GREEDY, NUM_REPLY)
        (scored,) = [event for event in bench.events[name] if isinstance(event, PromptScored)]
        assert [int(token.text) for token in scored.rest] == FIRST[1:]
        scores.append([token.logprob for token in scored.rest])
    assert bench.reuse("cached").reused == 0
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)
    # What was computed for them is kept.
    assert next_turn(bench, alone, FIRST).reused >= len(FIRST) - 1
