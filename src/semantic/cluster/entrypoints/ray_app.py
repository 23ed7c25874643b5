"""Servers as replicas of a Ray Serve application: routing by agent, health, draining, scaling.

A replica is the server that `semantic serve` runs, with `store = shared`; Ray's proxies forward
requests to it. Consistent hashing sends an agent's requests to one replica, or to the next ones
while that one is full. This routing only saves reads from the object store; correctness does not
depend on it. A replica receives requests once its model is loaded, and none once it begins to stop.
It then finishes its streams and uploads its remaining blocks.
"""

import asyncio
import itertools
import logging
import math
import os
import pickle
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semantic.adapters.config.sources import load_settings
from semantic.adapters.outbound.blocks.directory import DirectoryLock
from semantic.cluster.entrypoints.supervisor import require_shared_store
from semantic.domain.errors import InvalidRequestError
from semantic.entrypoints.bootstrap import Server, bootstrap
from semantic.entrypoints.server import create_app, tune_process
from semantic.ports.inbound import ModelState

try:
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
except ModuleNotFoundError:  # the command reports it; a replica does not need it
    ConsistentHashRouter = object

NAME = "semantic"
_HOPELESS = {ModelState.HUNG, ModelState.FAILED, ModelState.STOPPED}
_HIGH_PRESSURE = 0.8  # share of the KV cache's memory that is in use and cannot be evicted
_NUM_FALLBACKS = 8  # replicas to try when an agent's own is full
_QUEUES = 2  # batches per replica, the running one included, before others are tried
_AGENT_PATH = re.compile(r"(?:/v1)?/agents/([^/]+)")
# Headers that identify the agent, else the client's thread or session, in this order.
_AGENT_HEADERS = (
    "x-agent-id",
    "x-claude-code-agent-id",
    "thread-id",
    "thread_id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
)


class Replica:
    """The Ray Serve deployment class: one server in a process of Ray."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Wire a server in the first directory of this machine that no other replica uses."""
        tune_process()
        settings = load_settings(dict(options))
        logging.getLogger().setLevel(settings.runtime.log_level.upper())
        self._lock = _claim_directory(settings.home_dir / "replicas")
        own = {**options, "cache_dir": str(self._lock.path.parent / "cache")}
        self._server = bootstrap(load_settings(own))
        self._is_loaded = False

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Make the ASGI application; its lifespan starts and stops the server."""
        app = create_app(self._server)
        app.add_middleware(ReplicaHeader)
        return app

    @property
    def server(self) -> Server:
        return self._server

    async def check_health(self) -> None:
        """Check the model's state; the first call waits until the model is loaded.

        Raises:
            RuntimeError: Ray must replace this replica: the device hangs, or its thread failed or
                stopped.
        """
        models = self._server.models
        if not self._is_loaded and (loading := models.running_load()) is not None:
            ended = asyncio.shield(asyncio.wrap_future(loading))
            await asyncio.gather(ended, return_exceptions=True)  # the state says how it ended
        self._is_loaded = True
        status = models.current()
        if status.state in _HOPELESS:
            raise RuntimeError(f"{status.id} is {status.state.value}: {status.detail}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report memory pressure, which scales replicas together with Ray's request count."""
        return {"memory_pressure": self._server.pressure()}


class ReplicaHeader:
    """Middleware that adds `x-served-by`: the host name and process id of the replica."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._name = f"{socket.gethostname()}/{os.getpid()}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-served-by"] = self._name
            await send(message)

        await self._app(scope, receive, send_named)


def _claim_directory(base: Path) -> DirectoryLock:
    """Lock the first free directory; one that an earlier replica left is reused with its blocks."""
    for number in itertools.count():
        try:
            return DirectoryLock(base / str(number))
        except InvalidRequestError:
            continue  # another replica uses it
    raise AssertionError  # pragma: no cover - there are always more numbers


# -- routing and scaling -------------------------------------------------------------------------


def agent_key(path: str, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The agent, thread or session that a path and headers name; None if they name none.

    Example:
        >>> agent_key("/v1/agents/coder/generate", [])
        'coder'
        >>> agent_key("/v1/messages", [(b"x-agent-id", b"coder")])
        'coder'
    """
    if found := _AGENT_PATH.match(path):
        return found[1]
    told = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
    return next((told[name] for name in _AGENT_HEADERS if told.get(name)), None)


class AgentRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Routes by consistent hash of the agent; a request without a key goes to any replica.

    Requests that name no agent keep Ray's own routing key, if they have one.
    """

    # During a step, a replica may take longer than Ray's default of 0.1 s to report the length of
    # its queue; its agents would then move to the next replica.
    queue_len_response_deadline_s = 1.0
    max_queue_len_response_deadline_s = 4.0

    def _routing_key(self, pending_request: Any) -> str | None:
        argument = next(iter(pending_request.args), None) if pending_request else None
        key = key_of_argument(argument)
        return key or str(super()._routing_key(pending_request) or "") or None


def key_of_argument(argument: object) -> str | None:
    """The routing key of a request as Ray's proxy passes it to a router: possibly pickled."""
    request = pickle.loads(argument) if isinstance(argument, bytes) else argument  # noqa: S301 - by Ray
    scope = getattr(request, "asgi_scope", None)
    return agent_key(scope["path"], scope["headers"]) if scope else None


class AutoscalingTargets(Protocol):
    """The part of Ray's autoscaling configuration that `replicas_wanted` reads."""

    def get_target_ongoing_requests(self) -> float:
        """Return how many requests a replica should have at a time."""


class ReplicaLoad(Protocol):
    """The part of Ray's autoscaling context that `replicas_wanted` reads."""

    total_num_requests: float
    aggregated_metrics: Mapping[str, Mapping[Any, float]]
    config: AutoscalingTargets


def replicas_wanted(load: ReplicaLoad) -> tuple[int, dict[str, Any]]:
    """Ray's autoscaling policy: the replicas that the requests or the memory pressure require.

    Returns the larger number of the two, and the policy's state, which is empty.
    """
    by_queue = load.total_num_requests / load.config.get_target_ongoing_requests()
    pressures = (load.aggregated_metrics or {}).get("memory_pressure", {}).values()
    return max(math.ceil(by_queue), math.ceil(sum(pressures) / _HIGH_PRESSURE)), {}


def build(options: Mapping[str, Any]) -> Any:
    """Make the Ray Serve application; Ray's `import_path` names this function.

    Raises:
        InvalidRequestError: a setting is wrong, or the store is not shared.
    """
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    settings = load_settings(dict(options))
    require_shared_store(settings)
    most = settings.max_replicas or settings.replicas
    scaling = AutoscalingConfig(
        min_replicas=settings.replicas,
        max_replicas=most,
        target_ongoing_requests=settings.runtime.max_batch_size,
        upscale_delay_s=settings.upscale_delay_s,
        downscale_delay_s=settings.downscale_delay_s,
        metrics_interval_s=1,
        look_back_period_s=max(2, min(settings.upscale_delay_s, 30)),
        policy=AutoscalingPolicy(policy_function=f"{__name__}:replicas_wanted"),
    )
    router = RequestRouterConfig(
        request_router_class=AgentRouter,
        request_router_kwargs={"num_fallback_replicas": _NUM_FALLBACKS},
    )
    deployment = serve.deployment(
        name=NAME,
        autoscaling_config=scaling,
        request_router_config=router,
        max_ongoing_requests=_QUEUES * settings.runtime.max_batch_size,
        max_queued_requests=settings.runtime.max_queue,
        health_check_period_s=2,
        health_check_timeout_s=settings.hang_timeout_s,
        graceful_shutdown_timeout_s=settings.request_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": settings.replica_cpus, "num_gpus": settings.replica_gpus},
    )
    return deployment(serve.ingress()(Replica)).bind(dict(options))
