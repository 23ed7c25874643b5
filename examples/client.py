"""A small client over httpx that the examples share."""

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx

Json = dict[str, Any]


def connect(url: str | None = None) -> httpx.Client:
    """Connect to a server; the default address is in `SEMANTIC_URL`."""
    base_url = url or os.environ.get("SEMANTIC_URL", "http://127.0.0.1:8000")
    return httpx.Client(base_url=base_url, timeout=600, trust_env=False)


def call(http: httpx.Client, method: str, path: str, **options: Any) -> Json:
    """Send a request; raises the server's error message if it is refused."""
    try:
        answer = http.request(method, path, **options)
    except httpx.ConnectError:
        raise SystemExit(
            f"no server answers at {http.base_url}; start one with make serve, or set SEMANTIC_URL"
        ) from None
    if answer.is_error:
        raise RuntimeError(answer.json()["error"]["message"])
    found: Json = answer.json() if answer.content else {}
    return found


def say(http: httpx.Client, agent_id: str, message: str, **options: Any) -> Json:
    """Send one message to an agent and wait for the reply."""
    body = {"message": message, "temperature": 0, "max_tokens": 40, **options}
    return call(http, "POST", f"/v1/agents/{agent_id}/generate", json=body)


def stream(http: httpx.Client, agent_id: str, message: str, **options: Any) -> Iterator[Json]:
    """Send one message to an agent and yield the reply's events."""
    body = {"message": message, "temperature": 0, "max_tokens": 40, "stream": True, **options}
    with http.stream("POST", f"/v1/agents/{agent_id}/generate", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))
