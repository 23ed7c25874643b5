"""Cost of constrained replies: the share of a decode step spent on masks.

Four sequences of the starter model decode under a schema; the time spent in the constraints is
compared with the rest of the step. Applying a mask to the logits counts as the backend's time.
A stall is the time of all sequences' constraints in one step, during which the engine waits.
Targets: below 15 % and no stall above 50 ms, whether the token budget is ample, tight, or just
enough for a required list.
"""

import sys
import time
from collections.abc import Sequence

from benchmarks.common import make_engine, make_job
from benchmarks.report import Report, run
from benchmarks.starter import backend, prompt_tokens, starter_directory
from semantic.adapters.outbound.grammar.compiler import LLGuidanceGrammar
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.domain.chat import JsonFormat, JsonObject
from semantic.domain.errors import DrainingError
from semantic.domain.reply_format import ReplyFormat, ReplyShape
from semantic.domain.sampling import SamplingParams
from semantic.ports.backend import ModelBackendPort
from semantic.ports.text import TokenConstraint

NUM_ROWS = 4
NUM_STEPS = 120
MAX_TOKENS = 2000
TARGET = 0.15
STALL_TARGET_MS = 50
_ENTRY: JsonObject = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "year": {"type": "integer"},
        "kind": {"enum": ["city", "river", "person"]},
        "notes": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "year", "kind"],
    "additionalProperties": False,
}


def schema_of(num_entries: int) -> JsonObject:
    """Return the schema of a list with at least this many entries."""
    return {
        "type": "object",
        "properties": {"entries": {"type": "array", "minItems": num_entries, "items": _ENTRY}},
        "required": ["entries"],
        "additionalProperties": False,
    }


class TimedConstraint:
    """Measures the time spent in a constraint."""

    spent_s = 0.0

    def __init__(self, inner: TokenConstraint) -> None:
        self._inner = inner

    def allowed(self) -> bytes | None:
        started = time.perf_counter()
        mask = self._inner.allowed()
        TimedConstraint.spent_s += time.perf_counter() - started
        return mask

    def accept(self, token: int) -> None:
        started = time.perf_counter()
        self._inner.accept(token)
        TimedConstraint.spent_s += time.perf_counter() - started

    def copy(self) -> "TimedConstraint":
        return TimedConstraint(self._inner.copy())


def step_times(
    device: ModelBackendPort,
    tokenizer: HFTokenizer,
    prompt: list[int],
    constraints: Sequence[TokenConstraint | None],
    num_steps: int,
) -> tuple[list[float], list[float]]:
    """Return the seconds of each decode step, and of those the seconds in constraints."""
    engine = make_engine(device, tokenizer)
    for row, inner in enumerate(constraints):
        sampling = SamplingParams(temperature=1, seed=row)
        timed = TimedConstraint(inner) if inner else None
        engine.submit(
            make_job(str(row), prompt[row:], MAX_TOKENS, sampling=sampling, constraint=timed)
        )
    steps: list[float] = []
    masks: list[float] = []
    while engine.has_work and len(steps) < num_steps:
        TimedConstraint.spent_s = 0.0
        started = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started)
        masks.append(TimedConstraint.spent_s)
    engine.abandon(DrainingError("the benchmark is over"))
    return steps[NUM_ROWS * 2 :], masks[NUM_ROWS * 2 :]


def measure(report: Report) -> None:
    """Measure with three token budgets."""
    directory = starter_directory()
    tokenizer = HFTokenizer(directory)
    grammar = LLGuidanceGrammar(tokenizer)
    prompt = prompt_tokens(directory, 128)
    num_steps = report.choose(30, NUM_STEPS)

    def constrained(
        num_entries: int, max_tokens: int, steps: int
    ) -> tuple[list[float], list[float]]:
        shape = ReplyShape(ReplyFormat(), JsonFormat(schema_of(num_entries)))
        constraints = [grammar.constrain(shape, max_tokens) for _ in range(NUM_ROWS)]
        return step_times(device, tokenizer, prompt, constraints, steps)

    with backend(directory) as device:
        step_times(device, tokenizer, prompt, [None] * NUM_ROWS, num_steps // 4)
        free, _ = step_times(device, tokenizer, prompt, [None] * NUM_ROWS, num_steps)
        report.add(f"a free step, {NUM_ROWS} sequences", [1000 * step for step in free], "ms")
        runs = {
            "a budget with room": constrained(12, 2000, num_steps),
            "a tight budget, to its end": constrained(12, 2 * num_steps, 2 * num_steps),
            "a budget that a long list fills": constrained(40, 720, num_steps),
        }
    for title, (steps, masks) in runs.items():
        report.add(f"{title}: a mask", [1e6 * mask / NUM_ROWS for mask in masks], "µs a row")
        share = 100 * sum(masks) / sum(steps)
        report.add(f"{title}: masks, of a step", share, "%", most=100 * TARGET)
        report.add(f"{title}: longest stall", 1000 * max(masks), "ms", most=STALL_TARGET_MS)


if __name__ == "__main__":
    sys.exit(run("grammar", measure))
