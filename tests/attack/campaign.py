"""`make attack`: runs every kind of attack for some minutes; one seed decides all random choices.

    python -m tests.attack.campaign --seed 7 --minutes 10
    python -m tests.attack.campaign --seed 7 --kinds imports --first 12 --rounds 1

The second form repeats one round. The exit status is 1 if a promise did not hold.
"""

import argparse
import contextlib
import secrets
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.attack.connections import Connections
from tests.attack.damage import DamagedFiles
from tests.attack.fuzz import FuzzedRequests
from tests.attack.images import HostileImages
from tests.attack.imports import TamperedImports
from tests.attack.kills import Kills
from tests.attack.races import Races
from tests.attack.schemas import HostileSchemas
from tests.attack.site import Attack, Finding, Truth, make_dice
from tests.attack.templates import HostileTemplates

KINDS: dict[str, type[Attack]] = {
    attack.kind: attack
    for attack in (
        Kills,
        DamagedFiles,
        FuzzedRequests,
        HostileSchemas,
        HostileTemplates,
        HostileImages,
        TamperedImports,
        Connections,
        Races,
    )
}
_MOST_SHOWN = 20
_MOST_FINDINGS = 100  # a server that fails like this needs no more proof


def numbers(first: int, rounds: int | None, seconds: float) -> Iterator[int]:
    """The numbers of rounds: so many, or as many as begin within so many seconds."""
    until = time.monotonic() + seconds
    number = first
    while (rounds is None or number < first + rounds) and time.monotonic() < until:
        yield number
        number += 1


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    kind: str
    num_rounds: int
    num_requests: int
    findings: tuple[Finding, ...]
    seconds: float
    answers: Mapping[int, int]


def carry_out(attack: Attack, seed: int, rounds: Iterable[int]) -> Outcome:
    """Run some rounds of one kind; whatever they raise is a finding."""
    started = time.monotonic()
    attack.work.mkdir(parents=True, exist_ok=True)
    num_rounds = 0
    attack.open()
    try:
        for number in rounds:
            attack.round = number
            num_rounds += 1
            with _noted(attack):
                attack.run_round(make_dice(seed, attack.kind, number))
            if len(attack.findings) >= _MOST_FINDINGS:
                break
    finally:  # also after Ctrl-C, so that no server is left behind
        with _noted(attack):
            attack.close()
    seconds = time.monotonic() - started
    return Outcome(
        attack.kind,
        num_rounds,
        attack.num_requests,
        tuple(attack.findings),
        seconds,
        attack.answers,
    )


@contextlib.contextmanager
def _noted(attack: Attack) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a round that cannot be finished is a finding
        places = traceback.extract_tb(error.__traceback__)
        place = next((p for p in reversed(places) if "attack" in p.filename), places[-1])
        where = f"{Path(place.filename).name}:{place.lineno}"
        attack.find(f"{type(error).__name__} at {where}: {str(error)[:400]}")


def table(outcomes: Sequence[Outcome]) -> str:
    """What was done and found, for people."""
    lines = [f"{'kind':<12} {'rounds':>7} {'requests':>9} {'findings':>9} {'seconds':>8}"]
    for done in outcomes:
        counts = f"{done.num_rounds:>7} {done.num_requests:>9} {len(done.findings):>9}"
        lines.append(f"{done.kind:<12} {counts} {done.seconds:>8.0f}")
        if done.answers:
            answers = (f"{status}: {number:,}" for status, number in sorted(done.answers.items()))
            lines.append(f"  answers by status: {', '.join(answers)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign in a directory of its own."""
    parser = argparse.ArgumentParser(prog="attack", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="all chance (default: drawn)")
    parser.add_argument("--minutes", type=float, default=10, help="length of all kinds together")
    parser.add_argument("--kinds", nargs="*", choices=[*KINDS, []], default=[], help="only these")
    parser.add_argument("--rounds", type=int, default=None, help="rounds of each kind, not minutes")
    parser.add_argument(
        "--requests", type=int, default=FuzzedRequests.requests_a_round, help="of a round of fuzz"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else secrets.randbelow(10**6)
    kinds = given.kinds or list(KINDS)
    FuzzedRequests.requests_a_round = given.requests
    seconds = float("inf") if given.rounds is not None else given.minutes * 60 / len(kinds)
    outcomes = []
    # Its servers end with it, however it ends.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say(f"attack: seed {seed}, {', '.join(kinds)}")
    with tempfile.TemporaryDirectory(prefix="semantic-attack-") as place:
        truth = Truth(Path(place) / "truth").start()
        try:
            for kind in kinds:
                attack = KINDS[kind](Path(place) / kind, truth)
                outcome = carry_out(attack, seed, numbers(given.first, given.rounds, seconds))
                outcomes.append(outcome)
                say("\n".join(table([outcome]).splitlines()[1:]))
        finally:
            truth.close()
    report(outcomes, seed)
    return 1 if any(outcome.findings for outcome in outcomes) else 0


def report(outcomes: Sequence[Outcome], seed: int) -> None:
    """Say what was found, how to see it again, and the table."""
    for outcome in outcomes:
        for finding in outcome.findings[:_MOST_SHOWN]:
            say(f"\n{finding.kind}, round {finding.round}: {finding.what}")
        left = len(outcome.findings) - _MOST_SHOWN
        if left > 0:
            say(f"... and {left} more of {outcome.kind}")
    say(f"\n{table(outcomes)}\n")
    if any(outcome.findings for outcome in outcomes):
        say(
            f"again: make attack SEED={seed}\none round: python -m tests.attack.campaign "
            f"--seed {seed} --kinds KIND --first ROUND --rounds 1"
        )


def say(text: str) -> None:
    """Print at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
