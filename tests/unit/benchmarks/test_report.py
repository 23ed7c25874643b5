"""The plumbing of benchmarks: figures, bounds, comparison with an earlier result, the runner."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as runner
from benchmarks.report import Figure, Report, Rounds, interleaved, run

pytestmark = pytest.mark.unit


def fill(report: Report) -> None:
    report.settings["size"] = 3
    report.add("spent", [3.0, 1.0, 2.0], "s", most=2.5)
    report.add("speed", 4.0, "tokens/s", least=report.choose(1.0, 5.0))
    report.note("all is well")


def test_everything_is_measured_in_turns_after_a_round_that_does_not_count() -> None:
    calls: list[str] = []

    def call(name: str) -> float:
        calls.append(name)
        return len(calls)

    rounds = interleaved({"a": lambda: call("a"), "b": lambda: call("b")}, 2)
    assert calls == ["a", "b"] * 3
    assert rounds.figures == {"a": [3, 5], "b": [4, 6]}


def test_a_ratio_is_taken_round_by_round() -> None:
    rounds = Rounds({"ours": [1.0, 20.0, 3.0], "theirs": [2.0, 10.0, 4.0]})
    assert rounds.ratios("ours", "theirs") == [0.5, 2.0, 0.75]
    assert rounds.ratio("ours", "theirs") == 0.75


@pytest.mark.parametrize(
    "least, most, is_met, bound",
    [
        (None, None, True, ""),
        (2.0, None, True, ">= 2: ok"),
        (2.5, None, False, ">= 2.5: MISSED"),
        (None, 2.0, True, "<= 2: ok"),
        (None, 1.5, False, "<= 1.5: MISSED"),
    ],
)
def test_a_bound_is_on_the_median(
    least: float | None, most: float | None, is_met: bool, bound: str
) -> None:
    figure = Figure("x", (1.0, 2.0, 9.0), "s", least, most)
    assert (figure.is_met, figure.bound, figure.spread) == (is_met, bound, "1 to 9")


@pytest.mark.parametrize(
    "earlier, ratio",
    [
        ({"median": 4.0, "unit": "s"}, "0.50x"),
        ({"median": 4.0, "unit": "ms"}, ""),
        ({"median": 0.0, "unit": "s"}, ""),
        (None, ""),
    ],
)
def test_a_table_compares_with_the_earlier_result(
    earlier: dict[str, Any] | None, ratio: str
) -> None:
    report = Report("sort")
    fill(report)
    table = report.table({"figures": {"spent": earlier}} if earlier else None)
    assert f"| spent | 2 | s | 1 to 3 | <= 2.5: ok | {ratio} |" in table.splitlines()


def test_a_command_prints_its_table_and_writes_its_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    assert run("sort", fill, ["--quick", "--json", str(path)]) == 0
    assert run("sort", fill, ["--against", str(path)]) == 1  # not quick: another bound
    assert "| speed | 4 | tokens/s |  | >= 5: MISSED | 1.00x |" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["figures"]["spent"]["values"] == [3.0, 1.0, 2.0]
    assert (found["settings"], found["notes"]) == ({"size": 3}, ["all is well"])
    assert set(found["environment"]) >= {"machine", "versions", "commit", "load", "python"}


# -- the runner ----------------------------------------------------------------------------------


def test_every_benchmark_of_the_suite_is_a_module_that_reports() -> None:
    folder = Path(runner.__file__).parent
    for name in runner.SUITE:
        assert f'run("{name}", measure' in (folder / f"bench_{name}.py").read_text()


def test_results_are_merged_and_missed_bounds_reported(tmp_path: Path) -> None:
    report = Report("sort")
    fill(report)
    found = {"environment": {}, "minutes": 1, "benchmarks": {"sort": report.as_json()}}
    other = {"environment": {}, "minutes": 1, "benchmarks": {"other": report.as_json()}}
    path = tmp_path / "results" / "full.json"
    runner.save(other, path)
    runner.save(found, path)
    stored = json.loads(path.read_text())
    assert list(stored["benchmarks"]) == ["other", "sort"]
    assert runner.missed(stored) == ["other: speed", "sort: speed"]


def test_a_benchmark_that_fails_is_reported_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one(name: str, *, is_quick: bool, against: Path | None) -> dict[str, Any]:
        del is_quick, against
        broken = {"benchmark": name, "failed": "exit status 3", "figures": {}}
        report = Report(name)
        fill(report)
        return broken if name == "render" else report.as_json()

    monkeypatch.setattr(runner, "run_one", one)
    monkeypatch.setattr(runner, "OUTPUT", tmp_path)
    assert runner.main(["render", "resume"]) == 1
    said = capsys.readouterr().out
    assert "[2/2] resume" in said
    assert "BROKEN render: exit status 3" in said
    assert "MISSED resume: speed" in said
    assert set(json.loads((tmp_path / "full.json").read_text())["benchmarks"]) == {
        "render",
        "resume",
    }
