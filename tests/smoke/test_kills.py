"""Servers that are killed after a change, in a swap, or whose model loses one of its processes."""

import importlib.util
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.chaos.changes import KINDS, Changer
from tests.chaos.kills import opened
from tests.smoke.server_process import ServerProcess, serve, serve_forked
from tests.waiting import eventually

pytestmark = pytest.mark.smoke

# Processes import MLX in a second, and PyTorch with Transformers in eight.
LIBRARY = "torch" if importlib.util.find_spec("mlx_lm") is None else "mlx"
TALK = [{"role": "user", "content": "Tell me of the rivers. " * 60}]


def _ranks(server: ServerProcess) -> list[int]:
    children = psutil.Process(server.process.pid).children()
    return [
        child.pid for child in children if "semantic.cluster.entrypoints.shards" in child.cmdline()
    ]


@pytest.mark.slow
def test_a_killed_rank_ends_in_an_error_a_restart_and_the_same_text(
    tiny_starter_dir: Path, tmp_path: Path
) -> None:
    options = ("--backend", LIBRARY, "--device", "cpu", "--dtype", "float32", "--shards", "2")
    body = {"messages": TALK, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    with serve(
        tmp_path / "home", tmp_path / "log", "--model", str(tiny_starter_dir), *options
    ) as server:
        with server.client() as http:
            before = http.post("/v1/chat/completions", json=body).json()
            ranks = _ranks(server)
            assert len(ranks) == 2
            os.kill(ranks[1], signal.SIGKILL)
            lost = http.post("/v1/chat/completions", json=body)
            if lost.status_code != 200:  # it may have waited for the model to be loaded again
                assert lost.status_code == 503
                assert "2 shards are lost" in lost.json()["error"]["message"]
            assert eventually(lambda: http.get("/health/ready").status_code == 200, timeout_s=300)
            after = http.post("/v1/chat/completions", json=body).json()
            assert after["choices"][0]["message"] == before["choices"][0]["message"]
            assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            again = _ranks(server)
            assert len(again) == 2
            assert not set(again) & set(ranks)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0


def test_agents_of_a_server_that_was_killed_in_a_swap_go_on(tmp_path: Path) -> None:
    options = ("--backend", "fake", "--durability", "sync")
    body = {"messages": TALK, "temperature": 0, "max_tokens": 8}
    with (
        serve_forked(tmp_path / "home", tmp_path / "first.log", *options) as server,
        server.client() as http,
    ):
        before = http.post("/v1/chat/completions", json=body).json()
        endless = {**body, "max_tokens": 10**6, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=endless):
            asked = http.post("/admin/models/swap", json={"model": "fake-2", "wait": False})
            assert asked.status_code == 202
            assert http.get("/health").json()["state"] in ("ready", "swapping")
            server.process.send_signal(signal.SIGKILL)
            server.process.wait(60)
    with (
        serve_forked(tmp_path / "home", tmp_path / "second.log", *options) as server,
        server.client() as http,
    ):
        after = http.post("/v1/chat/completions", json=body).json()
        assert http.get("/health").json()["problem"] == ""
    assert after["model"] == before["model"] == "fake"
    assert after["choices"][0]["message"] == before["choices"][0]["message"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 256


@pytest.mark.slow
def test_every_change_that_was_answered_is_there_after_a_kill(tmp_path: Path) -> None:
    changer, home = Changer("changed", "fake", seed=0), tmp_path / "home"
    for kind in KINDS:
        options = ("--backend", "fake", "--durability", "sync")
        with serve_forked(home, tmp_path / "log", *options) as server, server.client() as http:
            changer.change(kind, http)
            server.process.send_signal(signal.SIGKILL)
            server.process.wait(60)
        with opened(home / "cache") as ledger:
            assert changer.check(ledger, is_synced=True) == [], kind
