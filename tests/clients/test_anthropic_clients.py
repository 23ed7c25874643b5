"""Libraries that speak Anthropic's protocol, against the starter model."""

import json
from pathlib import Path
from typing import Any

import pytest

from semantic.adapters.config.settings import STARTER_MODEL
from tests.clients.conftest import run_client
from tests.smoke.server_process import ServerProcess

pytestmark = pytest.mark.clients

SCRIPTS = Path(__file__).parent / "scripts"


def run(clients: Path, home: Path, script: str, *arguments: str, environment: str = "venv") -> Any:
    """Run a script with the clients' own Python; returns what it printed."""
    python = clients / environment / "bin" / "python"
    command = [str(python), str(SCRIPTS / script), *arguments]
    done = run_client(command, home, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_langchain(clients: Path, server: ServerProcess, tmp_path: Path) -> None:
    told = run(clients, tmp_path, "langchain_client.py", server.url, STARTER_MODEL)
    assert told["text"]
    assert told["streamed"]
    assert told["usage"]["input_tokens"] > 0
    call = told["calls"][0]  # the model may make several
    assert call["name"] == "get_weather"
    assert isinstance(call["args"]["city"], str)


def test_litellm(clients: Path, server: ServerProcess, tmp_path: Path) -> None:
    arguments = (server.url, STARTER_MODEL)
    told = run(clients, tmp_path, "litellm_client.py", *arguments, environment="litellm")
    assert told["text"]
    assert told["streamed"]
    assert told["prompt_tokens"] > 0
    assert 0 < told["completion_tokens"] <= 20


def test_pydantic_ai(clients: Path, server: ServerProcess, tmp_path: Path) -> None:
    told = run(clients, tmp_path, "pydantic_ai_client.py", server.url, STARTER_MODEL)
    assert told["text"]
    assert told["city"] in ("Paris", "Rome")


def test_the_agent_sdk(clients: Path, server: ServerProcess, tmp_path: Path) -> None:
    program = clients / "node_modules" / ".bin" / "claude"
    arguments = (server.url, STARTER_MODEL, str(program), str(tmp_path))
    first, second = run(clients, tmp_path, "agent_sdk_client.py", *arguments)
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    before = sum(first[part] for part in parts)
    assert second["cache_read_input_tokens"] >= before
