"""How many connections fit, and what a listening socket does when descriptors run out."""

import contextlib
import errno
import gc
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from semantic.adapters.inbound.http.connections import ConnectionLimits, Listener, OpenConnections

pytestmark = pytest.mark.unit


def limits(num_descriptors: int, max_connections: int = 1024) -> ConnectionLimits:
    return ConnectionLimits.within(
        num_descriptors, max_connections, read_timeout_s=1, write_timeout_s=1
    )


@pytest.mark.parametrize("num_descriptors", [16, 64, 256, 1024, 65536])
@pytest.mark.parametrize("max_connections", [1, 100, 10_000])
def test_descriptors_are_left_for_files(num_descriptors: int, max_connections: int) -> None:
    found = limits(num_descriptors, max_connections)
    assert 1 <= found.max_open <= max_connections
    num_left = num_descriptors - found.max_open - found.num_spare
    assert num_left >= min(256, num_descriptors // 2)


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(socket.AF_INET, OpenConnections(limits(1024))) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        listener.setblocking(False)
        yield listener


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing more."""
    gc.collect()  # what earlier tests left open is not closed meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_event_loop_that_finds_no_descriptor_tries_once(listener: Listener) -> None:
    with socket.create_connection(listener.getsockname()):
        with no_descriptors():
            with pytest.raises(OSError, match="open files") as caught:
                listener.accept()
            assert caught.value.errno == errno.EMFILE
            with pytest.raises(BlockingIOError):  # where asyncio's loop of tries ends
                listener.accept()
        accepted, _ = listener.accept()
        accepted.close()


def test_an_event_loop_accepts_a_few_at_a_time(listener: Listener) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        batches = [0, 0]
        for index in range(2):
            with contextlib.suppress(BlockingIOError):
                while True:
                    stack.enter_context(listener.accept()[0])
                    batches[index] += 1
        assert batches == [16, 4]
