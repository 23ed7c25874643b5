"""The engine on every backend: whatever happens to a sequence, it gets its tokens of alone."""

from collections.abc import Sequence

import pytest

from semantic.adapters.outbound.backends.fake import FakeTokenizer
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.request import EngineEvent, EventBatch, Job
from semantic.application.engine.scheduler import EngineLimits
from semantic.domain.blocks import BlockNamespace
from semantic.domain.events import Failed, Finished, TextDelta
from semantic.domain.pool import BlockPool
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.ports.backend import ModelBackendPort
from tests.contract.conftest import Alone
from tests.contract.driver import prompt

pytestmark = pytest.mark.contract

GREEDY = SamplingParams(temperature=0, seed=0)
WARM = SamplingParams(temperature=0.8, seed=11, frequency_penalty=0.5)


class IdTokenizer(FakeTokenizer):
    """Writes each token as its id, so that text tells the tokens."""

    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def token_bytes(self, token: int) -> bytes:
        return f"{token} ".encode()


class Bench:
    """An engine on a backend, and the events it gave."""

    def __init__(
        self, backend: ModelBackendPort, budget_tokens: int = 4000, prefill_step_size: int = 16
    ) -> None:
        self.events: dict[str, list[EngineEvent]] = {}
        self.store = AgentCacheStore(BlockPool(backend.spec, backend.bytes_for([budget_tokens])))
        limits = EngineLimits(prefill_step_size=prefill_step_size)
        self.engine = BlockPoolBatchEngine(backend, IdTokenizer(), self.store, limits, self._keep)
        self.root = BlockNamespace("model", backend.traits.kv_abi).root()

    def _keep(self, batch: EventBatch) -> None:
        for name, event in batch:
            self.events.setdefault(name, []).append(event)

    def submit(
        self, name: str, tokens: Sequence[int], num_reply: int, params: SamplingParams = GREEDY
    ) -> None:
        stop = StopRules(ignore_eos=True)
        self.engine.submit(
            Job(name, name, self.root, tuple(tokens), params, stop, num_reply, boundaries=(5, 40))
        )

    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.engine.check_integrity()

    def run(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                return
            self.step(1)
        raise AssertionError("the engine did not come to rest")

    def reply(self, name: str) -> list[int]:
        final = self.events[name][-1]
        assert isinstance(final, Finished), final
        text = "".join(e.text for e in self.events[name] if isinstance(e, TextDelta))
        return IdTokenizer().encode(text)

    def num_reused(self, name: str) -> int:
        final = self.events[name][-1]
        assert isinstance(final, Finished)
        return final.usage.cache_read_tokens


def test_a_mixed_batch_that_joins_and_leaves(backend: ModelBackendPort, alone: Alone) -> None:
    bench = Bench(backend)
    jobs = {
        f"j{i}": (prompt(3 + 7 * i, i), 4 + 3 * (i % 3), (GREEDY, WARM)[i % 2]) for i in range(7)
    }
    for name, job in jobs.items():
        bench.submit(name, *job)
        bench.step(2)
    bench.engine.cancel("j6")
    bench.run()
    for name, (tokens, num_reply, params) in list(jobs.items())[:-1]:
        assert bench.reply(name) == alone(tokens, params, num_reply)


def test_the_next_turn_resumes(backend: ModelBackendPort, alone: Alone) -> None:
    bench = Bench(backend)
    said = prompt(30)
    for turn in range(3):
        bench.submit(f"t{turn}", said, 9)
        bench.run()
        assert bench.reply(f"t{turn}") == alone(said, GREEDY, 9)
        said = [*said, *bench.reply(f"t{turn}"), *prompt(4, turn)]
    assert bench.num_reused("t2") >= 30


def test_agents_that_start_alike_share(backend: ModelBackendPort, alone: Alone) -> None:
    bench = Bench(backend)
    common = prompt(45)
    jobs = {f"j{i}": [*common, *prompt(2 + i, 100 + i)] for i in range(4)}
    for name, tokens in jobs.items():
        bench.submit(name, tokens, 5)
    bench.run()
    for name, tokens in jobs.items():
        assert bench.reply(name) == alone(tokens, GREEDY, 5)
    assert all(bench.num_reused(name) >= 37 for name in list(jobs)[1:])


def test_preempted_and_continued(backend: ModelBackendPort, alone: Alone) -> None:
    # Two fit until they grow past 256 tokens; torch counts in allocations of that size.
    bench = Bench(backend, budget_tokens=3 * 256, prefill_step_size=128)
    jobs = {f"j{i}": prompt(235 + i, i) for i in range(3)}
    for name, tokens in jobs.items():
        bench.submit(name, tokens, 40, WARM)
    bench.run()
    for name, tokens in jobs.items():
        assert bench.reply(name) == alone(tokens, WARM, 40)
    assert bench.engine.num_preemptions > 0


def test_an_id_out_of_range_ends_its_own_request(backend: ModelBackendPort, alone: Alone) -> None:
    bench = Bench(backend)
    bench.submit("good", prompt(20), 6)
    bench.submit("bad", [*prompt(20, 1), 10**6], 6)
    bench.run()
    assert isinstance(bench.events["bad"][-1], Failed)
    assert bench.reply("good") == alone(prompt(20), GREEDY, 6)
