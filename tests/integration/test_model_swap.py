"""Models that are swapped while a server runs, over HTTP and with the fake models."""

import contextlib
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http_server import RunningServer, make_settings, run_server
from tests.waiting import await_that

pytestmark = pytest.mark.integration

QUESTION = [{"role": "user", "content": "What is the capital of France? " * 40}]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningServer]:
    with run_server(make_settings(tmp_path, drain_timeout_s=300)) as made:
        yield made


def chat(http: httpx.Client, model: str = "", **fields: Any) -> httpx.Response:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 8, **fields}
    return http.post("/v1/chat/completions", json={**body, **({"model": model} if model else {})})


def said(answer: httpx.Response) -> tuple[str, str]:
    body = answer.raise_for_status().json()
    return body["model"], body["choices"][0]["message"]["content"]


def swap(http: httpx.Client, model: str, **fields: Any) -> dict[str, Any]:
    answer = http.post("/admin/models/swap", json={"model": model, **fields})
    made: dict[str, Any] = answer.raise_for_status().json()
    return made


def states(http: httpx.Client) -> dict[str, str]:
    listed = http.get("/v1/models").raise_for_status().json()["data"]
    return {model["id"]: model["state"] for model in listed}


def test_there_and_back_with_what_agents_left(http: httpx.Client, running: RunningServer) -> None:
    first = chat(http)
    assert states(http) == {"fake": "loaded", "fake-2": "on_disk"}
    done = swap(http, "fake-2")
    assert (done["previous"], done["model"], done["cut_requests"]) == ("fake", "fake-2", 0)
    assert states(http) == {"fake-2": "loaded", "fake": "on_disk"}
    assert running.server.memory.cache.store.usage().num_blocks == 0

    other = chat(http)
    assert said(other)[0] == "fake-2"
    assert said(other)[1] != said(first)[1]
    assert other.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    swap(http, "fake")
    again = chat(http)
    assert said(again) == said(first)
    usage = again.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_an_agent_goes_on_with_the_other_model_and_comes_back_to_its_state(
    http: httpx.Client,
) -> None:
    http.post("/v1/agents", json={"id": "a"}).raise_for_status()

    def turn(text: str) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
        answer = http.post("/v1/agents/a/generate", json={**body, "temperature": 0})
        made: dict[str, Any] = answer.raise_for_status().json()
        return made

    def found(turned: dict[str, Any]) -> int:
        return sum(turned["reuse"][tier] for tier in ("hot", "pool", "disk"))

    before = turn("first " * 100)
    swap(http, "fake-2")
    assert found(turn("second")) == 0
    swap(http, "fake")
    usage = before["usage"]
    kept = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    assert found(turn("third")) >= kept - 1


def test_text_is_read_off_tokens_by_the_model_that_wrote_them(http: httpx.Client) -> None:
    def turn(text: str) -> dict[str, str]:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
        http.post("/v1/chat/completions", json=body, headers={"X-Agent-ID": "a"})
        return shown()

    def shown() -> dict[str, str]:
        found: dict[str, str] = http.get("/v1/agents/a/explain").json()["diverged"]
        return found

    turn("one")
    alike = turn("open")
    swap(http, "fake-2")
    words = "tokens of fake, which is not loaded]"
    assert all(shown()[side].endswith(words) for side in ("before", "expected", "actual"))
    mixed = turn("once")
    assert (mixed["before"][-1], mixed["actual"][:2]) == ("o", "nc")
    assert mixed["expected"].endswith(words)
    http.post("/admin/models/unload").raise_for_status()
    assert "fake-2, which is not loaded" in shown()["actual"]
    swap(http, "fake")
    assert shown()["expected"].startswith("pen")
    assert alike["expected"].startswith("ne")


def test_every_request_of_a_batch_is_answered_and_none_by_the_wrong_model(
    http: httpx.Client,
    running: RunningServer,
) -> None:
    alone = {name: said(chat(http, max_tokens=200)) for name in ("fake",)}
    swap(http, "fake-2")
    alone["fake-2"] = said(chat(http, max_tokens=200))
    swap(http, "fake")
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(chat, http, max_tokens=200) for _ in range(12)]
        await_that(lambda: running.server.device.num_live)
        done = swap(http, "fake-2")
        asked += [pool.submit(chat, http, max_tokens=200) for _ in range(4)]
        answers = [said(future.result()) for future in asked]
    assert done["cut_requests"] == 0
    assert {text for _, text in answers} <= {text for _, text in alone.values()}
    assert all(answer == alone[answer[0]] for answer in answers)
    assert {name for name, _ in answers[-4:]} == {"fake-2"}


def test_what_does_not_end_in_time_is_answered_and_kept(
    http: httpx.Client, running: RunningServer
) -> None:
    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(chat, http, max_tokens=100_000, ignore_eos=True)
        await_that(lambda: running.server.memory.cache.store.usage().num_blocks)
        assert swap(http, "fake-2", drain_timeout_s=0)["cut_requests"] == 1
        answer = endless.result()
        assert answer.status_code == 503
        assert "swapped" in answer.json()["error"]["message"]
        swap(http, "fake")
        cached = chat(http).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 256


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/chat/completions", {"messages": QUESTION}),
        ("/v1/messages", {"messages": QUESTION, "max_tokens": 5}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/agents/a/generate", {"messages": QUESTION}),
    ],
    ids=["chat", "messages", "responses", "agent"],
)
def test_those_who_wait_hear_what_is_happening(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr("semantic.adapters.inbound.http.streaming.HEARTBEAT_S", 0.05)
    endless = {"messages": QUESTION, "stream": True, "max_tokens": 10**6, "ignore_eos": True}
    with contextlib.ExitStack() as holding:
        http.post("/v1/agents", json={"id": "a"}).raise_for_status()
        holding.enter_context(http.stream("POST", "/v1/chat/completions", json=endless))
        answer = http.post("/admin/models/swap", json={"model": "fake-2", "wait": False})
        assert (answer.status_code, answer.json()["status"]) == (202, "accepted")
        await_that(lambda: http.get("/health").json()["state"] == "swapping")  # it is fetched
        with http.stream("POST", path, json={**body, "stream": True}) as stream:
            heard = ""
            for piece in stream.iter_text():
                heard += piece
                if "model fake-2: " in heard:
                    holding.close()
        assert stream.status_code == 200
        before, _, after = heard.partition("model fake-2: ")
        assert ("fake-2" in after, '"error":{' in heard, "fake" in before) == (True, False, False)


def test_a_request_for_another_model_is_told_how_to_get_it(http: httpx.Client) -> None:
    answer = chat(http, "fake-2")
    assert answer.status_code == 404
    assert "swap_on_request" in answer.json()["error"]["message"]
    assert chat(http, "nobody").status_code == 404


def test_swaps_that_are_asked_for_at_once(http: httpx.Client, running: RunningServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        body = [{"model": name} for name in ("fake-2", "fake") * 8]
        answers = list(pool.map(lambda b: http.post("/admin/models/swap", json=b), body))
        assert {answer.status_code for answer in answers} <= {200, 409}
        current = running.server.models.current().id
        assert said(chat(http))[0] == current


def test_requests_swap_models_where_that_is_permitted(tmp_path: Path) -> None:
    settings = make_settings(
        tmp_path, swap_on_request=True, min_residence_s=0, model_aliases=["small=fake-2"]
    )
    with run_server(settings) as running, running.client() as http:
        assert said(chat(http, "fake-2"))[0] == "fake-2"
        assert said(chat(http, "claude-anything"))[0] == "fake-2"
        assert said(chat(http, "fake"))[0] == "fake"
        assert said(chat(http, "small"))[0] == "fake-2"
        assert chat(http, "nobody").status_code == 404


def test_a_model_stays_for_a_while_before_a_request_may_swap_it(tmp_path: Path) -> None:
    settings = make_settings(
        tmp_path, swap_on_request=True, min_residence_s=3600, request_timeout_s=2
    )
    with run_server(settings) as running, running.client() as http:
        answer = chat(http, "fake-2")
        assert answer.status_code == 504
        assert said(chat(http))[0] == "fake"
        swap(http, "fake-2")  # whoever runs the server need not wait


def test_an_idle_model_is_unloaded_and_comes_back_with_the_next_request(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, model_keep_alive_s=0.2)
    with run_server(settings) as running, running.client() as http:
        before = chat(http)
        await_that(lambda: states(http)["fake"] == "on_disk")
        assert running.server.device.model is None
        assert http.get("/health/ready").json()["state"] in ("unloaded", "swapping")
        again = chat(http)
        assert said(again) == said(before)
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 256


def test_loading_and_unloading_by_hand(http: httpx.Client) -> None:
    refused = http.post("/admin/models/load", json={"model": "fake-2"})
    assert refused.status_code == 409
    assert http.post("/admin/models/unload").json()["previous"] == "fake"
    assert http.post("/admin/models/unload").json()["status"] == "done"
    assert http.post("/admin/models/load", json={"model": "fake-2"}).json()["model"] == "fake-2"
    assert said(chat(http))[0] == "fake-2"
    shown = http.get("/admin/models").json()["models"]
    assert [model["state"] for model in shown] == ["ready", "on_disk"]
    unknown = http.post("/admin/models/swap", json={"model": "nobody"})
    assert (unknown.status_code, "nobody" in unknown.text) == (404, True)


def test_what_was_said_is_exported_while_no_model_is_loaded(http: httpx.Client) -> None:
    body = {"messages": QUESTION, "max_tokens": 4}
    http.post("/v1/agents", json={"id": "a"}).raise_for_status()
    http.post("/v1/agents/a/generate", json=body).raise_for_status()
    http.post("/admin/models/unload").raise_for_status()
    file = http.get("/v1/agents/a/export").raise_for_status().content
    made = http.post("/v1/agents/import?id=b", content=file).raise_for_status().json()
    assert (made["turns"], made["import_state"]) == (1, "recomputed")
    assert "no model was loaded" in made["import_reason"]


def test_the_feed_tells_of_a_swap(http: httpx.Client) -> None:
    with http.stream("GET", "/v1/events") as feed:
        lines = (line for line in feed.iter_lines() if line.startswith("data: "))
        next(lines)
        swap(http, "fake-2")
        heard: list[dict[str, Any]] = []
        while not heard or heard[-1]["type"] != "model.ready":
            heard.append(json.loads(next(lines).removeprefix("data: ")))
    told = [event["type"] for event in heard if event["type"].startswith("model.")]
    assert told[0] == "model.fetching"
    assert {event["model"] for event in heard if "model" in event} == {"fake-2"}


def test_settings_change_while_it_runs(http: httpx.Client, running: RunningServer) -> None:
    server = running.server
    before = http.get("/admin/runtime").json()
    assert (before["memory_budget_mb"], before["log_level"]) == (4096, "info")
    changes = {
        "batch_window_ms": 1,
        "target_step_ms": 50,
        "default_max_tokens": 3,
        "memory_budget_mb": 64,
        "disk_budget_mb": 100,
        "write_queue_mb": 7,
        "log_level": "warning",
        "model_keep_alive_s": 60,
    }
    after = http.patch("/admin/runtime", json=changes)
    assert after.json() == {**before, **changes} == http.get("/admin/runtime").json()
    assert (server.device.limits.batch_window_ms, server.device.limits.target_step_ms) == (
        1,
        50,
    )
    assert server.models.policy.model_keep_alive_s == 60
    shown = http.get("/v1/cache").json()
    assert shown["memory"]["budget"] == 64 * 2**20
    assert (shown["disk"]["budget"], shown["disk"]["queue_budget"]) == (100 * 2**20, 7 * 2**20)
    assert logging.getLogger().level == logging.WARNING
    answer = http.post("/v1/chat/completions", json={"messages": QUESTION, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 3
    swap(http, "fake-2")
    assert http.get("/v1/cache").json()["memory"]["budget"] == 64 * 2**20
    http.patch("/admin/runtime", json={"log_level": "info"}).raise_for_status()


@pytest.mark.parametrize(
    "changes", [{"max_batch_size": 0}, {"log_level": "loud"}, {"port": 1}, {"max_queue": None}]
)
def test_a_wrong_setting_is_refused_by_its_name(
    http: httpx.Client, changes: dict[str, Any]
) -> None:
    answer = http.patch("/admin/runtime", json=changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, *changes)


def test_models_are_recommended_and_deleted_over_http(http: httpx.Client) -> None:
    found = http.get("/admin/models/recommended").json()["models"]
    assert [one["name"] for one in found if one["is_best"]] == ["small"]
    assert not any(one["is_here"] for one in found)
    served, other = (model["id"] for model in http.get("/admin/models").json()["models"])
    refused = http.delete(f"/admin/models/{served}")
    assert refused.status_code == 409
    assert "serve another one first" in refused.json()["error"]["message"]
    assert http.delete(f"/admin/models/{other}").status_code == 400  # it has no files
    assert http.delete("/admin/models/nowhere").status_code == 404


def test_a_model_is_downloaded_over_http(http: httpx.Client) -> None:
    def downloads() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = http.get("/admin/models/downloads").json()["downloads"]
        return found

    name = "org/small-4bit"
    started = http.post("/admin/models/downloads", json={"model": name})
    assert (started.status_code, started.json()["state"]) == (202, "running")
    await_that(lambda: downloads()[0]["done_bytes"] > 0)
    assert downloads()[0]["total_bytes"] == 10**9
    assert http.delete(f"/admin/models/downloads/{name}").status_code == 204
    await_that(lambda: downloads()[0]["state"] == "stopped")
    assert "small-4bit" not in states(http)
    assert http.delete("/admin/models/downloads/fake").status_code == 404
    refused = http.post("/admin/models/downloads", json={"model": "nowhere"})
    assert refused.status_code == 404
    listed = http.get("/admin/models").json()["models"]
    assert all(model["max_context"] > 0 for model in listed)  # of those on disk, too
