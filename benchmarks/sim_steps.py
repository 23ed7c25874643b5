"""Simulates agents that take turns beside another agent's long prompt: what each of them waits.

The real engine and scheduler run on the fake backend; only time is simulated. A step takes what
`Costs` says. Attention reads all tokens before a chunk, so the cost of a chunk grows with its
position: a simulation without these terms is wrong by a factor of four at 100,000 tokens. Not
simulated: HTTP, sealing and the host's share of a step.

    python -m benchmarks.sim_steps
"""

import random
import sys
from collections import deque
from dataclasses import dataclass, field

from benchmarks.common import make_job
from benchmarks.report import Report, run
from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer, fake_spec
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.request import EventBatch, Job
from semantic.application.settings import EngineLimits
from semantic.domain.events import Failed, Finished
from semantic.domain.pool import BlockPool
from semantic.ports.backend import Step, StepOutput, Ticket

LONG, HOT, ADDED, REPLY = 100_000, 8000, 40, 32
NUM_AGENTS = (1, 3)
PAUSE_S = (0.1, 0.6)  # between an agent's turns


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of a step.

    Attributes:
        decode: Of one token each of some rows.
        chunk: Of each chunk of a prompt.
        key: Of each token that a chunk attends to.
        token: Of each token of a chunk.
        pair: Of each pair of a token of a chunk and a token that it attends to.
        tile: Attention computes a multiple of this many tokens of a chunk.
    """

    decode: float
    chunk: float
    key: float
    token: float
    pair: float
    tile: int = 1

    def of(self, step: Step) -> float:
        total = 0.0
        for chunk in step.chunks:
            num_tokens, end = chunk.num_tokens, chunk.start + chunk.num_tokens
            if num_tokens > 1:
                rows = -(-num_tokens // self.tile) * self.tile
                total += self.chunk + self.token * num_tokens
                total += (self.key + self.pair * rows) * end
        return total + self.decode * any(chunk.num_tokens == 1 for chunk in step.chunks)


# 8B in bfloat16 on one H200. Steps: 21 ms and 0.026 ms per token, decoding 5 ms. Attention of 32
# layers: 512 queries on 4k, 16k and 30k keys 4.8, 12.5 and 24.6 ms; 2,048 on 16k and 30k 32 and 58.
H200 = Costs(decode=5.0, chunk=21.0, key=4.3e-4, token=0.026, pair=7.3e-7, tile=512)
H200_WITHOUT_POSITION = Costs(decode=5.0, chunk=21.0, key=0.0, token=0.026, pair=0.0)


class TimedBackend(FakeBackend):
    """Its steps take time on its own clock, one after another, as on a device."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(fake_spec(block_tokens=256), pipeline_depth=1)
        self.now = 0.0
        self._costs, self._busy_until = costs, 0.0
        self._ends: deque[float] = deque()

    def launch(self, step: Step) -> Ticket:
        seconds = self._costs.of(step) / 1000
        self._busy_until = max(self.now, self._busy_until) + seconds
        self._ends.append(self._busy_until)
        return super().launch(step)

    def collect(self, ticket: Ticket) -> StepOutput:
        self.now = max(self.now, self._ends.popleft())
        return super().collect(ticket)


@dataclass
class Outcome:
    """Seconds of the long prompt; of the agents' turns beside it, first token and ms per token."""

    long_s: float = 0.0
    firsts: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)


class Simulation:
    """One long prompt and agents that send turn after turn."""

    def __init__(self, costs: Costs, num_agents: int) -> None:
        self.backend = TimedBackend(costs)
        store = AgentCacheStore(BlockPool(self.backend.spec, 2**31))
        self._engine = BlockPoolBatchEngine(
            self.backend,
            FakeTokenizer(),
            store,
            EngineLimits(draft_tokens=0),
            self._emit,
            clock=lambda: self.backend.now,
        )
        self._num_agents = num_agents
        self._jobs: dict[str, tuple[Job, float]] = {}
        self._pauses = random.Random(1)  # noqa: S311 - a simulation
        self._next: list[tuple[float, int, list[int]]] = []
        self._ended: list[str] = []
        self._number = 0
        self.outcome = Outcome()

    def run(self, num_tokens: int) -> Outcome:
        for agent in range(self._num_agents):  # their state is hot afterwards
            self._send(agent, [agent] * HOT)
        self._run_until_idle()
        for agent in range(self._num_agents):
            self._send(agent, [agent] * (HOT + ADDED))
        for _ in range(20):
            self._engine.step()
        started = self.backend.now
        self._engine.submit(long := make_job("long", [200] * num_tokens, 1))
        while long.trace.first_token is None:
            self._engine.step()
            self._answer(started)
        self.outcome.long_s = long.trace.first_token - started
        return self.outcome

    def _run_until_idle(self) -> None:
        while self._engine.has_work:
            self._engine.step()
        self._ended.clear()

    def _send(self, agent: int, tokens: list[int], sent: float | None = None) -> None:
        self._number += 1
        job = make_job(f"{agent}.{self._number}", tokens, REPLY, agent=str(agent))
        self._jobs[job.id] = job, self.backend.now if sent is None else sent
        self._engine.submit(job)

    def _answer(self, started: float) -> None:
        """Note the turns that ended, and send the next one of each agent."""
        for name in self._ended:
            if name not in self._jobs:
                continue
            job, sent = self._jobs.pop(name)
            first, last = job.trace.first_token, job.trace.last_token
            if sent >= started and first is not None and last is not None:
                self.outcome.firsts.append(first - sent)
                self.outcome.token_ms.append((last - first) / (REPLY - 1) * 1000)
            agent, then = int(job.agent), self.backend.now + self._pauses.uniform(*PAUSE_S)
            self._next.append((then, agent, [*job.tokens, *[agent] * (REPLY + ADDED)]))
        self._ended.clear()
        due = [turn for turn in self._next if turn[0] <= self.backend.now]
        self._next = [turn for turn in self._next if turn[0] > self.backend.now]
        for then, agent, tokens in due:
            self._send(agent, tokens, then)

    def _emit(self, events: EventBatch) -> None:
        for name, event in events:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                self._ended.append(name)


def measure(report: Report) -> None:
    """Simulate the long prompt alone and beside agents."""
    length = report.choose(30_000, LONG)
    report.settings.update(long=length, hot=HOT, added=ADDED, reply=REPLY, pause_s=PAUSE_S)
    for title, costs in {"position ignored": H200_WITHOUT_POSITION, "H200": H200}.items():
        alone = Simulation(costs, 0).run(length).long_s
        report.add(f"{title}: long prompt alone", alone, "s")
        for count in NUM_AGENTS:
            beside = Simulation(costs, count).run(length)
            name = f"{title}: {count} beside it"
            report.add(f"{name}, long prompt / alone", beside.long_s / alone)
            report.add(f"{name}, first token", beside.firsts, "s")
            report.add(f"{name}, per token", beside.token_ms, "ms")


if __name__ == "__main__":
    sys.exit(run("steps", measure))
