"""The processes that hold a model's shares: started here, or joining from other machines.

The server listens; each rank connects, proves that it knows the key, is told which share to load,
finds the other ranks and then mirrors what the server says. A rank whose server is gone ends.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Literal, TypeAlias

import structlog

from semantic.adapters.config.settings import Settings
from semantic.adapters.outbound.backends.sharded import ShardedBackend, mirror, share_of
from semantic.domain.errors import BackendError, InvalidRequestError, SemanticError
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.backend import ModelBackendPort

_log = structlog.get_logger(__name__)

MakeShare: TypeAlias = Callable[[Path, ModelCacheSpec], ModelBackendPort]

_KEY = "SEMANTIC_SHARD_KEY"
_JOIN_S = 600.0  # how long ranks on other machines may take to come
_STOP_S = 5.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Order:
    """What a rank is told.

    Attributes:
        addresses: Of each rank, where the others find it: host and a free port.
        spec: Of the rank's share.
        options: Settings of the server that say how the model is run.
    """

    rank: int
    addresses: tuple[tuple[str, int], ...]
    backend: Literal["torch", "mlx"]
    directory: str
    spec: ModelCacheSpec
    options: dict[str, Any]

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return len(self.addresses)


# -- the server's side -----------------------------------------------------------------------------


def load_sharded(
    directory: Path, spec: ModelCacheSpec, settings: Settings, backend: Literal["torch", "mlx"]
) -> ShardedBackend:
    """Load a model into as many processes as the settings say.

    Raises:
        InvalidRequestError: it cannot be divided so, or a rank could not load its share.
        BackendError: a rank did not come, or ended.
    """
    share = share_of(spec, settings.shards)
    ranks = _Ranks(settings)
    try:
        links = ranks.gather(directory, share, backend)
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
        self, directory: Path, share: ModelCacheSpec, backend: Literal["torch", "mlx"]
    ) -> Sequence[Connection]:
        """Start ranks or wait for them, and have each load its share.

        Raises:
            BackendError: one did not come, or ended.
            InvalidRequestError: one could not load its share.
        """
        settings = self._settings
        host, port = _address(settings.shard_listen) if settings.shard_listen else (_LOOPBACK, 0)
        key = settings.shard_key or secrets.token_hex()
        with Listener((host, port), authkey=key.encode()) as listener:
            port = _bound(listener).getsockname()[1]
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
            link.send(Order(rank, addresses, backend, str(directory), share, options))
        for link in self._links:
            self._await_loaded(link)
        return self._links

    def end(self) -> None:
        """End every rank, whatever it is at."""
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
            environment["CUDA_VISIBLE_DEVICES"] = str(number)  # each its own
        command = [sys.executable, "-m", __name__, address]
        self._processes.append(subprocess.Popen(command, env=environment))  # noqa: S603 - our own

    def _accept(self, listener: Listener) -> str:
        """Take the next rank that knows the key; returns its host."""
        deadline = time.monotonic() + _JOIN_S
        _bound(listener).settimeout(1.0)
        while True:
            if any(process.poll() is not None for process in self._processes):
                raise BackendError("a shard's process ended before it joined; see its message")
            try:
                self._links.append(listener.accept())
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise BackendError(f"not all shards have joined in {_JOIN_S:g} s") from None
            except (AuthenticationError, EOFError, OSError) as error:
                _log.warning("a shard with a wrong key tried to join", error=str(error))
            else:
                last = listener.last_accepted
                return str(last[0]) if isinstance(last, tuple) else _LOOPBACK

    def _await_loaded(self, link: Connection) -> None:
        try:
            answer = link.recv()
        except (EOFError, OSError):
            raise BackendError("a shard ended while it loaded the model") from None
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


def _bound(listener: Listener) -> socket.socket:
    """The socket of a listener, which offers neither a timeout nor its port."""
    inner: socket.socket = listener._listener._socket  # type: ignore[attr-defined]
    return inner


def _free_ports(number: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind((_LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]


# -- a rank's side ---------------------------------------------------------------------------------


def join(address: str) -> int:
    """Be a rank of the server that listens there; returns an exit status."""
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
        raise BackendError(f"no server takes shards at {address}: {error}") from None
    try:
        backend = _load_share(order)
    except Exception as error:  # noqa: BLE001 - the server says it
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
    from semantic.adapters.outbound.backends.torch.loading import TorchOptions, choose_device
    from semantic.adapters.outbound.backends.torch.shares import Share

    host, port = order.addresses[0]
    torch.distributed.init_process_group(
        "nccl" if choose_device(options["device"]).type == "cuda" else "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=order.rank,
        world_size=order.num_ranks,
    )
    num_threads = options.pop("threads")
    chosen = TorchOptions(
        **options, num_threads=num_threads, share=Share(order.rank, order.num_ranks)
    )
    return lambda directory, spec: TorchBackend(directory, spec, chosen)


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
