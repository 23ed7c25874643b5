"""Operator endpoints: swap models, drain the server, change runtime settings."""

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field, create_model

from semantic.adapters.inbound.admin.models import (
    ModelOut,
    ModelsOut,
    RemovedModel,
    SuggestedModel,
    SuggestedModels,
)
from semantic.adapters.inbound.http.errors import refusals
from semantic.adapters.validation import pydantic_fields
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import SwapReport
from semantic.application.models.registry import ModelRegistry
from semantic.application.models.runtime import Runtime
from semantic.application.settings import changeable_settings

_POLL_S = 0.02

ModelName = Annotated[
    str,
    Field(
        min_length=1,
        description="a name from /v1/models, an alias, a path, or a Hugging Face id",
        examples=["fake"],
    ),
]
DrainS = Annotated[
    float | None,
    Field(
        ge=0,
        le=1e9,  # about the longest wait that threads support
        description="how long running requests may continue; default: drain_timeout_s",
    ),
]
Wait = Annotated[bool, Field(description="false answers 202 at once; events report the result")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Swap(_Body):
    """Serve another model."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"model": "smollm2-135m-instruct"}]}
    )

    model: ModelName
    drain_timeout_s: DrainS = None
    wait: Wait = True


class Load(_Body):
    """Load a model when none is loaded; by default the one that was served last."""

    model: str = Field(
        default="", description="as for a swap; empty: the model served last", examples=["fake"]
    )
    wait: Wait = True


class Unload(_Body):
    """Unload the model."""

    drain_timeout_s: DrainS = None
    wait: Wait = True


class SwapOut(BaseModel):
    """The result of a swap; `seconds` is how long requests had to wait."""

    status: Literal["done", "accepted"] = Field(examples=["done"])
    previous: str | None = Field(default=None, examples=["fake-2"])
    model: str | None = Field(default=None, examples=["fake"])
    seconds: float | None = Field(default=None, examples=[1.93])
    cut_requests: int | None = Field(default=None, examples=[0])


class Drain(_Body):
    """Accept no new work."""

    wait_s: float = Field(
        default=0,
        ge=0,
        le=3600,
        description="answer when everything has finished, or after this many seconds",
    )


class DrainOut(BaseModel):
    """`drained` once no request waits or runs."""

    status: Literal["draining", "drained", "serving"] = Field(examples=["drained"])
    live_requests: int = Field(examples=[0])


if TYPE_CHECKING:
    _RuntimeFields = _Body
else:
    _RuntimeFields = create_model(
        "_RuntimeFields", __base__=_Body, **pydantic_fields(changeable_settings())
    )


class RuntimePatch(_RuntimeFields):
    """Settings to change; absent fields keep their value. Bounds are those of the settings."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"batch_window_ms": 5}, {}]}
    )


class RuntimeOut(_RuntimeFields):
    """The current values of all settings that can change."""

    model_config = ConfigDict(from_attributes=True)


class AdminApi:
    """Endpoints for the server's operator."""

    def __init__(self, models: ModelRegistry, device: DeviceThread, runtime: Runtime) -> None:
        self._models = models
        self._device = device
        self._runtime = runtime

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/admin", tags=["admin"], responses=refusals(400, 404, 409, 503))
        add = router.add_api_route
        add("/models", self.models, methods=["GET"])
        add("/models/recommended", self.recommended, methods=["GET"])
        add("/models/{model:path}", self.remove, methods=["DELETE"])
        add("/models/swap", self.swap, methods=["POST"])
        add("/models/load", self.load, methods=["POST"])
        add("/models/unload", self.unload, methods=["POST"])
        add("/drain", self.drain, methods=["POST"])
        add("/drain", self.end_drain, methods=["DELETE"])
        add("/runtime", self.runtime, methods=["GET"])
        add("/runtime", self.change_runtime, methods=["PATCH"])
        return router

    async def runtime(self) -> RuntimeOut:
        """Return the settings that can change while the server runs."""
        return RuntimeOut.model_validate(self._runtime.read())

    async def change_runtime(self, body: RuntimePatch) -> RuntimeOut:
        """Change some settings until the server stops; returns all of them."""
        changes = body.model_dump(exclude_unset=True)
        return RuntimeOut.model_validate(await asyncio.to_thread(self._runtime.change, changes))

    async def models(self) -> ModelsOut:
        """List the loaded model, the one that is being loaded, and those on this machine."""
        found = await asyncio.to_thread(self._models.models)
        facts = await asyncio.to_thread(lambda: [self._models.facts(one.id) for one in found])
        models = [ModelOut.describe(*one) for one in zip(found, facts, strict=True)]
        return ModelsOut(backend=found[0].backend, models=models)

    async def recommended(self) -> SuggestedModels:
        """List known models, with the memory and the speed that this machine has for them."""
        found = await asyncio.to_thread(self._models.suggestions)
        models = [
            SuggestedModel.model_validate(one).model_copy(update={"is_here": is_here})
            for one, is_here in found
        ]
        return SuggestedModels(models=models)

    async def remove(self, model: str) -> RemovedModel:
        """Delete a model's files from this machine; not those that other programs downloaded."""
        freed = await asyncio.to_thread(self._models.remove, model)
        return RemovedModel(model=model, freed_bytes=freed)

    async def swap(self, body: Swap, response: Response) -> SwapOut:
        """Serve another model; running requests may finish first, new ones wait for it.

        A model that is not on this machine is downloaded first. If it cannot be loaded, the server
        returns to the previous model, and the response says why.
        """
        done = await asyncio.to_thread(self._models.swap, body.model, body.drain_timeout_s)
        return await _answer(done, response, is_awaited=body.wait)

    async def load(self, response: Response, body: Load | None = None) -> SwapOut:
        """Load a model when none is loaded."""
        body = body or Load()
        done = await asyncio.to_thread(self._models.load, body.model)
        return await _answer(done, response, is_awaited=body.wait)

    async def unload(self, response: Response, body: Unload | None = None) -> SwapOut:
        """Unload the model and free its memory; the next request for it loads it again."""
        body = body or Unload()
        done = await asyncio.to_thread(self._models.unload, body.drain_timeout_s)
        return await _answer(done, response, is_awaited=body.wait)

    async def drain(self, body: Drain | None = None) -> DrainOut:
        """Refuse new work with 503, and let waiting and running requests finish.

        `/health/ready` answers 503 from now on, and `/health/live` 200.
        """
        self._device.is_draining = True
        await wait_until_drained(self._device, body.wait_s if body else 0)
        num_live = self._device.num_live
        return DrainOut(status="draining" if num_live else "drained", live_requests=num_live)

    async def end_drain(self) -> DrainOut:
        """Accept work again."""
        self._device.is_draining = False
        return DrainOut(status="serving", live_requests=self._device.num_live)


async def wait_until_drained(device: DeviceThread, timeout_s: float) -> None:
    """Wait until no request waits or runs, for at most `timeout_s` seconds."""
    for _ in range(int(timeout_s / _POLL_S)):
        if not device.num_live:
            return
        await asyncio.sleep(_POLL_S)


async def _answer(done: Future[SwapReport], response: Response, *, is_awaited: bool) -> SwapOut:
    if not is_awaited and not done.done():
        response.status_code = 202
        return SwapOut(status="accepted")
    # A client that disconnects does not cancel the swap.
    report = await asyncio.shield(asyncio.wrap_future(done))
    return SwapOut(
        status="done",
        previous=report.previous,
        model=report.model,
        seconds=round(report.seconds, 3),
        cut_requests=report.num_cut,
    )
