"""Claude Code, as its users run it, against the starter model."""

import itertools
import json
import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from semantic.adapters.config.settings import STARTER_MODEL
from tests.clients.conftest import run_client
from tests.smoke.server_process import ServerProcess
from tests.waiting import await_that

pytestmark = pytest.mark.clients

QUESTION = "What is the capital of France? Answer in one word."


@dataclass(frozen=True)
class ClaudeCode:
    """Claude Code with a home of its own, which knows nothing but the server."""

    program: Path
    home: Path
    url: str

    def command(self, *arguments: str) -> list[str]:
        output = ("--output-format", "stream-json", "--verbose")
        return [str(self.program), "--bare", "-p", *output, *arguments]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": STARTER_MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "100",
            "CLAUDE_CODE_MAX_RETRIES": "1",
        }

    def ask(self, *arguments: str) -> list[dict[str, Any]]:
        """Run it to its end; returns the lines it wrote."""
        done = run_client(self.command(*arguments), self.home, self.environment)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert lines, done.stderr
        return lines


@pytest.fixture
def claude(clients: Path, server: ServerProcess, tmp_path: Path) -> ClaudeCode:
    program = clients / "node_modules" / ".bin" / "claude"
    return ClaudeCode(program, tmp_path, server.url)


def usages(lines: list[dict[str, Any]]) -> list[dict[str, int]]:
    """The usage of each request that was answered, in order; its blocks come as one line each."""
    by_message = {
        line["message"]["id"]: line["message"]["usage"]
        for line in lines
        if line["type"] == "assistant" and line["message"]["id"].startswith("msg_")
    }
    return list(by_message.values())


def prompt_tokens(usage: dict[str, int]) -> int:
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage[part] for part in parts)


def test_each_turn_reuses_the_whole_one_before(claude: ClaudeCode) -> None:
    turns = [
        claude.ask(QUESTION),
        claude.ask("--continue", "And of Spain? One word."),
        claude.ask("--continue", "And of Italy? One word."),
    ]
    # A cut reply is asked to go on, by a message that Claude Code leaves out in the next turn.
    firsts = [usages(lines)[0] for lines in turns]
    for before, after in itertools.pairwise(firsts):
        assert after["cache_read_input_tokens"] >= prompt_tokens(before)
    session_ids = {line["session_id"] for lines in turns for line in lines if "session_id" in line}
    assert len(session_ids) == 1


def test_a_tool_list_that_changes_is_named(claude: ClaudeCode, server: ServerProcess) -> None:
    named = {**claude.environment, "ANTHROPIC_CUSTOM_HEADERS": "X-Agent-ID: tool-changer"}
    for arguments in ((QUESTION,), ("--continue", "And of Spain? One word.", "--tools", "Bash")):
        run_client(claude.command(*arguments), claude.home, named)
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        entries = http.get("/v1/agents/tool-changer/timeline").json()["data"]
    texts = [entry["miss"]["text"] for entry in entries if entry["miss"]]
    words = r"tool list changed: \d tools? removed (at|from) position \d, [\d,]+ tokens recomputed"
    assert any(re.fullmatch(words, text) for text in texts), entries


def test_three_sessions_at_once(claude: ClaudeCode, tmp_path: Path) -> None:
    sessions = []
    for name in ("a", "b", "c"):
        home = tmp_path / name
        home.mkdir()
        sessions.append(ClaudeCode(claude.program, home, claude.url))
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda session: session.ask(QUESTION), sessions))
    for lines in replies:
        assert usages(lines)
        assert lines[-1]["type"] == "result"
    # They start alike, and what they share was computed once at most.
    firsts = [usages(lines)[0] for lines in replies]
    assert sum(usage["cache_read_input_tokens"] > 500 for usage in firsts) >= 2


def test_a_reply_too_long_for_the_context_is_asked_for_again(claude: ClaudeCode) -> None:
    """The model has 8192 tokens; Claude Code reads that off the refusal and asks for fewer."""
    generous = {**claude.environment, "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "32000"}
    process = subprocess.Popen(  # noqa: S603 - our own command
        claude.command(QUESTION),
        env=generous,
        cwd=claude.home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert usages(lines)


def await_log(server: ServerProcess, text: str, before: int) -> None:
    """Wait until the server's log holds a text more often than before."""
    await_that(lambda: server.output.count(text) > before)


def await_live(http: httpx.Client, is_live: bool) -> None:
    """Wait until the server has a request to compute, or none."""
    await_that(lambda: bool(http.get("/v1/cache").json()["live_requests"]) is is_live)


def num_computed(http: httpx.Client) -> float:
    """How many tokens of prompts the server has computed."""
    found = re.search(r"^semantic_tokens_prefilled_total (\S+)$", http.get("/metrics").text, re.M)
    assert found is not None
    return float(found[1])


def test_a_session_that_is_killed_in_mid_prefill_is_given_up_at_once(
    claude: ClaudeCode, server: ServerProcess
) -> None:
    with server.client() as http:
        before, computed = server.output.count('"/v1/messages"'), num_computed(http)
        long = " ".join(f"word{index}" for index in range(1000))
        body = {"model": STARTER_MODEL, "messages": [{"role": "user", "content": long}]}
        num_tokens = http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
        process = subprocess.Popen(  # noqa: S603 - our own command
            claude.command(long),
            env=claude.environment,
            cwd=claude.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        await_live(http, is_live=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        await_log(server, '"/v1/messages"', before)
        assert (
            '"status": 200' in [line for line in server.output.splitlines() if "POST" in line][-1]
        )
        await_live(http, is_live=False)
        # It was cut short: much of the prompt was not computed.
        assert num_computed(http) - computed < num_tokens - 1000
