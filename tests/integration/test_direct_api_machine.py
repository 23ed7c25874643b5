"""Random calls of the agent API against a plain model of agents and their turns."""

from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.http_server import RunningServer

pytestmark = pytest.mark.integration

SETTINGS = {"log_level": "error", "orphan_ttl_h": 0}

IDS = st.sampled_from(["a", "b", "c", "d"])
WORDS = st.text("xyz ", min_size=1, max_size=12).filter(str.strip)


@dataclass(frozen=True)
class ModelAgent:
    """What an agent should be: its system prompt, and the turns that led to where it is."""

    system: str
    log: tuple[str, ...] = ()


@dataclass
class Model:
    agents: dict[str, ModelAgent] = field(default_factory=dict)
    # Of each turn: the conversation's texts up to its end.
    turns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # The same conversation has one answer.
    answers: dict[tuple[str, ...], str] = field(default_factory=dict)

    def texts(self, agent: ModelAgent) -> tuple[str, ...]:
        return self.turns[agent.log[-1]] if agent.log else ()


class ApiMachine(RuleBasedStateMachine):
    def __init__(self, http: httpx.Client) -> None:
        super().__init__()
        self.http = http
        self.model = Model()

    def teardown(self) -> None:
        for agent_id in self.model.agents:
            assert self.http.delete(f"/v1/agents/{agent_id}").status_code == 204

    def post(self, agent_id: str, verb: str, body: dict[str, Any]) -> tuple[int, Any]:
        answer = self.http.post(f"/v1/agents/{agent_id}/{verb}", json=body)
        return answer.status_code, answer.json()

    @rule(agent_id=IDS, system=st.sampled_from(["", "be brief", "be long"]))
    def create(self, agent_id: str, system: str) -> None:
        known = self.model.agents.get(agent_id)
        answer = self.http.post("/v1/agents", json={"id": agent_id, "system": system})
        if known is None:
            assert answer.status_code == 201
            self.model.agents[agent_id] = ModelAgent(system)
        else:
            assert answer.status_code == (200 if known.system == system else 409)

    @rule(agent_id=IDS, system=st.sampled_from(["", "be brief", "be kind"]))
    def patch(self, agent_id: str, system: str) -> None:
        answer = self.http.patch(f"/v1/agents/{agent_id}", json={"system": system})
        if agent_id in self.model.agents:
            assert answer.status_code == 200
            known = self.model.agents[agent_id]
            self.model.agents[agent_id] = replace(known, system=system)
        else:
            assert answer.status_code == 404

    @rule(agent_id=IDS)
    def delete(self, agent_id: str) -> None:
        status = self.http.delete(f"/v1/agents/{agent_id}").status_code
        assert status == (204 if self.model.agents.pop(agent_id, None) else 404)

    @rule(agent_id=IDS, words=WORDS, is_stream=st.booleans())
    def generate(self, agent_id: str, words: str, is_stream: bool) -> None:
        agent = self.model.agents.get(agent_id)
        body = {"message": words, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
        if agent is None:
            assert self.post(agent_id, "generate", body)[0] == 404
            return
        if is_stream:
            path, asked_for = f"/v1/agents/{agent_id}/generate", {**body, "stream": True}
            answer = self.http.post(path, json=asked_for)
            assert '"type":"finished"' in answer.text
            reply = self.http.get(f"/v1/agents/{agent_id}/turns", params={"limit": 1}).json()
            turn_id = reply["data"][0]["id"]
            text = reply["data"][0]["messages"][-1]["content"][0]["text"]
        else:
            status, reply = self.post(agent_id, "generate", body)
            assert status == 200
            turn_id, text = reply["turn_id"], reply["text"]
        before = self.model.texts(agent)
        asked = (agent.system, *before[1:], words) if before else (agent.system, words)
        assert self.model.answers.setdefault(asked, text) == text
        self.model.turns[turn_id] = (*asked, text)
        self.model.agents[agent_id] = replace(agent, log=(*agent.log, turn_id))

    @rule(agent_id=IDS, new_id=IDS, back=st.none() | st.integers(0, 3))
    def fork(self, agent_id: str, new_id: str, back: int | None) -> None:
        agent = self.model.agents.get(agent_id)
        turn_id = self._turn(agent, back)
        status, _ = self.post(agent_id, "fork", {"ids": [new_id], "turn_id": turn_id})
        if agent is None or (turn_id is not None and turn_id not in agent.log):
            assert status == 404
        elif new_id in self.model.agents:
            assert status == 409
        else:
            assert status == 201
            log = agent.log if turn_id is None else _until(agent.log, turn_id)
            self.model.agents[new_id] = replace(agent, log=log)

    @rule(agent_id=IDS, back=st.none() | st.integers(0, 3))
    def rewind(self, agent_id: str, back: int | None) -> None:
        agent = self.model.agents.get(agent_id)
        turn_id = self._turn(agent, back)
        status, _ = self.post(agent_id, "rewind", {"turn_id": turn_id})
        if agent is None or (turn_id is not None and turn_id not in agent.log):
            assert status == 404
        else:
            assert status == 200
            log = () if turn_id is None else _until(agent.log, turn_id)
            self.model.agents[agent_id] = replace(agent, log=log)

    @rule(agent_id=IDS, to=st.sampled_from(["disk", "cold"]))
    def evict(self, agent_id: str, to: str) -> None:
        status, _ = self.post(agent_id, "evict", {"to": to})
        assert status == (200 if agent_id in self.model.agents else 404)

    @rule(agent_id=IDS, new_id=IDS)
    def move(self, agent_id: str, new_id: str) -> None:
        exported = self.http.get(f"/v1/agents/{agent_id}/export")
        if agent_id not in self.model.agents:
            assert exported.status_code == 404
            return
        content, params = exported.content, {"id": new_id}
        taken = self.http.post("/v1/agents/import", params=params, content=content)
        if new_id in self.model.agents:
            assert taken.status_code == 409
            return
        assert taken.status_code == 201
        agent = self.model.agents[agent_id]
        turns = self.http.get(f"/v1/agents/{new_id}/turns", params={"limit": 100}).json()["data"]
        log = tuple(turn["id"] for turn in reversed(turns))
        for old, new in zip(agent.log, log, strict=True):
            self.model.turns[new] = self.model.turns[old]
        self.model.agents[new_id] = replace(agent, log=log)

    @rule()
    def collect(self) -> None:
        assert self.http.post("/v1/cache/gc", json={"orphan_age_s": 0}).status_code == 200

    @invariant()
    def the_server_agrees(self) -> None:
        listed = self.http.get("/v1/agents", params={"limit": 100}).json()["data"]
        seen = {agent["id"]: (agent["settings"]["system"], agent["head"]) for agent in listed}
        assert seen == {
            name: (agent.system, agent.log[-1] if agent.log else None)
            for name, agent in self.model.agents.items()
        }
        for name, agent in self.model.agents.items():
            page = self.http.get(f"/v1/agents/{name}/turns", params={"limit": 100}).json()
            assert tuple(turn["id"] for turn in reversed(page["data"])) == agent.log

    def _turn(self, agent: ModelAgent | None, back: int | None) -> str | None:
        if back is None:
            return None
        log = agent.log if agent else ()
        return log[-1 - back] if back < len(log) else "turn_unknown"


def _until(log: tuple[str, ...], turn_id: str) -> tuple[str, ...]:
    return log[: log.index(turn_id) + 1]


def test_any_calls_leave_agents_as_a_reference_model_predicts(running: RunningServer) -> None:
    with running.client() as http:

        class Machine(ApiMachine):
            def __init__(self) -> None:
                super().__init__(http)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=50,
                stateful_step_count=20,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
