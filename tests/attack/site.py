"""The base of every attack: its own server, the correct replies, and a list of findings.

Servers are real processes on the fake backend, listen on loopback alone, and keep everything in
the campaign's own directory.
"""

import contextlib
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import httpx

from tests.chaos import talk
from tests.chaos.talk import Message, ask
from tests.no_tls import NO_TLS
from tests.smoke.server_process import ServerProcess, serve, serve_forked

MODEL = "fake"
MAX_TOKENS = 12
PATIENCE_S = 60.0  # nothing that is asked of a healthy server takes so long, on any machine
DOCUMENTED_FAILURES = frozenset({503, 504, 529})
# Expiry and backups come round often enough for an attack to meet them; nothing runs for long.
PATIENT_SETTINGS: dict[str, Any] = {"default_max_tokens": MAX_TOKENS}
SETTINGS = {**PATIENT_SETTINGS, "upkeep_interval_s": 1, "request_timeout_s": 30}


@dataclass(frozen=True)
class Finding:
    """A promise that did not hold."""

    kind: str
    round: int
    what: str


def make_dice(seed: int, kind: str, number: int) -> random.Random:
    """All chance of one round, so that it can be repeated without those before it."""
    return random.Random(f"{seed}/{kind}/{number}")  # noqa: S311 - chance, not secrets


def client(url: str, timeout_s: float = PATIENCE_S) -> httpx.Client:
    """A client for one server on this machine."""
    limits = httpx.Limits(max_keepalive_connections=8)
    return httpx.Client(
        base_url=url, timeout=timeout_s, trust_env=False, limits=limits, verify=NO_TLS
    )


class Server:
    """A server that can be started again over the same directory."""

    def __init__(
        self,
        work: Path,
        *options: str,
        settings: Mapping[str, Any] = SETTINGS,
        max_files: int | None = None,
    ) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.work = work
        self.home = work / "home"
        self._options = ("--backend", "fake", *options)
        self._settings = settings
        self._max_files = max_files
        self._running = contextlib.ExitStack()
        self._num_starts = 0
        self._num_read = 0
        self.process: ServerProcess | None = None
        self.http = client("http://127.0.0.1:1")

    @property
    def cache(self) -> Path:
        return self.home / "cache"

    def start(self) -> Self:
        self._num_starts += 1
        self._num_read = 0
        log = self.work / f"server-{self._num_starts}.log"
        self.process = self._running.enter_context(
            serve(self.home, log, *self._options, max_files=self._max_files, **self._settings)
            if self._max_files
            else serve_forked(self.home, log, *self._options, **self._settings)
        )
        self.http = self._running.enter_context(client(self.process.url))
        return self

    def stop(self) -> int:
        """End it as Ctrl-C does; returns the exit status."""
        assert self.process is not None
        status = self.process.stop()
        self.kill()
        return status

    def kill(self) -> None:
        self._running.close()
        self._running = contextlib.ExitStack()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.process.poll() is None

    def new_log_lines(self) -> list[str]:
        """What it said since the last call."""
        assert self.process is not None
        text = self.process.output
        new, self._num_read = text[self._num_read :], len(text)
        return new.splitlines()


class Truth:
    """A server that is never attacked and keeps nothing: its replies are the right ones."""

    def __init__(self, work: Path) -> None:
        self.server = Server(work, "--durability", "none", settings=PATIENT_SETTINGS)
        self._known: dict[tuple[tuple[str, str], ...], str] = {}

    def start(self) -> Self:
        self.server.start()
        self.server.http.timeout = httpx.Timeout(talk.PATIENCE_S)
        return self

    def close(self) -> None:
        self.server.kill()

    def reply(self, messages: Sequence[Message]) -> str:
        """The greedy reply to a conversation, `MAX_TOKENS` long."""
        key = tuple((said["role"], said["content"]) for said in messages)
        if key not in self._known:
            self._known[key] = ask(self.server.http, MODEL, messages, MAX_TOKENS)
        return self._known[key]


@dataclass
class Attack(ABC):
    """One kind of attack, in rounds.

    Attributes:
        work: A directory of its own.
        truth: What replies should be.
        num_requests: How much was sent or done.
        answers: How many answers there were by status, for the kinds that count them.
        findings: Promises that did not hold.
    """

    kind: ClassVar[str]
    work: Path
    truth: Truth
    num_requests: int = 0
    answers: Counter[int] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    round: int = 0

    @abstractmethod
    def run_round(self, dice: random.Random) -> None:
        """Attack once, and check that the promises hold."""

    def open(self) -> None:  # noqa: B027 - most need nothing
        """Prepare what all rounds share."""

    def close(self) -> None:  # noqa: B027 - most need nothing
        """End what is left, with the checks that come last."""

    def find(self, what: str) -> None:
        """Note a broken promise, once a round."""
        finding = Finding(self.kind, self.round, what)
        if finding not in self.findings:
            self.findings.append(finding)


class ServerAttack(Attack):
    """An attack on one server that must survive all rounds."""

    options: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[Mapping[str, Any]] = SETTINGS

    def open(self) -> None:
        self.server = Server(self.work, *self.options, settings=self.settings).start()

    def close(self) -> None:
        if not self.server.is_alive:
            return
        try:
            status = self.server.stop()
        except Exception as error:  # noqa: BLE001 - whatever keeps it from stopping is a finding
            self.find(f"the server does not stop: {type(error).__name__}")
            self.server.kill()
        else:
            if status != 0:
                self.find(f"the server stopped with status {status}")

    def restart(self, why: str) -> None:
        """Give up on a server, and go on with another."""
        self.find(why)
        self.server.kill()
        self.server.start()

    def check_server(self, *, is_log_checked: bool = True) -> None:
        """See that the server lives, says that all is well, and answers right."""
        if not self.server.is_alive:
            self.restart("the server died")
            return
        try:
            health = self.server.http.get("/health")
            if health.status_code != 200 or health.json()["problem"]:
                self.find(f"/health: {health.status_code} {health.text[:300]}")
            self.check_witness()
        except httpx.HTTPError as error:
            self.restart(f"the server no longer answers: {error!r}")
            return
        if is_log_checked:
            self.check_log()

    def check_witness(self) -> None:
        """A client that takes no part gets the correct reply."""
        said = [{"role": "user", "content": f"Witness of {self.kind}, round {self.round}."}]
        reply = ask(self.server.http, MODEL, said, MAX_TOKENS)
        if reply != self.truth.reply(said):
            self.find(f"a bystander's reply is wrong: {reply!r}")

    def check_log(self) -> None:
        """No request may end in a defect that only the log tells of."""
        for line in self.server.new_log_lines():
            if "Traceback" in line or '"level": "error"' in line:
                self.find(f"the log tells of a defect: {line[:120]} ... {line[-300:]}")
                return
