"""The documents name files that are there."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"  # which tells of files that are gone
)
_NAMED = re.compile(r"(?<![\w/.-])((?:src|tests|benchmarks|examples|config|deploy)/[\w./-]+\.\w+)")


_NAMED_TEST = re.compile(r"`(tests/[\w/-]+\.py)::(\w+)`")


def test_tests_that_a_page_names_are_there() -> None:
    named = {name for page in PAGES for name in _NAMED_TEST.findall(page.read_text("utf-8"))}
    assert len(named) >= 8
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text("utf-8"), f"{path}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = _NAMED.findall(page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []
