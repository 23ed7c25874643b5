"""The KV cache in the agent API: tiers, figures, events and files."""

import json
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from semantic.application.agents.ledger import as_anonymous
from semantic.domain.agents import LOCAL_TENANT, Agent
from semantic.entrypoints.cli.app import main
from tests.agent_files import changed, members
from tests.http_server import RunningServer, make_settings, run_server
from tests.integration.test_direct_api import error_of, events_of, get, make, post, say, texts
from tests.waiting import await_that

pytestmark = pytest.mark.integration

LONG = "a long system prompt, " * 20


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningServer]:
    with run_server(make_settings(tmp_path, log_level="warning")) as server:
        yield server


# -- tiers ------------------------------------------------------------------------------------


def test_prefetch_loads_an_agent_before_its_next_turn(http: httpx.Client) -> None:
    make(http, id="a", system=LONG)
    say(http, "a", "one")
    http.post("/v1/agents/a/evict")
    tokens = get(http, "/v1/agents/a")["tokens"]

    assert http.post("/v1/agents/a/prefetch").json()["parts"] > 0

    await_that(lambda: get(http, "/v1/agents/a")["state"]["memory_tokens"] >= tokens - 1)
    assert http.post("/v1/agents/a/prefetch").json()["parts"] == 0
    assert say(http, "a", "two")["reuse"]["pool"] >= tokens - 1


def test_after_a_restart_the_latest_agents_go_on_hot(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    with run_server(settings) as server, server.client() as http:
        make(http, id="a", system=LONG)
        before = say(http, "a", "one")
    with run_server(settings) as server, server.client() as http:
        device = server.server.device
        await_that(lambda: device.run_between_steps(lambda engine: len(engine._memory.idle)))
        reply = say(http, "a", "two")
        assert reply["reuse"]["hot"] > before["usage"]["prompt_tokens"]
        assert reply["reuse"]["pool"] == reply["reuse"]["disk"] == 0
    with run_server(make_settings(tmp_path / "other")) as server, server.client() as http:
        make(http, id="a", system=LONG)
        assert [say(http, "a", text)["text"] for text in ("one", "two")] == [
            before["text"],
            reply["text"],
        ]


def test_what_a_pinned_agent_reaches_is_pinned(http: httpx.Client, running: RunningServer) -> None:
    def num_pinned() -> int:
        nodes = running.server.memory.cache.store.nodes()
        return sum(node.num_pins > 0 for node in nodes)

    make(http, id="a", system=LONG)
    make(http, id="b", system=LONG)
    say(http, "a", "one")
    say(http, "b", "one")
    assert num_pinned() == 0

    http.patch("/v1/agents/a", json={"pin": True})
    num_of_one = num_pinned()
    http.patch("/v1/agents/b", json={"pin": True})
    http.delete("/v1/agents/a")

    assert num_of_one > 0
    assert num_pinned() == num_of_one
    http.patch("/v1/agents/b", json={"pin": False})
    assert num_pinned() == 0


# -- figures ----------------------------------------------------------------------------------


def test_the_cache_endpoint_reports_its_state(http: httpx.Client, running: RunningServer) -> None:
    fresh = get(http, "/v1/cache")
    assert (fresh["replies"], fresh["dedup_ratio"], fresh["hit_rates"]["all"]) == (0, None, None)
    replies = []
    for name in ("a", "b", "c"):
        make(http, id=name, system=LONG)
        replies.append(say(http, name, "one"))
    make(http, id="empty")
    assert running.server.memory.disk is not None
    running.server.memory.disk.flush(60)  # a file is larger than what it holds

    seen = get(http, "/v1/cache")

    assert seen["agents"] == {"hot": 3, "warm": 0, "cold": 1}
    assert seen["replies"] == 3
    rows = {row[0]: row for row in get(http, "/v1/cache/blocks")["blocks"]}
    chains = []
    for name in ("a", "b", "c"):
        block = get(http, f"/v1/agents/{name}")["state"]["block"]
        chains.append(dict[str, int]())
        while block in rows:
            chains[-1][block] = max(rows[block][4:6])
            block = rows[block][1]
    alone = sum(sum(chain.values()) for chain in chains)
    together = sum((chains[0] | chains[1] | chains[2]).values())
    assert seen["dedup_ratio"] == round(alone / together, 4) > 2
    assert 0.5 < seen["hit_rates"]["all"] < 1
    assert sum(seen["reuse"].values()) == sum(reply["usage"]["prompt_tokens"] for reply in replies)
    assert 0 < seen["memory"]["used"] <= seen["memory"]["budget"]
    assert seen["counters"]["sealed"] > 0
    assert seen["disk"]["problem"] == ""
    assert seen["disk"]["other"] > 0  # the ledger
    assert seen["device"] is None


def test_blocks_are_listed_in_pages_and_then_as_they_change(http: httpx.Client) -> None:
    make(http, id="a", system=LONG)
    say(http, "a", "one")
    whole = get(http, "/v1/cache/blocks")
    rows = {row[0]: row for row in whole["blocks"]}
    assert (whole["total"], whole["next"], whole["stale"]) == (len(rows), None, False)
    chain = [rows[get(http, "/v1/agents/a")["state"]["block"]]]
    while chain[-1][1] in rows:
        chain.append(rows[chain[-1][1]])
    # Name, parent, start, tokens, bytes in memory, bytes on disk, last used, pinned.
    assert chain[-1][2] == 0
    assert sum(row[3] for row in chain) == get(http, "/v1/agents/a")["state"]["tokens"]

    paged: list[Any] = []
    after: str | None = ""
    while after is not None:
        page = get(http, "/v1/cache/blocks", after=after, limit=1)
        paged += page["blocks"]
        after = page["next"]
    assert sorted(row[0] for row in paged) == sorted(rows)

    http.patch("/v1/agents/a", json={"pin": True})
    http.post("/v1/agents/a/evict")
    changed = get(http, "/v1/cache/blocks", since=whole["mark"])
    assert {row[0] for row in changed["blocks"]} == set(rows)
    assert all(row[4] == 0 < row[5] and row[7] for row in changed["blocks"])
    http.patch("/v1/agents/a", json={"pin": False})
    http.post("/v1/agents/a/evict", json={"to": "cold"})
    last = get(http, "/v1/cache/blocks", since=changed["mark"])
    assert (set(last["gone"]), last["blocks"], last["total"]) == (set(rows), [], 0)
    assert get(http, "/v1/cache/blocks", since=last["mark"])["gone"] == []


def test_no_request_is_listed_as_running_after_it_ended(http: httpx.Client) -> None:
    make(http, id="a")
    say(http, "a", "one")
    await_that(lambda: get(http, "/v1/running") == {"object": "list", "data": []})


@pytest.mark.parametrize("since", [0, 2**62])
def test_a_reader_that_missed_too_much_gets_all_blocks_again(
    http: httpx.Client, since: int
) -> None:
    assert get(http, "/v1/cache/blocks", since=since)["stale"]


def test_gc_deletes_garbage_and_verify_checks_the_rest(http: httpx.Client) -> None:
    make(http, id="a", system=LONG)
    make(http, id="b", system="b" + LONG)
    say(http, "a", "one")
    say(http, "b", "one")
    http.delete("/v1/agents/b")

    assert post(http, "/v1/cache/gc", orphan_age_s=0)["freed_bytes"] > 0
    assert post(http, "/v1/cache/gc", orphan_age_s=0)["freed_bytes"] == 0
    checked = events_of(http.post("/v1/cache/verify"))
    assert checked[0]["type"] == "progress"
    done = checked[-1]
    assert (done["type"], done["bad"]) == ("done", 0)
    assert done["checked"] == done["total"] == get(http, "/v1/cache")["disk"]["files"] > 0


# -- events -----------------------------------------------------------------------------------


def test_watchers_receive_events(http: httpx.Client) -> None:
    heard: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        with http.stream("GET", "/v1/events") as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    heard.put(json.loads(line[6:]))
                    if '"agent.deleted"' in line:
                        return

    listener = threading.Thread(target=listen)
    listener.start()
    assert heard.get(timeout=60)["type"] == "cache"
    make(http, id="a")
    reply = say(http, "a", "one")
    http.patch("/v1/agents/a", json={"weight": 2.0})
    http.post("/v1/agents/a/fork", json={"ids": ["b"]})
    http.post("/v1/agents/a/rewind", json={"turn_id": None})
    http.post("/v1/agents/a/evict")
    http.delete("/v1/agents/a")
    listener.join(60)

    events = list(heard.queue)
    agents = [(e["type"], e["agent_id"]) for e in events if e["type"].startswith("agent.")]
    assert agents == [
        ("agent.created", "a"),
        ("agent.updated", "a"),
        ("agent.forked", "b"),
        ("agent.rewound", "a"),
        ("agent.evicted", "a"),
        ("agent.deleted", "a"),
    ]
    started, finished = (e for e in events if e["type"].startswith("turn."))
    assert started["turn_id"] == finished["turn_id"] == reply["turn_id"]
    assert finished["reuse"] == reply["reuse"]
    assert finished["reason"] == reply["finish_reason"]
    assert sum(e["sealed"] for e in events if e["type"] == "cache") > 0


def test_a_server_that_stops_ends_event_streams(http: httpx.Client, running: RunningServer) -> None:
    with http.stream("GET", "/v1/events") as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        running.server.request_stop()

        assert [line for line in lines if line.startswith("data: ")] == []


# -- files ------------------------------------------------------------------------------------


def test_an_agent_leaves_and_comes_back_elsewhere(
    http: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(http, id="a", system=LONG, labels={"k": "v"}, pin=True)
    say(http, "a", "one")
    say(http, "a", "two")
    tokens = get(http, "/v1/agents/a")["tokens"]
    exported = http.get("/v1/agents/a/export")
    third = say(http, "a", "three")

    assert main(["cache", "export-key", "--home", str(tmp_path)]) == 0
    trusted = {"trusted_export_keys": {"laptop": capsys.readouterr().out.split()[-1]}}
    settings = make_settings(tmp_path / "other", **trusted)
    with run_server(settings) as elsewhere, elsewhere.client() as other:
        taken = other.post("/v1/agents/import", content=exported.content).json()
        reply = say(other, "a", "three")
        log = get(other, "/v1/agents/a/turns")["data"]

    assert exported.headers["content-disposition"] == 'attachment; filename="a.tar"'
    assert exported.headers["content-type"] == "application/x-tar"
    assert members(exported.content)[0][0] == "agent.json"
    assert (taken["turns"], taken["tokens"]) == (2, tokens)
    assert (taken["import_state"], taken["import_reason"]) == ("imported", "signed by laptop")
    assert taken["settings"]["labels"] == {"k": "v"}
    assert not taken["settings"]["pin"]
    assert reply["text"] == third["text"]
    assert reply["usage"]["cached_tokens"] >= tokens - 1
    assert texts(log)[:4] == texts(get(http, "/v1/agents/a/turns")["data"])[:4]


def test_a_name_that_is_taken_is_not_overwritten(http: httpx.Client) -> None:
    make(http, id="a")
    say(http, "a", "one")
    content = http.get("/v1/agents/a/export").content

    assert error_of(http.post("/v1/agents/import", content=content)) == (409, "conflict")
    renamed = http.post("/v1/agents/import", params={"id": "b"}, content=content)
    assert (renamed.status_code, renamed.json()["id"]) == (201, "b")
    assert error_of(http.post("/v1/agents/import?id=a%20b", content=content))[0] == 400


def test_an_anonymous_agent_imported_under_a_name_lives_like_a_named_one(
    http: httpx.Client, running: RunningServer
) -> None:
    agents, tenant = running.server.memory.agents, LOCAL_TENANT
    unnamed = agents.create(as_anonymous(Agent("anon-1", time.time(), tenant=tenant)))
    content = http.get("/v1/agents/anon-1/export").content
    http.delete("/v1/agents/anon-1")

    for query in ("", "?id=kept"):
        assert http.post(f"/v1/agents/import{query}", content=content).status_code == 201

    again, named = agents.get(tenant, "anon-1"), agents.get(tenant, "kept")
    assert (again.is_anonymous, again.ttl_s) == (True, unnamed.ttl_s)
    assert (named.is_anonymous, named.ttl_s) == (False, None)


def test_another_models_state_is_refused_and_its_messages_are_not(http: httpx.Client) -> None:
    make(http, id="a", system="s")
    first = say(http, "a", "one")
    content = http.get("/v1/agents/a/export").content
    other = changed(content, lambda _, member: member.replace(b'"fake"', b'"other"'))

    refused = http.post("/v1/agents/import", params={"id": "b"}, content=other)
    taken = http.post("/v1/agents/import?id=b&messages_only=true", content=other)

    assert refused.status_code == 400
    assert "messages_only" in refused.json()["error"]["message"]
    assert taken.status_code == 201
    assert taken.json()["state"]["tier"] == "cold"
    reply = say(http, "b", "two")
    log = get(http, "/v1/agents/b/turns")["data"]
    assert texts(log) == ["s", "one", first["text"], "two", reply["text"]]
    assert reply["text"] == say(http, "a", "two")["text"]
