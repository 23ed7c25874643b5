"""What a reply is told as when its turn was not logged."""

from typing import cast

import httpx
import pytest
from fastapi import FastAPI

from semantic.adapters.inbound.agents.routes import AgentApi
from semantic.application.agents.service import AgentService
from semantic.application.agents.transfer import AgentTransfer
from semantic.domain.agents import Principal
from semantic.domain.errors import AgentNotFoundError
from semantic.domain.events import Finished, Started, Usage
from semantic.domain.sampling import FinishReason
from tests.canned_replies import CannedReply

pytestmark = pytest.mark.unit

EVENTS = (Started("1", "fake", Usage(3)), Finished(FinishReason.CANCELLED, Usage(3)))


class DeletedAgent:
    """An agent that goes while it answers."""

    async def generate(self, *_: object) -> CannedReply:
        return CannedReply(EVENTS)

    def turns(self, *_: object) -> None:
        raise AgentNotFoundError("gone.")


async def test_a_reply_of_nothing_is_an_empty_text() -> None:
    app = FastAPI()
    agents, transfer = cast("AgentService", DeletedAgent()), cast("AgentTransfer", None)
    app.include_router(AgentApi(agents, transfer, Principal).router())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        told = (await http.post("/v1/agents/a/generate", json={"message": "hi"})).json()

    assert told["message"]["content"] == [{"type": "text", "text": ""}]
    assert (told["text"], told["turn_id"]) == ("", None)
