"""Endpoints of cache packs: make one of an agent; for operators, add, list and remove them."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from semantic.adapters.inbound.agents.requests import AgentId, AgentPath
from semantic.adapters.inbound.agents.routes import MEDIA_TYPE, TAR_CONTENT
from semantic.adapters.inbound.agents.views import View
from semantic.adapters.inbound.http.errors import refusals
from semantic.adapters.inbound.http.uploads import uploaded
from semantic.application.packs.service import DEFAULT_SHARE, PackService
from semantic.domain.agents import Principal
from semantic.ports.packs import PackView

PACKS_PATH = "/admin/packs"
_KEY = "3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29"
Tenants = Annotated[
    list[AgentId] | None,
    Query(description="tenants, if not the key's own; may be repeated", examples=[["team"]]),
]
PackName = Annotated[AgentId, Path(description="the pack's name", examples=["claude-code"])]


class PackOut(View):
    """A pack that a tenant's agents share."""

    name: str = Field(examples=["claude-code"])
    tenant: str = Field(examples=["local"])
    model: str = Field(examples=["smollm2-135m-instruct"])
    signer: str = Field(description="name of the trusted key", examples=["alice"])
    key: str = Field(description="public key of the signer", examples=[_KEY])
    tokens: int = Field(examples=[15360])
    blocks: int = Field(examples=[60])
    bytes: int = Field(description="size of its KV cache", examples=[707788800])
    memory_tokens: int = Field(examples=[0])
    disk_tokens: int = Field(examples=[15360])
    usable: bool = Field(description="whether the loaded model can use it", examples=[True])
    created_at: float = Field(examples=[1790000000.0])

    @classmethod
    def about(cls, pack: PackView) -> "PackOut":
        return cls(
            name=pack.name,
            tenant=pack.tenant,
            model=pack.model,
            signer=pack.signer.name,
            key=pack.signer.key,
            tokens=pack.num_tokens,
            blocks=pack.num_blocks,
            bytes=pack.num_bytes,
            memory_tokens=pack.memory_tokens,
            disk_tokens=pack.disk_tokens,
            usable=pack.is_usable,
            created_at=pack.created_at,
        )


class PackList(View):
    """Packs, sorted by name."""

    object: Literal["list"] = "list"
    data: list[PackOut]


class AddedPackOut(PackList):
    """A pack that was added, once for each tenant."""

    checked_blocks: int = Field(
        description="blocks that were computed again and compared", examples=[6]
    )


class PackApi:
    """Endpoints of packs. Those that may read a disk run on FastAPI's threads."""

    def __init__(
        self,
        packs: PackService,
        admit: Callable[[Principal], AbstractContextManager[None]],
        principal: Callable[[], Principal],
    ) -> None:
        """`admit` limits how many files are uploaded at once."""
        self._packs = packs
        self._admit = admit
        self._principal = principal

    def router(self) -> APIRouter:
        router = APIRouter(tags=["packs"])
        add, one = router.add_api_route, f"{PACKS_PATH}/{{name}}"
        add(
            "/v1/agents/{agent_id}/pack",
            self.make,
            methods=["GET"],
            response_class=StreamingResponse,
            response_model=None,
            responses={
                200: {"description": "the file", "content": TAR_CONTENT},
                **refusals(400, 404, 503),
            },
        )
        add(PACKS_PATH, self.packs, methods=["GET"], responses=refusals(400))
        add(
            PACKS_PATH,
            self.add,
            methods=["POST"],
            status_code=201,
            responses=refusals(400, 409, 413, 429, 503),
            openapi_extra={"requestBody": {"required": True, "content": TAR_CONTENT}},
        )
        add(
            one,
            self.remove,
            methods=["DELETE"],
            status_code=204,
            response_class=Response,
            responses=refusals(400, 404, 503),
        )
        return router

    def make(
        self,
        agent_id: AgentPath,
        name: Annotated[AgentId, Query(description="the pack's name", examples=["claude-code"])],
    ) -> StreamingResponse:
        """Make a pack of an agent's system prompt and tools, as a signed tar archive.

        The file has the blocks before the first user message and nothing of the conversation.
        """
        pieces: Iterator[bytes] = self._packs.make(self._principal(), agent_id, name)
        headers = {"content-disposition": f'attachment; filename="{name}.pack"'}
        return StreamingResponse(pieces, media_type=MEDIA_TYPE, headers=headers)

    def packs(self, tenant: Tenants = None) -> PackList:
        """List the packs of all tenants, or of some."""
        return PackList(data=[PackOut.about(pack) for pack in self._packs.packs(tenant or ())])

    async def add(
        self,
        http: Request,
        tenant: Tenants = None,
        name: Annotated[AgentId | None, Query(description="another name for the pack")] = None,
        sample: Annotated[
            float,
            Query(
                gt=0, le=1, description="share of the blocks to compute again; at least 4 blocks"
            ),
        ] = DEFAULT_SHARE,
    ) -> AddedPackOut:
        """Add a pack for all agents of a tenant.

        The server verifies the signature, which must be of a trusted key, the model's weights and
        the KV format. It then computes random blocks again and compares them, before it uses any.
        """
        principal = self._principal()
        with self._admit(principal):
            async with uploaded(http) as open_file:
                owners = tenant or [principal.tenant]
                added = await asyncio.to_thread(
                    lambda: self._packs.add(owners, open_file, name=name, share=sample)
                )
        data = [PackOut.about(pack) for pack in added.views]
        return AddedPackOut(data=data, checked_blocks=added.num_checked)

    def remove(self, name: PackName, tenant: Tenants = None) -> None:
        """Remove a pack; deletes its blocks, except those that conversations are built on."""
        self._packs.remove(tenant or [self._principal().tenant], name)
