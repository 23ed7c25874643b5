"""EXP-009 and EXP-010: the stream that Anthropic's clients expect, and Claude Code itself."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import anthropic
import httpx

from benchmarks.common import serving
from benchmarks.report import ROOT
from experiments.common import Experiment, Findings

# Events of a reply in Anthropic's documentation, and the fields that each has.
REFERENCE: dict[str, str] = {
    "message_start": "message.content message.id message.model message.role message.stop_reason "
    "message.stop_sequence message.type message.usage.input_tokens message.usage.output_tokens "
    "type",
    "content_block_start": "content_block.text content_block.type index type",
    "content_block_delta": "delta.text delta.type index type",
    "content_block_stop": "index type",
    "message_delta": "delta.stop_reason delta.stop_sequence type usage.output_tokens",
    "message_stop": "type",
}
_CLAUDE = "node_modules/.bin/claude"


def fields(value: Any, place: str = "") -> set[str]:
    """Return the paths of all values in a document.

    >>> sorted(fields({"a": {"b": 1}, "c": []}))
    ['a.b', 'c']
    """
    if not isinstance(value, dict):
        return {place}
    return {
        name for key, inner in value.items() for name in fields(inner, f"{place}.{key}".strip("."))
    }


def read_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return names and data of a stream's events, in order."""
    events = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in lines:  # and not a comment, which keeps a connection alive
            events.append((lines["event"], json.loads(lines["data"])))
    return events


def is_in_order(names: list[str]) -> bool:
    """Whether events have the order of a reply with one text; pings may be anywhere."""
    shape = [name for name in names if name != "ping"]
    deltas = shape.count("content_block_delta")
    order = ["message_start", "content_block_start", *["content_block_delta"] * deltas]
    return deltas > 0 and shape == [*order, "content_block_stop", "message_delta", "message_stop"]


def streams(found: Findings) -> None:
    """Read a stream raw, and with the vendor's package."""
    ask: dict[str, Any] = {"max_tokens": 20, "messages": [{"role": "user", "content": "Hello"}]}
    with serving_fake() as port:
        url = f"http://127.0.0.1:{port}"
        body = {"model": "claude-x", "stream": True, **ask}
        raw = httpx.post(f"{url}/v1/messages", json=body, timeout=60)
        client = anthropic.Anthropic(base_url=url, api_key="none")
        with client.messages.stream(model="claude-x", **ask) as stream:
            parsed = stream.get_final_message()
    events = read_events(raw.text)
    names = [name for name, _ in events]
    found.check("order of events", " ".join(dict.fromkeys(names)), is_passed=is_in_order(names))
    for name, reference in REFERENCE.items():
        data = next(event for each, event in events if each == name)
        missing = set(reference.split()) - fields(data)
        text = f"all fields, {len(fields(data))} in all" if not missing else f"no {missing}"
        found.check(name, text, is_passed=not missing and data["type"] == name)
    usage = f"stop_reason {parsed.stop_reason}, {parsed.usage.output_tokens} tokens"
    found.check(
        f"anthropic {anthropic.__version__} reads it", usage, is_passed=bool(parsed.content)
    )
    found.skip("byte for byte beside the real service", "needs an account; its documents stand in")


def serving_fake() -> Any:
    """Run a server with the fake backend in its own directory."""
    home = tempfile.mkdtemp(prefix="experiment-")
    return serving("--backend", "fake", "--home", home)


def claude_code(found: Findings) -> None:
    """Run Claude Code if it is installed; otherwise send a similar conversation."""
    clients = Path(os.environ.get("CLIENTS_DIR", ROOT / ".clients"))
    if (clients / _CLAUDE).exists() and not found.is_quick:
        command = [sys.executable, "-m", "pytest", "-q", "tests/clients/test_claude_code.py"]
        done = subprocess.run(  # noqa: S603 - our own tests
            command,
            cwd=ROOT,
            env={**os.environ, "CLIENTS_DIR": str(clients)},
            capture_output=True,
            text=True,
            check=False,
        )
        last = (done.stdout.strip().splitlines() or ["nothing was printed"])[-1]
        found.check("tests/clients/test_claude_code.py", last, is_passed=done.returncode == 0)
    else:
        found.skip("Claude Code itself", "it is not installed here: `make clients` does it (npm)")
    with serving_fake() as port:
        read = conversation(f"http://127.0.0.1:{port}")
    text = f"tokens read from the cache, turn by turn: {read}"
    is_growing = read[0] == 0 and all(a < b for a, b in itertools.pairwise(read))
    found.check("a conversation with tools, as it sends them", text, is_passed=is_growing)


def conversation(url: str) -> list[int]:
    """Send three turns with a system prompt and tools; returns the tokens read from the cache."""
    client = anthropic.Anthropic(base_url=url, api_key="none")
    system: Any = [
        {
            "type": "text",
            "text": "You are a coding agent. " * 60,
            "cache_control": {"type": "ephemeral"},
        }
    ]
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    tools: Any = [{"name": "Read", "description": "Reads a file.", "input_schema": schema}]
    messages: list[Any] = []
    read = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"Turn {turn}: what is in src/main.py?"})
        reply = client.messages.create(
            model="claude-x", max_tokens=20, system=system, tools=tools, messages=messages
        )
        read.append(reply.usage.cache_read_input_tokens or 0)
        messages.append({"role": "assistant", "content": reply.content})
    return read


EXPERIMENTS = (
    Experiment(
        id="EXP-009",
        question="Does the server's stream match what Anthropic's clients expect?",
        method="compare the events and fields of a streamed reply of a real server with "
        "Anthropic's documentation, and read the stream with Anthropic's own package",
        criterion="the order of events and all documented fields; the package reads it",
        adapted="documentation instead of recordings, which need an account",
        answer=streams,
    ),
    Experiment(
        id="EXP-010",
        question="Does Claude Code work with this server?",
        method="Claude Code with ANTHROPIC_BASE_URL, several turns, against the starter model "
        "(`make clients`); and a conversation with tools through Anthropic's package",
        criterion="conversations continue, and each turn reads the previous one from the cache",
        answer=claude_code,
    ),
)
