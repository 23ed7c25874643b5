"""Every metric changes with what it measures, and agrees with `/v1/cache` and the event feed."""

import contextlib
import json
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from semantic.adapters.config.settings import Settings
from semantic.entrypoints.bootstrap import Server, bootstrap
from semantic.ports.backend import Step, Ticket
from tests.chaos.mounts import fill_up, small_disk
from tests.http_server import RunningServer, make_settings, run_server
from tests.integration.test_tool_pauses import CHANGED, Chat, converse
from tests.waiting import await_that, repeating

pytestmark = pytest.mark.integration

Series = tuple[str, tuple[tuple[str, str], ...]]
SMALL = 15_000  # bytes of memory in which two requests of `LONG` tokens do not fit with replies
LONG = 1_500
ENDLESS = {
    "model": "fake",
    "messages": [{"role": "user", "content": "talk"}],
    "max_tokens": 100_000,
    "ignore_eos": True,
    "stream": True,
}
BOUNDED = {"model", "status", "kind", "tier", "reason", "result", "state", "le"}


class Seen:
    """The values that each series had, over all readings of all servers."""

    def __init__(self) -> None:
        self.values: dict[Series, set[float]] = defaultdict(lambda: {0.0})

    def read(self, server: Server) -> dict[Series, float]:
        text, _ = server.metrics.render("")
        reading: dict[Series, float] = {}
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                reading[key] = sample.value
        for key, value in reading.items():
            self.values[key].add(value)
        return reading

    def has_moved(self, name: str) -> bool:
        return len(self.values[name, ()]) > 1

    def keep_reading(self, server: Server) -> contextlib.AbstractContextManager[None]:
        return repeating(lambda: self.read(server))


def ask(http: httpx.Client, agent: str, text: str, max_tokens: int = 8) -> httpx.Response:
    return http.post(
        "/v1/chat/completions",
        json={
            "model": "fake",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
        },
        headers={"x-agent-id": agent},
    )


def together(ask_as: Callable[[str], httpx.Response]) -> list[int]:
    """Three agents ask at once; returns the statuses of their replies."""
    with ThreadPoolExecutor(3) as threads:
        return [reply.status_code for reply in threads.map(ask_as, "abc")]


def ask_much(http: httpx.Client, number: int, name: str) -> httpx.Response:
    return ask(http, name, f"{name}{number}" * (LONG // 2), 500)


def crowd(running: RunningServer, http: httpx.Client) -> None:
    """Three requests, of which two run and cannot both stay in memory; all are answered."""
    store = running.server.memory.cache.store
    taken = store.usage().total - SMALL
    store.reserve(taken)
    for number in range(10):  # they may come one after the other
        assert together(partial(ask_much, http, number)) == [200, 200, 200]
        if running.server.metrics.counts.engine.preemptions:
            break
    store.unreserve(taken)


def await_agent(running: RunningServer, seen: Seen, tier: str) -> None:
    """Wait until the metrics say that an agent's state is there."""
    series = "semantic_agents", (("tier", tier),)
    await_that(lambda: seen.read(running.server)[series])


def use_everything(running: RunningServer, seen: Seen) -> None:
    """Reuse, restore, cancel, refuse, evict."""
    disk = running.server.memory.disk
    assert disk is not None
    with running.client() as http:
        for tier in ("disk", "cold", "disk"):
            ask(http, "kept", "What is kept is read again. " * 40)
            disk.flush(60)
            http.post("/v1/agents/kept/evict", json={"to": tier}).raise_for_status()
            await_agent(running, seen, "warm" if tier == "disk" else tier)
        for _ in range(50):  # what is slower to read than to compute is computed
            http.post("/v1/agents/kept/evict", json={"to": "disk"}).raise_for_status()
            ask(http, "kept", "What is kept is read again. " * 40)
            disk.flush(60)
            if running.server.metrics.counts.requests.reuse.disk:
                break
        for agent in ("alike", "twin", "twin"):
            ask(http, agent, "The same beginning. " * 60)
        crowd(running, http)
        for number in range(4):  # the text of one is drafted for the next
            ask(http, f"echo-{number}", "Say it again.", 64)
        assert ask(http, "long", "too long" * 20_000).status_code == 400
        with http.stream("POST", "/v1/chat/completions", json=ENDLESS) as reply:
            next(reply.iter_lines())
        await_that(lambda: running.server.metrics.counts.requests.outcomes["fake", "cancelled"])
        for number in range(60):
            ask(http, f"agent-{number}", f"{number} is much to keep. " * 500)
            if number >= 12 and seen.has_moved("semantic_write_queue_bytes"):
                break
        disk.flush(60)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    seen = Seen()
    home = tmp_path_factory.mktemp("traffic")
    settings = make_settings(home, memory_budget_mb=1, disk_budget_mb=2, max_batch_size=2)
    with run_server(settings) as running, seen.keep_reading(running.server):
        use_everything(running, seen)
        await_that(lambda: seen.has_moved("semantic_tokens_per_second"))
    damage_and_fill(seen, tmp_path_factory.mktemp("faults"))
    hang_and_stop(seen, tmp_path_factory.mktemp("hung"))
    exchange(seen, make_settings(tmp_path_factory.mktemp("models")))
    fail_to_load(seen, make_settings(home, backend="torch", model=str(home / "nothing")))
    return seen


def call_tools(running: RunningServer, http: httpx.Client) -> None:
    """Two calls; the result of the second one is predicted, and differs."""
    counts, least = running.server.metrics.counts.engine, (1, 200)
    converse(
        Chat(http, "tools"),
        CHANGED,
        lambda number: await_that(lambda: counts.ahead_tokens >= least[number]),
    )


def exchange(seen: Seen, settings: Settings) -> None:
    """Another model while a reply runs, and none at all."""
    swapping = "semantic_model_state", (("state", "swapping"),)
    with run_server(settings) as running, running.client() as http:
        call_tools(running, http)
        with http.stream("POST", "/v1/chat/completions", json=ENDLESS) as reply:
            lines = reply.iter_lines()  # a generator that is dropped closes the stream
            next(lines)
            http.post("/admin/models/swap", json={"model": "fake-2", "wait": False})
            await_that(lambda: seen.read(running.server)[swapping])
        await_that(lambda: http.post("/admin/models/unload").is_success)  # once it is over
        seen.read(running.server)


def fail_to_load(seen: Seen, settings: Settings) -> None:
    server = bootstrap(settings)
    seen.read(server)
    server.device.start()
    await_that(lambda: server.device.state.value == "failed")
    seen.read(server)
    server.request_stop()
    server.memory.close(10)


def damage_and_fill(seen: Seen, home: Path) -> None:
    """Blocks that cannot be read, and blocks that cannot be written."""
    with small_disk(home / "disk", "size=4m") as disk:
        settings = make_settings(home, cache_dir=disk / "cache")
        with run_server(settings) as running, running.client() as http:
            ask(http, "lost", "What is lost is computed again. " * 40)
            assert running.server.memory.disk is not None
            running.server.memory.disk.flush(60)
            http.post("/v1/agents/lost/evict", json={"to": "disk"}).raise_for_status()
            for path in (disk / "cache" / "blocks").rglob("*.safetensors"):
                path.write_bytes(b"nonsense")
            ask(http, "lost", "What is lost is computed again. " * 40)
            fill_up(disk / "filler")
            ask(http, "full", "There is no room for this. " * 40)
            await_that(
                lambda: seen.read(running.server)["semantic_cache_persist_failure_total", ()]
            )


def hang_and_stop(seen: Seen, home: Path) -> None:
    """A device call that does not come back in time, while others wait; then it does."""
    settings = make_settings(home, hang_timeout_s=5, max_batch_size=1)
    with run_server(settings) as running, running.client() as http:
        server, model = running.server, running.server.device.model
        assert model is not None
        launch, gate = model.backend.launch, threading.Event()

        def stuck(step: Step) -> Ticket:
            gate.wait(120)
            return launch(step)

        model.backend.launch = stuck  # type: ignore[method-assign]
        with seen.keep_reading(server):
            assert together(lambda name: ask(http, name, "Is anybody there?")) == [500, 500, 500]
        assert seen.has_moved("semantic_request_queue_depth")
        seen.read(server)
        gate.set()
    await_that(lambda: server.device.state.value == "stopped")
    seen.read(server)


def test_every_series_moves(seen: Seen) -> None:
    ours = {key: values for key, values in seen.values.items() if key[0].startswith("semantic_")}
    is_count = [key for key in ours if not key[0].endswith(("_bucket", "_created"))]
    assert sorted(key for key in is_count if len(ours[key]) < 2) == []
    assert len({name for name, _ in is_count}) > 40


def test_labels_are_bounded(seen: Seen) -> None:
    labels = {(name, value) for _, pairs in seen.values for name, value in pairs}
    assert {name for name, _ in labels} <= BOUNDED
    assert len({value for name, value in labels if name != "le"}) < 60
    assert {value for name, value in labels if name == "model"} <= {"", "fake", "fake-2"}


PLANNED = {
    "semantic_request_total": "counter",
    "semantic_request_duration_seconds": "histogram",
    "semantic_time_to_first_token_seconds": "histogram",
    "semantic_request_queue_depth": "gauge",
    "semantic_batch_size": "histogram",
    "semantic_tokens_generated_total": "counter",
    "semantic_tokens_per_second": "gauge",
    "semantic_memory_used_bytes": "gauge",
    "semantic_cache_hit_total": "counter",
    "semantic_cache_miss_total": "counter",
    "semantic_pool_utilization_ratio": "gauge",
    "semantic_eviction_total": "counter",
    "semantic_agents_active": "gauge",
    "semantic_model_swap_duration_seconds": "histogram",
    "semantic_cache_persist_duration_seconds": "histogram",
}


def test_figures_agree_with_the_cache_and_the_feed(tmp_path: Path) -> None:
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        with http.stream("GET", "/v1/events") as feed:
            frames = (json.loads(f[6:]) for f in feed.iter_lines() if f.startswith("data: "))
            told: dict[str, int] = defaultdict(int)
            ended: list[Any] = []
            next(frames)
            for _ in range(2):
                ask(http, "agent", "Tell me what you know. " * 60)
            assert running.server.memory.disk is not None
            running.server.memory.disk.flush(60)
            cache = http.get("/v1/cache").json()
            counted = {name: cache["counters"][name] for name in ("sealed", "written")}
            while len(ended) < 2 or any(told[name] < count for name, count in counted.items()):
                frame = next(frames)
                if frame["type"] == "cache":
                    for name in counted:
                        told[name] += frame[name]
                elif frame["type"] == "turn.finished":
                    ended.append(frame)
        reply = http.get("/metrics")
        kinds = {f.name: f.type for f in text_string_to_metric_families(reply.text)}
        figures = Seen().read(running.server)
    assert reply.headers["content-type"].startswith("text/plain; version=")
    assert {n: kinds[n.removesuffix("_total")] for n in PLANNED} == PLANNED
    for name, metric in {"sealed": "block_sealed", "written": "cache_persist"}.items():
        assert figures[f"semantic_{metric}_total", ()] == counted[name] == told[name] > 0
    ours = {tier: figures["semantic_tokens_reused_total", (("tier", tier),)] for tier in ("hot",)}
    assert ours["hot"] == cache["reuse"]["hot"] == sum(e["reuse"]["hot"] for e in ended) > 0
    status = (("model", "fake"), ("status", ended[0]["reason"]))
    assert figures["semantic_request_total", status] == cache["replies"] == 2
    assert figures["semantic_disk_budget_bytes", ()] == cache["disk"]["budget"]


def test_clients_that_accept_openmetrics_get_it(http: httpx.Client) -> None:
    wanted = {"accept": "application/openmetrics-text; version=1.0.0"}
    reply = http.get("/metrics", headers=wanted)
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert reply.text.endswith("# EOF\n")


def test_the_last_hour_is_kept_under_the_same_names(
    http: httpx.Client, running: RunningServer
) -> None:
    body = {"model": "fake", "prompt": "hi", "max_tokens": 4, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    running.server.history.record()
    told = http.get("/metrics/history").json()
    text = http.get("/metrics").text

    assert told["series"]["semantic_tokens_generated_total"][-1] == 4
    for name, values in told["series"].items():
        assert f"{name} " in text
        assert len(values) == len(told["at"])
    assert [name for name in told["series"] if name.startswith("semantic_time_to_first_token")]
