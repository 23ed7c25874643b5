"""Loads the Model Context Protocol on the first request for it.

Importing the package `mcp` takes a second, which most starts of the server can spare.
"""

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from semantic.adapters.extras import missing_extra
from semantic.adapters.inbound.http.errors import error_response

if TYPE_CHECKING:
    from semantic.adapters.inbound.mcp.endpoint import McpEndpoint

MCP_PATH = "/mcp"


def missing_mcp() -> str:
    """Say how to install the package `mcp`."""
    return missing_extra("the Model Context Protocol", "mcp", "mcp")


class McpLoader:
    """An ASGI application that creates the endpoint when it is first called."""

    def __init__(self, make: Callable[[], "McpEndpoint"]) -> None:
        """`make` imports the package and creates the endpoint; it is called on a thread."""
        self._make = make
        self._wanted = asyncio.Event()
        self._made: asyncio.Future[McpEndpoint] | None = None

    @property
    def route(self) -> Route:
        return Route(MCP_PATH, endpoint=self, include_in_schema=False)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answer requests while this is open; once only."""
        self._made = asyncio.get_running_loop().create_future()
        runner = asyncio.create_task(self._run(self._made))
        try:
            yield
        finally:
            runner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await runner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if importlib.util.find_spec("mcp") is None or self._made is None:
            await error_response(501, missing_mcp(), "not_implemented")(scope, receive, send)
            return
        self._wanted.set()
        endpoint = await asyncio.shield(self._made)
        await endpoint(scope, receive, send)

    async def _run(self, made: "asyncio.Future[McpEndpoint]") -> None:
        await self._wanted.wait()
        endpoint = await asyncio.to_thread(self._make)
        async with endpoint.running():
            made.set_result(endpoint)
            await asyncio.Event().wait()  # until it is cancelled
