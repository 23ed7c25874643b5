"""Health checks and metrics, for operators and supervisors."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, Field

from semantic import __version__
from semantic.application.engine.model import STARTING
from semantic.application.models.registry import ModelRegistry
from semantic.ports.backend import DeviceMemory
from semantic.ports.inbound import ModelState, ModelStatus
from semantic.ports.telemetry import Readings

_ANSWERING = {ModelState.READY, ModelState.SWAPPING, ModelState.UNLOADED}
_HIGH_PRESSURE = 0.9
_HOPELESS = {ModelState.HUNG, ModelState.FAILED}


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition of the server, apart from its model.

    Attributes:
        pressure: The share of the KV cache's memory that eviction cannot free, from 0 to 1.
        problems: Faults that do not keep the server from answering.
        note: Stored data that cannot be used and is recomputed; not a fault.
        device: The device's own memory, if it has any.
    """

    is_draining: bool = False
    pressure: float = 0.0
    problems: Sequence[str] = ()
    note: str = ""
    device: DeviceMemory | None = None


def health_router(models: ModelRegistry, condition: Callable[[], Condition]) -> APIRouter:
    """Serve `/health` and its three probes."""
    router = APIRouter(tags=["health"])

    def answer(good: set[ModelState], *, is_work_wanted: bool) -> JSONResponse:
        current, now = models.current(), condition()
        is_good = current.state in good and not (is_work_wanted and now.is_draining)
        is_strained = now.pressure > _HIGH_PRESSURE or bool(now.problems)
        body = {
            "status": "unavailable" if not is_good else "degraded" if is_strained else "ok",
            "version": __version__,
            "model": current.id,
            "backend": current.backend,
            "state": _state(current, is_draining=now.is_draining),
            "detail": current.detail,
            "compute": asdict(current.compute) if current.compute else None,
            "draft_model": current.draft_model,
            "images": current.images.value if current.images else None,
            "pressure": round(now.pressure, 3),
            "device_memory": _shares(now.device) if now.device else None,
            "problem": "; ".join(now.problems),
            "note": now.note,
        }
        return JSONResponse(body, 200 if is_good else 503)

    @router.get("/health")
    async def health() -> JSONResponse:
        """Return the state of the server; 200 if it answers requests."""
        return answer(_ANSWERING, is_work_wanted=True)

    @router.get("/health/live")
    async def live() -> JSONResponse:
        """200 unless only a restart can help: the device hangs, or its thread has ended."""
        return answer(set(ModelState) - _HOPELESS, is_work_wanted=False)

    @router.get("/health/ready")
    async def ready() -> JSONResponse:
        """200 if the server answers new requests; during a swap they wait first."""
        return answer(_ANSWERING, is_work_wanted=True)

    @router.get("/health/startup")
    async def startup() -> JSONResponse:
        """200 once the model has been loaded."""
        return answer(_ANSWERING | {ModelState.HUNG}, is_work_wanted=False)

    return router


def _shares(device: DeviceMemory) -> dict[str, int]:
    return {**asdict(device), "scratch": device.scratch}


def _state(model: ModelStatus, *, is_draining: bool) -> str:
    if is_draining and model.state in _ANSWERING:
        return "draining"
    is_starting = model.state is ModelState.LOADING and model.detail == STARTING
    return "starting" if is_starting else model.state.value


class ReadingsOut(BaseModel):
    """Metrics over time: each series has one value for each timestamp in `at`."""

    at: list[float] = Field(examples=[[1767225661.5]])
    series: dict[str, list[float]] = Field(examples=[{"semantic_tokens_generated_total": [812.0]}])


def metrics_router(
    render: Callable[[str], tuple[bytes, str]], history: Callable[[float], Readings]
) -> APIRouter:
    """Serve `/metrics`, and the last hour of some metrics.

    Args:
        render: Formats all metrics as an `Accept` header requests; returns the content type too.
        history: Returns the readings since a timestamp.
    """
    router = APIRouter(tags=["health"])

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(accept: Annotated[str, Header()] = "") -> Response:
        """Prometheus metrics."""
        text, content_type = await asyncio.to_thread(render, accept)
        return Response(text, headers={"content-type": content_type})

    @router.get("/metrics/history")
    async def recent(
        since: Annotated[
            float, Query(ge=0, allow_inf_nan=False, description="only readings after this `at`")
        ] = 0,
    ) -> ReadingsOut:
        """The last hour of the metrics that the page at `/` draws."""
        readings = history(since)
        return ReadingsOut(at=readings.at, series=readings.series)

    return router
