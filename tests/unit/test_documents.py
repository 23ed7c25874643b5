"""Pages and package docstrings name existing files, and packages name all of their modules."""

import ast
import json
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


_SOURCE = ROOT / "src" / "semantic"
_LAYERS = "adapters|application|cluster|domain|entrypoints|ports"
_NAMED_SOURCE = re.compile(rf"`((?:{_LAYERS})/[\w/]+\.py)`")
_PACKAGES = sorted(path.parent for path in _SOURCE.rglob("__init__.py"))


_NAMED_TEST = re.compile(r"`(tests/[\w/-]+\.py)::(\w+)`")


def test_tests_that_a_page_names_are_there() -> None:
    named = {name for page in PAGES for name in _NAMED_TEST.findall(page.read_text("utf-8"))}
    assert len(named) >= 8
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text("utf-8"), f"{path}::{test}"


def test_every_failure_of_a_peer_has_its_report_and_our_test() -> None:
    page = (ROOT / "docs" / "cache-failures.md").read_text("utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| **")]
    assert len(rows) >= 19
    for failure, reports, ours in rows:
        assert re.search(r"\(https://github\.com/[^)]+/(?:issues|pull)/\d+\)", reports), failure
        assert _NAMED_TEST.search(ours), failure
    named = {test for path, test in _NAMED_TEST.findall(page) if path.endswith("peer_failures.py")}
    written = (ROOT / "tests/contract/test_peer_failures.py").read_text("utf-8")
    assert named == set(re.findall(r"^def (test_\w+)", written, re.MULTILINE))


def test_every_cell_of_the_comparison_names_its_source() -> None:
    page = (ROOT / "docs" / "compare.md").read_text("utf-8")
    table, sources = page.split("## Sources")
    source = re.compile(r"^\| (\d+) \| (?:run|read) \| .+ \| (.*20\d\d.*) \| .+ \|$", re.MULTILINE)
    dated = dict(source.findall(sources))
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) > 8
    named = set()
    for feature, *peers, _ in rows[1:]:
        for cell in peers:
            found = re.findall(r"\[(\d+)\]", cell)
            assert found or cell == "*not checked*", f"{feature}: {cell}"
            named |= set(found)
    assert named == set(dated)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = [f"src/semantic/{name}" for name in _NAMED_SOURCE.findall(text)] + _NAMED.findall(text)
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    "package", _PACKAGES, ids=lambda path: path.relative_to(_SOURCE).as_posix()
)
def test_a_package_names_its_modules_and_no_others(package: Path) -> None:
    story = ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))) or ""
    named = re.findall(r"`([\w/]+(?:\.py|/))`", story)
    modules = {path.name for path in package.glob("[!_]*.py")}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert (modules | folders) - set(named) == set()
    places = (
        package,
        package.parent,
        _SOURCE,
        *(path for path in package.iterdir() if path.is_dir()),
    )
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_pages_name_the_versions_of_clients_that_are_run() -> None:
    """What `make clients` and its siblings install."""
    clients = ROOT / "tests" / "clients"
    packages = json.loads((clients / "package.json").read_text())["dependencies"]
    pinned = {version for version in packages.values() if version != "*"}
    pinned |= set(re.findall(r"==(\S+)", (clients / "requirements.txt").read_text()))
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("connect.md", "ollama.md"))
    assert {version for version in pinned if version not in pages} == set()
