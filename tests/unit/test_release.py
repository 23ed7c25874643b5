"""The version and its changelog agree. `make release-check` adds what holds for a release only."""

import re
import subprocess
from pathlib import Path

import pytest

from semantic import __version__

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
_SECTION = re.compile(r"^## \[([^]]+)\](?: - (\d{4}-\d\d-\d\d))?\n(.*?)(?=^## |\Z)", re.M | re.S)


def sections() -> dict[str, tuple[str, str]]:
    """Date and text of each version in the changelog."""
    found = _SECTION.findall((ROOT / "CHANGELOG.md").read_text("utf-8"))
    return {name: (date, text.strip()) for name, date, text in found}


def test_the_version_is_the_latest_of_the_changelog() -> None:
    versions = [name for name in sections() if name != "Unreleased"]
    assert versions[0] == __version__
    assert sections()[__version__][0], "its section has a date"


def test_every_version_is_dated_and_says_something() -> None:
    for name, (date, text) in sections().items():
        assert name == "Unreleased" or (date and len(text) > 100), name


def test_a_release_has_no_loose_ends(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--release"):
        pytest.skip("only before a release: make release-check")
    assert sections().get("Unreleased", ("", ""))[1] == ""
    changed = subprocess.run(
        ["git", "status", "--porcelain"],  # noqa: S607 - the user's git
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert changed == "", "commit first"
