"""A server that is killed in the middle of a swap."""

import signal
from pathlib import Path

import pytest

from tests.smoke.server_process import serve

pytestmark = pytest.mark.smoke

TALK = [{"role": "user", "content": "Tell me of the rivers. " * 60}]


def test_agents_of_a_server_that_was_killed_in_a_swap_go_on(tmp_path: Path) -> None:
    options = ("--backend", "fake", "--durability", "sync")
    body = {"messages": TALK, "temperature": 0, "max_tokens": 8}
    with (
        serve(tmp_path / "home", tmp_path / "first.log", *options) as server,
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
        serve(tmp_path / "home", tmp_path / "second.log", *options) as server,
        server.client() as http,
    ):
        after = http.post("/v1/chat/completions", json=body).json()
        assert http.get("/health").json()["problem"] == ""
    assert after["model"] == before["model"] == "fake"
    assert after["choices"][0]["message"] == before["choices"][0]["message"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 256
