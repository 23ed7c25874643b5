"""Random schedules against a plain model: every request gets what it would get alone."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.adapters.outbound.backends.fake_vision import FakeVision, VisionKind
from semantic.application.engine.request import AheadJob, Job
from semantic.application.settings import EngineLimits
from semantic.domain.chat import ServiceClass
from semantic.domain.errors import BackendError, GenerationTimeoutError, PoolExhaustedError
from semantic.domain.events import Failed
from semantic.domain.images.spans import PreparedImage
from semantic.domain.sampling import FinishReason, SamplingParams, StopRules
from semantic.domain.spec import ModelCacheSpec
from tests.picture_prompts import PicturePrompt, fake_picture
from tests.unit.application.engine_rig import (
    FaultyBackend,
    JobOptions,
    Rig,
    alone,
    make_job,
    make_rig,
)

pytestmark = pytest.mark.unit

# Few heads and few tails, so that prompts often begin alike.
prompts = st.builds(
    "{}{}".format,
    st.sampled_from(["", "system prompt one. ", "system prompt one. and a tool list " * 2]),
    st.text("ab", min_size=1, max_size=30),
)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
)
stops = st.sampled_from(
    [
        StopRules(ignore_eos=True),
        StopRules(),
        StopRules(strings=("a", "th")),
        StopRules(strings=(" ",)),
    ]
)
job_options: st.SearchStrategy[JobOptions] = st.fixed_dictionaries(
    {
        "sampling": samplings,
        "stop": stops,
        "max_tokens": st.integers(1, 25),
        "agent": st.sampled_from(["x", "y", "z"]),
        "service_class": st.sampled_from(ServiceClass),
    }
)  # type: ignore[assignment]
cuts = st.lists(st.integers(1, 60), max_size=2)
limits = st.builds(
    EngineLimits,
    max_batch_size=st.integers(1, 6),
    prefill_step_size=st.integers(1, 40),
    ageing_s=st.sampled_from([0.0, 0.05, 10.0]),
    max_idle=st.integers(0, 3),
)
# Two of them have the same size, and one occurs at several places.
IMAGES = tuple(
    FakeVision(258).prepare(fake_picture(seed, size))
    for seed, size in ((1, (96, 96)), (2, (96, 96)), (1, (160, 96)))
)
pictures = st.lists(st.tuples(st.sampled_from(IMAGES), st.text("ab", max_size=8)), max_size=2)
specs = st.builds(
    fake_spec,
    block_tokens=st.sampled_from([4, 8]),
    window=st.sampled_from([0, 6]),
    has_state=st.booleans(),
)


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, cancels, failures and memory limits in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, Job] = {}
        self.cancelled: set[str] = set()
        self.num_faults = 0
        self.pending_faults = 0

    @initialize(
        spec=specs,
        depth=st.sampled_from([0, 1]),
        vision=st.sampled_from(VisionKind),
        budget=st.integers(120, 600),
        first=limits,
    )
    def begin(
        self,
        spec: ModelCacheSpec,
        depth: Literal[0, 1],
        vision: VisionKind,
        budget: int,
        first: EngineLimits,
    ) -> None:
        self.spec = spec
        self.rig: Rig = make_rig(
            backend=FaultyBackend(spec, pipeline_depth=depth, vision=vision),
            budget_tokens=budget,
            limits=first,
            max_idle=first.max_idle,
        )
        self.rig.backend.fail_launch = lambda _: self._take_fault()
        self.rig.backend.fail_collect = self._take_fault

    def _take_fault(self) -> bool:
        if self.pending_faults:
            self.pending_faults -= 1
            self.num_faults += 1
            return True
        return False

    @rule(
        prompt=prompts,
        shown=pictures,
        options=job_options,
        cuts=cuts,
        timeout=st.sampled_from([None, None, 0.3]),
    )
    def submit(
        self,
        prompt: str,
        shown: list[tuple[PreparedImage, str]],
        options: JobOptions,
        cuts: list[int],
        timeout: float | None,
    ) -> None:
        options["deadline"] = None if timeout is None else self.rig.now[0] + timeout
        texts = [(image, list(text.encode())) for image, text in shown]
        asked = PicturePrompt.of(
            list(prompt.encode()), *(piece for pair in texts for piece in pair)
        )
        ends = {c for c in cuts if c < len(prompt)} | set(asked.boundaries)
        options["boundaries"] = tuple(sorted(ends))
        job = make_job(f"j{len(self.jobs)}", prompt, **options)
        job = replace(job, tokens=asked.tokens, images=asked.images)
        self.jobs[job.id] = job
        self.rig.submit(job)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.jobs)))
        self.cancelled.add(name)
        self.rig.engine.cancel(name)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), result=prompts, count=st.integers(0, 4))
    def compute_ahead(self, data: st.DataObject, result: str, count: int) -> None:
        job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
        said = (*job.tokens, *self.rig.text(job.id).encode(), *result.encode())
        self.rig.engine.compute_ahead(AheadJob(job.agent, job.root, said, job.images))
        for _ in range(count):
            self.rig.engine.step_ahead()
            self.rig.check()

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    @rule()
    def fail_next_device_call(self) -> None:
        self.pending_faults = 1

    @rule(new=limits)
    def reconfigure(self, new: EngineLimits) -> None:
        self.rig.engine.reconfigure(new)

    @invariant()
    def parts_agree(self) -> None:
        if hasattr(self, "rig"):
            self.rig.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.run()
        for job in self.jobs.values():
            self._check(job)
        self.rig.engine.abandon(BackendError("the end"))
        assert self.rig.backend.num_open == 0
        assert self.rig.store.usage().working == 0

    def _check(self, job: Job) -> None:
        final, text, expected = self.rig.final(job.id), self.rig.text(job.id), alone(job, self.spec)
        if isinstance(final, Failed):
            assert expected.startswith(text)
            if isinstance(final.error, GenerationTimeoutError):
                assert job.deadline is not None
            elif isinstance(final.error, BackendError):
                assert self.num_faults > 1, "one failed step is survived by everyone"
            else:
                assert isinstance(final.error, PoolExhaustedError)
        elif final.reason is FinishReason.CANCELLED:
            assert job.id in self.cancelled
            assert expected.startswith(text)
        else:
            assert text == expected
            assert final.usage.cache_read_tokens < len(job.tokens)


TestEngine = EngineMachine.TestCase
