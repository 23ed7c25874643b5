"""A Ray of several nodes on this machine, servers on it, and agents that talk to them all the time.

Nodes are Ray's own processes with addresses 127.0.0.1, 127.0.0.2 and so on, and a directory each;
their proxies share one port, as behind a balancer. It needs a network with nothing but a loopback.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
import pytest

from tests.no_tls import NO_TLS
from tests.waiting import eventually, repeating

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
        # With fixed ports, Ray does not wait for its processes to report theirs, which can time
        # out on a busy machine.
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
        """Wait until it runs; on a busy machine Ray may give up, and is started again.

        A raylet aborts if its agent is not up soon, and the command ends after thirty seconds. No
        setting changes either.
        """
        end = time.monotonic() + 600
        while "Ray runtime started" not in self._log.read_text():
            assert time.monotonic() < end, self._log.read_text()[-3000:]
            if self.process.poll() is not None:
                Path("/tmp/ray/ray_current_cluster").unlink(missing_ok=True)  # noqa: S108 - Ray's own
                self.process = self._start()
            time.sleep(0.1)

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
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        # All are on one machine: a head would take the nodes' processes for its own.
        Path("/tmp/ray/ray_current_cluster").unlink(missing_ok=True)  # noqa: S108 - Ray's own
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
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # else a busy machine starves them
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


class RayFleet:
    """A head, nodes, and the application on them."""

    url = URL

    def __init__(self, nodes: list[Node], config: Path) -> None:
        self.nodes = nodes
        self.config = config
        self.driver = self.run_command()

    def run_command(self) -> "subprocess.Popen[bytes]":
        """Run `semantic cluster` until it is ready."""
        command = [sys.executable, "-m", "semantic", "cluster", "--config", str(self.config)]
        command += ["--port", str(PORT), "--ray-address", f"127.0.0.1:{GCS_PORT}"]
        with self.log.open("w") as sink:
            self.driver = subprocess.Popen(  # noqa: S603 - our own command
                command, stdout=sink, stderr=sink, env=environment(), cwd=self.config.parent
            )
        is_over = eventually(lambda: "ready:" in self.said or self.driver.poll() is not None, 300)
        assert is_over, self.logs()
        assert self.driver.poll() is None, self.logs()
        return self.driver

    @property
    def log(self) -> Path:
        return self.config.with_suffix(".log")

    @property
    def said(self) -> str:
        """By the command."""
        return self.log.read_text()

    @property
    def head(self) -> Node:
        return self.nodes[0]

    def replicas(self) -> list[int]:
        return [pid for node in self.nodes for pid in node.replicas()]

    def node_of(self, pid: int) -> Node:
        return next(node for node in self.nodes if pid in node.replicas())

    def starved_proxies(self) -> contextlib.AbstractContextManager[None]:
        """What passes replies to clients runs a tenth of the time, and is behind the servers."""
        proxies = [one for one in psutil.process_iter() if "ProxyActor" in one.name()]

        def starve() -> None:
            for send, pause_s in (psutil.Process.suspend, 0.45), (psutil.Process.resume, 0.0):
                for proxy in proxies:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        send(proxy)
                time.sleep(pause_s)

        return repeating(starve)

    def await_replicas(self, number: int, timeout_s: float = 300) -> None:
        """Wait until so many answer."""
        has_all = eventually(lambda: len(self.replicas()) == number, timeout_s)
        assert has_all, f"{self.replicas()}\n{self.logs()}"
        assert eventually(lambda: answering(URL) >= set(self.replicas()), 120), self.logs()

    def logs(self) -> str:
        """The last words of the command and of every replica."""
        return last_words(self.log, "replica_*.log")


def last_words(log: Path, of_ray: str) -> str:
    """The last lines of a command's log, and of Ray Serve's logs of these names."""
    serve = Path("/tmp/ray/session_latest/logs/serve")  # noqa: S108 - Ray's own
    paths = [log, *sorted(serve.glob(of_ray))]
    texts = {path: path.read_text(errors="replace").splitlines() for path in paths}
    return "\n".join(f"== {path}\n" + "\n".join(t[-25:]) for path, t in texts.items())


@contextlib.contextmanager
def running_fleet(directory: Path, num_nodes: int, settings: dict[str, Any]) -> Iterator[RayFleet]:
    """Start Redis, a head without replicas, nodes with two CPUs each, and `semantic cluster`."""
    config = directory / "cluster.toml"
    config.write_text("".join(f"{name} = {json.dumps(v)}\n" for name, v in settings.items()))
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
        fleet = RayFleet(nodes, config)
        stack.callback(lambda: _end(fleet.driver))
        yield fleet


def named(number: int) -> dict[str, str]:
    """Headers of a new agent: a router by agent sends each to another server."""
    return {"x-session-affinity": f"somebody-{number}"}


def answering(url: str) -> set[int]:
    """The processes that answer many requests, each of another agent."""
    with contextlib.suppress(httpx.HTTPError), httpx.Client(trust_env=False, timeout=20) as http:
        replies = (http.get(f"{url}/health/live", headers=named(i)) for i in range(30))
        return {served_by(reply) for reply in replies if reply.status_code == 200}
    return set()


def names_for_each(url: str, pids: set[int], number: int) -> list[str]:
    """Names of agents so that every process is the home of so many."""
    found: dict[int, list[str]] = {pid: [] for pid in pids}
    with httpx.Client(trust_env=False, timeout=60) as http:
        for name in map("calm-{}".format, range(1000)):
            home = served_by(http.get(f"{url}/v1/agents/{name}"))
            found.setdefault(home, []).append(name)
            if all(len(found[pid]) >= number for pid in pids):
                return [name for pid in sorted(pids) for name in found[pid][:number]]
    raise AssertionError(found)


def served_by(reply: httpx.Response) -> int:
    """The process that answered; 0 if it does not say."""
    return int(reply.headers.get("x-served-by", "0").rpartition("/")[2])


# -- agents --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Acknowledged:
    """A turn whose last event came."""

    turn: str
    pid: int
    num_cached: int
    reuse: dict[str, int]
    num_tries: int


@dataclass
class TalkingAgent:
    """An agent's client: says one thing after the other, each until it is acknowledged.

    Attributes:
        broken_on: The processes whose streams broke.
        waits: Seconds from a first failure to the turn's acknowledgement.
        open_on: The process whose stream says something now.
        asked: The tokens that are asked for now: `max_tokens` as it was when that began.
    """

    url: str
    name: str
    max_tokens: int
    pause_s: float = 0.0
    turns: list[Acknowledged] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    broken_on: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    open_on: int = 0
    asked: int = 0
    tokens_seen: int = 0

    def talk(self, is_over: threading.Event, is_given_up: threading.Event) -> None:
        """Talk until it is over; the last thing said is acknowledged too, unless it is given up."""
        while not is_over.is_set():
            text = f"{self.name} says {len(self.turns)}. {WORDS}"
            broken_at, tries = 0.0, 1
            while not self._say(text, tries):
                if is_given_up.is_set():
                    return
                broken_at, tries = broken_at or time.monotonic(), tries + 1
                time.sleep(0.1)
            if broken_at:
                self.waits.append(time.monotonic() - broken_at)
            is_over.wait(self.pause_s)

    def _say(self, text: str, tries: int) -> bool:
        messages = [{"role": "user", "content": text}]
        self.asked = self.max_tokens
        body = {"messages": messages, "max_tokens": self.asked, "stream": True}
        body["ignore_eos"] = True  # all are as long as they are to be, whatever is drawn
        path = f"{self.url}/v1/agents/{self.name}/generate"
        pid = 0
        try:
            with (
                httpx.Client(trust_env=False, timeout=60, verify=NO_TLS) as http,
                http.stream("POST", path, json=body) as reply,
            ):
                if reply.status_code != 200:
                    self.failures.append(f"{reply.status_code} {reply.read()[:90]!r}")
                    assert reply.status_code >= 409, self.failures
                    return False
                pid = served_by(reply)
                if self._read(reply, pid, tries):
                    return True
                self.failures.append("the stream ended without its last event")
        except httpx.HTTPError as error:
            self.failures.append(type(error).__name__)
        finally:
            self.open_on = 0
        self.broken_on += [pid] if pid else []
        return False

    def _read(self, reply: httpx.Response, pid: int, tries: int) -> bool:
        for line in reply.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: ") else {}
            if event.get("type") == "text":
                self.open_on = pid
                self.tokens_seen += 1
            if event.get("type") == "finished":
                cached = event["usage"]["cached_tokens"]
                turn = Acknowledged(event["turn_id"], pid, cached, event["reuse"], tries)
                self.turns.append(turn)
                return True
        return False


class Servers(Protocol):
    """What talks ask of those that they talk to."""

    url: str

    def replicas(self) -> list[int]: ...
    def await_replicas(self, number: int, timeout_s: float = 300) -> None: ...
    def logs(self) -> str: ...


class TalkingAgents:
    """Several agents that talk at once."""

    def __init__(
        self,
        fleet: Servers,
        prefix: str,
        num_agents: int,
        max_tokens: int = 200,
        *,
        pause_s: float = 0.0,
        names: Sequence[str] = (),
    ) -> None:
        self._fleet = fleet
        self._prefix = prefix
        self._began = time.monotonic()
        names = names or [f"{prefix}-{number}" for number in range(num_agents)]
        self.talkers = [TalkingAgent(fleet.url, name, max_tokens, pause_s) for name in names]
        self._is_over, self._is_given_up = threading.Event(), threading.Event()
        events = self._is_over, self._is_given_up
        self._threads = [
            threading.Thread(target=one.talk, args=events, daemon=True) for one in self.talkers
        ]

    def __enter__(self) -> "TalkingAgents":
        with httpx.Client(base_url=self._fleet.url, trust_env=False, timeout=60) as http:
            for talker in self.talkers:
                http.post("/v1/agents", json={"id": talker.name}).raise_for_status()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.let_end()
        if kind is not None:
            sys.stdout.write(f"{self.told()}\n{self._fleet.logs()}\n")
            return
        for thread in self._threads:
            thread.join(300)
        self._is_given_up.set()
        assert not any(thread.is_alive() for thread in self._threads), self.told()
        sys.stdout.write(f"\n{self._prefix}: {self.told()}\n")

    def let_end(self) -> None:
        """Say nothing new; what is said is still acknowledged."""
        self._is_over.set()

    @property
    def num_turns(self) -> int:
        return sum(len(one.turns) for one in self.talkers)

    @property
    def tokens_seen(self) -> int:
        return sum(one.tokens_seen for one in self.talkers)

    @property
    def failures(self) -> Counter[str]:
        return Counter(failure for one in self.talkers for failure in one.failures)

    def await_turns(self, more: int) -> None:
        """Wait until so many more turns are acknowledged."""
        end = self.num_turns + more
        assert eventually(lambda: self.num_turns >= end, 300), self.told()

    def await_stream(self) -> int:
        """Wait until a stream says something; returns the process that it is on."""
        assert eventually(self._open, 120), self.told()
        return next(iter(self._open()))

    def _open(self) -> set[int]:
        return {pid for one in self.talkers if (pid := one.open_on)}

    def told(self) -> dict[str, Any]:
        """What happened, in figures."""
        waits = [round(wait, 1) for one in self.talkers for wait in one.waits]
        return {
            "turns": self.num_turns,
            "tokens": self.tokens_seen,
            "failures": dict(self.failures),
            "waits": sorted(waits),
            "seconds": round(time.monotonic() - self._began, 1),
        }

    def moved(self, victims: set[int], before: set[int]) -> list[Acknowledged]:
        """Turns that were cut off, and went on at one that was there and lived."""
        cut = [one for one in self.talkers if victims.intersection(one.broken_on)]
        turns = [turn for one in cut for turn in one.turns if turn.num_tries > 1]
        sys.stdout.write(f"\ncut off: {[(turn.num_cached, turn.reuse) for turn in turns]}\n")
        assert turns, self.told()
        assert {turn.pid for turn in turns} <= before - victims
        return turns

    def check(self) -> None:
        """Every acknowledged turn is there once, in order, and readable by every replica."""
        self._fleet.await_replicas(len(self._fleet.replicas()))
        with httpx.Client(base_url=self._fleet.url, trust_env=False, timeout=60) as http:
            for talker in self.talkers:
                found = http.get(f"/v1/agents/{talker.name}/turns?limit=100").json()["data"]
                ids = [turn["id"] for turn in reversed(found)]
                known = [one.turn for one in talker.turns]
                assert len(ids) == len(set(ids))
                assert [one for one in ids if one in known] == known
                # A turn that was committed just when its server died may be there beside them.
                assert len(ids) <= len(known) + len(talker.failures)
            asked = {self._check_one(http, named(number)) for number in range(30)}
        assert asked == set(self._fleet.replicas())

    def _check_one(self, http: httpx.Client, headers: dict[str, str]) -> int:
        """Ask any server for all heads and for the text of the last turns."""
        listed = http.get("/v1/agents?limit=100", headers=headers)
        heads = {agent["id"]: agent["head"] for agent in listed.json()["data"]}
        for last in (one.turns[-1].turn for one in self.talkers if one.turns):
            turn = http.get(f"/v1/responses/resp_{last[5:]}", headers=headers)
            assert turn.status_code == 200, turn.text
            assert served_by(turn) == served_by(listed)
        wanted = {one.name: one.turns[-1].turn for one in self.talkers if one.turns}
        assert wanted.items() <= heads.items()
        return served_by(listed)
