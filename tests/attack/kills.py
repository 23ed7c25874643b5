"""Kills servers under load, and checks that every acknowledged turn is kept and correct."""

import contextlib
import io
import random
from typing import ClassVar

from tests.attack.site import MODEL, Attack
from tests.chaos.changes import Changer
from tests.chaos.kills import Trial
from tests.chaos.talk import make_agents

_NUM_AGENTS = 6
_MOST_REPLIES = 25  # a kill comes after fewer


class Kills(Attack):
    """Rounds alternate: `sync`, where nothing may be lost, encrypted; `write_behind`; `sync`."""

    kind: ClassVar[str] = "kills"

    def open(self) -> None:
        # A small budget, so that files are evicted while others are written.
        options = ["--backend", "fake", "--disk-budget-mb", "8"]
        self._trials = []
        for durability, is_encrypted in (("sync", True), ("write_behind", False), ("sync", False)):
            work = self.work / f"{durability}{'-encrypted' * is_encrypted}"
            trial = Trial(
                work / "home",
                work,
                durability,
                options,
                agents=make_agents(MODEL, _NUM_AGENTS, max_tokens=40),
                seed=0,
                most_replies=_MOST_REPLIES,
                changers=[Changer("changed", MODEL, durability)],
                is_encrypted=is_encrypted,
            )
            self._trials.append(trial)

    def run_round(self, dice: random.Random) -> None:
        trial = self._trials[self.round % len(self._trials)]
        trial.dice = dice
        before = trial.num_answered
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                trial.kill_once()
        finally:
            self.num_requests += trial.num_answered - before

    def close(self) -> None:
        for trial in self._trials:
            if not trial.num_received:
                continue
            with contextlib.redirect_stdout(io.StringIO()):
                trial.finish()
                trial.check_replies()
