"""The HTTP application over a wired `Server`, and the process that serves it."""

import asyncio
import contextlib
import functools
import logging
import math
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.client import HTTPConnection, HTTPException
from types import FrameType
from typing import TYPE_CHECKING, Any

import structlog
import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from semantic import __version__
from semantic.adapters.config.settings import Settings
from semantic.adapters.images.fetch import MediaFetcher
from semantic.adapters.images.sources import ImageSources
from semantic.adapters.inbound.admin.models import DownloadsApi
from semantic.adapters.inbound.admin.routes import AdminApi, wait_until_drained
from semantic.adapters.inbound.agents.cache import CacheApi
from semantic.adapters.inbound.agents.packs import PACKS_PATH, PackApi
from semantic.adapters.inbound.agents.routes import IMPORT_PATH, AgentApi
from semantic.adapters.inbound.agents.volatile import volatile_router
from semantic.adapters.inbound.anthropic.routes import anthropic_router
from semantic.adapters.inbound.http.connections import (
    ConnectionLimits,
    Listener,
    OpenConnections,
    raise_descriptor_limit,
)
from semantic.adapters.inbound.http.errors import allowance_headers, install_error_handlers
from semantic.adapters.inbound.http.guard import CapacityCheck, Guard, current_principal
from semantic.adapters.inbound.http.health import Condition, health_router, metrics_router
from semantic.adapters.inbound.http.middleware import (
    LOCAL_ORIGINS,
    AccessLog,
    BodyLimit,
    HeadAsGet,
    HostCheck,
    OriginCheck,
    ShortPaths,
)
from semantic.adapters.inbound.http.repairs import REPAIRED_HEADER, RepairNotice
from semantic.adapters.inbound.images import ImageReader, images_router
from semantic.adapters.inbound.ollama.origins import AppCors, from_app
from semantic.adapters.inbound.ollama.routes import OllamaApi
from semantic.adapters.inbound.openai.routes import openai_router
from semantic.adapters.inbound.page.routes import OLLAMA_GREETING, docs_router, page_router
from semantic.adapters.inbound.responses.routes import ResponsesApi
from semantic.adapters.outbound import host_memory
from semantic.application.agents.turn_log import PastTurns
from semantic.application.models.downloads import ModelDownloads
from semantic.application.requests.branches import AgentBranches, BranchLimits
from semantic.domain.access import LIMIT_KINDS, Allowance
from semantic.domain.errors import InvalidRequestError, ModelSwapError, SemanticError
from semantic.entrypoints.banner import LOOPBACK, announce, start_banner
from semantic.entrypoints.bootstrap import Server, image_limits
from semantic.entrypoints.mcp_loader import McpLoader

if TYPE_CHECKING:
    from semantic.adapters.inbound.mcp.endpoint import McpEndpoint

_log = structlog.get_logger(__name__)

# The device thread releases the GIL at each tensor operation. With Python's default of 5 ms it
# waited so long to get it back from the HTTP side that eight streams lost 38 % of their speed;
# with this value they lose a few percent (benchmarks/bench_streams.py), so one process suffices.
_SWITCH_INTERVAL_S = 0.00005
_EXPOSED_HEADERS = (
    "request-id",
    "x-request-id",
    "retry-after",
    "x-should-retry",
    REPAIRED_HEADER,
    *(name for kind in LIMIT_KINDS for name in allowance_headers(Allowance(kind, 0, 0, 0.0))),
)
_MAX_HEADER_BYTES = 2**16  # all headers of a request together
_CUT_S = 1  # extra time for requests to end after their connection was cut


def tune_process() -> None:
    """Tune the GIL switch interval and the allocator for a device thread beside HTTP."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    host_memory.share_arenas()


def create_app(server: Server) -> FastAPI:
    """Make the HTTP application; its lifespan starts and stops the device thread."""
    mcp = McpLoader(functools.partial(_make_mcp, server))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.start()
        recording = asyncio.create_task(server.history.run())
        async with mcp.serving():
            yield
        recording.cancel()
        server.request_stop()
        _await_device(server)
        _close_memory(server)

    app = FastAPI(
        title="Semantic",
        version=__version__,
        description="An inference server that keeps every agent's KV cache.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    install_error_handlers(app)
    principal, past = current_principal, PastTurns(server.memory.agents.log)
    read_images = _image_reader(server).read
    responses = ResponsesApi(
        server.inference, server.models, past, principal, server.summariser, read_images
    )
    agents = AgentApi(
        server.chat, server.agents, server.transfer, server.compaction, principal, read_images
    )
    routers = (
        docs_router(app.openapi),
        page_router(),
        openai_router(server.inference, server.models, principal, read_images),
        responses.router(),
        health_router(server.models, lambda: _condition(server)),
        metrics_router(server.metrics.render, server.history.since),
        anthropic_router(server.inference, principal, read_images),
        OllamaApi(server.inference, server.models, past, principal, read_images).router(),
        # Before the paths with a model's name, which would match `downloads` too.
        DownloadsApi(ModelDownloads(server.models)).router(),
        AdminApi(server.models, server.device, server.runtime).router(),
        CacheApi(server.cache, server.feed, principal).router(),
        agents.router(),
        PackApi(server.packs, server.transfer.admit_import, principal).router(),
        volatile_router(server.volatile, principal),
        images_router(principal, server.memory.agents.image_file),
    )
    # `include_router` would build each route again at its first request, while others wait.
    app.router.routes += [route for router in routers for route in router.routes]
    app.router.routes.append(mcp.route)
    _add_middleware(app, server)
    return app


def _image_reader(server: Server) -> ImageReader:
    settings = server.settings
    limits = image_limits(settings)
    fetcher = MediaFetcher(settings.allowed_media_domains or (), limits.max_bytes)
    sources = ImageSources(limits, fetcher)
    return ImageReader(limits, sources, current_principal, server.memory.agents.image_file)


def _make_mcp(server: Server) -> "McpEndpoint":
    from semantic.adapters.inbound.mcp.endpoint import McpEndpoint
    from semantic.adapters.inbound.mcp.tools import McpTools

    limits = BranchLimits(server.settings.mcp_max_branches, server.settings.mcp_max_depth)
    branches = AgentBranches(server.agents, server.chat, server.compaction, limits)
    return McpEndpoint(McpTools(server.agents, branches), current_principal)


def _problems(server: Server) -> list[str]:
    """Problems to report to probes. These need no key, so only admins see details of tenants."""
    problems = server.problems()
    if problems and not current_principal().is_admin:
        return ["the server has a problem; an admin key or the log shows details"]
    return problems


def _condition(server: Server) -> Condition:
    use = server.cache.use()
    note = server.memory.note if current_principal().is_admin else ""
    return Condition(
        server.device.is_draining, use.memory.needed_share, _problems(server), note, use.device
    )


def _add_middleware(app: FastAPI, server: Server) -> None:
    """Wrap the application in its middleware; the innermost is added first."""
    settings = server.settings
    origins = settings.cors_origins or ()
    is_from_app = from_app(settings.ollama_port) if settings.ollama else None
    app.add_middleware(
        BodyLimit,
        max_bytes=int(settings.max_body_mb * 2**20),
        larger=dict.fromkeys((IMPORT_PATH, PACKS_PATH), settings.runtime.disk_bytes),
    )
    app.add_middleware(Guard, access=server.access)
    if server.repairs:
        app.add_middleware(RepairNotice)
    app.add_middleware(OriginCheck, origins=origins, permits=is_from_app)
    # A remote address may have any host name, and it requires a key, which a DNS rebinding page
    # does not have.
    if settings.allowed_hosts or not settings.is_remote:
        app.add_middleware(HostCheck, hosts=settings.allowed_hosts or ())
    app.add_middleware(HeadAsGet)
    app.add_middleware(CapacityCheck)
    app.add_middleware(AccessLog, is_body_logged=settings.log_prompts)
    app.add_middleware(ShortPaths)
    cors: dict[str, Any] = {
        "allow_origins": origins,
        "allow_origin_regex": LOCAL_ORIGINS,
        "allow_methods": ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"),
        "allow_headers": ("*",),
        "allow_private_network": True,
        "expose_headers": _EXPOSED_HEADERS,
    }
    if is_from_app is None:
        app.add_middleware(CORSMiddleware, **cors)
    else:
        app.add_middleware(AppCors, is_from_app=is_from_app, **cors)


class _HttpServer(uvicorn.Server):
    """Stops in phases: refuses new requests, waits for replies, then ends replies and connections.

    A second signal ends replies at once. A Ctrl-C after the first signal also cuts connections.
    """

    def __init__(
        self, config: uvicorn.Config, server: Server, on_reload: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._server = server
        self._on_reload = on_reload
        self._timeout_s = server.settings.shutdown_timeout_s
        self._is_stopping = False
        self._draining: asyncio.Task[None] | None = None
        # A server started with nohup must not stop when its terminal closes.
        ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._has_terminal = not ignores_hangup and _is_terminal_there()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving, without raising them again after a clean stop."""
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {sig: signal.signal(sig, self.handle_exit) for sig in handled}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self.handle_hangup)
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        del frame
        if self.should_exit:
            if sig == signal.SIGINT:
                asyncio.get_running_loop().call_soon_threadsafe(self._abort_connections)
        elif self._is_stopping:
            self._end_replies()
            if sig == signal.SIGINT:
                asyncio.get_running_loop().call_soon_threadsafe(self._abort_connections)
        else:
            self._is_stopping = True
            self._server.device.is_draining = True
            asyncio.get_running_loop().call_soon_threadsafe(self._wait_for_replies, sig)

    def _wait_for_replies(self, sig: int) -> None:
        # Not in the signal handler, which may interrupt another log call.
        _log.info("stopping", signal=signal.Signals(sig).name)
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await wait_until_drained(self._server.device, self._timeout_s)
        self._end_replies()

    def _end_replies(self) -> None:
        self.should_exit = True
        self._server.request_stop()

    def handle_hangup(self, sig: int, frame: FrameType | None) -> None:
        """Reload keys, limits and the certificate; stop instead if the terminal was closed."""
        if self._has_terminal and not _is_terminal_there():
            self.handle_exit(sig, frame)
            return
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(loop.run_in_executor, None, self._on_reload)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down; cut the connections that are still open after `shutdown_timeout_s`."""
        asyncio.get_running_loop().call_later(self._timeout_s, self._abort_connections)
        await super().shutdown(sockets)

    def _abort_connections(self) -> None:
        """Abort open connections as if clients had left; uvicorn would log each as an error."""
        connections = list(self.server_state.connections)
        if connections:
            _log.warning("closing open connections", connections=len(connections))
        for connection in connections:
            connection.transport.abort()


def _is_terminal_there() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def serve(server: Server) -> int:
    """Serve until a signal arrives and return the process's exit status.

    Raises:
        InvalidRequestError: the server cannot listen on the address.
        ModelSwapError: the model cannot be loaded.
    """
    tune_process()
    try:
        status = _serve(server)
    finally:
        _close_memory(server)
    if not server.device.join(0):
        _exit_at_once(status)
    return status


def _exit_at_once(status: int) -> None:
    """Exit without unloading libraries: the device thread still uses them and would abort."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _await_device(server: Server) -> None:
    """Wait until the device thread has ended, but not for a load: it has nothing to write."""
    if server.device.lifecycle.loading is not None:
        _log.info("stopped while the model was loading")
    elif not server.device.join(server.settings.shutdown_timeout_s):
        _log.warning("device thread did not stop in time")


def _close_memory(server: Server) -> None:
    if not server.memory.close(server.settings.shutdown_timeout_s):
        _log.warning("server stopped before all blocks and turns were written")
    tracer, server.metrics.tracer = server.metrics.tracer, None
    if tracer is not None:
        tracer.close()


def _serve(server: Server) -> int:
    settings = server.settings
    connections = _open_connections(settings)
    tls = _tls_context(settings)
    listener = _listen(settings.host, settings.port, connections)
    port = listener.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"{'https' if tls else 'http'}://{host}:{port}"
    server.memory.announce(url.replace("//0.0.0.0:", f"//{LOOPBACK}:").replace("[::]", "[::1]"))
    config = _HttpConfig(
        create_app(server),
        log_config=None,
        access_log=False,
        loop="asyncio",  # `Listener` and `OpenConnections` require it
        http=connections.protocol(),
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        ws="none",
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout_s) + _CUT_S,
        ssl_context_factory=(lambda *_: tls) if tls else None,
    )
    config.handshake_timeout_s = settings.read_timeout_s
    more = listen_for_ollama(settings.ollama_port, connections) if settings.ollama else []
    http = _HttpServer(config, server, lambda: _reload(server, tls))
    failures: list[str] = []
    banner = start_banner(server, url, is_ollama=bool(more))
    announcing = (server, http, banner, failures)
    threading.Thread(target=announce, args=announcing, daemon=True).start()
    http.run(sockets=[listener, *more])
    for failure in failures:
        raise ModelSwapError(failure)
    return 0


def _reload(server: Server, tls: ssl.SSLContext | None) -> None:
    try:
        if tls is not None:
            _load_certificate(tls, server.settings)
        server.access.reload()
    except SemanticError as error:
        _log.error(
            "reloading keys and limits failed; the old ones stay in force",
            problem=error.message,
        )
    else:
        _log.info("reloaded keys and limits", keys=len(server.access.ring.keys))


def _tls_context(settings: Settings) -> ssl.SSLContext | None:
    if settings.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, settings)
    return context


def _load_certificate(context: ssl.SSLContext, settings: Settings) -> None:
    """Load the certificate and its key into a context; new connections use them."""
    certificate, key = settings.tls_cert, settings.tls_key
    assert certificate is not None and key is not None  # noqa: S101, PT018 - see the settings
    try:
        # Try them on an unused context first: a failure halfway would break the one in use.
        for place in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
            # The callback keeps OpenSSL from asking for a password on the terminal.
            place.load_cert_chain(certificate.expanduser(), key.expanduser(), lambda: b"")
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise InvalidRequestError(
            f"tls_cert {certificate} and tls_key {key} cannot be used: {error}; "
            "both are PEM files, the key without a password",
            param="tls_cert",
        ) from error


class _HttpConfig(uvicorn.Config):
    """A uvicorn config whose event loop limits the TLS handshake to `handshake_timeout_s`."""

    handshake_timeout_s = 60.0

    def get_loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop]:
        timeout_s = self.handshake_timeout_s

        class Loop(asyncio.SelectorEventLoop):
            async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:
                if options.get("ssl"):
                    options.setdefault("ssl_handshake_timeout", timeout_s)
                return await super().create_server(*args, **options)

        return Loop


def _open_connections(settings: Settings) -> OpenConnections:
    limits = ConnectionLimits.within(
        raise_descriptor_limit(),
        settings.max_connections,
        read_timeout_s=settings.read_timeout_s,
        write_timeout_s=settings.write_timeout_s,
    )
    return OpenConnections(limits)


def _listen(
    host: str, port: int, connections: OpenConnections, setting: str = "port"
) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = Listener(family, connections)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise InvalidRequestError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another {setting}",
            param=setting,
        ) from error
    return listener


def listen_for_ollama(port: int, connections: OpenConnections) -> list[socket.socket]:
    """Listen on Ollama's port; if it is taken, log that: the server runs without it."""
    try:
        return [_listen(LOOPBACK, port, connections, "ollama_port")]
    except InvalidRequestError as error:
        is_ollama = _greeting(port) == OLLAMA_GREETING
        reason = f"Ollama is already running on port {port}" if is_ollama else error.message
        _log.warning("port for clients of Ollama not opened; they can use --port", reason=reason)
        return []


def _greeting(port: int) -> str:
    """The text with which a program on a port answers `GET /`; empty if it does not."""
    connection = HTTPConnection(LOOPBACK, port, timeout=1)
    try:
        connection.request("GET", "/", headers={"accept": "text/plain"})
        return connection.getresponse().read(100).decode("utf-8", "replace")
    except (OSError, HTTPException):
        return ""
    finally:
        connection.close()
