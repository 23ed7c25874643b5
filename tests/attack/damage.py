"""Damages the directory of a stopped server, and starts another server on it.

Promised: replies are those computed fresh; what is not the server's stays as it was; turns that
are lost are told in `/health`; a start that is refused says why.
"""

import random
import shutil
import signal
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tests.attack.damages import DAMAGES, Damage, Place
from tests.attack.site import MAX_TOKENS, MODEL, Attack, Server
from tests.chaos.talk import SYSTEM, Message, ask
from tests.smoke.server_process import StartFailedError

_NUM_AGENTS = 4
_NUM_TURNS = 3
_REFUSED = 2  # the exit status of a start that was refused


@dataclass(frozen=True)
class _Kept:
    """What a foreign file or directory is: it must be the same afterwards."""

    mode: int
    content: bytes


class DamagedFiles(Attack):
    """Each round one damage, to files of a server that was stopped or of one that was killed."""

    kind: ClassVar[str] = "damage"

    def open(self) -> None:
        self._said: dict[str, list[Message]] = {}
        self._stopped = self._leave("stopped", is_killed=False)
        self._killed = self._leave("killed", is_killed=True)

    def _leave(self, name: str, *, is_killed: bool) -> Path:
        """Let agents talk to a server, end it, and keep what it left."""
        server = Server(self.work / name, "--durability", "sync").start()
        for number in range(_NUM_AGENTS):
            said: list[Message] = [{"role": "system", "content": 3 * SYSTEM}]
            for turn in range(_NUM_TURNS):
                said.append({"role": "user", "content": f"Question {turn} of agent {number}."})
                reply = ask(server.http, MODEL, said, MAX_TOKENS, f"agent-{number}")
                said.append({"role": "assistant", "content": reply})
            self._said[f"agent-{number}"] = said
        if is_killed:
            assert server.process is not None
            server.process.process.send_signal(signal.SIGKILL)
            server.process.process.wait()
            server.kill()
        else:
            assert server.stop() == 0
        return server.home

    def run_round(self, dice: random.Random) -> None:
        damage = DAMAGES[self.round % len(DAMAGES)]
        # Only a killed server leaves a write-ahead log.
        left = self._killed if "log" in damage.name or dice.random() < 0.5 else self._stopped
        work = self.work / f"round-{self.round}"
        server = Server(work, "--durability", "sync")
        shutil.copytree(left, server.home)
        place = Place(server.cache, work / "outside")
        place.outside.mkdir()
        (place.outside / "notes.txt").write_text("somebody's notes")
        ours = {path for path in _paths(server.home) if not path.is_symlink()}
        damage.do(place, dice)
        foreign = {path: _kept(path) for path in _foreign(place, ours)}
        self.num_requests += 1
        try:
            self._check(server, damage)
        finally:
            server.kill()
        for path, kept in foreign.items():
            if _kept(path) != kept and not _is_moved(place, path, kept):
                self.find(f"{damage.name}: {path.relative_to(work)} was changed or removed")
        shutil.rmtree(work)

    def _check(self, server: Server, damage: Damage) -> None:
        try:
            server.start()
        except StartFailedError as error:
            self._check_refusal(error, damage)
            return
        self._check_turns(server, damage)
        for agent_id, said in self._said.items():
            asked = [*said, {"role": "user", "content": "And now?"}]
            self.num_requests += 1
            if ask(server.http, MODEL, asked, MAX_TOKENS, agent_id) != self.truth.reply(asked):
                self.find(f"{damage.name}: {agent_id} is answered wrong")
        for path in ("/v1/cache/gc", "/v1/cache/verify"):
            answer = server.http.post(path, json={"orphan_age_s": 0} if "gc" in path else None)
            if answer.status_code != 200:
                self.find(f"{damage.name}: {path} answers {answer.status_code}")
        if (status := server.stop()) != 0:
            self.find(f"{damage.name}: the server stopped with status {status}")
        assert server.process is not None
        self._check_output(server.process.output, damage)

    def _check_refusal(self, error: StartFailedError, damage: Damage) -> None:
        if not damage.may_refuse or error.status != _REFUSED:
            self.find(f"{damage.name}: does not start: {str(error)[-400:]}")
        self._check_output(error.output, damage)

    def _check_output(self, output: str, damage: Damage) -> None:
        if "Traceback" in output:
            self.find(f"{damage.name}: a defect in the log: {output[-600:]}")

    def _check_turns(self, server: Server, damage: Damage) -> None:
        """Every turn is there, or that some are not is told."""
        health = server.http.get("/health")
        lost = [agent for agent, said in self._said.items() if not _is_there(server, agent, said)]
        if lost and not damage.may_lose:
            self.find(f"{damage.name}: turns of {lost} are gone")
        if lost and not health.json()["problem"]:
            self.find(f"{damage.name}: turns of {lost} are gone, and /health says nothing")


def _is_there(server: Server, agent_id: str, said: list[Message]) -> bool:
    answer = server.http.get(f"/v1/agents/{agent_id}/turns", params={"limit": 100})
    if answer.status_code == 404:
        return False
    assert answer.status_code == 200, answer.text
    found = [
        {"role": message["role"], "content": "".join(p["text"] for p in message["content"])}
        for turn in reversed(answer.json()["data"])
        for message in turn["messages"]
    ]
    return found == said


def _foreign(place: Place, ours: set[Path]) -> list[Path]:
    """What a damage put there, and all that lies outside."""
    kinds = ("lock", "ledger.db", "blocks")
    added = [
        path
        for path in (*_paths(place.cache), *_paths(place.outside))
        if path not in ours or (path.is_symlink() and path.name in kinds)
    ]
    if (place.cache / "blocks").is_file():
        added.append(place.cache / "blocks")
    # A damaged block is still a block, whatever became of its name.
    return [path for path in added if not _is_block(path)]


def _is_block(path: Path) -> bool:
    return _has_block_name(path) and not path.is_dir()


def _has_block_name(path: Path) -> bool:
    return len(path.name.split(".")[0]) == 64 and path.name.endswith(".full.safetensors")


def _is_moved(place: Place, path: Path, kept: _Kept | None) -> bool:
    """Whether a file went to quarantine with the directory that has a block's name."""
    found = (place.cache / "quarantine").rglob(path.name)
    return _has_block_name(path.parent) and any(_kept(one) == kept for one in found)


def _paths(top: Path) -> list[Path]:
    return sorted(path for path in top.rglob("*"))


def _kept(path: Path) -> _Kept | None:
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    content = b""
    if stat.S_ISREG(mode):
        content = path.read_bytes()
    elif stat.S_ISLNK(mode):
        content = str(path.readlink()).encode()
    return _Kept(stat.S_IFMT(mode), content)
