"""Random budgets, conversations and orders of reading: replies and memory are as they must be."""

import random
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.domain.spec import ModelCacheSpec
from tests.unit.application.cache.test_tiers import Bench
from tests.unit.application.engine_rig import make_job

pytestmark = pytest.mark.unit

SPECS = (
    fake_spec(block_tokens=16),
    fake_spec(block_tokens=16, window=24),
    fake_spec(block_tokens=16, has_state=True),
    fake_spec(block_tokens=16, window=40, has_state=True),
)


@dataclass(frozen=True)
class Scenario:
    """Agents that come back to a memory that is large enough for some of them.

    Attributes:
        lengths: Tokens of those that come back.
        num_fresh: Others that have nothing on disk.
        num_shared: Tokens that the former have in common.
        num_together: As many of the longest fit at once.
        room: Bytes beyond that.
    """

    spec: ModelCacheSpec
    lengths: list[int]
    num_fresh: int
    num_shared: int
    num_together: int
    room: int
    max_idle: int
    order: random.Random


scenarios = st.builds(
    Scenario,
    spec=st.sampled_from(SPECS),
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=5),
    num_fresh=st.integers(0, 2),
    num_shared=st.sampled_from([0, 40]),
    num_together=st.integers(1, 5),
    room=st.integers(0, 4000),
    max_idle=st.integers(0, 2),
    order=st.randoms(use_true_random=False),
)


@settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenario=scenarios)
def test_with_any_budget_and_order_replies_are_right_and_memory_is_within_the_budget(
    scenario: Scenario,
) -> None:
    spec, head = scenario.spec, "h" * scenario.num_shared
    jobs = [
        make_job(f"j{i}", head + chr(97 + i) * length, max_tokens=4)
        for i, length in enumerate(scenario.lengths)
    ]
    fresh = [make_job(f"f{i}", chr(65 + i) * 30, max_tokens=20) for i in range(scenario.num_fresh)]
    sizes = sorted((len(job.tokens) + 40 for job in (*jobs, *fresh)), reverse=True)
    with TemporaryDirectory() as directory:
        bench = Bench(Path(directory), spec, 2**28)
        bench.serve(*jobs)
        bench.close()
        budget = bench.backend.bytes_for(sizes[: scenario.num_together]) + scenario.room
        bench = Bench(Path(directory), spec, budget, scenario.max_idle)
        try:
            for job in scenario.order.sample([*jobs, *fresh], len(jobs) + len(fresh)):
                bench.submit(job)
                for _ in range(scenario.order.randrange(3)):
                    bench.step()
            bench.choose = scenario.order.choice
            bench.run()
            bench.expect_alone(*jobs, *fresh)
        finally:
            bench.close()
