"""Two servers on one database and one object store: each continues the other's agents."""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.postgres import num_shared_parts
from tests.smoke.server_process import ServerProcess, serve_forked
from tests.waiting import await_that

pytestmark = pytest.mark.smoke

LONG = "The quick brown fox jumps over the lazy dog. " * 40


class Site:
    """Servers that share everything but their directories."""

    def __init__(self, directory: Path, database_url: str, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._settings: dict[str, Any] = {
            "store": "shared",
            "database_url": database_url,
            "objects_url": (directory / "objects").as_uri(),
            "lease_s": 1.0,
        }

    def start(self, name: str) -> tuple[ServerProcess, httpx.Client]:
        home, log = self._directory / name, self._directory / f"{name}.log"
        started = serve_forked(home, log, "--backend", "fake", **self._settings)
        server = self._stack.enter_context(started)
        return server, self._stack.enter_context(server.client())


@pytest.fixture
def site(tmp_path: Path, database_url: str) -> Iterator[Site]:
    pytest.importorskip("psycopg")
    pytest.importorskip("obstore")
    with ExitStack() as stack:
        yield Site(tmp_path, database_url, stack)


def say(http: httpx.Client, agent: str, text: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0}
    reply = http.post(f"/v1/agents/{agent}/generate", json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def turns(http: httpx.Client, agent: str) -> list[str]:
    listed = http.get(f"/v1/agents/{agent}/turns").json()["data"]
    return [turn["id"] for turn in listed]


@pytest.mark.slow
def test_servers_continue_each_others_agents(site: Site, database_url: str) -> None:
    first, one = site.start("one")
    assert one.post("/v1/agents", json={"id": "coder"}).status_code == 201
    opening = say(one, "coder", LONG)
    await_that(lambda: num_shared_parts(database_url) >= 8)  # blocks of 256 tokens, and the rest

    _, two = site.start("two")
    going_on = say(two, "coder", "and now?")

    # The second machine computed little, and says what one machine alone would have said.
    assert going_on["reuse"]["disk"] >= 1792
    two.post("/v1/agents", json={"id": "alone"})
    assert say(two, "alone", LONG)["text"] == opening["text"]
    assert say(two, "alone", "and now?")["text"] == going_on["text"]
    # Both know both turns; a name is taken for both, and a setting is seen by both.
    assert turns(one, "coder") == turns(two, "coder") == [going_on["turn_id"], opening["turn_id"]]
    assert one.post("/v1/agents", json={"id": "alone", "system": "other"}).status_code == 409
    two.patch("/v1/agents/alone", json={"labels": {"seen": "here"}})
    assert one.get("/v1/agents/alone").json()["settings"]["labels"] == {"seen": "here"}
    _check_stateless(one, two)
    _check_kill(first, one, two)


def _check_stateless(one: httpx.Client, two: httpx.Client) -> None:
    """A client that keeps the conversation may send its turns anywhere, and is recognised."""
    said = [{"role": "user", "content": "hello"}]
    for number, http in enumerate((one, two, one)):
        body = {"model": "fake", "messages": said, "max_tokens": 8, "temperature": 0}
        reply = http.post("/v1/chat/completions", json=body, headers={"X-Agent-ID": "walker"})
        assert reply.status_code == 200, reply.text
        said += [reply.json()["choices"][0]["message"], {"role": "user", "content": f"{number}"}]
    assert len(turns(two, "walker")) == 3


def _check_kill(first: ServerProcess, one: httpx.Client, two: httpx.Client) -> None:
    """A server that dies in a turn leaves the agent as it was, for others to continue."""
    before = turns(two, "coder")
    body = {
        "messages": [{"role": "user", "content": "talk"}],
        "max_tokens": 100_000,
        "ignore_eos": True,
    }
    stream = one.stream("POST", "/v1/agents/coder/generate", json={**body, "stream": True})
    with suppress(httpx.HTTPError), stream as reply:
        for number, _ in enumerate(reply.iter_lines()):
            if number == 3:
                first.process.kill()
    assert first.process.wait(60) == -9
    after = say(two, "coder", "still there?")
    assert turns(two, "coder") == [after["turn_id"], *before]
