"""OpenAI's endpoints over canned replies."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import httpx
import pytest
from fastapi import FastAPI

from semantic.adapters.inbound.openai.routes import openai_router, repeat, start_all
from semantic.application.models.registry import ModelRegistry
from semantic.domain.agents import Principal
from semantic.domain.chat import ChatRequest, Message, Role
from semantic.domain.errors import OverloadedError
from semantic.domain.sampling import SamplingParams
from tests.canned_replies import CannedInference, CannedReply, no_images

pytestmark = pytest.mark.unit

REQUEST = ChatRequest("m", (Message.of(Role.USER, "hi"),))


async def test_an_echo_that_fails_leaves_no_reply_running() -> None:
    made: list[CannedReply] = []

    class Broken(CannedInference):
        async def start(self, request: ChatRequest, principal: Principal) -> CannedReply:
            made.append(await super().start(request, principal))
            return made[-1]

        async def decode(self, tokens: Sequence[int]) -> str:
            raise RuntimeError(f"a defect at {tokens}")

    app = FastAPI()
    app.include_router(openai_router(Broken(), cast("ModelRegistry", None), Principal, no_images))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        body = {"model": "m", "prompt": [1, 2], "n": 2, "echo": True}
        with pytest.raises(RuntimeError, match="a defect"):
            await http.post("/v1/completions", json=body)
    assert [reply.is_cancelled for reply in made] == [True, True]


@pytest.mark.parametrize(
    "error", [OverloadedError("full."), RuntimeError("a defect"), asyncio.CancelledError()]
)
async def test_if_one_does_not_start_none_runs(error: BaseException) -> None:
    made: list[CannedReply] = []

    class Full(CannedInference):
        async def start(self, request: ChatRequest, principal: Principal) -> CannedReply:
            if len(made) == 2:
                raise error
            made.append(await super().start(request, principal))
            return made[-1]

    with pytest.raises(type(error)):
        await start_all(Full(), repeat(REQUEST, 3), Principal())
    assert [reply.is_cancelled for reply in made] == [True, True]


@pytest.mark.parametrize("seed", [0, 7, -(2**63), 2**63 - 1, 2**64 - 1])
def test_seeds_of_several_replies_differ_and_are_valid(seed: int) -> None:
    requests = repeat(replace(REQUEST, sampling=SamplingParams(seed=seed)), 4)
    assert requests[0].sampling.seed == seed
    assert len({(request.sampling.seed or 0) % 2**64 for request in requests}) == 4
