"""An engine on the fake backend with a clock of its own, for tests of what comes out."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Generic, Literal, TypeAlias, TypedDict, TypeVar, Unpack

from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer, fake_spec
from semantic.adapters.outbound.backends.fake_vision import VisionKind
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.request import EngineEvent, EventBatch, Job, ReplyState
from semantic.application.settings import EngineLimits
from semantic.domain.blocks import BlockNamespace
from semantic.domain.chat import ServiceClass
from semantic.domain.errors import SemanticError
from semantic.domain.events import Failed, Finished, TextDelta
from semantic.domain.pool import BlockPool
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.backend import (
    Chunk,
    Draw,
    ModelBackendPort,
    Sampled,
    SequenceId,
    Step,
    StepOutput,
    Ticket,
)
from semantic.ports.text import TokenizerPort

ROOT = BlockNamespace("fake", "fake.v1").root()
GREEDY = SamplingParams(temperature=0, seed=0)


class FaultyBackend(FakeBackend):
    """A fake that fails steps on demand: in launch, in collect, or for certain sequences."""

    def __init__(
        self,
        spec: ModelCacheSpec | None = None,
        *,
        pipeline_depth: Literal[0, 1] = 0,
        vision: VisionKind = VisionKind.CAUSAL,
        kv_room: int | None = None,
    ) -> None:
        super().__init__(spec, pipeline_depth=pipeline_depth, vision=vision, kv_room=kv_room)
        self.fail_launch: Callable[[Step], bool] = lambda _: False
        self.fail_collect: Callable[[], bool] = lambda: False
        self.steps: list[Step] = []

    def fail_next(self, where: str, after: int = 0, times: int = 1) -> None:
        """Fail some calls of `launch` or `collect`, once so many have passed."""
        failures = iter([False] * after + [True] * times)
        if where == "launch":
            self.fail_launch = lambda _: next(failures, False)
        else:
            self.fail_collect = lambda: next(failures, False)

    @property
    def num_computed(self) -> int:
        """Tokens of all steps."""
        return sum(step.num_tokens for step in self.steps)

    def launch(self, step: Step) -> Ticket:
        self.steps.append(step)
        if self.fail_launch(step):
            raise RuntimeError("injected launch failure")
        return super().launch(step)

    def collect(self, ticket: Ticket) -> StepOutput:
        if self.fail_collect():
            raise RuntimeError("injected collect failure")
        return super().collect(ticket)


B = TypeVar("B", bound=ModelBackendPort)


class EngineRig(Generic[B]):
    """An engine, what it was asked and what it said.

    Its clock goes on with every step, and by `tick` each time it is read: where that is long, steps
    seem to take long, and reading from disk is always worth it.
    """

    def __init__(
        self,
        backend: B,
        store: AgentCacheStore,
        limits: EngineLimits | None = None,
        *,
        tokenizer: TokenizerPort | None = None,
        tick: float = 0.0,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.backend = backend
        self.store = store
        self.now = [1000.0]
        self.events: defaultdict[str, list[EngineEvent]] = defaultdict(list)
        self._tick = tick
        self.engine = BlockPoolBatchEngine(
            backend,
            tokenizer or FakeTokenizer(),
            store,
            limits or EngineLimits(max_idle=0),
            self._keep,
            self._read_clock,
            on_ready,
        )

    def _keep(self, batch: EventBatch) -> None:
        for name, event in batch:
            self.events[name].append(event)

    def _read_clock(self) -> float:
        self.now[0] += self._tick
        return self.now[0]

    def submit(self, *jobs: Job) -> None:
        for job in jobs:
            self.engine.submit(job)

    def serve(self, *jobs: Job) -> None:
        """Submit and run to the end."""
        self.submit(*jobs)
        self.run()

    def step(self, count: int = 1, *, seconds: float = 0.01) -> bool:
        """So many steps, and the invariants after each; False if nothing came of the last."""
        is_busy = False
        for _ in range(count):
            self.now[0] += seconds
            is_busy = self.engine.step()
            self.check()
        return is_busy

    def check(self) -> None:
        """The invariants."""
        self.engine.check_integrity()

    def wait(self) -> None:
        """What is done when a step did nothing, though there is work."""

    def run(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(20_000):
            if not self.engine.has_work:
                return
            if not self.step():
                self.wait()
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

    def num_reused(self, job_id: str) -> int:
        """Tokens of a job's prompt that were not computed."""
        return self.finished(job_id).usage.cache_read_tokens

    def reply_state(self, job_id: str) -> ReplyState:
        """What a job left behind."""
        (left,) = [event for event in self.events[job_id] if isinstance(event, ReplyState)]
        return left

    def error(self, job_id: str, kind: type[SemanticError] = SemanticError) -> str:
        """The message of a job that must have failed in this way."""
        final = self.final(job_id)
        assert isinstance(final, Failed), final
        assert isinstance(final.error, kind), final
        return final.error.message

    def expect_alone(self, *jobs: Job) -> None:
        """Each job got what it gets fresh and alone."""
        for job in jobs:
            self.finished(job.id)
            assert self.text(job.id) == alone(job, self.backend.spec), job.id


Rig: TypeAlias = EngineRig[FaultyBackend]


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
    return EngineRig(backend, store, replace(limits or EngineLimits(), max_idle=max_idle))


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
    spelled: Mapping[int, bytes] | None
    is_prompt_scored: bool


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
    backend = FakeBackend(spec or fake_spec(block_tokens=8), vision=VisionKind.CAUSAL)
    tokenizer = FakeTokenizer()
    tokens = list(job.tokens)
    reply: list[int] = []
    seq = SequenceId(0)
    backend.open_sequence(seq, tokens, job.images)
    fed, images = tuple(tokens), job.images
    while len(reply) < job.max_tokens:
        draw = Draw(job.sampling, len(job.tokens))
        chunk = Chunk(seq, len(tokens) - len(fed), fed, draw, images=images)
        (row,) = backend.collect(backend.launch(Step((chunk,)))).rows
        assert isinstance(row, Sampled)
        is_eos = row.token in tokenizer.eos_ids and not job.stop.ignore_eos
        if is_eos or row.token in job.stop.token_ids:
            break
        reply.append(row.token)
        tokens.append(row.token)
        fed, images = (row.token,), ()
    text = b"".join(tokenizer.token_bytes(token) for token in reply).decode("utf-8", "replace")
    ends = [text.find(stop) for stop in job.stop.strings if stop in text]
    return text[: min(ends)] if ends else text
