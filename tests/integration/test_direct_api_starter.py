"""The agent API on the starter model: forks, tiers, restarts and files change no word."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http_server import RunningServer, make_settings, run_server
from tests.integration.test_direct_api import events_of, get, make

pytestmark = pytest.mark.integration

SYSTEM = "You are a helpful assistant. You know about geography and answer in one sentence. " * 6
FIRST, SECOND = "What is the capital of France?", "And which river runs through it?"


@pytest.fixture(scope="module")
def settings(starter_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    cache = tmp_path_factory.mktemp("cache")
    return make_settings(starter_home, backend="torch", cache_dir=cache, log_level="warning")


@pytest.fixture(scope="module")
def running(settings: Any) -> Iterator[RunningServer]:
    with run_server(settings) as server:
        yield server


@pytest.fixture
def http(running: RunningServer) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client
        for agent in client.get("/v1/agents").json()["data"]:
            client.delete(f"/v1/agents/{agent['id']}")


def say(http: httpx.Client, agent_id: str, message: str) -> dict[str, Any]:
    body = {"message": message, "temperature": 0, "max_tokens": 12}
    answer = http.post(f"/v1/agents/{agent_id}/generate", json=body)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def test_an_agent_answers_and_remembers(http: httpx.Client) -> None:
    make(http, id="a", system=SYSTEM)
    first, second = say(http, "a", FIRST), say(http, "a", SECOND)

    assert "Paris" in first["text"]
    assert second["usage"]["cached_tokens"] > 0.8 * second["usage"]["prompt_tokens"]
    assert get(http, "/v1/agents/a")["turns"] == 2
    assert "reused" in get(http, "/v1/agents/a/explain")["summary"]


def test_a_fork_reuses_everything_and_says_the_same(http: httpx.Client) -> None:
    make(http, id="a", system=SYSTEM)
    say(http, "a", FIRST)
    tokens = get(http, "/v1/agents/a")["tokens"]
    http.post("/v1/agents/a/fork", json={"ids": ["b", "c"]})

    replies = [say(http, name, SECOND) for name in ("b", "c", "a")]

    assert len({reply["text"] for reply in replies}) == 1
    assert all(reply["usage"]["cached_tokens"] >= tokens - 1 for reply in replies)
    assert get(http, "/v1/cache")["dedup_ratio"] > 1.5


def test_from_disk_from_nothing_and_from_memory_say_the_same(http: httpx.Client) -> None:
    # Of its own, so that nothing of it is in memory because of other tests.
    make(http, id="a", system=f"Be kind. {SYSTEM}")
    first = say(http, "a", FIRST)
    tokens = get(http, "/v1/agents/a")["tokens"]
    states, replies = [], []
    for place in ("disk", "cold"):
        evicted = http.post("/v1/agents/a/evict", json={"to": place}).json()["state"]
        states.append((evicted["tier"], evicted["memory_bytes"]))
        replies.append(say(http, "a", SECOND))
        http.post("/v1/agents/a/rewind", json={"turn_id": first["turn_id"]})
    replies.append(say(http, "a", SECOND))

    assert states == [("warm", 0), ("cold", 0)]
    assert len({reply["text"] for reply in replies}) == 1
    assert replies[0]["reuse"]["disk"] + replies[0]["reuse"]["pool"] >= tokens - 1
    assert replies[0]["reuse"]["hot"] == 0
    assert events_of(http.post("/v1/cache/verify"))[-1]["bad"] == 0


def test_a_file_brings_the_state_along(http: httpx.Client) -> None:
    make(http, id="a", system=SYSTEM)
    say(http, "a", FIRST)
    tokens = get(http, "/v1/agents/a")["tokens"]
    content = http.get("/v1/agents/a/export").content
    expected = say(http, "a", SECOND)
    http.delete("/v1/agents/a")

    taken = http.post("/v1/agents/import", params={"id": "b"}, content=content).json()
    reply = say(http, "b", SECOND)

    assert taken["tokens"] == tokens
    assert reply["text"] == expected["text"]
    assert reply["usage"]["cached_tokens"] >= tokens - 1
