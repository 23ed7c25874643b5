"""What constraining replies costs: the share of a decode step that masks take.

Four sequences of the starter model decode under a schema; the time spent in the constraints is set
against the rest of the step. Applying a mask to the logits is the backend's, and counted with it.
A stall is what the constraints of all sequences take in one step, while the engine waits for them.
Targets: under 15 % and no stall over 50 ms, whether the budget has room, is tight, or is just
enough for a list that must be there.
"""

import sys
import time
from collections.abc import Sequence
from statistics import median

from benchmarks.common import Target, make_engine, make_job, verdict
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
    """A list of at least so many entries."""
    return {
        "type": "object",
        "properties": {"entries": {"type": "array", "minItems": num_entries, "items": _ENTRY}},
        "required": ["entries"],
        "additionalProperties": False,
    }


class TimedConstraint:
    """Counts the time spent in a constraint."""

    spent_s = 0.0

    def __init__(self, inner: TokenConstraint) -> None:
        self._inner = inner

    def allowed(self) -> bytes | None:
        """Compute the mask on the clock."""
        started = time.perf_counter()
        mask = self._inner.allowed()
        TimedConstraint.spent_s += time.perf_counter() - started
        return mask

    def accept(self, token: int) -> None:
        """Advance on the clock."""
        started = time.perf_counter()
        self._inner.accept(token)
        TimedConstraint.spent_s += time.perf_counter() - started

    def copy(self) -> "TimedConstraint":
        """Look ahead on the clock, too."""
        return TimedConstraint(self._inner.copy())


def step_times(
    device: ModelBackendPort,
    tokenizer: HFTokenizer,
    prompt: list[int],
    constraints: Sequence[TokenConstraint | None],
    num_steps: int,
) -> tuple[list[float], list[float]]:
    """Seconds of each decode step, and of those the seconds in the constraints."""
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


def main() -> int:
    """Print the shares; 1 if the target is missed."""
    directory = starter_directory()
    tokenizer = HFTokenizer(directory)
    grammar = LLGuidanceGrammar(tokenizer)
    prompt = prompt_tokens(directory, 128)

    def run(
        num_entries: int, max_tokens: int, num_steps: int = NUM_STEPS
    ) -> tuple[list[float], list[float]]:
        shape = ReplyShape(ReplyFormat(), JsonFormat(schema_of(num_entries)))
        constraints = [grammar.constrain(shape, max_tokens) for _ in range(NUM_ROWS)]
        return step_times(device, tokenizer, prompt, constraints, num_steps)

    with backend(directory) as device:
        step_times(device, tokenizer, prompt, [None] * NUM_ROWS, NUM_STEPS // 4)
        free, _ = step_times(device, tokenizer, prompt, [None] * NUM_ROWS, NUM_STEPS)
        print(f"{NUM_ROWS} sequences, median {1000 * median(free):.1f} ms a free step")
        runs = {
            "a budget with room": run(12, 2000),
            "a tight budget, to its end": run(12, 2 * NUM_STEPS, 2 * NUM_STEPS),
            "a budget that a long list fills": run(40, 720),
        }
    targets: list[Target] = []
    for title, (steps, masks) in runs.items():
        print(f"  {title}: median {1e6 * median(masks) / NUM_ROWS:.0f} us a row")
        share = 100 * sum(masks) / sum(steps)
        targets.append(Target(f"{title}, of a step", share, 100 * TARGET, "%"))
        targets.append(Target("  longest stall", 1000 * max(masks), STALL_TARGET_MS, "ms"))
    return verdict(targets)


if __name__ == "__main__":
    sys.exit(main())
