"""OpenAI's older completions over replies that are known beforehand."""

from collections.abc import Sequence

import httpx
import pytest
from fastapi import FastAPI

from semantic.adapters.inbound.openai.completions_routes import completions_router
from semantic.domain.agents import Principal
from semantic.domain.chat import ChatRequest
from tests.canned_replies import CannedInference, CannedReply

pytestmark = pytest.mark.unit


async def test_an_echo_that_fails_leaves_no_reply_running() -> None:
    made: list[CannedReply] = []

    class Broken(CannedInference):
        async def start(self, request: ChatRequest, principal: Principal) -> CannedReply:
            made.append(await super().start(request, principal))
            return made[-1]

        async def decode(self, tokens: Sequence[int]) -> str:
            raise RuntimeError(f"a defect at {tokens}")

    app = FastAPI()
    app.include_router(completions_router(Broken(), Principal))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        body = {"model": "m", "prompt": [1, 2], "n": 2, "echo": True}
        with pytest.raises(RuntimeError, match="a defect"):
            await http.post("/v1/completions", json=body)
    assert [reply.is_cancelled for reply in made] == [True, True]
