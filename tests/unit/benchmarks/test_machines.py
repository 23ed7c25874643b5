"""The tables of machines, and the pages that they are in."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.machines import (
    COLUMNS,
    FILE,
    PAGES,
    RESTART,
    add,
    headline,
    load,
    main,
    record_of,
    table,
    write_pages,
)

pytestmark = pytest.mark.unit

WHERE = {"machine": "a CPU", "load": [0.1], "commit": "abc", "date": "2026-11-18"}


def result(**figures: tuple[float, float]) -> dict[str, Any]:
    """A result of bench_peer."""
    found = {
        f"quiet, {name}, {server}": {"median": value}
        for name, values in figures.items()
        for server, value in zip(("semantic", "llama.cpp"), values, strict=True)
    }
    return {"figures": found, "environment": {**WHERE, "python": "3"}}


def test_pages_have_the_stored_results(tmp_path: Path) -> None:
    pages = [Path(shutil.copy(page, tmp_path)) for page in PAGES]
    write_pages(load(), pages)
    for page, written in zip(PAGES, pages, strict=True):
        assert written.read_text() == page.read_text(), "run python -m benchmarks.machines"


def test_every_stored_result_says_when_and_where() -> None:
    records = load()
    assert len(records) >= 4
    for record in records:
        assert record["figures"].keys() <= COLUMNS.keys()
        assert record["date"].startswith("20")
        assert record["machine"]


def test_a_machine_is_added_once_and_keeps_its_title(tmp_path: Path) -> None:
    file = tmp_path / "machines.json"
    add(record_of(result(**{RESTART: (1.0, 40.0), "one stream": (100.0, 50.0)}), "mine"), file)
    add(record_of(result(**{RESTART: (2.0, 60.0)})), file)
    add({**record_of(result(**{RESTART: (1.0, 9.0)}), "other"), "machine": "another"}, file)
    records = load(file)
    assert [record["title"] for record in records] == ["mine", "other"]
    assert records[0]["figures"] == {RESTART: [2.0, 60.0]}
    assert headline(records) == (
        "**After a restart, five agents answer 30 times sooner than with llama.cpp** on mine, "
        "9 times on other."
    )
    assert "| mine | 2 / 60 (30x) | not measured |" in table(records, [RESTART, "one stream"])
    assert headline([{**record, "kernels": "avx2"} for record in records[:1]] + records[1:]) == (
        "**After a restart, five agents answer 9 times sooner than with llama.cpp** on other."
    )
    assert json.loads(file.read_text()) == records


def test_a_result_without_the_peer_is_no_machine(tmp_path: Path) -> None:
    assert record_of(result()) == {}
    path = tmp_path / "peer.json"
    path.write_text(json.dumps(result()))
    with pytest.raises(SystemExit):
        main([str(path)])
    assert FILE.exists()
