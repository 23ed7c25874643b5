"""Changes agents in every way but by chat until the server dies, and remembers every answer."""

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.turn_log import turn_id
from semantic.domain.agents import LOCAL_TENANT

_FEWEST, _MOST = 2, 8  # agents that there are at a time
_ANY = "?"  # stands for the id of a turn that no answer told
_RESPONSE = "resp_"


@dataclass(frozen=True)
class State:
    """What an answer says of an agent, or of a stored response, whose text is its label."""

    label: str
    is_pinned: bool = False
    max_turns: int | None = None
    turns: tuple[str, ...] = ()

    def is_like(self, found: "State | None") -> bool:
        """Whether this was found, as far as the ids of its turns are known."""
        if found is None or len(self.turns) != len(found.turns):
            return False
        pairs = zip(self.turns, found.turns, strict=True)
        return replace(self, turns=tuple(t if ours == _ANY else ours for ours, t in pairs)) == found


def read_state(ledger: SqliteLedger, name: str) -> State | None:
    """What a ledger holds of an agent or a response; None if that is nothing."""
    if name.startswith(_RESPONSE):
        turn = ledger.turn(LOCAL_TENANT, turn_id(name.removeprefix(_RESPONSE)))
        return State(turn.messages[-1].text) if turn and turn.messages else None
    agent = ledger.agent(LOCAL_TENANT, name)
    if agent is None:
        return None
    turns = ledger.ancestry(LOCAL_TENANT, agent.head)[::-1] if agent.head else ()
    assert len(turns) == agent.num_turns, (name, turns, agent)
    return State(dict(agent.labels)["v"], agent.is_pinned, agent.quota.max_turns, turns)


class Changer:
    """Makes one change after another, each to agents of its own.

    Attributes:
        counts: How many changes of each kind were answered.
    """

    def __init__(self, name: str, model: str, seed: object) -> None:
        self.name = name
        self.model = model
        self.counts: Counter[str] = Counter()
        self._dice = random.Random(f"{seed}/{name}")  # noqa: S311 - chance, not secrets
        self._number = 0
        # Since the last check: what was found then, and what answers confirmed after it.
        self._states: dict[str, list[State | None]] = {}
        self._pending: dict[str, State | None] = {}  # what an answer that never came would confirm

    def take_turn(self, http: httpx.Client) -> None:
        """Make a change.

        Raises:
            httpx.HTTPError: it was refused, or no answer came.
        """
        num_agents = len(self._agents())
        kinds = [kind for kind in KINDS if kind != "create" or num_agents < _MOST]
        kind = self._dice.choice(kinds) if num_agents >= _FEWEST else "create"
        self.change("delete" if num_agents > _MOST else kind, http)

    def change(self, kind: str, http: httpx.Client) -> None:
        """Make a change of one of `KINDS`; all but `create` need an agent, `rewind` one with turns.

        Raises:
            httpx.HTTPError: it was refused, or no answer came.
        """
        self._number += 1
        getattr(self, f"_{kind}")(http)
        self.counts[kind] += 1

    def check(self, ledger: SqliteLedger, *, is_synced: bool) -> list[str]:
        """Compare a ledger with the answers; says what is missing or wrong.

        Without `is_synced` the latest changes may be missing; what is there must have been at some
        time since the last check.
        """
        wrong, num_made = [], 0
        for name in {**self._states, **self._pending}:
            states = self._states.get(name, [None])
            found = read_state(ledger, name)
            is_made = name in self._pending and _is_same(found, self._pending[name])
            num_made += is_made
            allowed = states[-1:] if is_synced else states
            if not is_made and not any(_is_same(found, state) for state in allowed):
                wrong.append(f"{name} is {found}, and was {states}; {self._pending.get(name)}")
            self._states[name] = [found]
        if num_made not in (0, len(self._pending)):
            wrong.append(f"a part of one change was made: {self._pending}")
        self._pending = {}
        return wrong

    # -- changes --------------------------------------------------------------------------------

    def _create(self, http: httpx.Client) -> None:
        name, made = self._new_name(), State(str(self._number))
        with self._changing({name: made}):
            self._post(http, "", {"id": name, "labels": {"v": made.label}})

    def _update(self, http: httpx.Client) -> None:
        name, known = self._choose()
        changed = replace(
            known,
            label=str(self._number),
            is_pinned=not known.is_pinned,
            max_turns=1000 + self._number,
        )
        body = {
            "labels": {"v": changed.label},
            "pin": changed.is_pinned,
            "quota": {"max_turns": changed.max_turns},
        }
        with self._changing({name: changed}):
            http.patch(f"/v1/agents/{name}", json=body).raise_for_status()

    def _generate(self, http: httpx.Client) -> None:
        name, known = self._choose()
        body = {"messages": [{"content": f"Say {self._number}."}], "max_tokens": 2}
        with self._changing({name: replace(known, turns=(*known.turns, _ANY))}) as after:
            turn = self._post(http, f"/{name}/generate", body)["turn_id"]
            after[name] = replace(known, turns=(*known.turns, turn))

    def _fork(self, http: httpx.Client) -> None:
        name, known = self._choose()
        names = [f"{self._new_name()}{letter}" for letter in "ab"]
        place = self._dice.randrange(len(known.turns)) if known.turns else None
        turns = known.turns if place is None else known.turns[: place + 1]
        body = {"ids": names, "turn_id": turns[-1] if turns else None}
        made = replace(known, is_pinned=False, turns=turns)
        with self._changing(dict.fromkeys(names, made)):
            self._post(http, f"/{name}/fork", body)

    def _rewind(self, http: httpx.Client) -> None:
        name, known = self._choose()
        turns = known.turns[: self._dice.randrange(len(known.turns) + 1)]
        with self._changing({name: replace(known, turns=turns)}):
            self._post(http, f"/{name}/rewind", {"turn_id": turns[-1] if turns else None})

    def _import(self, http: httpx.Client) -> None:
        source, known = self._choose()
        file = http.get(f"/v1/agents/{source}/export").raise_for_status().content
        name = self._new_name()
        made = replace(known, is_pinned=False, turns=(_ANY,) * len(known.turns))
        with self._changing({name: made}) as after:
            answer = http.post("/v1/agents/import", params={"id": name}, content=file)
            history = answer.raise_for_status().json()["history"]
            after[name] = replace(made, turns=tuple(history[::-1]))

    def _delete(self, http: httpx.Client) -> None:
        name, _ = self._choose()
        with self._changing({name: None}):
            http.delete(f"/v1/agents/{name}").raise_for_status()

    def _forget(self, http: httpx.Client) -> None:
        """Store a response, and delete it."""
        body = {"model": self.model, "input": f"What is {self._number}?", "max_output_tokens": 2}
        stored = http.post("/v1/responses", json=body).raise_for_status().json()
        texts = [part["text"] for item in stored["output"] for part in item["content"]]
        self._states[stored["id"]] = [State("".join(texts))]
        with self._changing({stored["id"]: None}):
            http.delete(f"/v1/responses/{stored['id']}").raise_for_status()

    # -- inside ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _changing(self, after: Mapping[str, State | None]) -> Iterator[dict[str, State | None]]:
        """Take what comes after a change as confirmed if the block ends; it may say it better."""
        self._pending = dict(after)
        yield self._pending
        for name, state in self._pending.items():
            self._states.setdefault(name, [None]).append(state)
        self._pending = {}

    def _agents(self) -> dict[str, State]:
        latest = {name: states[-1] for name, states in self._states.items()}
        return {n: s for n, s in latest.items() if s is not None and not n.startswith(_RESPONSE)}

    def _choose(self) -> tuple[str, State]:
        return self._dice.choice(list(self._agents().items()))

    def _new_name(self) -> str:
        return f"{self.name}-{self._number}"

    def _post(self, http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = http.post(f"/v1/agents{path}", json=body).raise_for_status().json()
        return answer


def _is_same(found: State | None, state: State | None) -> bool:
    return found is None if state is None else state.is_like(found)


KINDS: Sequence[str] = (
    "create",
    "update",
    "generate",
    "generate",
    "fork",
    "rewind",
    "import",
    "delete",
    "forget",
)
