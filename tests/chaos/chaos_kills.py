"""Fifty kills for each way to keep agents, each kind of model, and encryption; for `make chaos`.

Not collected by itself: it takes minutes. CHAOS_KILLS and CHAOS_SEED change how many, and when.
"""

import multiprocessing
import os
import secrets
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from examples.custom_model import make_tiny_model
from tests.chaos.changes import Changer
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
    wrong: list[str] = []
    for number in range(NUM_KILLS):
        try:
            trial.kill_once()
        except AssertionError as error:  # all are listed, and not the first alone
            wrong.append(f"kill {number + 1}: {error}")
            sys.stderr.write(f"  {wrong[-1]}\n")
        if number % 10 == 9:
            sys.stderr.write(f"  {number + 1} kills, {trial.num_received} replies received\n")
    trial.finish()
    num_compared = trial.check_replies()
    sys.stderr.write(f"  {num_compared} replies are right, {trial.num_turns[-1]} turns are kept\n")
    sys.stderr.write(f"  answered changes: {dict(trial.num_changes)}\n")
    assert not wrong, "\n".join(wrong)
    assert num_compared > NUM_KILLS


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("durability", ["sync", "write_behind"])
def test_the_fake_model(durability: str, is_encrypted: bool, tmp_path: Path) -> None:
    # A small budget, so that files are evicted while others are written.
    options = ["--backend", "fake", "--disk-budget-mb", "8"]
    agents = make_agents("fake", 6, max_tokens=60)
    changers = [Changer(f"changed-{number}", "fake", SEED) for number in range(2)]
    trial = Trial(
        tmp_path / "home",
        tmp_path,
        durability,
        options,
        agents,
        SEED,
        changers=changers,
        is_encrypted=is_encrypted,
    )
    run(trial, f"fake, {durability}{', encrypted' * is_encrypted}")


@pytest.fixture(scope="module")
def small_model(starter_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model for torch, which starts and answers fast."""
    made = make_tiny_model(starter_model_dir, tmp_path_factory.mktemp("model") / "small")
    weights = load_file(made / "model.safetensors")
    # As it is made, it repeats the last token; so, all that was said before decides.
    lively = {name: w * 8 if "_proj." in name else w for name, w in weights.items()}
    save_file(lively, made / "model.safetensors", {"format": "pt"})
    return made


@pytest.mark.parametrize("durability, is_encrypted", [("sync", True), ("write_behind", False)])
def test_a_torch_model(
    durability: str, is_encrypted: bool, small_model: Path, tmp_path: Path
) -> None:
    # Only float32 promises the same tokens in every batch.
    options = ["--model", str(small_model), "--dtype", "float32", "--disk-budget-mb", "20"]
    agents = make_agents(small_model.name, 3, max_tokens=12)
    trial = Trial(
        tmp_path / "home",
        tmp_path,
        durability,
        options,
        agents,
        SEED,
        most_replies=8,
        changers=[Changer("changed", small_model.name, SEED)],
        is_encrypted=is_encrypted,
    )
    run(trial, f"torch, {durability}{', encrypted' * is_encrypted}")
    replies = [done.reply for agent in agents for done in agent.received]
    assert len(set(replies)) > len(replies) // 2
