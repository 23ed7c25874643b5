"""The guides' examples are run as they stand, by the fake model, one page after the other.

A fence called `bash` or `python` is run; one called `console` is for people's eyes.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.smoke.server_process import serve

pytestmark = pytest.mark.integration

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDES = ("quick-start", "installation", "user-guide")
ADDRESS = "http://127.0.0.1:8000"
_FENCE = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("server")
    config = place / "settings.toml"
    config.write_text('model_aliases = ["smollm2-135m-instruct"]')
    arguments = ("--backend", "fake", "--config", str(config))
    with serve(place / "home", place / "log", *arguments) as server:
        server.await_ready()
        yield server.url


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_can_be_followed(guide: str, url: str, tmp_path: Path) -> None:
    examples = _FENCE.findall((DOCS / f"{guide}.md").read_text(encoding="utf-8"))
    assert examples
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "HOME": str(tmp_path), "SEMANTIC_URL": url}
    for language, text in examples:
        shell = [sys.executable, "-"] if language == "python" else ["bash", "-euo", "pipefail"]
        result = subprocess.run(  # noqa: S603 - our own examples
            shell,
            input=text.replace(ADDRESS, url),
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
        assert '{"error":' not in result.stdout
