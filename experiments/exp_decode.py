"""EXP-005 and EXP-latency: decode speed of several agents, and the wait for a batch."""

import itertools
import time
from collections.abc import Sequence
from functools import partial
from statistics import median

from benchmarks.common import GREEDY, make_engine, make_job
from benchmarks.report import interleaved
from benchmarks.starter import backend as starter_backend
from benchmarks.starter import prompt_tokens, starter_directory
from experiments.common import Experiment, Findings
from semantic.adapters.config.sources import load_settings
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.application.engine.request import EventBatch
from semantic.application.settings import EngineLimits
from semantic.domain.events import TextDelta
from semantic.ports.backend import LAST_SAMPLED, Chunk, Draw, ModelBackendPort, SequenceId, Step
from semantic.ports.text import TokenizerPort

AGENTS = (1, 3, 5, 7, 10)
NUM_PROMPT = 64
_SEQUENCES = itertools.count(10**6)
_JOBS = itertools.count()


def bare_speed(
    device: ModelBackendPort, prompt: Sequence[int], num_rows: int, num_new: int
) -> float:
    """Return the tokens per second of the device alone, the upper bound."""
    rows = [SequenceId(next(_SEQUENCES)) for _ in range(num_rows)]
    draw = Draw(GREEDY, len(prompt))
    for row in rows:
        device.open_sequence(row, list(prompt))
        device.collect(device.launch(Step((Chunk(row, 0, tuple(prompt), draw),))))
    started = time.perf_counter()
    for i in range(num_new):
        chunks = (Chunk(row, len(prompt) + i, LAST_SAMPLED, draw) for row in rows)
        device.collect(device.launch(Step(tuple(chunks))))
    spent = time.perf_counter() - started
    for row in rows:
        device.close_sequence(row)
    return num_rows * num_new / spent


def engine_speed(
    device: ModelBackendPort,
    tokenizer: TokenizerPort,
    prompt: Sequence[int],
    num_rows: int,
    num_new: int,
) -> float:
    """Return the engine's tokens per second while all sequences decode, sample and seal."""
    engine = make_engine(device, tokenizer, EngineLimits(max_batch_size=num_rows, max_idle=0))
    for row in range(num_rows):
        name = f"job {next(_JOBS)}"
        engine.submit(make_job(name, [*prompt[1:], prompt[row]], num_new + 2 * num_rows))
    for _ in range(num_rows + 1):
        engine.step()
    started, num_steps = time.perf_counter(), 0
    while engine.has_work and num_steps < num_new:
        engine.step()
        num_steps += 1
    spent = time.perf_counter() - started
    while engine.has_work:
        engine.step()
    return num_rows * num_steps / spent


def throughput(found: Findings) -> None:
    """Compare the engine with the device alone."""
    directory = starter_directory()
    prompt, tokenizer = prompt_tokens(directory, NUM_PROMPT), HFTokenizer(directory)
    num_new, rounds = (4, 1) if found.is_quick else (24, 3)
    with starter_backend(directory) as device:
        for rows in AGENTS:
            speeds = interleaved(
                {
                    "bare": partial(bare_speed, device, prompt, rows, num_new),
                    "engine": partial(engine_speed, device, tokenizer, prompt, rows, num_new),
                },
                rounds,
            )
            name = f"{rows} agents: {speeds.median('engine'):.1f} tokens/s, of what is possible"
            found.at_least(name, speeds.ratio("engine", "bare"), 0.8)


def first_token_ms(
    device: ModelBackendPort, tokenizer: TokenizerPort, prompts: Sequence[Sequence[int]]
) -> tuple[float, float]:
    """Return the milliseconds until all have a first token, and of a decode step after that."""
    arrived: set[str] = set()

    def keep(events: EventBatch) -> None:
        arrived.update(name for name, event in events if isinstance(event, TextDelta))

    engine = make_engine(device, tokenizer, EngineLimits(max_idle=0), emit=keep)
    started = time.perf_counter()
    for prompt in prompts:
        engine.submit(make_job(f"job {next(_JOBS)}", prompt, 16))
    while len(arrived) < len(prompts) and engine.has_work:
        engine.step()
    first = time.perf_counter() - started
    steps = []
    while engine.has_work:
        started = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started)
    return 1000 * first, 1000 * median(steps or [0.0])


def batch_window(found: Findings) -> None:
    """Measure what waiting for a batch costs the requests that wait."""
    directory = starter_directory()
    tokenizer, window = HFTokenizer(directory), load_settings().runtime.batch_window_ms
    text = prompt_tokens(directory, 2048)
    found.at_most("the window", window, 10, "ms")
    with starter_backend(directory) as device:
        first_token_ms(device, tokenizer, [text[:NUM_PROMPT]])
        for count in (1, 3) if found.is_quick else (1, 3, 5, 7):
            prompts = [text[i * 100 : i * 100 + 256] for i in range(count)]
            first, step = first_token_ms(device, tokenizer, prompts)
            share = 100 * window / (window + first)
            name = f"{count} agents: first tokens in {first:.0f} ms, a step {step:.1f} ms; the wait"
            found.at_most(name, share, 10, "% of it")
    found.skip("on Metal", "there is no Apple Silicon here; these are this machine's times")


EXPERIMENTS = (
    Experiment(
        id="EXP-005",
        question="How fast do 1, 3, 5, 7 and 10 agents decode together?",
        method="the starter model: tokens per second of the engine, compared with the device's "
        "own loop over the same number of rows, interleaved",
        criterion="at least 80 % of the upper bound",
        adapted="the upper bound is the bare device in the same run, not a model of its memory",
        answer=throughput,
    ),
    Experiment(
        id="EXP-latency",
        question="How long may an idle engine wait for other requests?",
        method="the time to first token of 1, 3, 5 and 7 agents with prompts of 256 tokens, and "
        "the decode steps after it, compared with `batch_window_ms`",
        criterion="the window is at most 10 ms, and at most a tenth of the time to the first token",
        adapted="a busy engine admits requests at every step, so only the first request after a "
        "pause waits for the window",
        answer=batch_window,
    ),
)
