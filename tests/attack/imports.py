"""Imports agents that were tampered with, and files that expand or take much memory.

Promised: a 4xx (or a 503 while others import), or an agent that harms nobody. Agents that share its
beginning get the replies that are computed fresh; lists, garbage collection and upkeep go on; it
can be deleted.
"""

import gzip
import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import httpx

from tests.agent_files import packed
from tests.attack.schemas import resident_bytes
from tests.attack.site import (
    DOCUMENTED_FAILURES,
    MAX_TOKENS,
    MODEL,
    PATIENCE_S,
    ServerAttack,
)
from tests.attack.tampering import CHANGES, Export, spoil_bytes, untouched
from tests.chaos.talk import Message, ask
from tests.waiting import eventually

_HEADERS = {"content-type": "application/x-tar"}
_BACKUP_EVERY = 10  # rounds between two looks at upkeep
_BOMBS_EVERY = 6
_NUM_BOMBS = 6  # at once
_MAX_GROWTH = 2**29  # bytes of memory that bombs may leave taken


def zeros(_: random.Random) -> tuple[bytes, dict[str, str]]:
    """400 MB of zeros as one block, in 0.4 MB."""
    block = (f"blocks/{'0' * 64}.full.safetensors", bytes(400 * 2**20))
    file = packed([("agent.json", b"{}"), block], "none")
    return gzip.compress(file), {"content-encoding": "gzip"}


def values(dice: random.Random) -> tuple[bytes, dict[str, str]]:
    """16 MB of JSON that would become 350 MB of lists."""
    inner = dice.choice((b"[]", b"{}", b'"ab"'))
    turn = b'{"id": "t", "body": {"messages": [' + b",".join([inner] * 5_000_000) + b"]}}"
    head = json.dumps({"id": "a", "model": "m", "fingerprint": "f", "abi": "a", "body": {}})
    return packed([("agent.json", head.encode()), ("turns/000001.json", turn)], "none"), {}


_BOMBS = (zeros, values)


class TamperedImports(ServerAttack):
    """Each round one agent, exported here or by another server, changed, imported, and used."""

    kind: ClassVar[str] = "imports"

    def run_round(self, dice: random.Random) -> None:
        said = self._conversation(dice)
        is_ours = dice.random() < 0.5
        http = self.server.http if is_ours else self.truth.server.http
        file, said = self._exported(http, said)
        change = CHANGES[self.round % len(CHANGES)]
        export = Export.parse(file)
        change(export, dice)
        file = export.compose()
        is_honest = change is untouched
        if not is_honest and dice.random() < 0.1:
            file = spoil_bytes(file, dice)
        what = f"{change.__name__}, exported {'here' if is_ours else 'elsewhere'}"
        status = self._import(file, what, dice)
        if is_honest and status != 201:
            self.find(f"{what}: the import answers {status}")
        self._check_others(said, what)
        self.check_server()
        if self.round % _BOMBS_EVERY == 0:
            self._send_bombs(dice)
        if self.round % _BACKUP_EVERY == _BACKUP_EVERY - 1:
            self._check_backup()

    def _conversation(self, dice: random.Random) -> list[Message]:
        """Words that no conversation contains yet, so that no state exists for them."""
        words = " ".join(str(dice.randrange(10**6)) for _ in range(100))
        return [
            {"role": "system", "content": f"Be brief. {words}"},
            {"role": "user", "content": "Begin."},
        ]

    def _exported(self, http: httpx.Client, said: list[Message]) -> tuple[bytes, list[Message]]:
        """Let an agent talk, export it, and let its server forget all of it."""
        agent_id = f"traveller-{self.round}"
        for _ in range(2):
            reply = ask(http, MODEL, said, MAX_TOKENS, agent_id)
            said = [*said, {"role": "assistant", "content": reply}]
            said.append({"role": "user", "content": "Go on."})
        exported = http.get(f"/v1/agents/{agent_id}/export")
        assert exported.status_code == 200, exported.text
        http.post(f"/v1/agents/{agent_id}/evict", json={"to": "cold"})
        assert http.delete(f"/v1/agents/{agent_id}").status_code == 204
        http.post("/v1/cache/gc", json={"orphan_age_s": 0})
        self.num_requests += 3
        return exported.content, said

    def _import(self, file: bytes, what: str, dice: random.Random) -> int:
        """Import it, and if it is let in, do everything with it that can be done."""
        http = self.server.http
        query = {"messages_only": "true"} if dice.random() < 0.2 else {}
        if dice.random() < 0.3:
            query["id"] = f"named-{self.round}"
        self.num_requests += 1
        answer = http.post("/v1/agents/import", content=file, params=query, headers=_HEADERS)
        if not (answer.status_code == 201 or 400 <= answer.status_code < 500):
            self.find(f"{what}: the import answers {answer.status_code} {answer.text[:300]}")
        if answer.status_code != 201:
            return answer.status_code
        agent_id = answer.json()["id"]
        said = {"message": "And?", "max_tokens": MAX_TOKENS, "temperature": 0}
        uses = [
            http.get(f"/v1/agents/{agent_id}"),
            http.get(f"/v1/agents/{agent_id}/turns"),
            http.post(f"/v1/agents/{agent_id}/generate", json=said),
            http.get(f"/v1/agents/{agent_id}/explain"),
            http.post(f"/v1/agents/{agent_id}/fork", json={"n": 1}),
            http.get(f"/v1/agents/{agent_id}/export"),
        ]
        self.num_requests += len(uses)
        for used in uses:
            if used.status_code >= 500 and used.status_code not in DOCUMENTED_FAILURES:
                request = f"{used.request.method} {used.request.url.path}"
                self.find(f"{what}: {request} answers {used.status_code} {used.text[:300]}")
        return answer.status_code

    def _send_bombs(self, dice: random.Random) -> None:
        """Import several files at once that cost far more than they are long."""
        bomb = _BOMBS[self.round // _BOMBS_EVERY % len(_BOMBS)]
        content, headers = bomb(dice)
        before = resident_bytes(self.server.pid)

        def send(_: int) -> httpx.Response:
            return self.server.http.post("/v1/agents/import", content=content, headers=headers)

        with ThreadPoolExecutor(_NUM_BOMBS) as pool:
            answers = list(pool.map(send, range(_NUM_BOMBS)))
        self.num_requests += len(answers)
        for answer in answers:
            if not 400 <= answer.status_code < 500 and answer.status_code != 503:
                self.find(f"{bomb.__name__}: {answer.status_code} {answer.text[:300]}")
        growth = resident_bytes(self.server.pid) - before
        if growth > _MAX_GROWTH:
            self.find(f"{bomb.__name__}: the server grew by {growth >> 20} MB")
        self.check_server()

    def _check_others(self, said: list[Message], what: str) -> None:
        """Somebody else has the same conversation, from its beginning to where it ended."""
        http = self.server.http
        for end in range(2, len(said) + 1, 2):
            reply = ask(http, MODEL, said[:end], MAX_TOKENS, f"other-{self.round}")
            self.num_requests += 1
            if reply != self.truth.reply(said[:end]):
                self.find(f"{what}: another agent's reply is poisoned: {reply!r}")
                break
        for answer in (
            http.get("/v1/agents", params={"limit": 100}),
            http.get("/v1/cache"),
            http.post("/v1/cache/gc", json={"orphan_age_s": 0}),
        ):
            self.num_requests += 1
            if answer.status_code != 200:
                self.find(f"{what}: {answer.request.url.path} answers {answer.status_code}")
        self._delete_all(what)

    def _delete_all(self, what: str) -> None:
        """Every imported agent can be deleted."""
        listed = self.server.http.get("/v1/agents", params={"limit": 100})
        if listed.status_code != 200:
            return  # found already
        for agent in listed.json()["data"]:
            answer = self.server.http.delete(f"/v1/agents/{agent['id']}")
            if answer.status_code != 204:
                self.find(f"{what}: deleting {agent['id']!r} answers {answer.status_code}")

    def _check_backup(self) -> None:
        """Housekeeping still comes as far as the ledger's backup."""
        backup = self.server.cache / "ledger.backup.db"
        before = backup.stat().st_mtime_ns if backup.exists() else 0
        ask(self.server.http, MODEL, self._conversation(random.Random(0)), 2, "new")  # noqa: S311
        self.num_requests += 1
        if not eventually(
            lambda: backup.exists() and backup.stat().st_mtime_ns > before, PATIENCE_S / 2
        ):
            self.find("the ledger is no longer backed up")
