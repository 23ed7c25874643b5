"""An engine on the fake backend with a clock of its own, for tests of what comes out."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict, Unpack

from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer, fake_spec
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.request import EngineEvent, EventBatch, Job
from semantic.application.engine.scheduler import EngineLimits
from semantic.domain.blocks import BlockNamespace
from semantic.domain.chat import ServiceClass
from semantic.domain.events import Failed, Finished, TextDelta
from semantic.domain.pool import BlockPool
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.backend import Chunk, Draw, Sampled, SequenceId, Step, StepOutput, Ticket

ROOT = BlockNamespace("fake", "fake.v1").root()
GREEDY = SamplingParams(temperature=0, seed=0)


class FaultyBackend(FakeBackend):
    """A fake that fails steps on demand: in launch, in collect, or for certain sequences."""

    def __init__(
        self, spec: ModelCacheSpec | None = None, *, pipeline_depth: Literal[0, 1] = 0
    ) -> None:
        super().__init__(spec, pipeline_depth=pipeline_depth)
        self.fail_launch: Callable[[Step], bool] = lambda _: False
        self.fail_collect: Callable[[], bool] = lambda: False
        self.steps: list[Step] = []

    def launch(self, step: Step) -> Ticket:
        self.steps.append(step)
        if self.fail_launch(step):
            raise RuntimeError("injected launch failure")
        return super().launch(step)

    def collect(self, ticket: Ticket) -> StepOutput:
        if self.fail_collect():
            raise RuntimeError("injected collect failure")
        return super().collect(ticket)


@dataclass
class Rig:
    """An engine, what it was given and what it said."""

    backend: FaultyBackend
    engine: BlockPoolBatchEngine
    store: AgentCacheStore
    now: list[float]
    events: dict[str, list[EngineEvent]] = field(default_factory=dict)

    def submit(self, job: Job) -> None:
        """Submit, expecting events."""
        self.events.setdefault(job.id, [])
        self.engine.submit(job)

    def step(self, seconds: float = 0.01) -> None:
        """One step and its invariants."""
        self.now[0] += seconds
        self.engine.step()
        self.engine.check_integrity()

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine did not come to rest")

    def text(self, job_id: str) -> str:
        """The text a job got so far."""
        return "".join(e.text for e in self.events[job_id] if isinstance(e, TextDelta))

    def final(self, job_id: str) -> Finished | Failed:
        """The one final event of a job."""
        finals = [e for e in self.events[job_id] if isinstance(e, Finished | Failed)]
        assert len(finals) == 1, f"{job_id} has {len(finals)} final events"
        assert self.events[job_id][-1] is finals[0], "nothing comes after the final event"
        return finals[0]

    def finished(self, job_id: str) -> Finished:
        """The final event of a job that must not have failed."""
        final = self.final(job_id)
        assert isinstance(final, Finished), final
        return final


def make_rig(
    *,
    spec: ModelCacheSpec | None = None,
    pipeline_depth: Literal[0, 1] = 0,
    budget_tokens: int = 100_000,
    limits: EngineLimits | None = None,
    backend: FaultyBackend | None = None,
    max_idle: int = 0,
) -> Rig:
    """Make an engine with memory for about `budget_tokens` tokens, live and sealed together.

    A test's own `backend` brings its spec and its depth; the arguments for them are not used then.
    """
    backend = backend or FaultyBackend(
        spec or fake_spec(block_tokens=8), pipeline_depth=pipeline_depth
    )
    store = AgentCacheStore(BlockPool(backend.spec, backend.bytes_for([budget_tokens])))
    now = [1000.0]
    events: dict[str, list[EngineEvent]] = {}

    def emit(batch: EventBatch) -> None:
        for name, event in batch:
            events.setdefault(name, []).append(event)

    engine = BlockPoolBatchEngine(
        backend,
        FakeTokenizer(),
        store,
        replace(limits or EngineLimits(), max_idle=max_idle),
        emit,
        clock=lambda: now[0],
    )
    return Rig(backend, engine, store, now, events)


class JobOptions(TypedDict, total=False):
    """Fields of a `Job` that a test may set."""

    max_tokens: int
    sampling: SamplingParams
    stop: StopRules
    agent: str
    service_class: ServiceClass
    boundaries: tuple[int, ...]
    weight: float
    deadline: float | None


def make_job(name: str, prompt: str = "hello", **options: Unpack[JobOptions]) -> Job:
    """Make a job; by default its own agent, greedy, and not ended by the end token."""
    defaults: JobOptions = {
        "agent": name,
        "max_tokens": 12,
        "sampling": GREEDY,
        "stop": StopRules(ignore_eos=True),
    }
    fields: JobOptions = {**defaults, **options}
    return Job(id=name, root=ROOT, tokens=tuple(FakeTokenizer().encode(prompt)), **fields)


def alone(job: Job, spec: ModelCacheSpec | None = None) -> str:
    """The text a job gets fresh and alone: one sequence, the prompt in one chunk, no engine."""
    backend = FakeBackend(spec or fake_spec(block_tokens=8))
    tokenizer = FakeTokenizer()
    tokens = list(job.tokens)
    reply: list[int] = []
    seq = SequenceId(0)
    backend.open(seq, tokens)
    fed = tuple(tokens)
    while len(reply) < job.max_tokens:
        chunk = Chunk(seq, len(tokens) - len(fed), fed, Draw(job.sampling, len(job.tokens)))
        (row,) = backend.collect(backend.launch(Step((chunk,)))).rows
        assert isinstance(row, Sampled)
        is_eos = row.token in tokenizer.eos_ids and not job.stop.ignore_eos
        if is_eos or row.token in job.stop.token_ids:
            break
        reply.append(row.token)
        tokens.append(row.token)
        fed = (row.token,)
    text = b"".join(tokenizer.token_bytes(token) for token in reply).decode("utf-8", "replace")
    ends = [text.find(stop) for stop in job.stop.strings if stop in text]
    return text[: min(ends)] if ends else text
