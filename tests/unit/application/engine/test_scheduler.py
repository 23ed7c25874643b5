from collections import deque
from typing import Literal, Unpack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.application.engine.generation import Generation
from semantic.application.engine.scheduler import (
    ConcurrentScheduler,
    VirtualClock,
)
from semantic.application.engine.steps import ChunkBudget, PromptWork
from semantic.application.parsing import TextAssembler
from semantic.application.settings import EngineLimits
from semantic.domain.chat import ServiceClass
from semantic.domain.events import Finished
from semantic.domain.sampling import FinishReason
from semantic.ports.backend import Step, StepOutput, Ticket
from tests.unit.application.engine_rig import FaultyBackend, JobOptions, Rig, make_job, make_rig

pytestmark = pytest.mark.unit


def generation(
    name: str, order: int, *, prompt: int = 10, arrived: float = 0.0, **options: Unpack[JobOptions]
) -> Generation:
    job = make_job(name, "x" * prompt, **options)
    return Generation(job, order, TextAssembler(lambda _: b""), arrived, block_tokens=8)


def names(generations: object) -> list[str]:
    assert hasattr(generations, "__iter__")
    return [g.job.id for g in generations]


def test_interactive_goes_before_background_and_arrival_decides_ties() -> None:
    scheduler = ConcurrentScheduler(EngineLimits())
    for item in (
        generation("bg", 0, service_class=ServiceClass.BACKGROUND),
        generation("b", 2),
        generation("a", 1),
    ):
        scheduler.enqueue(item)
    assert names(scheduler.candidates(now=0.0)) == ["a", "b", "bg"]


def test_background_ages_into_its_turn() -> None:
    scheduler = ConcurrentScheduler(EngineLimits(ageing_s=5))
    scheduler.enqueue(generation("bg", 0, service_class=ServiceClass.BACKGROUND, arrived=0.0))
    scheduler.enqueue(generation("new", 1, arrived=4.9))
    assert names(scheduler.candidates(now=4.9)) == ["new", "bg"]
    assert names(scheduler.candidates(now=5.0)) == ["bg", "new"]


def test_being_served_ends_the_wait() -> None:
    scheduler = ConcurrentScheduler(EngineLimits(prefill_step_size=4, ageing_s=5))
    for item in (generation("a", 0), generation("b", 1)):
        scheduler.enqueue(item)
        scheduler.admit(item)
    first = names(portion.generation for portion in scheduler.plan_step(now=10.0))
    second = names(portion.generation for portion in scheduler.plan_step(now=10.1))
    assert (first, second) == (["a"], ["b"])


def test_a_prompt_that_has_begun_is_not_put_off_for_another_but_for_a_short_one() -> None:
    scheduler = ConcurrentScheduler(EngineLimits(prefill_step_size=512))
    scheduler.budget.observe(PromptWork.of(0, 1000), 0.1)  # 2,500 tokens are a quarter of a second

    def turn() -> list[str]:
        portions = scheduler.plan_step(now=0.0)
        for portion in portions:
            portion.generation.progress.num_launched += portion.num_tokens
            portion.generation.progress.is_started = True
        return names(portion.generation for portion in portions)

    for item in (generation("a", 0, prompt=1536), generation("b", 1, prompt=6000)):
        scheduler.enqueue(item)
        scheduler.admit(item)
    assert [turn(), turn()] == [["a"], ["a"]]
    short = generation("short", 2, prompt=300)
    scheduler.enqueue(short)
    scheduler.admit(short)
    assert turn() == ["short"]
    assert [turn(), turn()] == [["a"], ["b"]]
    late = generation("late", 3, prompt=1536)
    scheduler.enqueue(late)
    scheduler.admit(late)
    assert [name for _ in range(8) for name in turn()] == [*["b"] * 4, *["late"] * 3, "b"]


def beside_a_long_prompt(*others: Generation) -> tuple[ConcurrentScheduler, Generation]:
    """All run, on a device that decodes in 10 ms and computes a token of prompts in 1 ms."""
    scheduler = ConcurrentScheduler(EngineLimits(target_step_ms=330))
    for _ in range(3):
        scheduler.budget.observe(PromptWork(), 0.01)
        scheduler.budget.observe(PromptWork.of(0, 320), 0.33)
    long = generation("long", 0, prompt=9000)
    for item in (long, *others):
        scheduler.enqueue(item)
        scheduler.admit(item)
    return scheduler, long


def test_a_chunk_of_a_long_prompt_is_followed_by_decode_steps() -> None:
    decoding = generation("d", 1)
    decoding.progress.start_at(9)
    scheduler, long = beside_a_long_prompt(decoding)
    pieces = []
    for _ in range(60):
        portions = {p.generation.job.id: p.num_tokens for p in scheduler.plan_step(now=0.0)}
        assert portions.pop("d") == 1
        pieces.append(portions.get("long", 0))
        long.progress.num_launched += pieces[-1]
    assert pieces[:7] == [320, *[0] * 5, 320]  # 41 ms are five of ten
    num_long = sum(size > 0 for size in pieces)
    assert set(pieces) == {0, 320}
    assert num_long == len(pieces) // 6
    scheduler.remove(decoding)
    assert names(p.generation for p in scheduler.plan_step(now=0.0)) == ["long"]


def test_a_background_decode_shares_every_step_with_a_long_prompt() -> None:
    decoding = generation("d", 1, service_class=ServiceClass.BACKGROUND)
    decoding.progress.start_at(9)
    scheduler, long = beside_a_long_prompt(decoding)
    assert names(p.generation for p in scheduler.plan_step(now=0.0)) == ["d", "long"]
    assert names(p.generation for p in scheduler.plan_step(now=0.0)) == [
        "d",
        "long",
    ]  # which goes first
    scheduler.remove(long)
    assert names(p.generation for p in scheduler.plan_step(now=0.0)) == ["d"]


def test_a_short_prompt_does_not_wait_for_a_chunk_of_a_long_one() -> None:
    scheduler, long = beside_a_long_prompt()

    def step() -> list[str]:
        portions = scheduler.plan_step(now=0.0)
        for portion in portions:
            portion.generation.progress.num_launched += portion.num_tokens
        return names(portion.generation for portion in portions)

    def joined_by(name: str, service_class: ServiceClass = ServiceClass.INTERACTIVE) -> list[str]:
        short = generation(name, 1, prompt=60, service_class=service_class)
        scheduler.enqueue(short)
        scheduler.admit(short)
        served = step()
        scheduler.remove(short)
        return served

    assert step() == ["long"]
    assert joined_by("first") == ["first"]
    # Its step took more than the break had: the next one waits for a piece of the long prompt.
    assert joined_by("second") == ["long"]
    assert joined_by("third") == ["third"]
    assert [step(), step()] == [["long"], ["long"]]
    assert joined_by("background", ServiceClass.BACKGROUND) == ["long"]
    scheduler.remove(long)
    assert joined_by("alone", ServiceClass.BACKGROUND) == ["alone"]


def test_a_retried_suspect_runs_before_others() -> None:
    scheduler = ConcurrentScheduler(EngineLimits())
    scheduler.enqueue(generation("free", 0))
    suspect = generation("suspect", 1, service_class=ServiceClass.BACKGROUND)
    suspect.progress.retry_until = 5
    scheduler.enqueue(suspect)
    assert next(scheduler.candidates(now=0.0)) is suspect


def test_the_agent_served_least_goes_first_and_weight_counts() -> None:
    clock = VirtualClock()
    for agent in ("light", "heavy"):
        clock.join(agent)
    clock.charge("light", 100, weight=1)
    clock.charge("heavy", 150, weight=2)
    assert clock.time_of("heavy") < clock.time_of("light")


def test_absence_earns_no_credit_and_leaves_no_trace() -> None:
    clock = VirtualClock()
    clock.join("busy")
    clock.join("guest")
    clock.charge("busy", 1000, 1)
    clock.charge("guest", 10, 1)
    clock.leave("guest")
    clock.join("guest")
    assert clock.time_of("guest") >= 10
    clock.join("newcomer")
    assert clock.time_of("newcomer") >= clock.time_of("guest")


def test_sustained_traffic_leaves_no_trace_in_the_clock() -> None:
    clock = VirtualClock()
    clock.join("x0")
    clock.charge("x0", 1, 1.0)
    for i in range(1, 200):
        clock.join(f"x{i}")
        clock.charge(f"x{i}", 10, 1.0)
        clock.leave(f"x{i - 1}")
    assert len(clock) < 10


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.booleans()), max_size=60))
def test_virtual_clock_never_runs_backwards(moves: list[tuple[str, int, bool]]) -> None:
    clock = VirtualClock()
    present: list[str] = []
    seen: dict[str, float] = {}
    for agent, tokens, is_leaving in moves:
        if is_leaving and agent in present:
            present.remove(agent)
            clock.leave(agent)
            continue
        present.append(agent)
        clock.join(agent)
        assert clock.time_of(agent) >= seen.get(agent, 0.0)
        clock.charge(agent, tokens, 1.0)
        seen[agent] = clock.time_of(agent)


def test_decodes_all_run_and_prompts_share_what_is_left() -> None:
    scheduler = ConcurrentScheduler(EngineLimits(prefill_step_size=64, target_step_ms=100))
    decoding, long, short = generation("d", 0), generation("l", 1, prompt=500), generation("s", 2)
    for item in (decoding, long, short):
        scheduler.enqueue(item)
        scheduler.admit(item)
    decoding.progress.start_at(9)
    portions = {p.generation.job.id: p.num_tokens for p in scheduler.plan_step(now=0.0)}
    assert portions["d"] == 1
    assert portions["l"] + portions.get("s", 0) <= 64
    # The long prompt has been served more by now, so the short one is first.
    long.progress.num_launched = portions["l"]
    second = {p.generation.job.id: p.num_tokens for p in scheduler.plan_step(now=0.0)}
    assert second["s"] == 10


@pytest.mark.parametrize(
    "lengths,expected",
    [((100, 90), {"0": 100}), ((100, 20), {"0": 100, "1": 20}), ((50, 90), {"0": 50, "1": 78})],
    ids=["a small piece waits", "what fits whole comes along", "half of a step is worth it"],
)
def test_prompts_are_not_cut_into_small_pieces(
    lengths: tuple[int, ...], expected: dict[str, int]
) -> None:
    scheduler = ConcurrentScheduler(EngineLimits(prefill_step_size=128))
    for order, length in enumerate(lengths):
        item = generation(str(order), order, prompt=length)
        scheduler.enqueue(item)
        scheduler.admit(item)
    assert {p.generation.job.id: p.num_tokens for p in scheduler.plan_step(now=0.0)} == expected


@given(per_token=st.floats(0.01, 5.0), fixed=st.floats(0.0, 40.0), target=st.floats(10.0, 300.0))
def test_chunk_budget_finds_the_target(per_token: float, fixed: float, target: float) -> None:
    limits = EngineLimits(target_step_ms=target, prefill_step_size=4096)
    budget = ChunkBudget()
    for _ in range(40):
        budget.observe(PromptWork(), fixed / 1000)
        tokens = budget.tokens(limits)
        budget.observe(PromptWork.of(0, tokens), (fixed + tokens * per_token) / 1000)
    tokens = budget.tokens(limits)
    took = fixed + tokens * per_token
    at_bounds = tokens in (ChunkBudget.MIN_TOKENS, 4096)
    assert at_bounds or tokens % ChunkBudget.BLOCK == 0
    block_ms = ChunkBudget.BLOCK * per_token
    assert at_bounds or took <= 1.2 * target + block_ms
    least = target / 2 if tokens >= ChunkBudget.USUAL else target  # large ones are powers of two
    assert at_bounds or took >= 0.8 * least - block_ms


def test_steps_that_took_long_once_do_not_keep_prompts_in_small_pieces() -> None:
    budget, limits, sizes = ChunkBudget(), EngineLimits(prefill_step_size=4096), []
    for _ in range(ChunkBudget.NUM_TRIALS):
        budget.observe(PromptWork(), 0.005)
    for step in range(60):
        tokens = budget.tokens(limits) if step % 5 else 200  # what was left of a prompt
        budget.observe(
            PromptWork.of(0, tokens), (20 + tokens / 40 + (60 if step < 5 else 0)) / 1000
        )
        sizes.append(tokens)
    assert min(sizes[1:6]) < 500
    assert set(sizes[-10:]) == {200, 2048}


@pytest.mark.parametrize("decode_ms", [5, 40])
def test_by_default_a_prompt_takes_little_longer_than_alone(decode_ms: int) -> None:
    budget, limits, tokens = ChunkBudget(), EngineLimits(prefill_step_size=100_000), 0
    for _ in range(40):
        budget.observe(PromptWork(), decode_ms / 1000)
        tokens = budget.tokens(limits)
        budget.observe(PromptWork.of(0, tokens), (decode_ms + tokens * 0.1) / 1000)
    alone = tokens * 0.1
    assert 1.05 < (decode_ms + alone) / alone < 1.15


def test_chunks_get_smaller_where_attention_costs_more() -> None:
    def seconds(work: PromptWork) -> float:
        ms = 20 + 4e-4 * work.num_keys + 0.03 * work.num_tokens + 8e-7 * work.num_pairs
        return ms / 1000

    budget, limits, start = ChunkBudget(), EngineLimits(prefill_step_size=4096), 0
    for _ in range(ChunkBudget.NUM_TRIALS):
        budget.observe(PromptWork(), 0.005)
    sizes: list[int] = []
    while start < 100_000:
        sizes.append(budget.tokens_alone(limits, start))
        work = PromptWork.of(start, sizes[-1])
        budget.observe(work, 0.005 + seconds(work))
        start += sizes[-1]
    assert (max(sizes), sizes[-1]) == (4096, 1024)
    # What was learnt at the end of a long prompt tells what its other parts take.
    for start, size in ((8000, 4096), (50_000, 2048), (100_000, 1024)):
        work = PromptWork.of(start, size)
        assert budget.expected_ms(work) == pytest.approx(5 + 1000 * seconds(work), rel=0.15)
        assert budget.tokens_alone(limits, start) == size


def test_a_long_chunk_alone_ends_before_the_next_is_launched() -> None:
    scheduler, long = beside_a_long_prompt()
    scheduler.plan_step(now=0.0)
    assert scheduler.is_exclusive
    long.progress.num_launched = 8500  # the rest takes half a second
    scheduler.plan_step(now=0.0)
    assert not scheduler.is_exclusive


def test_decodes_run_alone_until_their_step_time_is_known() -> None:
    budget, limits = ChunkBudget(), EngineLimits(prefill_step_size=4096)
    sizes: list[int] = []
    budget.observe(PromptWork.of(0, 4096), 0.129)
    for _ in range(5):
        tokens = budget.tokens(limits)
        # The first step without prompts prepares the device; the others do not.
        decode_ms = 5 if sizes else 900
        budget.observe(PromptWork.of(0, tokens), (decode_ms + tokens * 0.026) / 1000)
        sizes.append(tokens)
    assert sizes == [0, 0, 0, 1024, 1024]
    assert ChunkBudget().tokens(EngineLimits(target_step_ms=100, prefill_step_size=512)) == 128


class TimedBackend(FaultyBackend):
    """Its steps take time on a rig's clock: some each, and some for each token of a prompt."""

    def __init__(
        self, *, step_ms: float = 0.0, token_ms: float = 0.0, pipeline_depth: Literal[0, 1] = 0
    ) -> None:
        super().__init__(fake_spec(block_tokens=8), pipeline_depth=pipeline_depth)
        self.now = [0.0]
        self._step_ms = step_ms
        self._token_ms = token_ms
        self._flying: deque[Step] = deque()

    def launch(self, step: Step) -> Ticket:
        self._flying.append(step)
        return super().launch(step)

    def collect(self, ticket: Ticket) -> StepOutput:
        chunks = self._flying.popleft().chunks
        num_prompt_tokens = sum(c.num_tokens for c in chunks if c.num_tokens > 1)
        self.now[0] += (self._step_ms + self._token_ms * num_prompt_tokens) / 1000
        return super().collect(ticket)


def timed_rig(backend: TimedBackend) -> Rig:
    limits = EngineLimits(prefill_step_size=400, target_step_ms=135)
    rig = make_rig(backend=backend, limits=limits)
    backend.now = rig.now
    return rig


def learnt_budget(rig: Rig) -> int:
    """Prompt tokens that a newcomer gets in its first step while someone decodes."""
    rig.submit(make_job("newcomer", "n" * 300))
    rig.step(seconds=0.0)
    (num_tokens,) = (c.num_tokens for c in rig.backend.steps[-1].chunks if c.num_tokens > 1)
    return num_tokens


def test_prompts_get_the_learnt_budget_while_someone_decodes() -> None:
    rig = timed_rig(TimedBackend(token_ms=2))
    rig.submit(make_job("lesson", "x" * 100, max_tokens=1))
    rig.step(seconds=0.0)
    rig.submit(make_job("decoding", "d", max_tokens=200))
    rig.step(seconds=0.0)
    # 135 ms at 2 ms a token are 67, in whole blocks.
    assert learnt_budget(rig) == 64


@pytest.mark.parametrize("depth", [0, 1])
def test_decode_steps_teach_the_decode_time(depth: Literal[0, 1]) -> None:
    rig = timed_rig(TimedBackend(step_ms=10, token_ms=1, pipeline_depth=depth))
    rig.submit(make_job("decoding", "x" * 200, max_tokens=300))
    rig.step(40, seconds=0.0)
    # The prompt took 210 ms for 200 tokens; of 135 ms decoding takes 10: 119 tokens, not 128.
    assert learnt_budget(rig) == 96


def test_a_step_one_ahead_is_timed_from_the_collect_before_it() -> None:
    rig = timed_rig(TimedBackend(step_ms=50, pipeline_depth=1))
    rig.submit(make_job("decoding", "x" * 100, max_tokens=300))
    rig.step(40, seconds=0.0)
    # The prompt took 50 ms for 100 tokens; of 135 ms decoding takes 50, not the 100 since launch.
    assert learnt_budget(rig) == 160


def test_victim_is_the_youngest_of_the_lowest_class_never_the_only_one() -> None:
    scheduler = ConcurrentScheduler(EngineLimits())
    only = generation("only", 0)
    scheduler.enqueue(only)
    scheduler.admit(only)
    assert scheduler.victim() is None
    background = generation("bg", 1, service_class=ServiceClass.BACKGROUND)
    young = generation("young", 2)
    for item in (background, young):
        scheduler.enqueue(item)
        scheduler.admit(item)
    assert scheduler.victim() is background
    scheduler.remove(background)
    assert scheduler.victim() is young


arrivals = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),  # gap to the one before
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(ServiceClass),
        st.floats(0.1, 8.0),  # weight
        st.integers(1, 6),  # turns of the loop it runs for
    ),
    min_size=1,
    max_size=25,
)


@given(arrivals=arrivals, slots=st.integers(1, 3))
def test_the_bound_on_waiting(
    arrivals: list[tuple[float, str, ServiceClass, float, int]], slots: int
) -> None:
    """Once aged, a request is overtaken only by those that have waited longer."""
    limits = EngineLimits(max_batch_size=slots, ageing_s=5.0)
    scheduler = ConcurrentScheduler(limits)
    queue: list[tuple[float, Generation, int]] = []
    moment = 0.0
    for order, (gap, agent, service_class, weight, turns) in enumerate(arrivals):
        moment += gap
        item = generation(
            f"j{order}",
            order,
            arrived=moment,
            agent=agent,
            service_class=service_class,
            weight=weight,
        )
        queue.append((moment, item, turns))
    remaining = {id(item): turns for _, item, turns in queue}
    now = 0.0
    while queue or scheduler.waiting or scheduler.running:
        while queue and queue[0][0] <= now:
            scheduler.enqueue(queue.pop(0)[1])
        aged = [g for g in scheduler.waiting if now - g.waiting_since >= limits.ageing_s]
        for candidate in scheduler.candidates(now):
            scheduler.admit(candidate)
            longer = [g for g in aged if g.waiting_since < candidate.waiting_since]
            assert not [g for g in longer if g in scheduler.waiting]
        for portion in scheduler.plan_step(now):
            item = portion.generation
            remaining[id(item)] -= 1
            if not remaining[id(item)]:
                scheduler.remove(item)
        scheduler.check_integrity()
        now += 1.0


def test_integrity_check_can_fail() -> None:
    scheduler = ConcurrentScheduler(EngineLimits())
    item = generation("a", 0)
    scheduler.enqueue(item)
    item.final = Finished(FinishReason.END_TURN, item.usage)
    with pytest.raises(AssertionError, match="ended"):
        scheduler.check_integrity()


def test_alone_a_prompt_gets_what_fits_a_quarter_of_a_second() -> None:
    budget, limits = ChunkBudget(), EngineLimits()
    assert budget.tokens_alone(limits) == 128
    budget.observe(PromptWork.of(0, 512), 0.02)
    assert budget.tokens_alone(limits) == 4096
    assert budget.tokens_alone(EngineLimits(prefill_step_size=100)) == 100
    for _ in range(5):
        budget.observe(PromptWork.of(0, 20), 0.01)  # as long as many more would take
    assert budget.tokens_alone(limits) == 4096
    for _ in range(20):
        budget.observe(PromptWork.of(0, 512), 0.5)
    assert budget.tokens_alone(limits) == 512


@pytest.mark.parametrize(
    "num_tokens,seconds,expected",
    [(128, 40.0, ChunkBudget.MIN_TOKENS), (512, 16.0, 128), (512, 1.0, 256)],
)
def test_no_chunk_takes_so_long_that_a_slow_device_seems_to_hang(
    num_tokens: int, seconds: float, expected: int
) -> None:
    budget = ChunkBudget()
    budget.observe(PromptWork.of(0, num_tokens), seconds)
    assert budget.tokens_alone(EngineLimits()) == expected


@pytest.mark.parametrize(
    "start,size,expected",
    [(0, 4096, 4096), (4013, 2048, 2131), (3000, 2048, 1096), (700, 512, 324), (77, 96, 96)],
)
def test_large_chunks_end_at_multiples(start: int, size: int, expected: int) -> None:
    assert ChunkBudget().chunk(start, size, 10_000) == expected


@pytest.mark.parametrize(
    "size,left,expected", [(4096, 4120, 4120), (4096, 4609, 4096), (64, 72, 72), (64, 9, 9)]
)
def test_a_prompts_last_few_tokens_come_along(size: int, left: int, expected: int) -> None:
    assert ChunkBudget().chunk(0, size, left) == expected


def test_a_step_has_no_more_prompt_tokens_than_the_device_can_hold() -> None:
    limits, budget = EngineLimits(), ChunkBudget(max_step_tokens=1024)
    budget.observe(PromptWork.of(0, 2048), 0.01)  # a fast device
    assert ChunkBudget().chunk(900, 1024, 9000) > 1024  # to end at a multiple
    for start in (0, 300, 900):
        assert budget.tokens_alone(limits, start) == 1024
        assert budget.chunk(start, 1024, 9000) <= 1024
        assert budget.chunk(start, 1024, 1100) <= 1024
