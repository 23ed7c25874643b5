"""The response that holds a compacted conversation of the Responses API."""

import secrets
import time
from collections.abc import Sequence
from typing import Literal

from typing_extensions import TypedDict

from semantic.adapters.inbound.http.streaming import Json
from semantic.adapters.inbound.responses.events import PREFIX, ResponseUsage, usage_json
from semantic.adapters.inbound.responses.items import encode_summary
from semantic.adapters.inbound.responses.stored import items_of
from semantic.application.requests.compaction.summary import Summary, is_summary
from semantic.domain.chat import Message, Role


class CompactedBody(TypedDict):
    """A compacted conversation: its user messages, and one item that holds the summary."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[Json]
    usage: ResponseUsage


def user_messages(messages: Sequence[Message]) -> list[Message]:
    """Return what the user wrote, without the summaries of earlier compactions."""
    return [one for one in messages if one.role is Role.USER and one.text and not is_summary(one)]


def compacted(kept: Sequence[Message], summary: Summary) -> CompactedBody:
    """Write the response for the messages that stay, and the summary of the others."""
    name = secrets.token_hex(12)
    item: Json = {
        "id": f"cmp_{name}",
        "type": "compaction",
        "encrypted_content": encode_summary(summary.text),
    }
    return {
        "id": f"{PREFIX}{name}",
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*items_of(name, kept), item],
        "usage": usage_json(summary.usage),
    }
