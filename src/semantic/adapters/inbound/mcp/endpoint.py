"""Serves the tools at `/mcp`, over the package `mcp`."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable

from mcp import types
from mcp.server import Server, ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from semantic import __version__
from semantic.adapters.inbound.mcp.tools import McpTools
from semantic.domain.agents import Principal
from semantic.domain.errors import SemanticError

_INSTRUCTIONS = (
    "Agents on this server keep their whole conversation in a KV cache. Ask another agent, or an "
    "earlier self, without changing it (ask_agent); fork an agent to try several ways, compare the "
    "branches, keep one and delete the rest. None of this computes a conversation again."
)


class McpEndpoint:
    """An ASGI application without sessions: each request is complete in itself."""

    def __init__(self, tools: McpTools, principal: Callable[[], Principal]) -> None:
        self._tools = {tool.name: tool for tool in tools.all()}
        self._principal = principal
        server: Server[object] = Server(
            "semantic",
            version=__version__,
            instructions=_INSTRUCTIONS,
            on_list_tools=self._list,
            on_call_tool=self._call,
        )
        self._manager = StreamableHTTPSessionManager(server, json_response=True, stateless=True)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve requests while this is open; once only."""
        async with self._manager.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._manager.handle_request(scope, receive, send)

    async def _list(
        self, _: ServerRequestContext[object], __: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        tools = [
            types.Tool(
                name=tool.name,
                description=tool.description,
                input_schema=tool.arguments.model_json_schema(),
                annotations=types.ToolAnnotations(
                    read_only_hint=tool.is_read_only,
                    destructive_hint=tool.name == "delete_agent",
                    open_world_hint=False,
                ),
            )
            for tool in self._tools.values()
        ]
        return types.ListToolsResult(tools=tools)

    async def _call(
        self, _: ServerRequestContext[object], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        tool = self._tools.get(params.name)
        if tool is None:
            names = ", ".join(self._tools)
            return _failure(f"there is no tool {params.name!r}; there are {names}.")
        try:
            found = await tool.call(self._principal(), params.arguments or {})
        except ValidationError as error:
            return _failure("; ".join(_fault(one) for one in error.errors()))
        except SemanticError as error:
            return _failure(error.message)
        text = types.TextContent(type="text", text=json.dumps(found, ensure_ascii=False))
        return types.CallToolResult(content=[text], structured_content=found)


def _fault(error: object) -> str:
    assert isinstance(error, dict)  # noqa: S101 - pydantic's
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}"


def _failure(message: str) -> types.CallToolResult:
    content = types.TextContent(type="text", text=message)
    return types.CallToolResult(content=[content], is_error=True)
