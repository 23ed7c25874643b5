"""Two plain servers behind deploy/haproxy.cfg: an agent stays with one, and outlives it."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from semantic.domain.blocks import pack_tokens
from tests.cluster.rig import WORDS, TalkingAgents, answering, served_by
from tests.smoke.server_process import ServerProcess, serve
from tests.waiting import await_that, eventually

pytestmark = pytest.mark.cluster

CONFIG = Path(__file__).resolve().parents[2] / "deploy/haproxy.cfg"
SHORT, ENDLESS = 200, 100_000  # tokens of replies that end, and of one that does not
# The blocks of a conversation that are in the object store, found by how it begins.
UPLOADED = """WITH RECURSIVE chain AS (
    SELECT name FROM parts WHERE position(%s IN tokens) > 0
    UNION SELECT parts.name FROM parts JOIN chain ON parts.parent = chain.name
) SELECT count(*) FROM chain"""


@dataclass
class ProxiedServers:
    """Two servers and the proxy before them."""

    url: str
    servers: list[ServerProcess]

    def replicas(self) -> list[int]:
        return [one.process.pid for one in self.servers if one.process.poll() is None]

    def await_replicas(self, number: int, timeout_s: float = 120) -> None:
        assert eventually(lambda: len(answering(self.url)) == number, timeout_s), self.logs()

    def logs(self) -> str:
        return "\n".join(one.output[-2000:] for one in self.servers)


@pytest.fixture
def pair(tmp_path: Path, database_url: str) -> Iterator[ProxiedServers]:
    haproxy = shutil.which("haproxy")
    if haproxy is None:
        pytest.skip("there is no haproxy: apt-get install haproxy")
    settings: dict[str, Any] = {
        "store": "shared",
        "database_url": database_url,
        "objects_url": (tmp_path / "objects").as_uri(),
        "backend": "fake",
        "model": "fake-slow",  # so that reading blocks is faster than computing them
        "lease_s": 1.0,
    }
    with contextlib.ExitStack() as stack:
        # It listens on a port that is ours before it starts.
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        text = CONFIG.read_text().replace("bind :8000", f"bind fd@{listener.fileno()}")
        servers = []
        for number, name in enumerate(("one", "two"), 1):
            started = serve(tmp_path / name, tmp_path / f"{name}.log", **settings)
            server = stack.enter_context(started)
            address = server.url.removeprefix("http://")
            # Each is called by its process, as replicas of Ray call themselves.
            text = text.replace(
                f"server {name} 10.0.0.{number}:8000", f"server {server.process.pid} {address}"
            )
            servers.append(server)
        config = tmp_path / "haproxy.cfg"
        config.write_text(text)
        command = [haproxy, "-db", "-f", str(config)]
        proxy = subprocess.Popen(command, pass_fds=[listener.fileno()])  # noqa: S603 - the proxy
        stack.callback(proxy.wait)
        stack.callback(proxy.kill)
        made = ProxiedServers(f"http://127.0.0.1:{listener.getsockname()[1]}", servers)
        made.await_replicas(2)
        yield made


def num_uploaded(database_url: str, beginning: str) -> int:
    import psycopg

    with psycopg.connect(database_url) as connection:
        row = connection.execute(UPLOADED, [pack_tokens(list(beginning.encode()))]).fetchone()
    return int(row[0]) if row else 0


def test_agents_stay_with_a_server_and_go_on_without_it(
    pair: ProxiedServers, database_url: str
) -> None:
    body = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 8}
    homes = []
    with httpx.Client(base_url=pair.url, trust_env=False, timeout=60) as http:
        for name in map("quiet-{}".format, range(9)):
            http.post("/v1/agents", json={"id": name}).raise_for_status()
            turns = [http.post(f"/v1/agents/{name}/generate", json=body) for _ in range(3)]
            homes.append({served_by(turn) for turn in turns})
            assert all(turn.json()["reuse"]["hot"] for turn in turns[1:])
    before = set(pair.replicas())
    assert [len(home) for home in homes] == [1] * 9
    assert set[int]().union(*homes) == before

    with TalkingAgents(pair, "plain", 1, SHORT) as talk:
        talk.await_turns(3)
        (talker,) = talk.talkers
        talker.max_tokens = ENDLESS
        await_that(lambda: talker.asked == ENDLESS)
        victim = talk.await_stream()
        # Most of what it was asked is uploaded.
        first = "plain-0 says 0."
        assert eventually(lambda: num_uploaded(database_url, first) > 9, every_s=0.1), talk.told()
        talker.max_tokens = SHORT
        os.kill(victim, signal.SIGKILL)
        talk.await_turns(1)
    moved = talk.moved({victim}, before)
    assert all(turn.num_cached >= turn.reuse["disk"] > turn.reuse["computed"] for turn in moved)
    talk.check()
