"""Coding agents continue a session after a restart of the server, which computes only new tokens.

Each is configured as docs/connect.md says. The fake model has room for their prompts; its replies
are random and cut short, which some clients report as an error, so their exit status says nothing.
"""

import contextlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import run_client
from tests.clients.terminal import Terminal
from tests.smoke.server_process import ServerProcess, serve
from tests.waiting import await_that

pytestmark = pytest.mark.clients

MODEL = "fake"
CONTEXT, REPLY = 131_072, 200
NEEDED_SHARE = 0.95
AIDER = (
    f"aider --model openai/{MODEL} --no-git --yes-always --no-show-model-warnings "
    "--no-check-update --restore-chat-history --max-chat-history-tokens 100000 --message"
)
# How each begins a session and continues the latest one.
WAYS: dict[str, tuple[str, str]] = {
    "claude": ("claude -p", "claude -p --continue"),
    "codex": (
        "codex exec --skip-git-repo-check -s read-only",
        "codex exec resume --last --skip-git-repo-check",
    ),
    "opencode": ("opencode run", "opencode run --continue"),
    "pi": (f"pi --provider local --model {MODEL} -p",
           f"pi --provider local --model {MODEL} --continue -p"),
    "qwen": ("qwen -p", "qwen --continue -p"),
    "continue": ("cn -p", "cn --resume -p"),
    "aider": (AIDER, AIDER),
    "cline": (f"cline -P openai -m {MODEL}", f"cline -P openai -m {MODEL} --id"),
}  # fmt: skip
# Cline compacts a conversation whose replies are cut; the fake model's end before this.
ROOM = {"cline": 10_000}
QUESTION = "What is the capital of France?"
# aider repeats instructions of 900 characters after the conversation, whose length must not matter.
LONG_QUESTION = f"{QUESTION} {'Answer in one word, without an explanation. ' * 600}"


def codex(url: str) -> str:
    return (
        f'model = "{MODEL}"\nmodel_provider = "local"\nmodel_context_window = {CONTEXT}\n'
        f'[model_providers.local]\nname = "local"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    )


def opencode(url: str) -> Any:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "local",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"limit": {"context": CONTEXT, "output": REPLY}}},
    }
    return {"model": f"local/{MODEL}", "provider": {"local": provider}}


def pi(url: str) -> Any:
    provider = {
        "baseUrl": f"{url}/v1",
        "api": "openai-completions",
        "apiKey": "none",
        "models": [{"id": MODEL, "contextWindow": CONTEXT, "maxTokens": REPLY}],
    }
    return {"providers": {"local": provider}}


def qwen(url: str) -> Any:
    model = {
        "id": MODEL,
        "envKey": "LOCAL_API_KEY",
        "baseUrl": f"{url}/v1",
        "generationConfig": {
            "contextWindowSize": CONTEXT,
            "samplingParams": {"max_tokens": REPLY},
        },
    }
    return {
        "env": {"LOCAL_API_KEY": "none"},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": MODEL},
        "modelProviders": {"openai": [model]},
    }


def continue_(url: str) -> Any:
    model = {
        "name": "local",
        "provider": "openai",
        "model": MODEL,
        "apiBase": f"{url}/v1",
        "apiKey": "none",
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": CONTEXT, "maxTokens": REPLY},
    }
    return {"name": "local", "version": "0.0.1", "schema": "v1", "models": [model]}


FILES: dict[str, Callable[[str], Any]] = {
    ".codex/config.toml": codex,
    ".config/opencode/opencode.json": opencode,
    ".pi/agent/models.json": pi,
    ".qwen/settings.json": qwen,
    ".continue/config.yaml": continue_,  # JSON is YAML
}


class Session:
    """A client with a home of its own, which knows nothing but the server."""

    def __init__(self, clients: Path, home: Path, url: str) -> None:
        programs = (clients / "node_modules" / ".bin", clients / "aider" / "bin")
        self._project = home / "project"  # a client may write into its home
        self._project.mkdir(parents=True)
        self._environment = {
            "HOME": str(home),
            "PATH": os.pathsep.join((*map(str, programs), os.environ["PATH"])),
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "NO_PROXY": "*",
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(REPLY),
        }
        for name, written in FILES.items():
            content = written(url)
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content)
            (home / name).write_text(text)

    def run(self, *command: str) -> str:
        """Run a command to its end; returns what it printed."""
        done = run_client(command, self._project, self._environment)
        return done.stdout + done.stderr

    def ask(self, command: str, question: str, server: ServerProcess) -> None:
        """Ask, and wait for the reply."""
        before = replies(server)
        printed = self.run(*command.split(), question)
        assert replies(server) > before, printed


class ClineSession(Session):
    """Cline, whose configuration is a command, and which continues a session only on its screen."""

    def __init__(self, clients: Path, home: Path, url: str) -> None:
        super().__init__(clients, home, url)
        self.run(*f"cline auth openai -b {url}/v1 -k none -m {MODEL}".split())

    def ask(self, command: str, question: str, server: ServerProcess) -> None:
        if not command.endswith("--id"):
            super().ask(command, question, server)
            return
        listed = run_client(
            ["cline", "history", "--json", "--limit", "1"], self._project, self._environment
        )
        (session,) = json.loads(listed.stdout)
        stored = Path(session["messagesPath"])
        num_before = len(roles(stored))

        def is_answered() -> bool:
            with contextlib.suppress(ValueError):  # it is being written
                return roles(stored)[num_before:][:2] == ["user", "assistant"]
            return False

        words = [*command.split(), session["sessionId"]]
        with Terminal(words, self._project, self._environment) as terminal:
            terminal.await_text(QUESTION)  # the conversation is there
            terminal.type(question)
            terminal.await_text(question)
            terminal.type("\r")
            await_that(is_answered, 300)


def roles(stored: Path) -> list[str]:
    """The roles of the messages that Cline has stored."""
    return [message["role"] for message in json.loads(stored.read_text())["messages"]]


def replies(server: ServerProcess) -> int:
    """How many replies the server has written."""
    with server.client() as http:
        return int(http.get("/v1/cache").json()["replies"])


def share_reused(server: ServerProcess) -> float:
    """The share of all prompt tokens since the server started that was not computed."""
    with server.client() as http:
        return float(http.get("/v1/cache").json()["hit_rates"]["all"])


@pytest.mark.parametrize("name", WAYS)
def test_a_session_continues_after_a_restart(clients: Path, tmp_path: Path, name: str) -> None:
    first, more = WAYS[name]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = tmp_path / "user"
    make = ClineSession if name == "cline" else Session
    session = make(clients, home, f"http://127.0.0.1:{port}")

    def start(log: str) -> Any:
        arguments = ("--backend", "fake", "--port", str(port))
        place = tmp_path / "server"
        room = ROOM.get(name, REPLY)
        return serve(place, tmp_path / log, *arguments, default_max_tokens=room)

    with start("first.log") as server:
        session.ask(first, LONG_QUESTION if name == "aider" else QUESTION, server)
        session.ask(more, "And of Spain?", server)
        assert server.stop() == 0
    with start("second.log") as server:
        session.ask(more, "And of Italy?", server)
        assert share_reused(server) >= NEEDED_SHARE
