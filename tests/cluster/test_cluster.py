"""Three replicas on Ray: one is killed, then its node; scaled, stopped; then the head is killed.

Every acknowledged turn is readable by all afterwards, none is there twice, and whoever tries again
goes on elsewhere with blocks from the object store. `-s` shows what happened, in figures. The tests
run in this order, on one Ray.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.rig import (
    RayFleet,
    TalkingAgents,
    names_for_each,
    require_cluster,
    running_fleet,
)
from tests.smoke.server_process import serve
from tests.waiting import eventually

pytestmark = pytest.mark.cluster

LONG = 1000  # tokens of a stream that takes seconds
MANIFEST = Path(__file__).resolve().parents[2] / "deploy/rayservice.yaml"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray alone
def test_ray_takes_the_manifests_application() -> None:
    require_cluster()
    from ray.serve.schema import ServeDeploySchema

    from semantic.cluster.entrypoints.ray_app import build

    config = yaml.safe_load(yaml.safe_load(MANIFEST.read_text())["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert build({**application.args, "database_url": "postgresql://db"})


@pytest.fixture(scope="module")
def fleet(postgres_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    require_cluster()
    from tests.postgres import new_schema

    directory = tmp_path_factory.mktemp("fleet")
    settings: dict[str, Any] = {
        "store": "shared",
        "database_url": new_schema(postgres_server),
        "objects_url": (directory / "objects").as_uri(),
        "backend": "fake",
        "model": "fake-slow",  # so that reading blocks is faster than computing them
        "lease_s": 2.0,
        "replicas": 3,
        "max_replicas": 4,
        "max_batch_size": 4,  # too few for the load, even if half of its agents are reading
        "upscale_delay_s": 2,
        "downscale_delay_s": 8,
    }
    with running_fleet(directory, 2, settings) as made:
        made.await_replicas(3)
        yield made


def test_an_agent_stays_with_its_replica(fleet: RayFleet) -> None:
    with TalkingAgents(fleet, "home", 9) as talk:
        talk.await_turns(27)
    talk.check()
    assert not talk.failures
    homes = [{turn.pid for turn in one.turns} for one in talk.talkers]
    assert [len(home) for home in homes] == [1] * 9
    assert len(set[int]().union(*homes)) > 1
    # So it finds its state where it left it.
    assert all(turn.reuse["hot"] for one in talk.talkers for turn in one.turns[1:])


def test_a_replica_is_killed_in_a_stream(fleet: RayFleet) -> None:
    before = set(fleet.replicas())
    with TalkingAgents(fleet, "one", 1, LONG) as talk:
        talk.await_turns(3)
        victim = talk.await_stream()
        os.kill(victim, signal.SIGKILL)
        talk.await_turns(1)
    # Who tries again goes on elsewhere, with what the dead one had uploaded.
    (turn,) = talk.moved({victim}, before)
    assert turn.num_cached >= turn.reuse["disk"] > turn.reuse["computed"], turn
    fleet.await_replicas(3)
    talk.check()


def test_its_node_is_killed(fleet: RayFleet) -> None:
    before = set(fleet.replicas())
    with TalkingAgents(fleet, "node", 4, LONG) as talk:
        talk.await_turns(8)
        node = fleet.node_of(talk.await_stream())
        victims = set(node.replicas())
        node.kill()
        talk.await_turns(8)
    node.start_again()
    talk.moved(victims, before)
    fleet.await_replicas(3, 180)
    talk.check()


def test_replicas_come_and_go_with_the_load(fleet: RayFleet) -> None:
    with TalkingAgents(fleet, "load", 24) as talk:
        assert eventually(lambda: len(fleet.replicas()) == 4, 300), talk.told()
        talk.await_turns(24)
    began = time.monotonic()
    many = set(fleet.replicas())
    # Ray chooses who stops, so that all four have streams until then.
    names = names_for_each(fleet.url, many, 2)
    with TalkingAgents(fleet, "calm", len(names), LONG, names=names) as calm:
        assert eventually(lambda: len(fleet.replicas()) == 3, 300), calm.told()
    sys.stdout.write(f"\n4 to 3 replicas after {time.monotonic() - began:.0f} s\n")
    assert not talk.failures + calm.failures
    gone = many - set(fleet.replicas())
    assert gone & {turn.pid for one in calm.talkers for turn in one.turns}
    talk.check()
    calm.check()


def test_streams_end_before_the_cluster_stops(fleet: RayFleet, tmp_path: Path) -> None:
    with TalkingAgents(fleet, "last", 6, 2 * LONG) as talk:
        talk.await_turns(6)
        talk.let_end()
        time.sleep(1)  # requests in flight have ended
        talk.await_stream()
        fleet.driver.send_signal(signal.SIGINT)
        assert eventually(lambda: "stopping:" in fleet.said, 60)
        seen, turns = talk.tokens_seen, talk.num_turns
        with fleet.starved_proxies():  # they still have something to send when servers have ended
            assert eventually(lambda: not fleet.replicas(), 120), fleet.logs()
            time.sleep(1)  # the command has seen it
    assert not talk.failures
    assert talk.num_turns > turns
    assert talk.tokens_seen > seen
    assert fleet.driver.wait(300) == 0
    # A plain server finds what was said, and uploaded at the end.
    with (
        serve(tmp_path, tmp_path / "log", "--config", str(fleet.config)) as server,
        server.client() as http,
    ):
        for one in talk.talkers:
            body = {"messages": [{"role": "user", "content": "and?"}], "max_tokens": 4}
            reply = http.post(f"/v1/agents/{one.name}/generate", json=body).json()
            assert reply["reuse"]["disk"] > reply["reuse"]["computed"]
            turns = http.get(f"/v1/agents/{one.name}/turns").json()["data"]
            assert turns[1]["id"] == one.turns[-1].turn


def test_the_head_is_killed_and_comes_back(fleet: RayFleet) -> None:
    if fleet.driver.poll() is not None:  # a test before stopped it
        fleet.run_command()
    fleet.await_replicas(3)
    before = fleet.replicas()
    # The load is small: Ray's head gives up if it does not start within thirty seconds.
    with TalkingAgents(fleet, "head", 6, 50, pause_s=0.5) as talk:
        talk.await_turns(6)
        fleet.head.kill()
        talk.await_turns(18)  # while it is gone
        assert fleet.replicas() == before
        fleet.head.start_again()
        talk.await_turns(6)
    talk.check()
    # The command finds the servers again; nobody starts it, and it replaces none of them.
    assert eventually(lambda: fleet.said.count("ready:") == 2, 300), fleet.logs()
    assert fleet.replicas() == before
    # Who dies is replaced again.
    os.kill(fleet.replicas()[0], signal.SIGKILL)
    assert eventually(lambda: len(set(fleet.replicas()) - set(before)) == 1, 300), fleet.logs()
    fleet.await_replicas(3)
    fleet.driver.send_signal(signal.SIGINT)
    assert fleet.driver.wait(300) == 0
    assert not fleet.replicas()
