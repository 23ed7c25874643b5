"""An agent on disk that is larger than the memory it is reloaded into."""

from pathlib import Path
from typing import Any

import pytest

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
