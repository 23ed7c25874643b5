"""A Ray of several nodes on this machine, servers on it, and agents that talk to them all the time.

Nodes are Ray's own processes with addresses 127.0.0.1, 127.0.0.2 and so on, and a directory each;
their proxies share one port, as behind a balancer. It needs a network with nothing but a loopback.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.waiting import eventually

GCS_PORT, REDIS_PORT, PORT = 6390, 19101, 19100
URL = f"http://127.0.0.1:{PORT}"
WORDS = "The quick brown fox jumps over the lazy dog. " * 12


def require_cluster() -> None:
    """Skip what cannot run here, and say why."""
    pytest.importorskip("ray", reason="Ray is not installed; make cluster-tests installs it")
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server: apt-get install redis-server")
    if {name for _, name in socket.if_nameindex()} != {"lo"}:
        pytest.skip("Ray listens to everybody: make cluster-tests runs this without a network")


class Node:
    """One of Ray's nodes, with a home of its own for replicas."""

    def __init__(self, number: int, directory: Path, cpus: int) -> None:
        self.home = directory / f"node{number}"
        self._command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        self._command += [f"--node-ip-address=127.0.0.{number}", f"--num-cpus={cpus}"]
        self._command += ["--object-store-memory=80000000", "--disable-usage-stats"]
        if number == 1:
            self._command += ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"]
        else:
            self._command += [f"--address=127.0.0.1:{GCS_PORT}"]
        # Ports that are known need no waiting for who takes them, which a busy machine fails.
        agents = ("metrics-export", "dashboard-agent-listen", "runtime-env-agent")
        ports = enumerate((*agents, "dashboard-agent-grpc"), 20000 + 10 * number)
        self._command += [f"--{name}-port={port}" for port, name in ports]
        self._log = directory / f"node{number}.log"
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as sink:
            return subprocess.Popen(  # noqa: S603 - Ray's own command
                self._command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment(self.home),
                start_new_session=True,
            )

    def await_up(self) -> None:
        assert eventually(lambda: "Ray runtime started" in self._log.read_text(), 120), self._log

    def replicas(self) -> list[int]:
        """The processes that hold a directory here."""
        found = []
        for path in self.home.glob("replicas/*/lock"):
            text = path.read_text()  # empty once it was let go
            pid = json.loads(text)["pid"] if text else 0
            found += [pid] if Path(f"/proc/{pid}").exists() else []
        return found

    def kill(self) -> None:
        """End all of its processes at once."""
        for pid in [self.process.pid, *_descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def start_again(self) -> None:
        self._log.write_text("")
        self.process = self._start()
        self.await_up()


def environment(home: Path | None = None) -> dict[str, str]:
    """Of Ray's processes and ours."""
    usual = {k: v for k, v in os.environ.items() if not k.startswith(("SEMANTIC_", "RAY_"))}
    return {
        **usual,
        **({"SEMANTIC_HOME": str(home)} if home else {}),
        "RAY_AUTH_MODE": "disabled",
        "RAY_REDIS_ADDRESS": f"127.0.0.1:{REDIS_PORT}",
        "RAY_external_storage_namespace": "semantic-tests",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # else a busy machine starves them
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(words[1]), []).append(int(path.parent.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


@dataclass
class Fleet:
    """A head, nodes, and the application on them."""

    nodes: list[Node]
    log: Path

    @property
    def head(self) -> Node:
        return self.nodes[0]

    def replicas(self) -> list[int]:
        return [pid for node in self.nodes for pid in node.replicas()]

    def node_of(self, pid: int) -> Node:
        return next(node for node in self.nodes if pid in node.replicas())

    def await_replicas(self, number: int, timeout_s: float = 120) -> None:
        assert eventually(lambda: len(self.replicas()) == number, timeout_s), self.replicas()


@contextlib.contextmanager
def running_fleet(directory: Path, num_nodes: int, settings: dict[str, Any]) -> Iterator[Fleet]:
    """Start Redis, a head without replicas, nodes with two CPUs each, and `semantic cluster`."""
    config = directory / "cluster.toml"
    config.write_text("".join(f"{name} = {json.dumps(v)}\n" for name, v in settings.items()))
    log = directory / "cluster.log"
    with contextlib.ExitStack() as stack:
        redis = subprocess.Popen(  # noqa: S603 - the system's own program
            [shutil.which("redis-server") or "", "--port", str(REDIS_PORT), "--save", ""],
            stdout=subprocess.DEVNULL,
            cwd=directory,
        )
        stack.callback(_end, redis)
        nodes = [Node(1, directory, 0)]
        stack.callback(nodes[0].kill)
        nodes[0].await_up()
        for number in range(2, num_nodes + 2):
            nodes.append(Node(number, directory, 2))
            stack.callback(nodes[-1].kill)
            nodes[-1].await_up()  # two that start at once take the same socket
        command = [sys.executable, "-m", "semantic", "cluster", "--config", str(config)]
        command += ["--port", str(PORT), "--ray-address", f"127.0.0.1:{GCS_PORT}"]
        with log.open("w") as sink:
            driver = subprocess.Popen(  # noqa: S603 - our own command
                command, stdout=sink, stderr=sink, env=environment(), cwd=directory
            )
        stack.callback(_end, driver)
        is_up = eventually(lambda: "ready:" in log.read_text() or driver.poll() is not None, 300)
        assert is_up, log.read_text()
        assert driver.poll() is None, log.read_text()
        yield Fleet(nodes, log)


# -- agents --------------------------------------------------------------------------------------


@dataclass
class Talker:
    """An agent's client: says one thing after the other, each until it is acknowledged."""

    name: str
    max_tokens: int
    acknowledged: list[str] = field(default_factory=list)
    reuse: list[dict[str, int]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    tokens_seen: int = 0

    def talk(self, is_over: threading.Event) -> None:
        """Talk until it is over; the last thing said is acknowledged too."""
        while not is_over.is_set():
            text = f"{self.name} says {len(self.acknowledged)}. {WORDS}"
            broken_at = None
            while not self._say(text):
                broken_at = broken_at or time.monotonic()
                time.sleep(0.1)
            if broken_at is not None:
                self.waits.append(time.monotonic() - broken_at)

    def _say(self, text: str) -> bool:
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.max_tokens,
            "stream": True,
        }
        path = f"{URL}/v1/agents/{self.name}/generate"
        try:
            with (
                httpx.Client(trust_env=False, timeout=120) as http,
                http.stream("POST", path, json=body) as reply,
            ):
                if reply.status_code != 200:
                    self.failures.append(f"{reply.status_code} {reply.read()[:90]!r}")
                    assert reply.status_code >= 409, self.failures
                    return False
                return self._read(reply)
        except httpx.HTTPError as error:
            self.failures.append(type(error).__name__)
            return False

    def _read(self, reply: httpx.Response) -> bool:
        for line in reply.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: ") else {}
            self.tokens_seen += event.get("type") == "text"
            if event.get("type") == "finished":
                self.acknowledged.append(event["turn_id"])
                self.reuse.append(event["reuse"])
                return True
        self.failures.append("the stream ended without its last event")
        return False


class Talk:
    """Several agents that talk at once."""

    def __init__(self, prefix: str, num_agents: int, max_tokens: int = 200) -> None:
        self.talkers = [Talker(f"{prefix}-{i}", max_tokens) for i in range(num_agents)]
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=one.talk, args=(self._is_over,), daemon=True)
            for one in self.talkers
        ]

    def __enter__(self) -> "Talk":
        with httpx.Client(base_url=URL, trust_env=False, timeout=60) as http:
            for talker in self.talkers:
                http.post(
                    "/v1/agents", json={"id": talker.name, "overflow": "drop_oldest"}
                ).raise_for_status()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(180)
        assert not any(thread.is_alive() for thread in self._threads), "a turn never ended"

    @property
    def num_turns(self) -> int:
        return sum(len(one.acknowledged) for one in self.talkers)

    def await_turns(self, more: int) -> None:
        """Wait until so many more turns are acknowledged."""
        end = self.num_turns + more
        assert eventually(lambda: self.num_turns >= end, 150), self.told()

    def told(self) -> dict[str, Any]:
        """What happened, in figures."""
        failures = Counter(failure for one in self.talkers for failure in one.failures)
        waits = [round(wait, 1) for one in self.talkers for wait in one.waits]
        return {"turns": self.num_turns, "failures": dict(failures), "waits": sorted(waits)}

    def check(self) -> None:
        """Every acknowledged turn is there once, in order, whichever replica is asked."""
        with httpx.Client(base_url=URL, trust_env=False, timeout=60) as http:
            for talker in self.talkers:
                found = http.get(f"/v1/agents/{talker.name}/turns?limit=100").json()["data"]
                ids = [turn["id"] for turn in reversed(found)]
                assert len(ids) == len(set(ids))
                assert [one for one in ids if one in talker.acknowledged] == talker.acknowledged
            # Who asks for all agents names none, and is sent anywhere.
            views = [_heads(http) for _ in range(8)]
            heads = {one.name: one.acknowledged[-1] for one in self.talkers if one.acknowledged}
        for view in views:
            assert heads.items() <= view.items()


def _heads(http: httpx.Client) -> dict[str, str]:
    listed = http.get("/v1/agents?limit=100").json()["data"]
    return {agent["id"]: agent["head"] for agent in listed}
