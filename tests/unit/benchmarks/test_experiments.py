"""Experiments: verdicts, the page, and the arithmetic of each, on the fake backend."""

from pathlib import Path

import pytest

from benchmarks.bench_growth import fill, opening
from benchmarks.bench_memory import (
    agents_bytes,
    agents_that_fit,
    computed_bytes,
    padded_bytes,
    resting_bits,
)
from benchmarks.blocks import CONFIGS, spec_of
from experiments import __main__ as runner
from experiments.common import Answer, Experiment, Findings, Line, answer
from experiments.exp_blocks import allocation, percentile
from experiments.exp_caches import resumed_as_alone
from experiments.exp_decode import bare_speed, engine_speed, first_token_ms
from experiments.exp_disk import atomic_writes, disk_times
from experiments.exp_wire import REFERENCE, is_in_order, read_events
from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer, fake_spec

pytestmark = pytest.mark.unit


def ask(experiment: Experiment) -> Answer:
    return answer(experiment, is_quick=True)


# -- verdicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verdicts, whole",
    [("PASS PASS", "PASS"), ("PASS SKIP", "PASS"), ("PASS FAIL SKIP", "FAIL"), ("SKIP", "SKIP")],
)
def test_an_answer_fails_if_a_line_fails(verdicts: str, whole: str) -> None:
    lines = tuple(Line(verdict, "x", "y") for verdict in verdicts.split())  # type: ignore[arg-type]
    assert Answer("EXP-1", lines=lines).verdict == whole


def test_bounds_and_errors_become_lines() -> None:
    def body(found: Findings) -> None:
        found.at_most("a", 2.0, 1.0, "ms")
        found.at_least("b", 2.0, 1.0)
        found.skip("c", "no Metal")
        raise ValueError("broken")

    made = ask(Experiment("EXP-1", "why?", "so", "it does", body, adapted="all"))
    assert [line.verdict for line in made.lines] == ["FAIL", "PASS", "SKIP", "FAIL"]
    assert Answer.from_json(made.as_json()) == made
    page = runner.page([made])
    assert "| [EXP-1](#exp-1-fail) | why? | FAIL |" in page
    assert "| FAIL | run | ValueError: broken |" in page
    assert "- Differs from the plan: all" in page


def test_all_fifteen_are_there_with_what_they_ask() -> None:
    assert len(runner.MODULES) == 15
    for name in ("EXP-002", "EXP-003", "EXP-007a", "EXP-009", "EXP-013"):
        found = runner.find(name)
        assert all((found.question, found.method, found.criterion))


# -- arithmetic ----------------------------------------------------------------------------------


def test_blocks_are_allocated_in_a_full_pool() -> None:
    found = Findings(is_quick=True)
    allocation(found)
    assert [line.name for line in found.lines][:2] == ["p50 of 200", "p95 of 200"]
    assert percentile([3.0, 1.0, 2.0, 4.0], 95) == 3.0


@pytest.mark.parametrize("window, has_state", [(0, False), (24, False), (24, True)])
def test_state_goes_on_as_alone_after_files(window: int, has_state: bool) -> None:
    backend = FakeBackend(fake_spec(window=window, has_state=has_state))
    prompts = [list(b"a prompt of some length, longer than a window"), list(b"short")]
    assert resumed_as_alone(backend, prompts, has_files=True) == [True, True]
    assert backend.num_open == 0


def test_speeds_count_tokens_of_all_rows() -> None:
    backend, prompt = FakeBackend(fake_spec(block_tokens=256)), list(b"a prompt")
    assert bare_speed(backend, prompt, 3, 4) > 0
    assert engine_speed(backend, FakeTokenizer(), prompt, 3, 4) > 0
    first, step = first_token_ms(backend, FakeTokenizer(), [prompt, prompt[::-1]])
    assert first > 0
    assert step > 0


def test_files_are_written_plainly_and_safely() -> None:
    found = Findings(is_quick=True)
    atomic_writes(found)
    disk_times(found)
    assert [line.name.split(",")[0] for line in found.lines] == [
        "4",
        "written within a step of 10 ms",
        *["write 2", "read 2", "write 4", "read 4"],
        "reading 4",
        *["write a MB", "read a MB"],
    ]
    assert [line.verdict for line in found.lines[2:6]] == ["NOTE"] * 4


def test_events_are_read_and_their_order_checked() -> None:
    text = "\n\n".join(f'event: {name}\ndata: {{"type": "{name}"}}' for name in REFERENCE)
    names = [name for name, _ in read_events(f": wait\n\n{text}")]
    assert is_in_order(names)
    assert is_in_order(["ping", *names])
    assert not is_in_order(names[::-1])
    assert not is_in_order(names[:-1])


# -- memory and growth ---------------------------------------------------------------------------


def test_what_blocks_take_is_what_the_geometry_asks_for() -> None:
    spec = spec_of("GPT-OSS-20B", scale=16)
    lengths = (1500, 1100, 2000)
    measured, computed = agents_bytes(spec, lengths, 1024), computed_bytes(spec, lengths, 1024)
    assert computed <= measured <= 1.1 * computed
    assert padded_bytes(spec, lengths) == 3 * spec.bytes_per_context(2000)


@pytest.mark.parametrize(
    "model, published", [("Gemma 3 12B", (24, 12, 6, 3)), ("Llama 3.1 8B", (70, 35, 17, 8))]
)
def test_without_windows_as_many_fit_as_was_published(
    model: str, published: tuple[int, ...]
) -> None:
    spec = spec_of(model)
    contexts = (4096, 8192, 16384, 32768)
    fits = [agents_that_fit(spec, n, 4, 10.2 * 2**30, has_windows=False) for n in contexts]
    for found, expected in zip(fits, published, strict=True):
        assert expected <= found <= 1.13 * expected
    with_windows = [agents_that_fit(spec, n, 4) for n in contexts]
    assert (with_windows[-1] > 3 * published[-1]) == (model == "Gemma 3 12B")


def test_four_bits_with_their_scales_are_four_and_a_half() -> None:
    assert [resting_bits(bits) for bits in (16, 8, 4)] == [16, 8.5, 4.5]
    assert [spec_of(name).num_window for name in CONFIGS] == [40, 0, 0, 12]


def test_a_directory_of_agents_opens_as_a_server_left_it(tmp_path: Path) -> None:
    fill(tmp_path, 7)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 7
    assert all(spent > 0 for spent in opening(tmp_path))
