"""Three replicas on Ray: one is killed in its streams, then its node, then the head; then scaled.

Every acknowledged turn is readable by all afterwards, none is there twice, and whoever tries again
goes on elsewhere with blocks from the object store. `-s` shows what happened, in figures.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.rig import Fleet, Talk, require_cluster, running_fleet
from tests.waiting import eventually

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def fleet(postgres_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    require_cluster()
    from tests.postgres import new_schema

    directory = tmp_path_factory.mktemp("fleet")
    settings: dict[str, Any] = {
        "store": "shared",
        "database_url": new_schema(postgres_server),
        "objects_url": (directory / "objects").as_uri(),
        "backend": "fake",
        "lease_s": 2.0,
        "replicas": 3,
        "max_replicas": 4,
        "max_batch_size": 6,
        "upscale_delay_s": 2,
        "downscale_delay_s": 8,
    }
    with running_fleet(directory, 2, settings) as made:
        made.await_replicas(3)
        yield made


def tell(what: str, talk: Talk, began: float) -> None:
    sys.stdout.write(f"\n{what}: {talk.told()}, {time.monotonic() - began:.0f} s\n")


def test_a_replica_is_killed_in_its_streams(fleet: Fleet) -> None:
    began = time.monotonic()
    with Talk("one", 6, max_tokens=400) as talk:
        talk.await_turns(12)
        victim = fleet.replicas()[0]
        os.kill(victim, signal.SIGKILL)
        talk.await_turns(18)
    tell("a replica was killed", talk, began)
    talk.check()
    broken = [one for one in talk.talkers if one.failures]
    assert broken
    # Who tried again went on elsewhere, with what the dead one had uploaded.
    assert any(reuse["disk"] > 0 for one in broken for reuse in one.reuse)
    fleet.await_replicas(3)


def test_its_node_is_killed(fleet: Fleet) -> None:
    began = time.monotonic()
    with Talk("node", 6) as talk:
        talk.await_turns(12)
        node = fleet.node_of(fleet.replicas()[-1])
        node.kill()
        talk.await_turns(18)
    tell("a node was killed", talk, began)
    talk.check()
    node.start_again()
    fleet.await_replicas(3, 240)


def test_the_head_is_killed_and_comes_back(fleet: Fleet) -> None:
    began = time.monotonic()
    with Talk("head", 6) as talk:
        talk.await_turns(12)
        fleet.head.kill()
        killed = talk.num_turns
        talk.await_turns(24)
        sys.stdout.write(f"\nwhile the head was down: {talk.num_turns - killed} turns\n")
        fleet.head.start_again()
        talk.await_turns(12)
    tell("the head was killed", talk, began)
    talk.check()


def test_replicas_come_and_go_with_the_load(fleet: Fleet) -> None:
    began = time.monotonic()
    fleet.await_replicas(3)
    with Talk("load", 24) as talk:
        assert eventually(lambda: len(fleet.replicas()) > 3, 150), talk.told()
        talk.await_turns(30)
        most = len(fleet.replicas())
    fewer = time.monotonic()
    with Talk("calm", 2) as calm:  # streams of replicas that stop end
        assert eventually(lambda: len(fleet.replicas()) == 3, 200), fleet.replicas()
    tell(f"3 to {most} replicas, back after {time.monotonic() - fewer:.0f} s", talk, began)
    assert not [failure for one in [*talk.talkers, *calm.talkers] for failure in one.failures]
    talk.check()
    calm.check()
