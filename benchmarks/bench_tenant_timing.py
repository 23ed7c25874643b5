"""A timing attack on the cache: can a tenant detect what another tenant has sent?

    python -m benchmarks.bench_tenant_timing [--rounds 30]

The attacker sends, interleaved, new prompts, prompts that its victim has just sent, and prompts
that it has sent itself. The area under the ROC curve shows how well the time to the whole answer
distinguishes the second and the third kind from the first: 0.5 is chance, 1 is certainty.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks.report import Report, run
from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.ledger import AgentLedger, write_at_once
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.model import LoadedModel
from semantic.application.engine.request import EventBatch, Job
from semantic.application.prompt.renderer import Renderer
from semantic.application.prompt.replay import ReplayStore, TenantReplays
from semantic.application.settings import EngineLimits
from semantic.domain.agents import Principal
from semantic.domain.chat import ChatRequest, Message, Role
from semantic.domain.events import Finished
from semantic.domain.pool import BlockPool
from semantic.domain.sampling import SamplingParams, StopRules

_WORDS = 400


class Target:
    """Rendering and the engine with its cache, as in a server."""

    def __init__(self) -> None:
        tokenizer = FakeTokenizer()
        self.model = LoadedModel("fake", FakeBackend(), tokenizer)
        store = AgentCacheStore(BlockPool(self.model.backend.spec, 2**30))
        self._is_done = False
        self._engine = BlockPoolBatchEngine(
            self.model.backend, tokenizer, store, EngineLimits(), self._emit
        )
        self._renderer, self._replays = Renderer(tokenizer), ReplayStore()
        ledger = SqliteLedger.in_memory()
        self.agents = AgentLedger(ledger, ledger.load(), write_at_once(ledger))

    def ask(self, who: Principal, number: int) -> float:
        """Run a request to its end; returns the milliseconds it took."""
        request = ChatRequest("fake", (Message.of(Role.USER, f"{number:05} " * _WORDS),))
        root = self.model.root(who)
        started = time.perf_counter()
        prompt = self._renderer.render(request, replays=TenantReplays(root, self._replays))
        self._is_done = False
        self._engine.submit(
            Job(
                id=f"{who.tenant}-{number}-{started}",
                agent=f"{who.tenant}/one",
                root=root,
                tokens=prompt.tokens,
                sampling=SamplingParams(seed=1),
                stop=StopRules(),
                max_tokens=1,
            )
        )
        while not self._is_done:
            self._engine.step()
        return (time.perf_counter() - started) * 1000

    def _emit(self, events: EventBatch) -> None:
        self._is_done |= any(isinstance(event, Finished) for _, event in events)


def area_under_curve(cold: Sequence[float], other: Sequence[float]) -> float:
    """Return how often a value of `other` is smaller than one of `cold`."""
    wins = sum((a < b) + (a == b) / 2 for a in other for b in cold)
    return wins / (len(cold) * len(other))


def measure(report: Report) -> None:
    """Run the attack."""
    rounds = report.options.rounds or report.choose(10, 30)
    target = Target()
    victim, prober = (target.agents.principal(name) for name in ("victim", "prober"))
    times: dict[str, list[float]] = {"nobody": [], "the victim": [], "the prober": []}
    for number in range(rounds + 3):
        cold, said = 2 * number, 2 * number + 1
        target.ask(victim, said)
        taken = (target.ask(prober, cold), target.ask(prober, said), target.ask(prober, said))
        if number >= 3:  # the first are slower, whatever they ask
            for values, ms in zip(times.values(), taken, strict=True):
                values.append(ms)
    for name, values in times.items():
        report.add(f"said before by {name}", values, "ms")
        area = area_under_curve(times["nobody"], values)
        report.add(f"said before by {name}, AUC against nobody", area, "")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--rounds", type=int)


if __name__ == "__main__":
    sys.exit(run("tenant_timing", measure, add_options=add_options))
