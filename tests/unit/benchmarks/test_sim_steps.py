"""Simulated steps take the time of `Costs`; agents beside a long prompt get their turns."""

from statistics import median

import pytest

from benchmarks.sim_steps import H200, Simulation
from semantic.ports.backend import Chunk, SequenceId, Step

pytestmark = pytest.mark.unit


def test_a_chunk_costs_more_the_later_it_is() -> None:
    early, late = (
        H200.of(Step((Chunk(SequenceId(0), start, (1,) * 1024),))) for start in (0, 100_000)
    )
    assert (round(early), round(late)) == (49, 167)


def test_agents_beside_a_long_prompt_get_their_tokens() -> None:
    alone = Simulation(H200, 0).run(40_000)
    beside = Simulation(H200, 3).run(40_000)
    assert not alone.firsts
    assert 1.0 < beside.long_s / alone.long_s < 1.35
    assert median(beside.firsts) < 0.25
    assert median(beside.token_ms) < 40
