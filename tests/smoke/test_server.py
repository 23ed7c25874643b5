"""A real server with the real starter model, as a new user meets it."""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.smoke.server_process import serve, serve_forked
from tests.waiting import await_that

pytestmark = pytest.mark.smoke

QUESTION: Any = [
    {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
]


def client_for(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_it_answers_the_paris_question_and_stops_while_it_computes(
    starter_home: Path, tmp_path: Path
) -> None:
    with serve(starter_home, tmp_path / "log", shutdown_timeout_s=0.01) as server:
        with client_for(server.url) as client:
            model = client.models.list().data[0].id
            reply = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
            stream = client.chat.completions.create(
                model=model, messages=QUESTION, temperature=0, stream=True
            )
            streamed = "".join(c.choices[0].delta.content or "" for c in stream)
        with httpx.Client(trust_env=False) as http:
            compute = http.get(f"{server.url}/health").json()["compute"]
        assert reply.choices[0].message.content == "The capital of France is Paris."
        assert streamed == reply.choices[0].message.content
        assert reply.choices[0].finish_reason == "stop"
        asking = threading.Thread(target=ask_for_long, args=(server.url,))
        asking.start()
        with httpx.Client(trust_env=False) as http:
            metrics = f"{server.url}/metrics"
            await_that(lambda: "semantic_requests_running 1" in http.get(metrics).text)
        assert server.stop() == 0
        asking.join(20)
    summary = f"{compute['dtype']} on cpu, {compute['num_threads']} thread"
    usual = ("listening", "smollm2-135m-instruct on torch", "curl ", "ready: ", summary)
    page, chat = f"page       {server.url}/\n", f"semantic chat --server {server.url}\n"
    for words in (*usual, page, chat):
        assert words in server.output
    assert "times as fast as" in compute["reason"] or "quantised weights" in compute["reason"]
    for words in ("Traceback", "Warning", "C++", "terminate"):
        assert words not in server.output
    assert (starter_home / "logs/server.log").is_file()


def test_it_says_how_long_a_request_may_be_if_the_memory_is_small(
    starter_home: Path, tmp_path: Path
) -> None:
    with serve_forked(starter_home, tmp_path / "log", memory_budget_mb=64) as server:
        with server.client() as http:
            (model,) = http.get("/v1/models").json()["data"]
        usable = model["max_context"]
        assert 1024 < usable < 8192
        assert model["max_model_len"] == usable  # vLLM's name
        server.await_line(f"may have {usable:,} of the model's 8,192 tokens")


def ask_for_long(url: str) -> None:
    """Give it a prompt that takes it some seconds, and be cut off."""
    with contextlib.suppress(httpx.HTTPError), httpx.Client(trust_env=False) as http:
        messages = [{"role": "user", "content": "So much to read. " * 1200}]
        http.post(f"{url}/v1/chat/completions", json={"messages": messages}, timeout=60)


@contextlib.contextmanager
def long_stream(url: str) -> Iterator[httpx.Response]:
    """Ask for a reply without an end."""
    body = {
        "model": "fake",
        "messages": QUESTION,
        "stream": True,
        "ignore_eos": True,
        "max_tokens": 100_000,
    }
    with (
        httpx.Client(trust_env=False, timeout=60) as http,
        http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
    ):
        yield answer


def test_ctrl_c_in_mid_generation_stops_cleanly(tmp_path: Path) -> None:
    lines: list[str] = []
    is_streaming = threading.Event()

    def read(url: str) -> None:
        with long_stream(url) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) > 2:
                    is_streaming.set()

    with serve(
        tmp_path / "home", tmp_path / "log", "--backend", "fake", shutdown_timeout_s=1
    ) as server:
        reader = threading.Thread(target=read, args=(server.url,))
        reader.start()
        assert is_streaming.wait(60)
        assert server.stop() == 0
        reader.join(20)
    assert "Traceback" not in server.output
    assert len(lines) > 2
    assert "shutting down" in lines[-2]


def test_sigterm_refuses_new_work_and_lets_replies_end(tmp_path: Path) -> None:
    body = {"model": "fake", "messages": QUESTION, "max_tokens": 3000, "ignore_eos": True}
    path = "/v1/chat/completions"
    with serve_forked(
        tmp_path / "home", tmp_path / "log", "--backend", "fake", shutdown_timeout_s=600
    ) as server:
        with (
            server.client() as http,
            long_stream(server.url),  # it does not end before all has been asked
            http.stream("POST", path, json={**body, "stream": True}) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            await_that(lambda: http.get("/health/ready").status_code != 200)
            assert http.get("/health/live").json()["state"] == "draining"
            assert http.post(path, json=body).status_code == 503
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(60) == 0


@pytest.mark.parametrize("timeout_s,num_signals", [(600, 2), (0.5, 1)])
def test_clients_that_hold_up_a_stop_are_cut_off_by_a_second_ctrl_c_or_in_time(
    timeout_s: float, num_signals: int, tmp_path: Path
) -> None:
    with serve_forked(
        tmp_path / "home", tmp_path / "log", "--backend", "fake", shutdown_timeout_s=timeout_s
    ) as server:
        address = httpx.URL(server.url)
        with socket.create_connection((address.host, address.port)) as upload:
            upload.sendall(b"POST /v1/agents/import HTTP/1.1\r\nhost: localhost\r\n")
            upload.sendall(b"content-length: 100\r\n\r\nand no more")
            with long_stream(server.url) as answer:
                assert next(answer.iter_lines())
                for _ in range(num_signals):
                    server.process.send_signal(signal.SIGINT)
                    await_that(lambda: '"stopping"' in server.output)
                assert server.process.wait(60) == 0
    assert "Traceback" not in server.output
    assert server.output.count("closing open connections") == 1
    assert '"level": "error"' not in server.output


def test_a_stop_does_not_wait_for_a_schema_that_never_compiles(tmp_path: Path) -> None:
    schema = {"type": "integer", "multipleOf": 99_999_989}
    body = {
        "model": "fake",
        "messages": QUESTION,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }

    def ask(url: str) -> None:
        with contextlib.suppress(httpx.HTTPError), httpx.Client(trust_env=False) as http:
            http.post(f"{url}/v1/chat/completions", json=body, timeout=60)

    with serve_forked(tmp_path, tmp_path / "log", "--backend", "fake") as server:
        asking = threading.Thread(target=ask, args=[server.url])
        asking.start()
        await_that(psutil.Process(server.process.pid).children)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.output
        asking.join()


# A load that never ends; the server prints its banner after the first step.
STUCK = """
import sys, threading
from semantic.entrypoints.cli.app import main
from semantic.entrypoints.loading import ModelLoader

def load(self, entry, on_progress):
    on_progress("reading weights")
    threading.Event().wait()

ModelLoader._load_fake = load
sys.exit(main())
"""


def test_ctrl_c_does_not_wait_for_a_model_that_loads_and_loses_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    body = {"model": "fake", "messages": QUESTION, "stream": True}
    with (
        serve(
            home,
            tmp_path / "log",
            "--backend",
            "fake",
            is_ready=False,
            program=["-c", STUCK],
            shutdown_timeout_s=600,
        ) as server,
        server.client() as http,
    ):
        http.post("/v1/agents", json={"id": "early"}).raise_for_status()
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert "reading weights" in next(lines)
            assert server.stop() == 0
            assert any("shutting down" in line for line in lines)
    assert "Traceback" not in server.output
    with (
        serve_forked(home, tmp_path / "again.log", "--backend", "fake") as server,
        server.client() as http,
    ):
        assert http.get("/v1/agents/early").json()["id"] == "early"


def test_ollamas_port_is_opened_unless_it_is_taken(tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    usual = {"backend": "fake", "ollama_port": port}
    with serve_forked(tmp_path / "a", tmp_path / "a.log", "--ollama", **usual) as first:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            assert http.get("/").text == "Ollama is running"
            assert http.get("/api/tags").json()["models"][0]["name"] == "fake"
            assert http.get("/v1/models").status_code == 200
        assert f"http://127.0.0.1:{port}   (Ollama)" in first.output
        with serve_forked(tmp_path / "b", tmp_path / "b.log", "--ollama", **usual) as second:
            second.await_line(f"Ollama is already running on port {port}")
            with second.client() as http:
                assert http.get("/api/version").status_code == 200
