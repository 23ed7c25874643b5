"""Ray's driver: starts Ray or connects to it, runs the application, and watches Ray's head.

The supervisor runs this module as a process, and starts it again if it ends early.
"""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from semantic.adapters.config.settings import Settings
from semantic.adapters.config.sources import load_settings
from semantic.cluster.entrypoints.ray_app import NAME, build
from semantic.domain.errors import InvalidRequestError, SemanticError

_POLL_S = 0.2
_FAILING = ("DEPLOY_FAILED", "UNHEALTHY")  # states of an application that Ray may still repair
_WATCH_S = 2.0  # between two checks of the head; the second that fails in a row counts
_CONNECT_S = 5.0
_PROXIES_S = 30.0  # for Ray's proxies to send on what the servers have said
_USAGE_ERROR, _LOST = 2, 3


class _Signals:
    """SIGINT and SIGTERM: the first is remembered, further ones raise KeyboardInterrupt."""

    def __init__(self) -> None:
        self.is_stopping = False
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        if self.is_stopping:
            raise KeyboardInterrupt
        self.is_stopping = True


def drive(link: Connection) -> int:
    """Run the application until a signal arrives; returns an exit status.

    Raises:
        InvalidRequestError: a setting is wrong, or Ray is not reachable.
    """
    options, is_restart = link.recv()
    settings = load_settings(options)
    _connect(settings)
    signals = _Signals()
    try:
        _deploy(settings, options, is_restart=is_restart)
        _await_running(link, signals)
        _say(f"listening: {_url(settings)}")
        _say(f"ready: {settings.replicas} replicas of {settings.model}")
        link.send_bytes(b"ready")
        lost = _await_end(link, signals, _HeadWatch().check)
        if lost:
            _say(f"lost: {lost}")
            _exit_now()
        _say("stopping: running replies finish; a second signal stops them at once")
        _drain()
    except KeyboardInterrupt:
        pass
    _shut_down()
    return 0


def _connect(settings: Settings) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15, other load starves it
    import ray

    address = settings.ray_address
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if not address:
        quiet["include_dashboard"] = False
    try:
        ray.init(address or "local", **quiet)
    except ConnectionError as error:
        raise InvalidRequestError(
            f"no Ray cluster responds at {address}: {error}", param="ray_address"
        ) from error


def _deploy(settings: Settings, options: Mapping[str, Any], *, is_restart: bool) -> None:
    from ray import serve

    http = {"host": settings.host, "port": settings.port, "keep_alive_timeout_s": 60}
    if settings.tls_cert and settings.tls_key:
        http |= {"ssl_certfile": str(settings.tls_cert), "ssl_keyfile": str(settings.tls_key)}
    serve.start(proxy_location="EveryNode", http_options=http)
    # Servers that outlived the head keep running: to deploy them again would replace them all.
    if not is_restart or NAME not in serve.status().applications:
        serve.run(build(options), name=NAME, route_prefix="/")


def _await_running(link: Connection, signals: _Signals) -> None:
    from ray import serve

    said = ""
    while not signals.is_stopping:
        now = serve.status().applications[NAME]
        if now.status == "RUNNING":
            return
        if now.status in _FAILING and now.status != said:
            said = now.status
            _say(f"waiting: Ray reports {said}: {now.message.strip() or 'no reason'}")
        if link.poll(_POLL_S):  # closed: the supervisor was killed
            _exit_now()


def _await_end(link: Connection, signals: _Signals, check: Callable[[], str | None]) -> str | None:
    """Wait for a signal, or for Ray's loss: then returns its description."""
    num_failed, checked_at = 0, time.monotonic()
    while not signals.is_stopping:
        if link.poll(_POLL_S):  # closed: the supervisor was killed
            _exit_now()
        if time.monotonic() - checked_at < _WATCH_S:
            continue
        lost = check()
        num_failed = num_failed + 1 if lost else 0
        if num_failed > 1:
            return lost
        checked_at = time.monotonic()
    return None


class _HeadWatch:
    """Checks whether Ray's head answers and still knows the node of this process."""

    def __init__(self) -> None:
        import ray

        context = ray.get_runtime_context()
        host, _, port = str(context.gcs_address).rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._node = context.get_node_id()

    def check(self) -> str | None:
        """Return what is wrong, or None. Ray itself would report it a minute later."""
        import ray

        try:
            socket.create_connection(self._address, _CONNECT_S).close()
        except OSError as error:
            return f"Ray's head at {self._address[0]}:{self._address[1]} does not answer: {error}"
        if not any(one["NodeID"] == self._node and one["Alive"] for one in ray.nodes()):
            return "Ray's node on this machine is dead"
        return None


def _drain() -> None:
    from ray import serve

    serve.delete(NAME, _blocking=False)  # blocking waits at most a minute
    while NAME in serve.status().applications:
        time.sleep(_POLL_S)
    # Replies pass through Ray's proxies, which may still hold the last tokens when the servers
    # have ended, and which Ray kills when it shuts down.
    until = time.monotonic() + _PROXIES_S
    while any(map(_is_sending, serve.status().proxies)) and time.monotonic() < until:
        time.sleep(_POLL_S)


def _is_sending(node: str) -> bool:
    """Return whether the proxy on a node still sends a reply, or does not respond."""
    import ray
    from ray.serve._private.constants import SERVE_NAMESPACE, SERVE_PROXY_NAME

    try:
        proxy = ray.get_actor(f"{SERVE_PROXY_NAME}-{node}", SERVE_NAMESPACE)
        return bool(ray.get(proxy.__ray_call__.remote(_num_replies), timeout=_CONNECT_S))
    except ray.exceptions.GetTimeoutError:
        return True
    except (ValueError, ray.exceptions.RayError):  # it has ended
        return False


def _num_replies(proxy: Any) -> int:
    """Return how many requests a proxy has; HAProxy does not say."""
    return getattr(getattr(proxy, "http_proxy", None), "_ongoing_requests", 0)


def _shut_down() -> None:
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()


def _exit_now() -> None:
    """Exit without Ray's cleanup, which waits for a head that is dead."""
    os._exit(_LOST)


def _url(settings: Settings) -> str:
    return f"{'https' if settings.tls_cert else 'http'}://{settings.host}:{settings.port}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run with the connection that the supervisor passes; returns an exit status."""
    os.umask(0o077)
    # Until Ray is connected, a signal ends the process even inside Ray's own code.
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_DFL)
    link = Connection(int(sys.argv[1]))
    os.dup(link.fileno())  # open until the process has ended, for which the supervisor waits
    try:
        return drive(link)
    except SemanticError as error:
        sys.stderr.write(f"semantic: {error.message}\n")
        return _USAGE_ERROR


if __name__ == "__main__":
    raise SystemExit(main())
