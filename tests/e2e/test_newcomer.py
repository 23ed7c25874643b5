"""A newcomer's first hour: a fresh clone, `make serve`, and every command of three pages in order.

The server is the one that the quick start starts, with the starter model. What is already installed
here is not installed again. Commands of other people's programs are tested by `make clients`; here
they must be written correctly, and `semantic launch` must know how to start them.
"""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.integration.test_guides import FENCE, NEWCOMERS, PAGES, ROOT, RUN, follow
from tests.smoke.server_process import ServerProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FOLLOWED = sorted(NEWCOMERS - {"quick-start"})  # after the quick start
RESTART = "## Restart it"
# Fences that cannot be run here, by their title: where their programs are run.
ELSEWHERE = {
    "needs pipx": "make install-test",
    "needs Claude Code": "tests/clients/test_claude_code.py",
    "needs Codex": "tests/clients/test_openai_clients.py",
    "needs pi": "tests/clients/test_launch.py",
    "needs aider": "tests/clients/test_launch.py",
    "needs Cline": "tests/clients/test_after_restart.py",
    "needs openai-agents": "tests/clients/test_openai_clients.py",
    "needs claude-agent-sdk": "tests/clients/test_anthropic_clients.py",
    "needs langchain-openai": "tests/clients/test_openai_clients.py",
    "needs langchain-anthropic": "tests/clients/test_anthropic_clients.py",
    "needs litellm": "tests/clients/test_anthropic_clients.py",
    "needs pydantic-ai": "tests/clients/test_anthropic_clients.py",
    "needs the AI SDK": "tests/clients/test_openai_clients.py",
    "needs llm": "tests/clients/test_openai_clients.py",
    "needs lm-eval[api] and transformers": "tests/clients/test_lm_eval.py",
    # Installed and run by hand when their sections were written.
    "needs smolagents": "",
    "needs crewai": "",
    "needs dspy": "",
    "needs llama-index-llms-openai-like": "",
}
READERS: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
}
STARTED = "needs make"
LAUNCHED = "needs a client"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of this repository, with the environment of these tests as its own."""
    place = tmp_path_factory.mktemp("newcomer") / "semantic"
    subprocess.run(["git", "clone", "-q", ROOT, place], check=True)  # noqa: S603, S607
    (place / ".venv").mkdir()
    (place / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (place / ".venv" / ".serve").touch()
    return place


@contextmanager
def serving(clone: Path, home: Path, command: str) -> Iterator[ServerProcess]:
    """Runs the quick start's command until the context ends, by Ctrl-C."""
    log = home.with_suffix(".log")
    environment = {name: v for name, v in os.environ.items() if not name.startswith("SEMANTIC_")}
    environment |= {"SEMANTIC_HOME": str(home), "SEMANTIC_PORT": "0", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(clone / "src")
    with log.open("w") as sink:
        process = subprocess.Popen(  # noqa: S603 - the quick start's own command
            command.split(),
            cwd=clone,
            env=environment,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
    server = ServerProcess(process, log)
    try:
        server.await_listening()
        server.await_ready()
        yield server
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def follow_all(text: str, url: str, place: Path) -> str:
    """Run every fence of a text that can be run here; returns all that they printed."""
    said = ""
    for info, example in FENCE.findall(text):
        if info in RUN:
            said += follow(info, example, url, place)
        elif LAUNCHED in info:
            clients = re.search(r"semantic launch (\w+) +# or ([\w, ]+)", example)
            assert clients is not None, example
            for client in (clients[1], *clients[2].split(", ")):
                said += follow("bash", f"semantic launch {client} --dry-run --force", url, place)
            assert "semantic top" in example
            said += follow("bash", "semantic top --once", url, place)
    return said


def test_three_pages_are_followed_from_a_fresh_clone(clone: Path, starter_home: Path) -> None:
    place = clone.parent
    home = place / "home"
    home.mkdir()
    for name in ("models", "native"):  # downloaded and compiled before
        shutil.copytree(starter_home / name, home / name, copy_function=os.link)
    before, restarted = PAGES["quick-start"].read_text("utf-8").split(RESTART)
    (command,) = re.findall(r"^make serve$", before, re.MULTILINE)
    with serving(clone, home, command) as server:
        assert "poet" in follow_all(before, server.url, place)
    with serving(clone, home, command) as server:
        said = follow_all(restarted, server.url, place)
        assert re.search(r"reuse.*(disk|pool)", said), said
        for name in FOLLOWED:
            follow_all(PAGES[name].read_text("utf-8"), server.url, place)


def test_what_is_not_followed_is_written_correctly_and_run_elsewhere() -> None:
    titles = set()
    for name in NEWCOMERS:
        for info, text in FENCE.findall(PAGES[name].read_text("utf-8")):
            language, _, title = info.partition(" title=")
            titles |= {title.strip('"')} - {""}
            if language in READERS:
                assert READERS[language](text)
            elif language == "python":
                ast.parse(text)
            elif language == "bash":
                subprocess.run(["bash", "-n", "-c", text], check=True)  # noqa: S603, S607
    assert titles - {STARTED, LAUNCHED} <= ELSEWHERE.keys()
    tests = {path for path in ELSEWHERE.values() if path.startswith("tests/")}
    assert [path for path in tests if not (ROOT / path).exists()] == []
