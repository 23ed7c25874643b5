"""What is done with bodies that are refused, message by message."""

import pytest
from starlette.types import Message, Receive, Scope, Send

from semantic.adapters.inbound.http.middleware import BodyLimit

pytestmark = pytest.mark.unit


async def never(_: Scope, __: Receive, ___: Send) -> None:
    raise AssertionError("the application is not asked")


@pytest.mark.parametrize("num_pieces, num_read", [(1, 1), (4, 4), (100, 11)])
async def test_an_answer_waits_for_the_end_of_a_body_in_an_unknown_encoding(
    num_pieces: int, num_read: int
) -> None:
    happened: list[str] = []

    async def receive() -> Message:
        happened.append("read")
        is_more = len(happened) < num_pieces
        return {"type": "http.request", "body": b"x" * 10, "more_body": is_more}

    async def send(message: Message) -> None:
        happened.append(str(message.get("status", "body")))

    headers = [(b"content-encoding", b"br"), (b"host", b"localhost")]
    scope = {"type": "http", "path": "/v1/messages", "method": "POST", "headers": headers}
    await BodyLimit(never, 100)(scope, receive, send)
    assert happened == ["read"] * num_read + ["415", "body"]
