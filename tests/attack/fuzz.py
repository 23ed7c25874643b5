"""Sends malformed requests to every endpoint of the server's OpenAPI document.

Promised: nothing that is sent makes the server fail. It answers with a 2xx, a 4xx, or one of the
documented refusals, and is as healthy as before. Requests of a foreign web page are refused, also
where its name was made to lead to this machine (DNS rebinding).
"""

import itertools
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import httpx

from tests.attack.mutations import VALID, pack, spoil, spoil_headers
from tests.attack.site import DOCUMENTED_FAILURES, ServerAttack

_AT_ONCE = 8
_AGENTS = ("fuzz-a", "fuzz-b")
_OBEYED = "/admin/drain"  # needs no body, and a server that was told to drain refuses work
_STRANGE_IDS = ("nobody", "a" * 300, "%00", "%ff", "..%2f..", "a b", "%F0%9F%92%A5", "x" * 128)
_FOREIGN = (
    {b"origin": b"http://evil.example"},
    {b"sec-fetch-site": b"cross-site", b"origin": b"null"},
)
_REBOUND = (b"evil.example", b"evil.example:8000", b"localhost.evil.example", b"[::1", b"a b", b"")


class FuzzedRequests(ServerAttack):
    """Each round some requests, several at a time, then a look at the server."""

    kind: ClassVar[str] = "fuzz"
    requests_a_round = 20
    options: ClassVar[tuple[str, ...]] = ("--allow-remote",)  # a local address stays local

    def open(self) -> None:
        super().open()
        document = self.server.http.get("/openapi.json").json()
        self._operations = sorted(
            (method.upper(), path)
            for path, methods in document["paths"].items()
            for method in methods
            if method in {"post", "patch"}
        )
        self._reads = sorted(path for path, all_of in document["paths"].items() if "get" in all_of)
        self._make_agents()

    def _make_agents(self) -> None:
        for agent_id in _AGENTS:
            self.server.http.post("/v1/agents", json={"id": agent_id})
            said = {"message": "hello", "max_tokens": 4}
            self.server.http.post(f"/v1/agents/{agent_id}/generate", json=said)
        body = {"model": "fake", "input": "hi", "max_output_tokens": 4}
        self._response_id = self.server.http.post("/v1/responses", json=body).json()["id"]

    def run_round(self, dice: random.Random) -> None:
        sends = (self._draw(dice) for _ in range(self.requests_a_round))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            # A few are drawn ahead, and not all: packed bodies are large.
            while waiting := list(itertools.islice(sends, 4 * _AT_ONCE)):
                list(pool.map(lambda send: send(), waiting))
        self.check_server()
        self._send_foreign(dice)
        self._send_rebound(dice)

    def _draw(self, dice: random.Random) -> Callable[[], None]:
        """Choose the next request; returns what sends it."""
        method, path = dice.choice([each for each in self._operations if each[1] != _OBEYED])
        content = spoil(dice.choice(VALID.get(path, [{}])), dice)
        headers = spoil_headers(dice)
        if dice.random() < 0.1:
            content, encoding = pack(content, dice)
            headers |= encoding
        place = self._place(path, dice)
        self.num_requests += 1
        return lambda: self._send(method, path, place, content, headers)

    def _send(
        self, method: str, path: str, place: str, content: bytes, headers: dict[bytes, bytes]
    ) -> None:
        try:
            answer = self.server.http.request(method, place, content=content, headers=headers)
        except httpx.HTTPError as error:
            self.find(f"{method} {path}: {error!r}; {content[:300]!r} {headers}")
            return
        status = answer.status_code
        self.answers[status] += 1
        if status >= 500 and status not in DOCUMENTED_FAILURES:
            self.find(f"{method} {path}: {status} {answer.text[:200]}; {content[:300]!r} {headers}")
        elif "internal_error" in answer.text:
            self.find(f"{method} {path}: {answer.text[-300:]}; {content[:300]!r}")

    def _place(self, path: str, dice: random.Random) -> str:
        agent = dice.choice(_AGENTS if dice.random() < 0.8 else _STRANGE_IDS)
        response = self._response_id if dice.random() < 0.8 else dice.choice(_STRANGE_IDS)
        return path.replace("{agent_id}", agent).replace("{response_id}", response)

    def _send_foreign(self, dice: random.Random) -> None:
        """What a page of another site sends is refused, valid as it may be."""
        method, path = dice.choice(self._operations)
        content = json.dumps(VALID.get(path, [{}])[0]).encode()
        headers = {b"content-type": b"application/json", **dice.choice(_FOREIGN)}
        place = self._known_place(path)
        self.num_requests += 1
        answer = self.server.http.request(method, place, content=content, headers=headers)
        self.answers[answer.status_code] += 1
        if not 400 <= answer.status_code < 500:
            self.find(f"{method} {path} from a foreign page answers {answer.status_code}")

    def _send_rebound(self, dice: random.Random) -> None:
        """A page that reaches the server under a name of its own cannot even read."""
        path, host = dice.choice(self._reads), dice.choice(_REBOUND)
        self.num_requests += 1
        answer = self.server.http.get(self._known_place(path), headers={b"host": host})
        self.answers[answer.status_code] += 1
        if answer.status_code != 400:
            self.find(f"GET {path} with the host {host!r} answers {answer.status_code}")

    def _known_place(self, path: str) -> str:
        return path.replace("{agent_id}", _AGENTS[0]).replace("{response_id}", self._response_id)
