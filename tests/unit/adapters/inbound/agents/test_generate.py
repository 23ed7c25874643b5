"""The reply of a turn that was not logged."""

from collections.abc import Sequence
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from semantic.adapters.inbound.agents.routes import AgentApi
from semantic.application.agents.service import AgentService
from semantic.application.agents.transfer import AgentTransfer
from semantic.application.requests.compaction.successor import AgentCompaction
from semantic.domain.agents import Principal
from semantic.domain.errors import AgentNotFoundError
from semantic.domain.events import Event, Finished, Started, Usage
from semantic.domain.sampling import FinishReason
from tests.canned_replies import CUT_CALL, CannedReply, no_images

pytestmark = pytest.mark.unit

EVENTS = (Started("1", "fake", Usage(3)), Finished(FinishReason.CANCELLED, Usage(3)))


class DeletedAgent:
    """An agent that goes while it answers."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    async def generate(self, *_: object, **__: object) -> CannedReply:
        return CannedReply(self._events)

    def turns(self, *_: object) -> None:
        raise AgentNotFoundError("gone.")


async def generate(events: Sequence[Event]) -> Any:
    app = FastAPI()
    inference = DeletedAgent(events)
    agents, transfer = cast("AgentService", inference), cast("AgentTransfer", None)
    compaction = cast("AgentCompaction", None)
    app.include_router(
        AgentApi(inference, agents, transfer, compaction, Principal, no_images).router()
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return (await http.post("/v1/agents/a/generate", json={"message": "hi"})).json()


async def test_a_call_that_was_cut_off_is_shown_as_incomplete() -> None:
    told = await generate(CUT_CALL)
    assert told["finish_reason"] == "max_tokens"
    assert told["message"]["content"] == [
        {"type": "text", "text": "I look."},
        {
            "type": "incomplete_tool_use",
            "id": "1",
            "name": "read",
            "partial_input": '{"path": "ä',
        },
    ]


async def test_a_reply_of_nothing_is_an_empty_text() -> None:
    told = await generate(EVENTS)
    assert told["message"]["content"] == [{"type": "text", "text": ""}]
    assert (told["text"], told["turn_id"]) == ("", None)
