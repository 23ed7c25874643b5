"""Runs the documents' examples unchanged on the fake model, one page after the other.

A fence called `bash` or `python` is run, unless its title says what it needs and tests have not:
`title="needs Docker"`. Others hold data. `tests/e2e/test_newcomer.py` follows a newcomer's first
pages on the starter model.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.smoke.server_process import serve

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page.stem: page for page in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]}
ADDRESSES = ("http://127.0.0.1:8000", "localhost:8000")
NEWCOMERS = {"quick-start", "user-guide", "connect"}
DATA = {"", "json", "toml", "yaml", "mermaid", "text"}
RUN = {"bash": ("bash", "-euo", "pipefail", "-c"), "python": (sys.executable, "-c")}
FENCE = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def examples(page: str) -> list[tuple[str, str]]:
    """What is run of a page: the language, and the text."""
    found = FENCE.findall(PAGES[page].read_text(encoding="utf-8"))
    return [(info, text) for info, text in found if info in RUN]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("server")
    settings: Any = {"model_aliases": ["smollm2-135m-instruct"], "default_max_tokens": 16}
    with serve(place / "home", place / "log", "--backend", "fake", **settings) as server:
        yield server.url


def follow(language: str, example: str, url: str, place: Path) -> str:
    """Run an example unchanged but for the server's address, and return its output."""
    text = example
    for address in ADDRESSES:
        text = text.replace(address, url)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(  # noqa: S603 - our own examples
        [*RUN[language], text],
        env={**os.environ, "PATH": programs, "HOME": str(place), "SEMANTIC_URL": url},
        cwd=place,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
    assert '{"error":' not in result.stdout, f"{text}\n{result.stdout}"
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in sorted({*PAGES} - NEWCOMERS) if examples(page)])
def test_examples_can_be_followed(page: str, url: str, tmp_path: Path) -> None:
    for agent in httpx.get(f"{url}/v1/agents", trust_env=False).json()["data"]:
        httpx.delete(f"{url}/v1/agents/{agent['id']}", trust_env=False)
    for language, example in examples(page):
        follow(language, example, url, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_every_example_is_run_or_names_what_it_needs(page: str) -> None:
    infos = [info for info, _ in FENCE.findall(PAGES[page].read_text(encoding="utf-8"))]
    unknown = [info for info in infos if not re.fullmatch(r'\w+ title="needs [^"]+"', info)]
    assert set(unknown) <= RUN.keys() | DATA
