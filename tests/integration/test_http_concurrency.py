"""Many streams at once over real sockets, slow readers among them."""

import asyncio
import json
import resource
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http_server import RunningServer, make_settings, run_server

pytestmark = pytest.mark.integration

NUM_STREAMS = 200
NUM_TOKENS = 8


def body(index: int, *, stream: bool) -> dict[str, Any]:
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": f"stream {index % 20} " * 4}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": stream,
    }


async def read(http: httpx.AsyncClient, index: int) -> str:
    """Read one stream to its end; every fifth reader dawdles."""
    text, is_done = "", False
    request = body(index, stream=True)
    async with http.stream("POST", "/v1/chat/completions", json=request) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if index % 5 == 0:
                await asyncio.sleep(0.01)
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    assert is_done
    return text


async def read_all(running: RunningServer) -> list[str]:
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(
        base_url=running.url, limits=limits, timeout=120, trust_env=False
    ) as http:
        return list(await asyncio.gather(*(read(http, i) for i in range(NUM_STREAMS))))


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.slow
def test_two_hundred_streams_all_finish_and_leave_nothing_behind(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, max_batch_size=32, log_level="warning")
    with run_server(settings) as running:
        with running.client() as http:
            alone = [
                http.post("/v1/chat/completions", json=body(i, stream=False)).json()
                for i in range(20)
            ]
        expected = [reply["choices"][0]["message"]["content"] for reply in alone]
        for texts in (asyncio.run(read_all(running)) for _ in range(2)):
            assert texts == [expected[i % 20] for i in range(NUM_STREAMS)]
        before = peak_mb()
        assert asyncio.run(read_all(running)) == texts
        assert peak_mb() - before < 16
        assert running.server.device.num_live == 0
