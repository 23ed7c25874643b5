"""Fifty kills for each way to keep agents and each kind of model; run by `make chaos`.

Not collected by itself: it takes minutes. CHAOS_KILLS and CHAOS_SEED change how many, and when.
"""

import multiprocessing
import os
import secrets
import sys
from pathlib import Path

import pytest

from tests.chaos.kills import Trial
from tests.chaos.talk import make_agents

pytestmark = pytest.mark.e2e

# What servers import before they are started, so that a kill takes a second and not ten.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    [
        "semantic.entrypoints.cli.app",
        "semantic.entrypoints.server",
        "semantic.adapters.outbound.backends.torch.backend",
        "transformers.models.llama.modeling_llama",
    ]
)
NUM_KILLS = int(os.environ.get("CHAOS_KILLS", "50"))
SEED = int(os.environ.get("CHAOS_SEED") or secrets.randbelow(10**6))


def run(trial: Trial, name: str) -> None:
    sys.stderr.write(f"\n{name}: {NUM_KILLS} kills, CHAOS_SEED={SEED}\n")
    for number in range(NUM_KILLS):
        trial.kill_once()
        if number % 10 == 9:
            sys.stderr.write(f"  {number + 1} kills, {trial.num_received} replies received\n")
    trial.finish()
    num_compared = trial.check_replies()
    sys.stderr.write(f"  {num_compared} replies are right, {trial.num_turns[-1]} turns are kept\n")
    assert num_compared > NUM_KILLS


@pytest.mark.parametrize("durability", ["sync", "write_behind"])
def test_the_fake_model(durability: str, tmp_path: Path) -> None:
    # A small budget, so that files are evicted while others are written.
    options = ["--backend", "fake", "--disk-budget-mb", "8"]
    agents = make_agents("fake", 6, max_tokens=60)
    trial = Trial(tmp_path / "home", tmp_path, durability, options, agents, SEED)
    run(trial, f"fake, {durability}")


@pytest.mark.parametrize("durability", ["sync", "write_behind"])
def test_the_starter_model(durability: str, starter_home: Path, tmp_path: Path) -> None:
    # Only float32 promises the same tokens in every batch.
    options = ["--dtype", "float32", "--disk-budget-mb", "200"]
    agents = make_agents("smollm2-135m-instruct", 3, max_tokens=12)
    trial = Trial(starter_home, tmp_path, durability, options, agents, SEED, 8)
    run(trial, f"starter model, {durability}")
