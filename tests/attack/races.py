"""Lets many clients perform all operations at once on few agents.

Promised: no failure of the server; replies are those of the conversation that an agent's log tells;
logs are whole: their turns follow one another up to the head.
"""

import random
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import httpx

from tests.attack.site import (
    DOCUMENTED_FAILURES,
    MAX_TOKENS,
    MODEL,
    ServerAttack,
    client,
)
from tests.chaos.talk import Message
from tests.waiting import eventually

NUM_CLIENTS = 6
OPERATIONS = 8  # of each client in a round
_NAMES = ("race-a", "race-b", "race-c")
_SETTINGS = {"max_tokens": MAX_TOKENS, "temperature": 0}
_SYSTEM = "You are raced. Stay calm, whatever others do at the same time. " * 2


class Races(ServerAttack):
    """Each round all clients at once, then a look at every agent's log."""

    kind: ClassVar[str] = "races"

    def run_round(self, dice: random.Random) -> None:
        for name in _NAMES:
            self.server.http.post("/v1/agents", json={"id": name, "system": _SYSTEM})
        racers = [_Racer(self, random.Random(dice.random())) for _ in range(NUM_CLIENTS)]  # noqa: S311
        for racer in racers:
            racer.join()
            self.num_requests += racer.num_sent
            for trouble in racer.troubles:
                self.find(trouble)
        replies = {turn: text for racer in racers for turn, text in racer.replies.items()}
        if not eventually(self._is_idle):
            self.find("something still runs after everybody has left")
        for agent in self._agents():
            self._check_agent(agent, replies)
        self.check_server()
        for agent in self._agents():
            answer = self.server.http.delete(f"/v1/agents/{agent['id']}")
            if answer.status_code != 204:
                self.find(f"deleting {agent['id']} answers {answer.status_code}")

    def _is_idle(self) -> bool:
        return int(self.server.http.get("/v1/cache").json()["live_requests"]) == 0

    def _agents(self) -> list[dict[str, Any]]:
        answer = self.server.http.get("/v1/agents", params={"limit": 100, "prefix": "race"})
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["data"]
        return found

    def _check_agent(self, agent: dict[str, Any], replies: dict[str, str]) -> None:
        """Every logged reply is the right one to what was logged before it."""
        path = f"/v1/agents/{agent['id']}/turns"
        answer = self.server.http.get(path, params={"limit": 100})
        if answer.status_code != 200:
            self.find(f"{path} answers {answer.status_code} {answer.text[:200]}")
            return
        turns = answer.json()["data"]
        heads = [turn["id"] for turn in turns] + [None]
        parents = [agent["head"], *(turn["parent"] for turn in turns)]
        if heads != parents or len(turns) != agent["turns"]:
            self.find(f"the log of {agent['id']} is broken: {heads} {parents} {agent['turns']}")
        said: list[Message] = []
        for turn in reversed(turns):
            said = [] if turn["starts_anew"] else said
            said = [*said, *map(_plain, turn["messages"])]
            self._check_turn(agent["id"], turn, said, replies)

    def _check_turn(
        self, agent_id: str, turn: dict[str, Any], said: list[Message], replies: dict[str, str]
    ) -> None:
        reply = said[-1]["content"]
        if said[-1]["role"] != "assistant":
            self.find(f"turn {turn['id']} of {agent_id} has no reply: {turn['messages']}")
            return
        right = self.truth.reply(said[:-1])
        is_cut = turn["finish_reason"] == "cancelled"  # of a longer reply
        if reply != right and not (is_cut and (right.startswith(reply) or reply.startswith(right))):
            self.find(f"{agent_id} was answered {reply!r}, not {right!r}; {turn['finish_reason']}")
        if turn["id"] in replies and replies[turn["id"]] != reply:
            self.find(f"{agent_id} was told {replies[turn['id']]!r}, the log says {reply!r}")


def _plain(message: dict[str, Any]) -> Message:
    text = "".join(part.get("text", "") for part in message["content"])
    return {"role": message["role"], "content": text}


class _Racer:
    """One client, on a thread."""

    def __init__(self, attack: Races, dice: random.Random) -> None:
        assert attack.server.process is not None
        self._url = attack.server.process.url
        self._truth = attack.truth
        self._dice = dice
        self.num_sent = 0
        self.troubles: list[str] = []
        self.replies: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(240)
        if self._thread.is_alive():
            self.troubles.append("a client is not answered")

    def _run(self) -> None:
        with client(self._url) as self._http:
            for _ in range(OPERATIONS):
                deed = self._dice.choice(_DEEDS)
                name = self._dice.choice(_NAMES)
                self.num_sent += 1
                try:
                    answer = deed(self, f"/v1/agents/{name}")
                except httpx.HTTPError as error:
                    self.troubles.append(f"{deed.__name__.strip('_')}: {error!r}")
                    continue
                status = answer.status_code
                if status >= 500 and status not in DOCUMENTED_FAILURES:
                    request = f"{answer.request.method} {answer.request.url.path}"
                    self.troubles.append(f"{request}: {status} {answer.text[:200]}")

    # -- deeds ----------------------------------------------------------------------------------

    def _generate(self, place: str) -> httpx.Response:
        body = {"message": f"Say {self._dice.randrange(5)}.", **_SETTINGS}
        answer = self._http.post(f"{place}/generate", json=body)
        if answer.status_code == 200:
            reply = answer.json()
            self.replies[reply["turn_id"]] = reply["text"]
        return answer

    def _leave(self, place: str) -> httpx.Response:
        """Begin a stream, and leave in the middle of it."""
        body = {"message": "Talk.", **_SETTINGS, "max_tokens": 100_000, "ignore_eos": True}
        body["stream"] = True
        with self._http.stream("POST", f"{place}/generate", json=body) as answer:
            for number, _ in enumerate(answer.iter_raw()):
                if number >= self._dice.randrange(3):
                    break
            return httpx.Response(answer.status_code, request=answer.request)

    def _chat(self, place: str) -> httpx.Response:
        """A stateless request that names the agent."""
        said = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": f"Say {self._dice.randrange(3)}."},
        ]
        body = {"model": MODEL, "messages": said, **_SETTINGS}
        headers = {"x-agent-id": place.rpartition("/")[2]}
        answer = self._http.post("/v1/chat/completions", json=body, headers=headers)
        if answer.status_code == 200:
            reply = answer.json()["choices"][0]["message"]["content"]
            if reply != self._truth.reply(said):
                self.troubles.append(f"a stateless reply is wrong: {reply!r}")
        return answer

    def _cancel(self, _: str) -> httpx.Response:
        body = {"model": MODEL, "input": "Talk.", "background": True, "max_output_tokens": 500}
        answer = self._http.post("/v1/responses", json=body)
        if answer.status_code != 200:
            return answer
        return self._http.post(f"/v1/responses/{answer.json()['id']}/cancel")

    def _fork(self, place: str) -> httpx.Response:
        return self._http.post(f"{place}/fork", json={"n": 1})

    def _rewind(self, place: str) -> httpx.Response:
        turns = self._http.get(f"{place}/turns")
        known = [turn["id"] for turn in turns.json().get("data", [])]
        turn_id = self._dice.choice([*known, None])
        return self._http.post(f"{place}/rewind", json={"turn_id": turn_id})

    def _delete(self, place: str) -> httpx.Response:
        answer = self._http.delete(place)
        body = {"id": place.rpartition("/")[2], "system": _SYSTEM}
        again = self._http.post("/v1/agents", json=body)
        return answer if answer.status_code >= 500 else again

    def _export(self, place: str) -> httpx.Response:
        return self._http.get(f"{place}/export")

    def _evict(self, place: str) -> httpx.Response:
        return self._http.post(f"{place}/evict", json={"to": self._dice.choice(("disk", "cold"))})

    def _prefetch(self, place: str) -> httpx.Response:
        return self._http.post(f"{place}/prefetch")

    def _collect(self, _: str) -> httpx.Response:
        return self._http.post("/v1/cache/gc", json={"orphan_age_s": 0})

    def _verify(self, _: str) -> httpx.Response:
        return self._http.post("/v1/cache/verify")

    def _patch(self, place: str) -> httpx.Response:
        return self._http.patch(place, json={"labels": {"n": str(self._dice.randrange(9))}})

    def _list(self, _: str) -> httpx.Response:
        return self._http.get("/v1/agents", params={"prefix": "race"})


_DEEDS: tuple[Callable[[_Racer, str], httpx.Response], ...] = (
    _Racer._generate,
    _Racer._generate,
    _Racer._generate,
    _Racer._generate,
    _Racer._leave,
    _Racer._chat,
    _Racer._chat,
    _Racer._cancel,
    _Racer._fork,
    _Racer._fork,
    _Racer._rewind,
    _Racer._delete,
    _Racer._export,
    _Racer._evict,
    _Racer._evict,
    _Racer._prefetch,
    _Racer._collect,
    _Racer._verify,
    _Racer._patch,
    _Racer._list,
)
