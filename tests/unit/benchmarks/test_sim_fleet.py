"""The simulated fleet: tokens are found where they must be, and each is counted once."""

from dataclasses import replace

import pytest

from benchmarks.sim_fleet import BLOCK, DEVICES, FIRST, HEAD, MORE, Fleet, Outcome, Simulation, Tier

pytestmark = pytest.mark.unit

ARM = DEVICES["arm"]
APART = Fleet(replicas=8, affinity=0.0, is_bounded=False, memory_gb=1, link_gbit=1.0)


def simulate(fleet: Fleet, turns: int = 6) -> Outcome:
    return Simulation(fleet, ARM, seed=1).run(turns)


def test_one_server_with_room_finds_all_but_what_is_new_in_memory() -> None:
    outcome = simulate(Fleet(replicas=1, memory_gb=100))
    assert outcome.tokens["disk"] == outcome.tokens["store"] == outcome.down_bytes == 0
    assert MORE <= outcome.tokens["computed"] / outcome.num_turns <= FIRST
    assert outcome.tokens["memory"] >= outcome.num_turns * HEAD


@pytest.mark.parametrize("link_gbit, is_read", [(10.0, True), (0.001, False)])
def test_what_other_servers_have_is_read_unless_computing_is_faster(
    link_gbit: float, is_read: bool
) -> None:
    outcome = simulate(replace(APART, link_gbit=link_gbit))
    assert (outcome.tokens["store"] > 0) == (outcome.down_bytes > 0) == is_read
    # Each turn writes what is new of it, and its last block, which grew.
    assert MORE <= outcome.up_bytes / ARM.token_bytes / outcome.num_turns <= FIRST + BLOCK


def test_affinity_saves_the_way_to_the_store() -> None:
    apart, affine = simulate(APART), simulate(replace(APART, affinity=1.0))
    assert affine.down_bytes < apart.down_bytes / 10
    assert sum(affine.seconds) / affine.num_turns < sum(apart.seconds) / apart.num_turns


def test_a_tier_drops_the_least_recently_used() -> None:
    tier = Tier(100)
    tier.keep(1, 60)
    tier.keep(2, 40)
    assert tier.find(1) == 60
    tier.keep(3, 30)
    assert [tier.find(key) for key in (1, 2, 3)] == [60, 0, 30]
    tier.keep(3, 200)  # more than there is room for
    assert [tier.find(key) for key in (1, 2, 3)] == [0, 0, 0]
