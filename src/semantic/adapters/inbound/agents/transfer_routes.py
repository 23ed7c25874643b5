"""Agents as files: export and import."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from semantic.adapters.inbound.agents.routes import AgentPath
from semantic.adapters.inbound.agents.schema import AgentId
from semantic.adapters.inbound.agents.views import ImportedOut
from semantic.adapters.inbound.http.errors import refusals
from semantic.domain.agents import Principal
from semantic.ports.inbound import AgentManagementPort, AgentTransferPort

MEDIA_TYPE = "application/x-tar"
IMPORT_PATH = "/v1/agents/import"
_PIECE = 2**20
_IN_MEMORY = 2**23
_FILE: dict[str, Any] = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_EXPORTED: dict[str, Any] = {"description": "the file", "content": _FILE}


class TransferApi:
    """Endpoints that move whole agents."""

    def __init__(
        self,
        transfer: AgentTransferPort,
        agents: AgentManagementPort,
        principal: Callable[[], Principal],
    ) -> None:
        self._transfer = transfer
        self._agents = agents
        self._principal = principal

    def router(self) -> APIRouter:
        """Say which method answers where."""
        router = APIRouter(tags=["agents"])
        router.add_api_route(
            "/v1/agents/{agent_id}/export",
            self.export,
            methods=["GET"],
            response_class=StreamingResponse,
            response_model=None,
            responses={
                200: {"description": "the file", "content": _FILE},
                **refusals(400, 404, 503),
            },
        )
        router.add_api_route(
            IMPORT_PATH,
            self.import_file,
            methods=["POST"],
            status_code=201,
            responses=refusals(400, 409, 413, 503),
            openapi_extra={"requestBody": {"required": True, "content": _FILE}},
        )
        return router

    async def export(self, agent_id: AgentPath) -> StreamingResponse:
        """A tar archive of settings, turns and attention state, with checksums and a signature."""
        pieces = await asyncio.to_thread(self._transfer.export, self._principal(), agent_id)
        headers = {"content-disposition": f'attachment; filename="{agent_id}.tar"'}
        return StreamingResponse(pieces, media_type=MEDIA_TYPE, headers=headers)

    async def import_file(
        self,
        http: Request,
        id: Annotated[AgentId | None, Query(description="its name from now on")] = None,  # noqa: A002
        messages_only: Annotated[bool, Query(description="leave attention state out")] = False,
    ) -> ImportedOut:
        """Take in an exported file; it is checked as a whole before anything is changed.

        Another model's attention state is refused; what was said can be had from it all the same.
        State of a file that neither this server nor a trusted one signed is left out, and computed
        with the next turn; `import_state` says which it was.
        """
        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
            async for piece in http.stream():
                await asyncio.to_thread(file.write, piece)
            taken = await asyncio.to_thread(
                lambda: self._transfer.take_in(
                    self._principal(), lambda: _pieces(file), id, is_messages_only=messages_only
                )
            )
        view = await asyncio.to_thread(self._agents.get, self._principal(), taken.agent.id)
        return ImportedOut.imported(view, taken)


def _pieces(file: "BinaryIO | tempfile.SpooledTemporaryFile[bytes]") -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(_PIECE):
        yield piece
