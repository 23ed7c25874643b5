"""The processes (ranks) that hold a model's shards, started here or on other machines.

The server listens. Each rank connects, proves that it knows the key, receives an `Order` for the
shard to load, connects to the other ranks and then mirrors the server's backend calls. A rank exits
when its connection to the server closes.
"""

import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import structlog

from semantic.adapters.config.settings import Settings
from semantic.cluster.adapters.sharded import ShardedBackend, mirror, share_of
from semantic.domain.errors import BackendError, InvalidRequestError, SemanticError
from semantic.domain.spec import Compute, ComputeHint, ModelCacheSpec
from semantic.ports.backend import ModelBackendPort

_log = structlog.get_logger(__name__)

MakeShare: TypeAlias = Callable[[Path, ModelCacheSpec], ModelBackendPort]

_KEY = "SEMANTIC_SHARD_KEY"
_JOIN_S = 600.0  # how long ranks on other machines may take to join
_PROVE_S = 10.0  # how long a connection may take to prove that it knows the key
_MAX_PROVING = 64
_POLL_S, _TICK_S = 1.0, 0.05
_STOP_S = 5.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Order:
    """The message that tells a rank what to load and how to reach the others.

    Attributes:
        addresses: Host and free port of each rank, by rank.
        directory: The model's files; the same path on every machine.
        spec: The cache geometry of one rank's shard.
    """

    rank: int
    addresses: tuple[tuple[str, int], ...]
    backend: Literal["torch", "mlx"]
    directory: str
    spec: ModelCacheSpec
    options: dict[str, Any]
    hint: ComputeHint

    @property
    def num_ranks(self) -> int:
        return len(self.addresses)


# -- the server's side -----------------------------------------------------------------------------


def load_sharded(
    directory: Path,
    spec: ModelCacheSpec,
    settings: Settings,
    backend: Literal["torch", "mlx"],
    hint: ComputeHint | None = None,
) -> ShardedBackend:
    """Load a model, split over `settings.shards` processes.

    Args:
        spec: The cache geometry of the whole model.
        hint: The dtype of earlier starts and stored blocks; all ranks use the same dtype.

    Raises:
        InvalidRequestError: the model cannot be split that way, or a rank could not load its shard.
        BackendError: a rank did not join, or exited.
    """
    share = share_of(spec, settings.shards)
    ranks = _Ranks(settings)
    try:
        links = ranks.gather(directory, share, backend, hint or ComputeHint())
        return ShardedBackend(links, ranks.end)
    except BaseException:
        ranks.end()
        raise


class _Ranks:
    """The processes of one model."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []

    def gather(
        self,
        directory: Path,
        share: ModelCacheSpec,
        backend: Literal["torch", "mlx"],
        hint: ComputeHint,
    ) -> Sequence[Connection]:
        settings = self._settings
        host, port = _address(settings.shard_listen) if settings.shard_listen else (_LOOPBACK, 0)
        key = settings.shard_key or secrets.token_hex()
        with RankListener(host, port, key.encode()) as listener:
            port = listener.port
            for number in range(1 if settings.shard_listen else settings.shards):
                self._start(number, f"{host}:{port}", key)
            if settings.shard_listen:
                _log.info(
                    "waiting for shards", joining=settings.shards - 1, address=f"{host}:{port}"
                )
            hosts = [self._accept(listener) for _ in range(settings.shards)]
        addresses = tuple(zip(hosts, _free_ports(len(hosts)), strict=True))
        options = settings.model_dump(include={"dtype", "device", "weights", "threads"})
        for rank, link in enumerate(self._links):
            link.send(Order(rank, addresses, backend, str(directory), share, options, hint))
        for link in self._links:
            self._await_loaded(link)
        return self._links

    def end(self) -> None:
        """Close all connections, which ends the ranks, and kill local ones after `_STOP_S`."""
        for link in self._links:
            link.close()
        deadline = time.monotonic() + _STOP_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        self._processes, self._links = [], []

    def _start(self, number: int, address: str, key: str) -> None:
        environment = os.environ | {_KEY: key}
        if "CUDA_VISIBLE_DEVICES" not in environment:
            environment["CUDA_VISIBLE_DEVICES"] = str(number)  # one GPU per rank
        command = [sys.executable, "-m", __name__, address]
        self._processes.append(subprocess.Popen(command, env=environment))  # noqa: S603 - our own

    def _accept(self, listener: "RankListener") -> str:
        deadline = time.monotonic() + _JOIN_S
        while time.monotonic() < deadline:
            if any(process.poll() is not None for process in self._processes):
                raise BackendError("a shard process exited before it joined; see its output")
            if (joined := listener.accept(_POLL_S)) is not None:
                link, host = joined
                self._links.append(link)
                return host
        raise BackendError(f"not all shards joined within {_JOIN_S:g} s")

    def _await_loaded(self, link: Connection) -> None:
        try:
            answer = link.recv()
        except (EOFError, OSError):
            raise BackendError("a shard process exited while it loaded the model") from None
        if isinstance(answer, Exception):
            raise answer


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or host == "0.0.0.0":  # noqa: S104 - it is refused
        raise InvalidRequestError(
            f"{text!r} is not an address that shards can reach: write this machine's HOST:PORT, "
            "such as 10.0.0.1:7100",
            param="shard_listen",
        )
    return host, int(port)


class RankListener:
    """Accepts connections and authenticates each by the key, in a thread of its own.

    A silent or slow connection therefore delays no other; it is closed after `patience_s`. Above
    `_MAX_PROVING` unauthenticated connections, the oldest is closed.
    """

    def __init__(self, host: str, port: int, key: bytes, *, patience_s: float = _PROVE_S) -> None:
        """Listen on an address; port 0 selects a free port."""
        self._key, self._patience_s = key, patience_s
        self._socket = socket.create_server((host, port))
        self.port: int = self._socket.getsockname()[1]
        self._proving: deque[tuple[socket.socket, float]] = deque()  # the oldest first
        self._joined: queue.SimpleQueue[tuple[Connection, str]] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening and close all connections that `accept` has not returned."""
        self._socket.close()
        self._shut(0)
        with contextlib.suppress(queue.Empty):
            while True:
                self._joined.get_nowait()[0].close()

    def accept(self, timeout_s: float) -> tuple[Connection, str] | None:
        """Return the next authenticated connection and its host; None after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            self._take(min(left_s, _TICK_S))
            self._shut(_MAX_PROVING)
            with contextlib.suppress(queue.Empty):
                return self._joined.get_nowait()
        return None

    def _take(self, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        with contextlib.suppress(OSError):  # a timeout, or the client closed the connection
            accepted, address = self._socket.accept()
            self._proving.append((accepted, time.monotonic() + self._patience_s))
            prove = threading.Thread(
                target=self._prove, args=(accepted, str(address[0])), daemon=True
            )
            prove.start()

    def _shut(self, most: int) -> None:
        while self._proving and (
            len(self._proving) > most or self._proving[0][1] < time.monotonic()
        ):
            late, _ = self._proving.popleft()
            with contextlib.suppress(OSError):  # already closed
                late.shutdown(socket.SHUT_RDWR)

    def _prove(self, accepted: socket.socket, host: str) -> None:
        with accepted:
            link = Connection(os.dup(accepted.fileno()))
            try:
                deliver_challenge(link, self._key)
                answer_challenge(link, self._key)
            except (AuthenticationError, EOFError, OSError) as error:
                _log.warning(
                    "refused a shard connection without the right shard_key",
                    host=host,
                    error=str(error),
                )
                link.close()
                return
        self._joined.put((link, host))


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind((_LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]


# -- a rank's side ---------------------------------------------------------------------------------


def join(address: str) -> int:
    """Run as a rank of the server at `address` (HOST:PORT); returns an exit status.

    Raises:
        InvalidRequestError: `SEMANTIC_SHARD_KEY` is missing or is not the server's key.
        BackendError: no server accepts shards at the address.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its ranks
    key = os.environ.get(_KEY, "")
    if not key:
        raise InvalidRequestError(f"set {_KEY} to the server's shard_key", param="shard_key")
    try:
        link = Client(_address(address), authkey=key.encode())
        order: Order = link.recv()
    except AuthenticationError:
        raise InvalidRequestError(f"{_KEY} is not the server's key", param="shard_key") from None
    except (EOFError, OSError) as error:
        raise BackendError(f"no server accepts shards at {address}: {error}") from None
    try:
        backend = _load_share(order)
    except Exception as error:  # noqa: BLE001 - the server reports it
        known = isinstance(error, SemanticError)
        link.send(error if known else BackendError(f"{type(error).__name__}: {error}"))
        return 1
    link.send(None)
    mirror(link, backend)
    return 0


def _load_share(order: Order) -> ModelBackendPort:
    directory = Path(order.directory)
    if not (directory / "config.json").is_file():
        raise InvalidRequestError(
            f"the model is not at {directory} on {socket.gethostname()}: copy it there",
            param="model",
        )
    make = {"torch": _torch_share, "mlx": _mlx_share}[order.backend]
    return make(order, order.options)(directory, order.spec)


def _torch_share(order: Order, options: dict[str, Any]) -> MakeShare:
    import torch

    from semantic.adapters.outbound.backends.torch.backend import TorchBackend
    from semantic.adapters.outbound.backends.torch.loading import TorchOptions
    from semantic.adapters.outbound.backends.torch.shares import Share

    host, port = order.addresses[0]
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=order.rank,
        world_size=order.num_ranks,
    )
    chosen = TorchOptions(
        dtype=options["dtype"],
        weights=options["weights"],
        num_threads=options["threads"],
        share=Share(order.rank, order.num_ranks),
        hint=_agreed_hint(order),
    )
    return lambda directory, spec: TorchBackend(directory, spec, chosen)


def _agreed_hint(order: Order) -> ComputeHint:
    """Broadcast rank 0's dtype: each rank would measure for itself, and results may differ."""
    import torch

    from semantic.adapters.outbound.backends.torch.loading import choose_dtype

    chosen: list[Compute | None] = [None]
    if order.rank == 0:
        dtype, reason = choose_dtype(order.options["dtype"], order.hint)
        chosen = [Compute("cpu", str(dtype).removeprefix("torch."), 0, "", reason)]
    torch.distributed.broadcast_object_list(chosen, src=0)
    return ComputeHint(chosen[0])


def _mlx_share(order: Order, options: dict[str, Any]) -> MakeShare:
    from semantic.adapters.outbound.backends.mlx import runtime

    runtime.prepare(options["threads"])
    host, port = order.addresses[0]
    os.environ |= {
        "MLX_RANK": str(order.rank),
        "MLX_WORLD_SIZE": str(order.num_ranks),
        "NCCL_HOST_IP": host,
        "NCCL_PORT": str(port),
    }
    import mlx.core as mx

    from semantic.adapters.outbound.backends.mlx.backend import MlxBackend
    from semantic.adapters.outbound.backends.mlx.loading import MlxOptions, choose_device

    choose_device(options["device"])
    with tempfile.NamedTemporaryFile("w", suffix=".json") as hosts:
        json.dump([[f"{host}:{port}"] for host, port in order.addresses], hosts)
        hosts.flush()
        os.environ["MLX_HOSTFILE"] = hosts.name
        is_cuda = mx.default_device() == mx.Device(mx.gpu) and mx.cuda.is_available()
        group = mx.distributed.init(strict=True, backend="nccl" if is_cuda else "ring")
    chosen = MlxOptions(options["dtype"], options["device"], options["weights"], group=group)
    return lambda directory, spec: MlxBackend.from_directory(directory, spec, chosen)


if __name__ == "__main__":
    sys.exit(join(sys.argv[1]))
