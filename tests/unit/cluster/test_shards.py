"""Ranks that join a server, and other connections to its port."""

import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from semantic.cluster.entrypoints.shards import RankListener

pytestmark = pytest.mark.unit

KEY = b"the key"
HOST = "127.0.0.1"


@pytest.fixture
def listener() -> Iterator[RankListener]:
    with RankListener(HOST, 0, KEY, patience_s=600) as made:
        yield made


def join(listener: RankListener, key: bytes = KEY) -> tuple[threading.Thread, list[object]]:
    """Connect as a rank does, in a thread; returns what it got."""
    got: list[object] = []

    def connect() -> None:
        try:
            with Client((HOST, listener.port), authkey=key) as link:
                got.append(link.recv())
        except (AuthenticationError, EOFError, OSError) as error:
            got.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    return thread, got


def welcome_rank(listener: RankListener) -> None:
    """Let a rank join and receive its first message."""
    rank, got = join(listener)
    joined = listener.accept(60)
    assert joined is not None
    link, host = joined
    assert host == HOST
    link.send("welcome")
    rank.join(60)
    link.close()
    assert got == ["welcome"]


@pytest.mark.parametrize("sent", [b"", b"\x00", b"\x00\x00\x00\x14too short"])
def test_a_silent_or_incomplete_connection_blocks_no_rank(
    listener: RankListener, sent: bytes
) -> None:
    with socket.create_connection((HOST, listener.port)) as silent:
        silent.sendall(sent)
        assert listener.accept(0.2) is None
        welcome_rank(listener)


def test_a_wrong_key_is_refused_and_the_next_rank_joins(listener: RankListener) -> None:
    stranger, refused = join(listener, b"another key")
    welcome_rank(listener)
    stranger.join(60)
    assert isinstance(refused[0], AuthenticationError | EOFError | OSError)


def test_a_connection_that_proves_nothing_in_time_is_closed() -> None:
    with (
        RankListener(HOST, 0, KEY, patience_s=-1) as listener,
        socket.create_connection((HOST, listener.port)) as silent,
    ):
        silent.settimeout(60)
        assert listener.accept(0.2) is None
        while silent.recv(1024):
            pass


def test_of_too_many_connections_the_oldest_is_closed(listener: RankListener) -> None:
    sockets = [socket.create_connection((HOST, listener.port)) for _ in range(66)]
    welcome_rank(listener)
    sockets[0].settimeout(60)
    while sockets[0].recv(1024):
        pass
    for each in sockets:
        each.close()
