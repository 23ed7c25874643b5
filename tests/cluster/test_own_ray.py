"""`semantic cluster` with a Ray of its own and the starter model, on one machine.

Memory pressure adds a replica; an agent continues on another replica with the same tokens; Ray's
head is killed and the service comes back by itself; Ctrl-C leaves no process. The tests run in this
order, on one command.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.own_ray import OwnRay, are_gone, running
from tests.cluster.rig import WORDS, require_cluster, served_by
from tests.smoke.server_process import serve
from tests.waiting import eventually

pytestmark = pytest.mark.cluster

NUM_TOKENS = 24
QUESTIONS = ("What does the fox do?", "And the dog?", "Tell me about both of them.")


@pytest.fixture(scope="module")
def own(
    postgres_server: str, starter_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnRay]:
    require_cluster()
    from tests.postgres import new_schema

    directory = tmp_path_factory.mktemp("own")
    settings: dict[str, Any] = {
        "store": "shared",
        "database_url": new_schema(postgres_server),
        "objects_url": (directory / "objects").as_uri(),
        "backend": "torch",
        "memory_budget_mb": 64,  # 1,400 tokens
        "lease_s": 2.0,
        "replicas": 1,
        "max_replicas": 2,
        "max_batch_size": 8,
        "upscale_delay_s": 2,
        "downscale_delay_s": 3600,
    }
    with running(starter_home, directory, settings) as made:
        yield made


def client() -> httpx.Client:
    return httpx.Client(base_url=OwnRay.url, trust_env=False, timeout=300)


def body(text: str, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def test_memory_pressure_adds_a_replica(own: OwnRay) -> None:
    own.await_replicas(1)
    is_over = threading.Event()
    num_replies = 0

    def talk() -> None:  # one request at a time: by their number, one replica is enough
        nonlocal num_replies
        with client() as http:
            while not is_over.is_set():
                asked = body(f"{num_replies} {WORDS * 9}", 120)
                headers = {"x-agent-ephemeral": "true"}
                http.post("/v1/chat/completions", json=asked, headers=headers).raise_for_status()
                num_replies += 1

    began = time.monotonic()
    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    try:
        assert eventually(lambda: len(own.replicas()) == 2, 300, every_s=0.5), own.logs()
    finally:
        is_over.set()
        thread.join(300)
    assert num_replies
    sys.stdout.write(f"\n1 to 2 replicas after {time.monotonic() - began:.0f} s\n")


def test_an_agent_continues_on_another_replica_with_the_same_tokens(
    own: OwnRay, starter_home: Path, tmp_path: Path
) -> None:
    own.await_replicas(2)
    first, second = f"{WORDS * 3} {QUESTIONS[0]}", QUESTIONS[1]
    with client() as http:
        http.post("/v1/agents", json={"id": "mover"}).raise_for_status()
        one = http.post("/v1/agents/mover/generate", json=body(first))
        await_uploads(own)
        os.kill(served_by(one), signal.SIGKILL)
        two = generate_until_answered(http, "mover", body(second))
    assert served_by(two) != served_by(one)
    reuse = two.json()["reuse"]
    sys.stdout.write(f"\non the other replica: {reuse}\n")
    assert reuse["disk"] > reuse["computed"]
    assert not reuse["hot"]

    # A server that has seen nothing computes the same tokens.
    home = tmp_path / "home"
    home.mkdir()
    for name in ("models", "native"):
        (home / name).symlink_to(starter_home / name)
    said = [one.json()["text"], two.json()["text"]]
    asked = body(second)
    asked["messages"] = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": said[0]},
        *asked["messages"],
    ]
    with serve(home, tmp_path / "log", backend="torch") as alone, alone.client() as http:
        reply = http.post("/v1/chat/completions", json=asked).json()
        assert reply["choices"][0]["message"]["content"] == said[1]
        assert not reply["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_the_head_is_killed_and_the_service_comes_back_by_itself(own: OwnRay, name: str) -> None:
    num_starts = own.num_starts
    agent = f"survivor-{name.replace('_', '-')}"
    with client() as http:
        http.post("/v1/agents", json={"id": agent}).raise_for_status()
        before = http.post(f"/v1/agents/{agent}/generate", json=body(f"{WORDS * 3} Go on."))
        await_uploads(own)
        old = own.processes()
        began = time.monotonic()
        own.named(name).kill()
        own.await_start(num_starts + 1)
        after = generate_until_answered(http, agent, body(QUESTIONS[2]))
        sys.stdout.write(f"\n{name} killed: answered after {time.monotonic() - began:.0f} s\n")
        turns = http.get(f"/v1/agents/{agent}/turns").json()["data"]
    assert are_gone(old)
    assert "restarting: in 1 s, attempt 1" in own.said
    assert [turn["id"] for turn in turns] == [after.json()["turn_id"], before.json()["turn_id"]]
    reuse = after.json()["reuse"]
    sys.stdout.write(f"the agent's cache: {reuse}\n")
    assert reuse["disk"] > reuse["computed"]


def test_ctrl_c_leaves_no_process(own: OwnRay) -> None:
    old = own.processes()
    assert own.stop() == 0, own.said
    assert "stopping:" in own.said
    assert are_gone(old)


def generate_until_answered(
    http: httpx.Client, agent: str, asked: dict[str, Any]
) -> httpx.Response:
    """Send a turn as a client does that tries again."""
    replies: list[httpx.Response] = []

    def is_answered() -> bool:
        try:
            replies.append(http.post(f"/v1/agents/{agent}/generate", json=asked))
        except httpx.TransportError:
            return False
        return replies[-1].status_code == 200

    assert eventually(is_answered, 300, every_s=0.5), [one.text for one in replies[-3:]]
    return replies[-1]


def await_uploads(own: OwnRay) -> None:
    """Wait until the blocks of the last turn are in the store: their number no longer grows."""
    from tests.postgres import num_shared_parts

    line = next(one for one in own.config.read_text().splitlines() if "database_url" in one)
    url = line.partition('"')[2].rstrip('"')
    before, seen_at = -1, time.monotonic()
    while time.monotonic() - seen_at < 3 or not before:
        number = num_shared_parts(url)
        if number != before:
            before, seen_at = number, time.monotonic()
        time.sleep(0.2)
