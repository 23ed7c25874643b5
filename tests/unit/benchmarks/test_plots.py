"""Plots: which figures of a result are drawn; the same figures give the same file."""

from pathlib import Path

import pytest

from benchmarks.plots import draw, draw_all, group

pytestmark = pytest.mark.unit


def test_bars_are_found_by_the_names_of_figures() -> None:
    names = {
        "5 agents x 1024, memory on: TTFT, first": 4.0,
        "5 agents x 1024, memory on: TTFT, after a restart": 0.5,
        "5 agents x 1024, llama.cpp: TTFT, first": 3.0,
        "5 agents x 1024, memory on: wall time": 9.0,
        "3 agents x 1024, memory on: TTFT, first": 9.0,
    }
    figures = {name: {"median": value} for name, value in names.items()}
    drawn: dict[str, object] = {}

    def drawing(groups: object, path: Path, *_: object, is_log: bool) -> None:
        drawn[path.stem] = (groups, is_log)

    draw_all({"benchmarks": {"workflow": {"figures": figures}}}, Path("x"), drawing)
    bars = {"memory on": {"first": 4.0, "after a restart": 0.5}, "llama.cpp": {"first": 3.0}}
    assert drawn == {"bench-first-token": (bars, True)}
    assert group({}, "(?P<series>.)(?P<group>.)") == {}


def test_the_same_figures_give_the_same_file(tmp_path: Path) -> None:
    bars = {"ours": {"a": 1.0, "b": 2.0}, "theirs": {"a": 3.0}}
    for name in ("one.svg", "two.svg"):
        draw(bars, tmp_path / name, "title", "s", is_log=True)
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert text.lstrip().startswith("<?xml")
