"""What stands around the app, over apps that misbehave; the HTTP server hears nothing of it."""

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send
from structlog.testing import capture_logs

from semantic.adapters.inbound.http.errors import install_error_handlers
from semantic.adapters.inbound.http.middleware import AccessLog, BodyLimit

pytestmark = pytest.mark.unit


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    install_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=100)
    app.add_middleware(AccessLog)
    return app


def client(app: FastAPI) -> httpx.AsyncClient:
    # The transport raises what the app lets through, and fails if it answers twice.
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def test_a_defect_is_answered_in_shape_and_logged_once(app: FastAPI) -> None:
    defect = RuntimeError("boom")

    @app.get("/broken")
    async def broken() -> None:
        raise defect

    with capture_logs() as lines:
        async with client(app) as http:
            answer = await http.get("/broken")
    assert answer.status_code == 500
    assert answer.headers["x-request-id"].startswith("req_")
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "boom" not in error["message"]
    (line,) = lines
    assert (line["path"], line["status"], line["exc_info"]) == ("/broken", 500, defect)


async def test_a_defect_in_a_started_answer_is_logged_with_the_status_sent() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("boom")

    sent = []

    async def send(message: object) -> None:
        sent.append(message)

    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    with capture_logs() as lines:
        await AccessLog(broken)(
            {"type": "http", "method": "GET", "path": "/x", "headers": []}, receive, send
        )
    assert len(sent) == 1
    assert [(line["log_level"], line["status"]) for line in lines] == [("error", 200)]


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
