"""`semantic launch` with the clients it knows, as their users install them.

Each answers one question without a screen, and finds its own configuration afterwards as it was.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients.conftest import run_client
from tests.smoke.server_process import ServerProcess, serve

pytestmark = pytest.mark.clients

QUESTION = "What is the capital of France? Answer in one sentence."
# How each asks without a screen, and a file of its own configuration.
WAYS = {
    "opencode": (("run", QUESTION), ".config/opencode/opencode.json"),
    "pi": (("-p", QUESTION), ".pi/agent/models.json"),
    "qwen": (("-p", QUESTION), ".qwen/settings.json"),
    "aider": (("--no-git", "--yes-always", "--message", QUESTION), ".aider.conf.yml"),
    "continue": (("-p", QUESTION), ".continue/config.yaml"),
}


# What they would write into an empty configuration themselves.
OWN = {
    "continue": "name: mine\nversion: 0.0.1\nschema: v1\n",
    "opencode": '{\n  "$schema": "https://opencode.ai/config.json"\n}',
    "qwen": '{\n  "$version": 4\n}',
}

# One's prompt alone is longer than the starter model's context, the other takes its rambling for
# work to go on with: the fake model has more room, and comes to an end.
WITH_FAKE = {"qwen", "opencode"}


@pytest.fixture(scope="module")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    place = tmp_path_factory.mktemp("fake")
    with serve(place / "home", place / "log", "--backend", "fake") as running:
        yield running


@pytest.mark.parametrize("client", WAYS)
def test_a_client_answers_and_its_configuration_stays(
    client: str, clients: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    name = "fake_server" if client in WITH_FAKE else "server"
    server: ServerProcess = request.getfixturevalue(name)
    arguments, name = WAYS[client]
    own = tmp_path / name
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(OWN.get(client, "{}"))
    before = own.read_bytes()
    places = (clients / "node_modules" / ".bin", clients / "aider" / "bin", os.environ["PATH"])
    environment = {"PATH": os.pathsep.join(map(str, places))}
    command = [sys.executable, "-m", "semantic", "launch", client, "--server", server.url, "--"]
    num_replies = replies(server)
    done = run_client([*command, *arguments], tmp_path, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    assert replies(server) > num_replies
    assert own.read_bytes() == before


def replies(server: ServerProcess) -> int:
    """How many replies the server has written."""
    told = httpx.get(f"{server.url}/v1/cache", trust_env=False, timeout=300)
    return int(told.json()["replies"])
