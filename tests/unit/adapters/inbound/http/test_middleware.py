"""The middleware around apps that misbehave: the HTTP server never sees their errors."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

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


async def read_whole(scope: Scope, receive: Receive, send: Send) -> None:
    del scope
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"read"})


async def post_packed(content: bytes) -> httpx.Response:
    app = BodyLimit(read_whole, 2**30)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
    async with http:
        return await http.post("/", content=content, headers={"content-encoding": "gzip"})


EMPTY = gzip.compress(b"")


@pytest.mark.parametrize("num_members, status", [(1000, 200), (1001, 413), (100_000, 413)])
async def test_a_body_of_many_compressed_members_is_refused(num_members: int, status: int) -> None:
    answer = await post_packed(EMPTY * num_members)
    assert answer.status_code == status
    if status == 413:
        assert "1000 compressed members" in answer.json()["error"]["message"]


@pytest.mark.parametrize("num_bytes, status", [(2**20, 200), (2**20 + 1, 413), (2**28, 413)])
async def test_a_body_that_expands_too_much_is_refused(num_bytes: int, status: int) -> None:
    packed = gzip.compress(bytes(num_bytes))
    answer = await post_packed(packed)
    assert len(packed) * 50 < num_bytes
    assert answer.status_code == status
    if status == 413:
        assert "50 times its packed size" in answer.json()["error"]["message"]


class CountingThreads(ThreadPoolExecutor):
    """Threads that count what they are given to do."""

    num_calls = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_calls += 1
        return super().submit(fn, *args, **kwargs)


async def test_packed_bodies_are_unpacked_off_the_event_loop() -> None:
    with CountingThreads(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        assert (await post_packed(gzip.compress(b"{}"))).status_code == 200
    assert threads.num_calls


async def test_a_body_that_comes_after_the_answer_is_discarded() -> None:
    async def answer_first(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await read_whole(scope, receive, lambda _: asyncio.sleep(0))
        await send({"type": "http.response.body", "body": b"done"})

    for content, headers in (
        (EMPTY * 2000, {"content-encoding": "gzip"}),
        (b"x" * 200, {"transfer-encoding": "chunked"}),
    ):
        app = BodyLimit(answer_first, 100)
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with http:
            answer = await http.post("/", content=aiter_of(content), headers=headers)
        assert (answer.status_code, answer.content) == (200, b"done")


async def aiter_of(content: bytes) -> AsyncIterator[bytes]:
    yield content
