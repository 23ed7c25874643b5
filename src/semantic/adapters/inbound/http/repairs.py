"""Tells rules which client sent a request, and the client which rules changed it."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from semantic.adapters.inbound.http.middleware import Middleware
from semantic.application.requests.rewriting.repairs import CALLING_CLIENT
from semantic.domain.volatile.rules import CallingClient

REPAIRED_HEADER = "x-prompt-repaired"
_PROTOCOLS = {
    "/v1/messages": "anthropic",
    "/v1/responses": "responses",
    "/v1/agents": "agents",
    "/v1/": "openai",
    "/api/": "ollama",
}


class RepairNotice(Middleware):
    """Names the rules that changed a request in a header of its response.

    A request that waits for its model gets the headers before it is prepared, and so without this
    one; *explain* names the rules in any case.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        user_agent = Headers(scope=scope).get("user-agent", "")
        client = CallingClient(user_agent, protocol_of(scope["path"]))
        CALLING_CLIENT.set(client)

        async def send_with_notice(message: Message) -> None:
            if message["type"] == "http.response.start" and client.repairs:
                MutableHeaders(scope=message)[REPAIRED_HEADER] = ", ".join(client.repairs)
            await send(message)

        await self._app(scope, receive, send_with_notice)


def protocol_of(path: str) -> str:
    """Name the API that a path belongs to; empty if it is none with prompts.

    Example:
        >>> protocol_of("/v1/messages/count_tokens")
        'anthropic'
    """
    return next((name for start, name in _PROTOCOLS.items() if path.startswith(start)), "")
