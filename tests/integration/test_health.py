"""Every state of a server, and what its health probes report."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from semantic.application.engine.model import LoadedModel
from semantic.domain.errors import ModelSwapError
from semantic.entrypoints.bootstrap import bootstrap
from semantic.entrypoints.server import create_app
from semantic.ports.backend import Step
from tests.chaos.mounts import fill_up, small_disk
from tests.http_server import RunningServer, make_settings, run_server
from tests.integration.test_metrics import ENDLESS, ask
from tests.waiting import await_that

pytestmark = pytest.mark.integration

PROBES = ("/health", "/health/ready", "/health/live", "/health/startup")


def statuses(http: httpx.Client) -> dict[str, int]:
    return {path: http.get(path).status_code for path in PROBES}


def told(http: httpx.Client) -> tuple[str, str]:
    body = http.get("/health").json()
    return body["state"], body["status"]


def probed(overall: int, live: int, startup: int) -> dict[str, int]:
    return dict(zip(PROBES, (overall, overall, live, startup), strict=True))


@contextlib.contextmanager
def talking(http: httpx.Client) -> Iterator[None]:
    """A reply that does not end by itself."""
    with http.stream("POST", "/v1/chat/completions", json=ENDLESS) as reply:
        lines = reply.iter_lines()  # a generator that is dropped closes the stream
        next(lines)
        yield


async def test_starting(tmp_path: Path) -> None:
    server = bootstrap(make_settings(tmp_path))
    transport = httpx.ASGITransport(create_app(server))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        answers = {path: (await http.get(path)) for path in PROBES}
    server.memory.close(10)
    assert {p: a.status_code for p, a in answers.items()} == probed(503, 200, 503)
    assert answers["/health"].json()["state"] == "starting"


def test_loading_and_a_load_that_fails(tmp_path: Path) -> None:
    gate = threading.Event()

    def load(on_progress: Callable[[str], None]) -> LoadedModel:
        on_progress("reading weights")
        gate.wait(120)
        raise ModelSwapError("the file ends too early.")

    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        done = running.server.device.exchange(load, drain_s=0)
        await_that(lambda: http.get("/health").json()["detail"] == "reading weights")
        assert (told(http), statuses(http)) == (("loading", "unavailable"), probed(503, 200, 503))
        gate.set()
        assert isinstance(done.exception(60), ModelSwapError)
        assert (told(http), statuses(http)) == (("failed", "unavailable"), probed(503, 503, 503))


def test_ready_pressed_and_drained(tmp_path: Path) -> None:
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        assert (told(http), statuses(http)) == (("ready", "ok"), probed(200, 200, 200))
        store = running.server.memory.cache.store
        taken = int(store.usage().total * 0.95)
        store.reserve(taken)
        assert (told(http), statuses(http)) == (("ready", "degraded"), probed(200, 200, 200))
        assert http.get("/health").json()["pressure"] >= 0.95
        store.unreserve(taken)
        with talking(http):
            drained = http.post("/admin/drain").json()
            assert drained == {"status": "draining", "live_requests": 1}
            assert told(http) == ("draining", "unavailable")
            assert statuses(http) == probed(503, 200, 200)
            refused = ask(http, "late", "Is it too late?")
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
        drained = http.post("/admin/drain", json={"wait_s": 30}).json()
        assert drained == {"status": "drained", "live_requests": 0}
        assert http.delete("/admin/drain").json()["status"] == "serving"
        assert told(http) == ("ready", "ok")
        assert ask(http, "late", "And now?").status_code == 200


def test_swapping(tmp_path: Path) -> None:
    with (
        run_server(make_settings(tmp_path, drain_timeout_s=60)) as running,
        running.client() as http,
    ):
        with talking(http):
            swap = {"model": "fake-2", "wait": False}
            assert http.post("/admin/models/swap", json=swap).status_code == 202
            await_that(lambda: told(http) == ("swapping", "ok"))
            assert statuses(http) == probed(200, 200, 200)
        await_that(lambda: told(http) == ("ready", "ok"))


def test_health_reports_a_hung_engine_and_its_recovery(tmp_path: Path) -> None:
    with run_server(make_settings(tmp_path, hang_timeout_s=0.2)) as running:
        gate = threading.Event()
        launch = backend_of(running).launch

        def stuck(step: Step) -> object:
            gate.wait(120)
            return launch(step)

        backend_of(running).launch = stuck
        with running.client() as http:
            assert ask(http, "stuck", "Is anybody there?").status_code == 500
            assert (told(http), statuses(http)) == (("hung", "unavailable"), probed(503, 503, 200))
            gate.set()
            await_that(lambda: told(http) == ("ready", "ok"))


def test_a_dead_engine(tmp_path: Path) -> None:
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        backend_of(running).launch = broken
        backend_of(running).close_sequence = broken
        assert ask(http, "dead", "Is anybody there?").status_code == 500
        await_that(lambda: told(http)[0] == "failed")
        assert statuses(http) == probed(503, 503, 503)
        assert ask(http, "dead", "Is anybody there?").status_code == 503


def broken(*_: object) -> None:
    raise RuntimeError("the device is gone")


def backend_of(running: RunningServer) -> Any:
    assert running.server.device.model is not None
    return running.server.device.model.backend


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=2m") as disk:
        settings = make_settings(tmp_path, cache_dir=disk / "cache")
        with run_server(settings) as running, running.client() as http:
            fill_up(disk / "filler")
            assert ask(http, "full", "There is no room for this. " * 40).status_code == 200
            await_that(lambda: "No space" in http.get("/health").json()["problem"])
            assert (told(http), statuses(http)) == (("ready", "degraded"), probed(200, 200, 200))
