"""Bodies that describe models, and the endpoints of downloads."""

import asyncio
import re
from typing import Self

from fastapi import APIRouter, Response
from pydantic import AliasPath, BaseModel, ConfigDict, Field

from semantic.adapters.inbound.http.errors import refusals
from semantic.application.models.downloads import ModelDownloads
from semantic.ports.inbound import ModelStatus
from semantic.ports.models import ModelFacts


class ModelOut(BaseModel):
    """A model, with details for the operator."""

    model_config = ConfigDict(from_attributes=True)

    id: str = Field(examples=["fake"])
    state: str = Field(validation_alias=AliasPath("state", "value"), examples=["ready"])
    detail: str = Field(examples=["ready"])
    family: str = Field(examples=["llama"])
    size_bytes: int = Field(validation_alias="num_bytes", examples=[269060552])
    fits: bool | None = Field(examples=[True])
    max_context: int = Field(examples=[8192])
    draft_model: str = Field(
        description="drafts for it; mtp: its own head; empty if none does", examples=[""]
    )
    precision: str = Field(
        default="", description="number format of the weights", examples=["BF16"]
    )
    bits: int | None = Field(default=None, description="of each weight", examples=[16])
    parameters: int = Field(default=0, description="0 if unknown", examples=[134515008])

    @classmethod
    def describe(cls, status: ModelStatus, facts: ModelFacts) -> Self:
        made = cls.model_validate(status)
        made.max_context = status.max_context or facts.max_context
        made.precision, made.parameters = facts.precision, facts.num_parameters
        if digits := re.search(r"\d+", facts.precision):
            made.bits = int(digits[0])
        return made


class ModelsOut(BaseModel):
    """All models, the current one first."""

    backend: str = Field(examples=["torch"])
    models: list[ModelOut]


class SuggestedModel(BaseModel):
    """A published model, and how it would run on this machine."""

    model_config = ConfigDict(from_attributes=True)

    name: str = Field(validation_alias=AliasPath("model", "name"), examples=["qwen3-4b"])
    source: str = Field(
        validation_alias=AliasPath("model", "four_bit"),
        description="the Hugging Face id of its four-bit version",
        examples=["mlx-community/Qwen3-4B-4bit"],
    )
    parameters: float = Field(
        validation_alias=AliasPath("model", "parameters"), description="in billions"
    )
    size_bytes: int = Field(validation_alias=AliasPath("model", "num_bytes"))
    memory_bytes: int = Field(
        validation_alias=AliasPath("model", "memory_bytes"),
        description="of the weights and a conversation of 16,384 tokens",
    )
    max_context: int = Field(validation_alias=AliasPath("model", "max_context"))
    licence: str = Field(validation_alias=AliasPath("model", "licence"))
    has_tools: bool = Field(validation_alias=AliasPath("model", "has_tools"))
    fits: bool
    is_best: bool = Field(description="the largest that fits, is fast enough and knows tools")
    tokens_per_s: float | None = Field(description="estimated; null if it is not measured")
    is_here: bool = Field(default=False, description="it is on this machine already")


class SuggestedModels(BaseModel):
    """Known models, the smallest first."""

    models: list[SuggestedModel]


class RemovedModel(BaseModel):
    """A model that was deleted."""

    model: str = Field(examples=["Qwen3-4B-4bit"])
    freed_bytes: int


class StartDownload(BaseModel):
    """Download a model without serving it."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"model": "org/small-4bit"}]}
    )

    model: str = Field(min_length=1, description="as for a swap", examples=["Qwen/Qwen3-4B"])


class DownloadOut(BaseModel):
    """A download since the start of the server."""

    model_config = ConfigDict(from_attributes=True)

    model: str = Field(examples=["org/small-4bit"])
    state: str = Field(
        validation_alias=AliasPath("state", "value"),
        description="running, done, stopped or failed",
        examples=["running"],
    )
    detail: str = Field(description="the current step, or why it failed", examples=[""])
    done_bytes: int = Field(validation_alias=AliasPath("transfer", "num_done"), examples=[2**20])
    total_bytes: int = Field(
        validation_alias=AliasPath("transfer", "num_total"),
        description="0 while unknown",
        examples=[10**9],
    )


class DownloadsOut(BaseModel):
    """All downloads, the latest first."""

    downloads: list[DownloadOut]


class DownloadsApi:
    """Endpoints under `/admin/models/downloads`."""

    def __init__(self, downloads: ModelDownloads) -> None:
        self._downloads = downloads

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/admin/models/downloads", tags=["admin"])
        add, one = router.add_api_route, "/{model:path}"
        add("", self.downloads, methods=["GET"])
        add("", self.start, methods=["POST"], status_code=202, responses=refusals(400, 404))
        add(
            one,
            self.stop,
            methods=["DELETE"],
            status_code=204,
            response_class=Response,
            responses=refusals(404),
        )
        return router

    async def downloads(self) -> DownloadsOut:
        """List the downloads since the start of the server, with their progress."""
        found = self._downloads.downloads()
        return DownloadsOut(downloads=[DownloadOut.model_validate(one) for one in found])

    async def start(self, body: StartDownload) -> DownloadOut:
        """Download a model while another one is served; a model on this machine is done at once."""
        started = await asyncio.to_thread(self._downloads.start, body.model)
        return DownloadOut.model_validate(started)

    async def stop(self, model: str) -> None:
        """Stop a download, of which complete files stay; forget one that has ended."""
        self._downloads.stop(model)
