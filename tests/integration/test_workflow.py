"""The workflow benchmark against servers on the fake backend."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.bench_load import add_metrics
from benchmarks.bench_workflow import PHASES, Talk, run_workflow, tell_ratios, tell_talk
from benchmarks.client import said
from benchmarks.report import Report
from benchmarks.systems import System, other
from tests.http_server import make_settings, run_server
from tests.waiting import await_that

pytestmark = pytest.mark.integration


def make_talk(name: str, home: Path, *, is_salted: bool = False) -> Talk:
    @contextlib.contextmanager
    def start(place: Path) -> Iterator[str]:
        with run_server(make_settings(place, max_idle=0, model_aliases=["any"])) as running:
            # State that is not loaded yet when a request arrives may be computed instead.
            cache = running.server.memory.cache
            cache.upkeep.warm_up()
            await_that(lambda: not cache.store.tiers.reading_bytes)
            yield f"{running.url}/v1"

    system = System(name, start, is_salted=is_salted)
    talks = [said(f"agent {i}: " + "notes " * 100, "shared " * 100) for i in range(2)]
    return Talk(system, home / name, talks, num_reply=4)


def test_phases_alternate_and_memory_is_found_again_after_a_restart(tmp_path: Path) -> None:
    talks = [make_talk("memory on", tmp_path), make_talk("memory off", tmp_path, is_salted=True)]
    told: list[str] = []
    run_workflow(talks, num_later=2, tell=told.append)
    order = [text.rsplit(":", 1)[0] for text in told]
    assert order == [f"{talk.system.name}, {phase}" for phase in PHASES for talk in talks]
    for talk in talks:
        assert [len(talk.firsts[phase]) for phase in PHASES] == [2, 4, 2]
        assert talk.num_tokens == 8 * 4
    reused = [[reply.num_reused for reply in talk.replies] for talk in talks]
    assert min(reused[0][2:]) > 1000
    assert max(reused[1]) < 100

    report = Report("workflow")
    for talk in talks:
        tell_talk(report, talk, "5 agents x 1024")
    tell_ratios(report, "5 agents x 1024", 5, 1024, "memory off")
    ratio = report.figures["5 agents x 1024: after a restart, memory off / memory on"]
    assert ratio.least == 8
    assert ratio.median == pytest.approx(
        report.figures["5 agents x 1024, memory off: TTFT, after a restart"].median
        / report.figures["5 agents x 1024, memory on: TTFT, after a restart"].median
    )


def test_a_brief_run_replays_only_the_turn_after_the_restart(tmp_path: Path) -> None:
    whole, brief = make_talk("memory on", tmp_path), make_talk("memory off", tmp_path)
    brief.is_brief = True
    run_workflow([whole, brief], num_later=1, tell=lambda _: None)
    assert list(brief.firsts) == [PHASES[2]]
    assert [len(messages) for messages in brief.talks] == [8, 8]
    report = Report("workflow")
    for talk in (whole, brief):
        tell_talk(report, talk, "5 agents x 4096")
    tell_ratios(report, "5 agents x 4096", 5, 4096, "memory off")
    assert report.figures["5 agents x 4096: after a restart, memory off / memory on"].least == 20


def test_a_server_that_is_not_ours_is_not_restarted(tmp_path: Path) -> None:
    with run_server(make_settings(tmp_path, model_aliases=["any"])) as running:
        talk = Talk(other(f"{running.url}/v1/", "any"), tmp_path, [said("Hello")], num_reply=2)
        run_workflow([talk], num_later=1, tell=lambda _: None)
    assert list(talk.firsts) == ["first", "later"]


def test_what_a_load_generator_found_is_kept() -> None:
    report = Report("load")
    percentiles = {"p25": 100.0, "p50": 200.0, "p75": 400.0}
    first = {"successful": {"percentiles": percentiles, "count": 10}}
    speed = {"successful": {"mean": 33.0}}
    metrics = {"time_to_first_token_ms": first, "output_tokens_per_second": speed}
    add_metrics(report, "memory on, first run", metrics)
    assert [figure.median for figure in report.figures.values()] == [0.2, 33.0, 10.0]
