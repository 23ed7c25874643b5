"""Servers with less memory than their agents need, on the host and on a device."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from examples.custom_model import make_tiny_model
from tests.http_server import RunningServer, make_settings, run_server

pytestmark = pytest.mark.integration

SYSTEM = "You answer in a few words. " * 60  # more than one block
BLOCK_TOKENS = 256
BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 4  # layers, heads, dimensions, keys and values, float32


def ask(running: RunningServer, said: list[dict[str, str]]) -> Any:
    body = {"model": running.model, "messages": said, "max_tokens": 8, "temperature": 0}
    with running.client() as http:
        reply = http.post("/v1/chat/completions", json=body, headers={"x-agent-id": "large"})
        reply.raise_for_status()
    return reply.json()


def test_a_reload_larger_than_memory_is_right_and_warm_block_by_block(
    starter_home: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"backend": "torch", "dtype": "float32", "cache_dir": tmp_path}
    said = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    with run_server(make_settings(starter_home, **options)) as running:
        first = ask(running, said)
        said.append(first["choices"][0]["message"])
        said.append({"role": "user", "content": "And of Italy?"})
        right = ask(running, said)
    num_tokens = right["usage"]["total_tokens"]
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert on_disk > 0.99 * num_tokens * BYTES_PER_TOKEN
    # Room for the running sequence, which grows by a block at a time, and for one block beside it.
    num_blocks = -(-num_tokens // BLOCK_TOKENS) + 1
    budget = num_blocks * BLOCK_TOKENS * BYTES_PER_TOKEN // 2**20 + 1
    settings = make_settings(starter_home, memory_budget_mb=budget, **options)
    with run_server(settings) as running:
        again = ask(running, said)
        store = running.server.memory.cache.store
        store.check_integrity()
        assert store.usage().used <= budget * 2**20
    assert again["choices"] == right["choices"]
    usage = again["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * usage["prompt_tokens"]


def answer_all(running: RunningServer, numbers: range) -> list[tuple[int, str]]:
    """Let agents answer long prompts at the same time; returns each status and reply."""

    def turn(number: int) -> tuple[int, str]:
        said = [{"role": "user", "content": f"Agent {number}. {SYSTEM * 2}"}]
        body = {"model": running.model, "messages": said, "max_tokens": 8, "temperature": 0}
        with running.client(headers={"x-agent-id": f"agent-{number}"}) as http:
            reply = http.post("/v1/chat/completions", json=body)
        got = reply.json()
        return reply.status_code, got["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(turn, numbers))


@pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="mlx-lm is not installed")
def test_a_device_too_small_for_all_agents_serves_them_in_turn_and_keeps_them(
    starter_home: Path, tmp_path: Path
) -> None:
    (starter,) = (starter_home / "models").glob("smollm2*")
    model = make_tiny_model(starter, tmp_path / "tiny")
    options: dict[str, Any] = {"backend": "mlx", "dtype": "float32", "model": str(model)}
    agents = range(6)
    with run_server(make_settings(tmp_path / "roomy", **options)) as running:
        expected = answer_all(running, agents)
    # The weights take 12.5 MB, an eighth is reserved, and two prompts do not fit into the rest.
    options["device_memory_mb"] = 15
    small = make_settings(tmp_path / "small", **options)
    with run_server(small) as running, running.client() as http:
        assert answer_all(running, agents) == expected
        memory = http.get("/health").json()["device_memory"]
        assert memory["total"] == 15 * 2**20
        assert 0 < memory["weights"] < memory["used"]
        too_long = {"model": running.model, "prompt": SYSTEM * 4, "max_tokens": 1}
        refused = http.post("/v1/completions", json=too_long)
        assert refused.status_code in {400, 429}
        assert "memory" in refused.json()["error"]["message"]
    with run_server(small) as running, running.client() as http:
        listed = http.get("/v1/agents").json()["data"]
        assert {agent["id"] for agent in listed} >= {f"agent-{number}" for number in agents}
        assert answer_all(running, agents) == expected
