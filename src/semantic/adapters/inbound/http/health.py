"""Whether the server lives and can answer, and its metrics: for people and supervisors."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Header
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from semantic import __version__
from semantic.application.models.registry import ModelRegistry
from semantic.ports.inbound import ModelState

_ANSWERING = {ModelState.READY, ModelState.SWAPPING, ModelState.UNLOADED}


def health_router(
    models: ModelRegistry, problems: Callable[[], Sequence[str]] = tuple
) -> APIRouter:
    """Serve `/health` and its three probes.

    Args:
        models: Whose state is told.
        problems: What is wrong although requests are answered.
    """
    router = APIRouter(tags=["health"])

    def answer(good: set[ModelState]) -> JSONResponse:
        current = models.current()
        is_good = current.state in good
        body = {
            "status": "ok" if is_good else "unavailable",
            "version": __version__,
            "model": current.id,
            "backend": current.backend,
            "state": current.state.value,
            "detail": current.detail,
            "compute": asdict(current.compute) if current.compute else None,
            "problem": "; ".join(problems()),
        }
        return JSONResponse(body, 200 if is_good else 503)

    @router.get("/health")
    async def health() -> JSONResponse:
        """Everything at a glance; 200 if requests are answered."""
        return answer(_ANSWERING)

    @router.get("/health/live")
    async def live() -> JSONResponse:
        """200 unless a restart is the only help: the device hangs, or its thread has ended."""
        return answer(set(ModelState) - {ModelState.HUNG, ModelState.FAILED})

    @router.get("/health/ready")
    async def ready() -> JSONResponse:
        """200 if requests are answered, though they may have to wait for a swap."""
        return answer(_ANSWERING)

    @router.get("/health/startup")
    async def startup() -> JSONResponse:
        """200 once the model was loaded."""
        return answer(_ANSWERING | {ModelState.HUNG})

    return router


def metrics_router(render: Callable[[str], tuple[bytes, str]]) -> APIRouter:
    """Serve `/metrics`.

    Args:
        render: Writes all metrics in a format of an `Accept` header; returns its content type too.
    """
    router = APIRouter(tags=["health"])

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(accept: Annotated[str, Header()] = "") -> Response:
        """Prometheus metrics."""
        text, content_type = await asyncio.to_thread(render, accept)
        return Response(text, headers={"content-type": content_type})

    return router
