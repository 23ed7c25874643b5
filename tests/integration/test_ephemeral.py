"""Requests with `X-Agent-Ephemeral: true` in every protocol: no file, list or event has them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from semantic.domain.blocks import pack_tokens
from tests.http_server import RunningServer, make_settings, run_server

pytestmark = pytest.mark.integration

HEADERS = {"X-Agent-Ephemeral": "true"}
SECRET, KNOWN = "xyzzy-quartz", "plugh-marble"
TEXT = f"Keep {SECRET} to yourself. " * 30
SAID = [{"role": "user", "content": TEXT}]
LIMITS: dict[str, Any] = {"model": "fake", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**LIMITS, "messages": SAID, "prediction": None},
    "/v1/completions": {**LIMITS, "prompt": TEXT, "echo": True, "logprobs": 1},
    "/v1/messages": {**LIMITS, "messages": SAID, "metadata": {"user_id": "someone"}},
    "/v1/responses": {**LIMITS, "input": TEXT, "max_output_tokens": 40, "store": True},
    "/api/chat": {"model": "fake", "messages": SAID, "options": {"num_predict": 40}},
    "/api/generate": {"model": "fake", "prompt": TEXT, "options": {"num_predict": 40}},
    "/v1/agents/poet/generate": {"message": TEXT, "max_tokens": 40, "ignore_eos": True},
}


def _forms(text: str) -> list[bytes]:
    """How a file may hold a text: as it is, or as the fake model's token ids."""
    ids = list(text.encode())
    lists = [json.dumps(ids, separators=(comma, ":"))[1:-1].encode() for comma in (",", ", ")]
    return [text.encode(), pack_tokens(ids), *lists]


def _found(home: Path, text: str) -> set[tuple[str, int]]:
    """The files that hold a text, and in which form."""
    files = [path for path in home.rglob("*") if path.is_file()]
    return {
        (str(path.relative_to(home)), number)
        for path in files
        for number, form in enumerate(_forms(text))
        if form in path.read_bytes()
    }


def _block_files(home: Path) -> set[tuple[str, int, int]]:
    stats = [(path, path.stat()) for path in home.rglob("*.safetensors")]
    return {(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in stats}


def _state(http: httpx.Client) -> Any:
    """What the server says about its agents and its cache."""
    agents = http.get("/v1/agents").json()
    turns = {a["id"]: http.get(f"/v1/agents/{a['id']}/turns").json() for a in agents["data"]}
    memory = http.get("/v1/cache").json()["memory"]
    assert http.get("/v1/running").json()["data"] == []
    return agents, turns, memory


def _tell(http: httpx.Client, agent: str, text: str) -> Any:
    body = {"message": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = http.post(f"/v1/agents/{agent}/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _ask_all(http: httpx.Client, *, is_streamed: bool) -> None:
    for path, body in REQUESTS.items():
        answer = http.post(path, json={**body, "stream": is_streamed}, headers=HEADERS)
        assert answer.status_code == 200, (path, answer.text)
        if path == "/v1/responses" and not is_streamed:
            assert answer.json()["store"] is False
            assert http.get(f"/v1/responses/{answer.json()['id']}").status_code == 404
        if path.endswith("poet/generate") and not is_streamed:
            assert answer.json()["turn_id"] is None
            assert answer.json()["usage"]["cached_tokens"] > 20  # it has read the agent's blocks


async def _events(running: RunningServer) -> int:
    """How many events the feed has for a reader who came before all ephemeral requests."""
    reader = running.server.feed.subscribe("local")
    with running.client() as http:
        await asyncio.to_thread(_ask_all, http, is_streamed=False)
    num_events = 0
    while await reader.next(0.05) is not None:
        num_events += 1
    reader.close()
    return num_events


def test_nothing_is_left_of_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "home"
    with run_server(make_settings(home, durability="sync")) as running:
        with running.client() as http:
            http.post("/v1/agents", json={"id": "poet"}).raise_for_status()
            for word in "abc":
                _tell(http, "poet", f"{KNOWN} {word}. " * 20)
            before, files = _state(http), _block_files(home)
            _ask_all(http, is_streamed=True)
            assert asyncio.run(_events(running)) == 0
            assert _state(http) == before
            assert SECRET not in http.get("/v1/agents/poet/explain").text
        assert files
        assert running.server.memory.close(20)
    assert _block_files(home) == files
    # The probe finds what the agent was told, as text and as tokens.
    forms = {form for _, form in _found(home, KNOWN)}
    assert 0 in forms
    assert len(forms) > 1
    assert _found(home, SECRET) == set()
    assert SECRET not in "".join(capfd.readouterr())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/agents/a/generate"])
def test_a_header_that_says_neither_is_refused(http: httpx.Client, path: str) -> None:
    body = REQUESTS.get(path, {"message": "x"})
    answer = http.post(path, json=body, headers={"X-Agent-Ephemeral": "perhaps"})
    assert answer.status_code == 400
    assert "true or false" in answer.text


def test_a_response_cannot_outlive_its_request(http: httpx.Client) -> None:
    body = {**REQUESTS["/v1/responses"], "background": True}
    answer = http.post("/v1/responses", json=body, headers=HEADERS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")


def test_the_replies_are_those_of_other_requests(http: httpx.Client) -> None:
    body = {**REQUESTS["/v1/chat/completions"], "max_tokens": 12}
    answers = [
        http.post("/v1/chat/completions", json=body, headers=headers).json()
        for headers in (HEADERS, {}, HEADERS)
    ]
    fresh, plain, reused = (answer["usage"]["prompt_tokens_details"] for answer in answers)
    assert answers[0]["choices"] == answers[1]["choices"] == answers[2]["choices"]
    assert (fresh["cached_tokens"], plain["cached_tokens"]) == (0, 0)
    assert reused["cached_tokens"] > 100
    assert (fresh["cache_write_tokens"], plain["cache_write_tokens"] > 100) == (0, True)
