"""Experiments: a question, a method and a criterion, with code to run and report them."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["PASS", "FAIL", "SKIP", "NOTE"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an answer."""

    verdict: Verdict
    name: str
    figure: str

    def __str__(self) -> str:
        return f"{self.verdict} {self.name}: {self.figure}"


@dataclass
class Findings:
    """The lines of one experiment's answer; each is printed at once.

    Attributes:
        is_quick: Whether a small version of the work will do.
    """

    is_quick: bool = False
    lines: list[Line] = field(default_factory=list)

    def check(self, name: str, figure: str, *, is_passed: bool) -> None:
        self._add(Line("PASS" if is_passed else "FAIL", name, figure))

    def at_most(self, name: str, figure: float, limit: float, unit: str) -> None:
        text = f"{figure:.4g} {unit} (at most {limit:.4g})"
        self.check(name, text, is_passed=figure <= limit)

    def at_least(self, name: str, figure: float, limit: float, unit: str = "x") -> None:
        text = f"{figure:.4g} {unit} (at least {limit:.4g})"
        self.check(name, text, is_passed=figure >= limit)

    def note(self, name: str, figure: str) -> None:
        self._add(Line("NOTE", name, figure))

    def skip(self, name: str, reason: str) -> None:
        self._add(Line("SKIP", name, reason))

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        print(f"  {line}", flush=True)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question that a script answers.

    Attributes:
        id: As the plan names it.
        adapted: How it differs from the plan, and why; empty if it does not.
    """

    id: str
    question: str
    method: str
    criterion: str
    answer: Callable[[Findings], None]
    adapted: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of an experiment, with its question."""

    id: str
    question: str = ""
    method: str = ""
    criterion: str = ""
    adapted: str = ""
    lines: tuple[Line, ...] = ()
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """FAIL if a line failed, SKIP if none could be run, else PASS."""
        verdicts = {line.verdict for line in self.lines}
        return "FAIL" if "FAIL" in verdicts else "PASS" if "PASS" in verdicts else "SKIP"

    @property
    def anchor(self) -> str:
        return f"{self.id}-{self.verdict}".lower()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Answer":
        return cls(**{**stored, "lines": tuple(Line(**line) for line in stored["lines"])})

    def __str__(self) -> str:
        text = [f"## {self.id}: {self.verdict}", "", f"**{self.question}**", ""]
        text += [f"- Method: {self.method}", f"- Passes if: {self.criterion}"]
        text += [f"- Differs from the plan: {self.adapted}"] if self.adapted else []
        text += ["", "| | | |", "|---|---|---|"]
        text += [f"| {line.verdict} | {line.name} | {line.figure} |" for line in self.lines]
        return "\n".join(text)


def answer(experiment: Experiment, *, is_quick: bool = False) -> Answer:
    """Run an experiment; an exception is a FAIL."""
    print(f"{experiment.id}: {experiment.question}", flush=True)
    found = Findings(is_quick)
    started = time.monotonic()
    try:
        experiment.answer(found)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        found.check("run", f"{type(error).__name__}: {error}", is_passed=False)
    asked = ("id", "question", "method", "criterion", "adapted")
    given = {name: getattr(experiment, name) for name in asked}
    made = Answer(**given, lines=tuple(found.lines), seconds=time.monotonic() - started)
    print(f"{made.verdict} {made.id} ({made.seconds:.0f} s)", flush=True)
    return made
