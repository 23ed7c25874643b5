"""A chat client for OpenAI-compatible servers that records when tokens arrive."""

import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

Messages = list[dict[str, str]]

# Made once: to make it takes tens of milliseconds, in which whoever else asks would wait.
_TLS = ssl.create_default_context()


@dataclass(frozen=True)
class Reply:
    """The result of a request; times in seconds since it was sent.

    Attributes:
        arrivals: Clock time of every piece of text.
        num_prompt: Tokens of the prompt as the server counts them; 0 if unknown.
        num_reused: Those of them that it did not compute.
    """

    first: float
    last: float
    num_tokens: int
    text: str
    num_prompt: int = 0
    num_reused: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    arrivals: tuple[float, ...] = field(default=(), repr=False)

    @property
    def ms_per_token(self) -> float:
        return 1000 * (self.last - self.first) / max(self.num_tokens - 1, 1)


@dataclass(frozen=True)
class Client:
    """Sends requests to a server.

    Attributes:
        url: Base URL, including `/v1`.
        headers: Of each request, such as the name of the client.
    """

    url: str
    model: str = "any"
    more: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    headers: dict[str, str] = field(default_factory=dict)

    async def ask(self, messages: Messages, num_tokens: int) -> Reply:
        """Send a chat and read its stream.

        Raises:
            RuntimeError: the server refused it, or answered nothing.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": num_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.more,
        }
        pieces: list[str] = []
        arrivals: list[float] = []
        usage: dict[str, Any] = {}
        async with httpx.AsyncClient(timeout=None, verify=_TLS) as http:  # noqa: S113 - who measures waits
            started = time.perf_counter()
            url, headers = f"{self.url}/chat/completions", self.headers
            async with http.stream("POST", url, json=body, headers=headers) as response:
                async for event in _events(response):
                    usage = event.get("usage") or usage
                    if piece := _text(event):
                        arrivals.append(time.perf_counter())
                        pieces.append(piece)
        if not pieces:
            raise RuntimeError(f"{self.url} sent no answer")
        reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        details = usage.get("completion_tokens_details") or {}
        return Reply(
            first=arrivals[0] - started,
            last=arrivals[-1] - started,
            num_tokens=usage.get("completion_tokens") or len(pieces),
            text="".join(pieces),
            num_prompt=usage.get("prompt_tokens", 0),
            num_reused=reused or 0,
            num_accepted=details.get("accepted_prediction_tokens") or 0,
            num_rejected=details.get("rejected_prediction_tokens") or 0,
            arrivals=tuple(arrivals),
        )


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    if response.status_code != 200:
        text = (await response.aread()).decode()
        raise RuntimeError(f"{response.url} answered {response.status_code}: {text[:500]}")
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            event: dict[str, Any] = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{response.url}: {event['error']}")
            yield event


def _text(event: dict[str, Any]) -> str:
    deltas = (choice.get("delta") or {} for choice in event.get("choices") or ())
    return "".join(delta.get("content") or "" for delta in deltas)


def said(text: str, system: str = "") -> Messages:
    """Start a conversation."""
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": text}]


def continued(messages: Messages, reply: Reply, text: str) -> Messages:
    """Continue a conversation."""
    answer = {"role": "assistant", "content": reply.text}
    return [*messages, answer, {"role": "user", "content": text}]
