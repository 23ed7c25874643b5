"""Agents that talk to a server until it dies, and remember every reply they received whole."""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import httpx

from tests.no_tls import NO_TLS

Message = dict[str, str]

SYSTEM = "You are one of several agents on this machine. Be brief, be kind, be exact. " * 4
QUESTIONS = (
    "Name a river in Germany.",
    "And one in France.",
    "Which of them is longer?",
    "What else is there to know about it?",
)
_FAILURES = (httpx.HTTPError, OSError)
PATIENCE_S = 1200.0  # others may use the machine, and it is not speed that is tried


@dataclass(frozen=True)
class Exchange:
    """A conversation and the reply that was received for it."""

    agent_id: str
    messages: tuple[Message, ...]
    reply: str


@dataclass
class Agent:
    """Holds one conversation after the other, each under an id of its own.

    Attributes:
        received: Replies that came whole.
        asked: The conversation that was sent last, whatever became of it.
    """

    name: str
    model: str
    max_tokens: int
    received: list[Exchange] = field(default_factory=list)
    asked: list[Message] = field(default_factory=list)
    number: int = 0

    @property
    def agent_id(self) -> str:
        return f"{self.name}.{self.number}"

    def conversation(self) -> list[Message]:
        """All that was said and answered so far."""
        last = [done for done in self.received if done.agent_id == self.agent_id]
        if not last:
            return [{"role": "system", "content": SYSTEM}]
        return [*last[-1].messages, {"role": "assistant", "content": last[-1].reply}]

    def take_turn(self, http: httpx.Client) -> None:
        """Ask the next question.

        Raises:
            httpx.HTTPError: no whole reply came.
        """
        said = self.conversation()
        num_turns = len(said) // 2
        if num_turns == len(QUESTIONS):
            self.number += 1
            said, num_turns = self.conversation(), 0
        question = f"{QUESTIONS[num_turns]} ({self.agent_id})"
        self.asked = [*said, {"role": "user", "content": question}]
        # Agents that wait for the whole reply and agents that read a stream take turns.
        is_stream = self.number % 2 == 1
        reply = ask(http, self.model, self.asked, self.max_tokens, self.agent_id, is_stream)
        self.received.append(Exchange(self.agent_id, tuple(self.asked), reply))


def ask(
    http: httpx.Client,
    model: str,
    messages: Sequence[Message],
    max_tokens: int,
    agent_id: str | None = None,
    is_stream: bool = False,
) -> str:
    """Get one greedy reply.

    Raises:
        httpx.HTTPError: no whole reply came.
    """
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": is_stream,
    }
    headers = {"x-agent-id": agent_id} if agent_id else {}
    answer = http.post("/v1/chat/completions", json=body, headers=headers)
    answer.raise_for_status()
    if not is_stream:
        return str(answer.json()["choices"][0]["message"]["content"])
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    if lines[-1] != "[DONE]":
        raise httpx.RemoteProtocolError("the stream was cut off")
    chunks = [json.loads(line) for line in lines[:-1] if not line.startswith(":")]
    if any("error" in chunk for chunk in chunks):
        raise httpx.RemoteProtocolError(f"the stream ended with an error: {lines[-2]}")
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


class Client(Protocol):
    """What asks a server for one thing after another."""

    def take_turn(self, http: httpx.Client) -> None: ...


class Load:
    """All clients ask at once, each on a thread, until the server is gone or `stop` is called."""

    def __init__(self, url: str, agents: Sequence[Client]) -> None:
        self._url = url
        self._is_stopping = threading.Event()
        self.refusals: list[str] = []
        self._threads = [
            threading.Thread(target=self._talk, args=(agent,), daemon=True) for agent in agents
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_talking(self) -> bool:
        """Whether anyone is still answered."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Let everyone end their turn."""
        self._is_stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _talk(self, agent: Client) -> None:
        with httpx.Client(
            base_url=self._url, timeout=PATIENCE_S, trust_env=False, verify=NO_TLS
        ) as http:
            while not self._is_stopping.is_set():
                try:
                    agent.take_turn(http)
                except httpx.HTTPStatusError as error:
                    self.refusals.append(error.response.text)
                    return
                except _FAILURES:
                    return
                except Exception as error:  # noqa: BLE001 - the reader of the refusals reports it
                    self.refusals.append(f"the reply makes no sense: {error!r}")
                    return


def make_agents(model: str, number: int, max_tokens: int) -> list[Agent]:
    """Make agents that all begin alike."""
    return [Agent(f"agent-{index}", model, max_tokens) for index in range(number)]
