"""Tests the real server on this machine: are replies from KV cache exact, and how fast are they?

The server runs as a process of its own with an empty cache directory, which is deleted at the end.
All replies are greedy, so equal prompts must give equal replies: in a batch, after a fork, and
after a restart.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from semantic.entrypoints.cli.client import Json, ServerError

OnStep = Callable[[str], None]

_RULE = "Read a file before you change it, and run its tests when you have changed it. "
_SYSTEM = "You write code with others. " + _RULE * 40
_QUESTIONS = (
    "How do you rename a function?",
    "What does a test check?",
    "When is a cache useful?",
    "Name three sorting algorithms.",
)
_NEXT = "Give an example."
_NUM_REPLY = 32
_NUM_STREAMED = 96
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One reply and what it took.

    Attributes:
        first_s: Seconds until its first token.
        rest_s: Seconds from then to its end.
        num_cached: Tokens of the prompt that came from KV cache.
    """

    text: str
    first_s: float
    rest_s: float
    num_prompt: int
    num_cached: int
    num_reply: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the report.

    Attributes:
        is_ok: Whether it is as it must be; None for figures.
    """

    what: str
    found: str
    is_ok: bool | None = None


class _TestedServer:
    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        listed = http.get("/v1/models").raise_for_status().json()["data"]
        self.model = next(one["id"] for one in listed if one["state"] in ("ready", "loaded"))

    def ask(self, agent: str, messages: Sequence[Json], num_reply: int = _NUM_REPLY) -> Measured:
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": num_reply,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.perf_counter()
        first: float | None = None
        text = ""
        usage: Json = {}
        path, headers = "/v1/chat/completions", {"x-agent-id": agent}
        with self._http.stream("POST", path, json=body, headers=headers) as reply:
            if reply.is_error:
                raise ServerError(f"the self-test's request failed: {reply.read().decode()}")
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                    first = first or (time.perf_counter() if text else None)
        ended = time.perf_counter()
        first = first or ended
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Measured(
            text,
            first - started,
            ended - first,
            usage["prompt_tokens"],
            cached,
            usage["completion_tokens"],
        )

    def ask_at_once(
        self, name: str, chats: Sequence[Sequence[Json]], num_reply: int = _NUM_REPLY
    ) -> list[Measured]:
        agents = [f"{name}{index}" for index in range(len(chats))]
        with ThreadPoolExecutor(len(chats)) as pool:
            return list(pool.map(self.ask, agents, chats, [num_reply] * len(chats)))

    def fork(self, agent: str, name: str) -> None:
        path = f"/v1/agents/{agent}/fork"
        self._http.post(path, json={"ids": [name]}).raise_for_status()

    @property
    def health(self) -> Json:
        found: Json = self._http.get("/health").json()
        return found


@contextlib.contextmanager
def _serving(arguments: Sequence[str], cache_dir: str) -> Iterator[_TestedServer]:
    command = [sys.executable, "-m", "semantic", "serve", "--port", "0", "--host", "127.0.0.1"]
    command += ["--log-level", "error", *arguments, "--cache-dir", cache_dir]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:  # noqa: S603 - this program
        url = ""
        try:
            for line in process.stdout or ():
                if "listening" in line:
                    url = line.split()[1]
                if "ready:" in line:
                    break
            else:
                raise ServerError("the self-test's server ended before it was ready")
            with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as http:
                yield _TestedServer(http)
        finally:
            process.send_signal(signal.SIGINT)


def _chat(question: str) -> list[Json]:
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]


def self_test(arguments: Sequence[str], on_step: OnStep) -> Iterator[Outcome]:
    """Run the self-test on a server with these flags; takes about two minutes with a small model.

    Raises:
        ServerError: the server does not start, or refuses a request.
        httpx.HTTPError: the server does not answer.
    """
    chats = [_chat(question) for question in _QUESTIONS]
    with tempfile.TemporaryDirectory(prefix="semantic-") as cache_dir:
        on_step("starting a server")
        started = time.perf_counter()
        with _serving(arguments, cache_dir) as server:
            yield Outcome("model", f"{server.model}, {_compute(server.health)}")
            yield Outcome("start", f"{time.perf_counter() - started:.1f} s")
            on_step("four agents, one after another")
            alone = [server.ask(f"a{index}", chat) for index, chat in enumerate(chats)]
            yield _prompt(alone[0])
            on_step("the same at once")
            yield _equal("batch of four", alone, server.ask_at_once("b", chats))
            on_step("a fork")
            server.fork("a0", "fork")
            said = {"role": "assistant", "content": alone[0].text}
            later = [*chats[0], said, {"role": "user", "content": _NEXT}]
            hot = server.ask("a0", later)
            yield _equal("fork", [hot], [server.ask("fork", later)])
            on_step("tokens per second")
            yield from _speeds(server)
        on_step("a restart")
        started = time.perf_counter()
        with _serving(arguments, cache_dir) as server:
            yield Outcome("second start", f"{time.perf_counter() - started:.1f} s")
            on_step("the same agents after the restart")
            restored = [server.ask(f"a{index}", chat) for index, chat in enumerate(chats)]
            yield _equal("after a restart", alone, restored)
            yield _equal("a later turn after a restart", [hot], [server.ask("a0", later)])
            yield _restart(alone[0], restored[0])


def _compute(health: Json) -> str:
    compute = health.get("compute")
    if not compute:
        return "computes nothing"
    return "{dtype} on {device}, {num_threads} threads, {kernels}".format(**compute)


def _equal(what: str, wanted: Sequence[Measured], found: Sequence[Measured]) -> Outcome:
    num_equal = sum(one.text == other.text for one, other in zip(wanted, found, strict=True))
    cached = sum(each.num_cached for each in found)
    prompts = sum(each.num_prompt for each in found)
    text = f"{num_equal} of {len(found)} replies equal; {cached:,} of {prompts:,} tokens reused"
    return Outcome(what, text, is_ok=num_equal == len(found))


def _prompt(cold: Measured) -> Outcome:
    speed = cold.num_prompt / cold.first_s
    text = f"{cold.num_prompt:,} tokens in {cold.first_s:.2f} s ({speed:,.0f} tokens/s)"
    return Outcome("prompt, computed", text)


def _restart(cold: Measured, restored: Measured) -> Outcome:
    ratio = cold.first_s / restored.first_s
    text = f"{restored.first_s:.2f} s to the first token, {ratio:.0f}x sooner than computed"
    return Outcome("prompt, after a restart", text)


def _speeds(server: _TestedServer) -> Iterator[Outcome]:
    ask = "Write a long story about a ship."
    one = server.ask("one", _chat(ask), _NUM_STREAMED)
    yield Outcome("one stream", f"{(one.num_reply - 1) / max(one.rest_s, 1e-6):.1f} tokens/s")
    chats = [_chat(f"{ask} Number {index}.") for index in range(len(_QUESTIONS))]
    started = time.perf_counter()
    replies = server.ask_at_once("s", chats, _NUM_STREAMED)
    speed = sum(reply.num_reply for reply in replies) / (time.perf_counter() - started)
    yield Outcome("four streams together", f"{speed:.1f} tokens/s, prompts included")
