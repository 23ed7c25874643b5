"""Opens connections and misuses them, while a turn runs and `/health` is polled.

Promised: silent, slow and broken connections stop neither health checks nor turns that run; running
out of descriptors loses no turn and does not flood the log; afterwards all is as before.
"""

import contextlib
import json
import random
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import httpx

from tests.attack.site import MODEL, SETTINGS, Attack, Server, ServerAttack, client
from tests.chaos.talk import ask
from tests.waiting import eventually

DESCRIPTORS = 256  # that the server may have open; more sockets than that are opened
MAX_LOG_LINES = 2000  # that one round may cost
_LONG_REPLY = 2000
_STREAM = {
    "model": MODEL,
    "stream": True,
    "max_tokens": 5000,
    "messages": [{"role": "user", "content": "Talk for long."}],
}


class Connections(ServerAttack):
    """Each round one misuse of many connections."""

    kind: ClassVar[str] = "connections"
    # A turn shares the engine with every stream that is not read.
    settings: ClassVar[Mapping[str, Any]] = {**SETTINGS, "request_timeout_s": 120}

    def open(self) -> None:
        self.server = Server(self.work, settings=self.settings, max_files=DESCRIPTORS).start()

    def run_round(self, dice: random.Random) -> None:
        misuse = MISUSES[self.round % len(MISUSES)]
        name = misuse.__name__.strip("_")
        turn = _Turn(self)
        self.server.new_log_lines()
        with contextlib.ExitStack() as sockets:
            assert turn.is_started.wait(60), "the turn did not start"
            self.num_requests += misuse(self.server, sockets, dice)
            self._check_health(name)
            turn.join()
        if turn.trouble:
            self.find(f"{name}: a running turn {turn.trouble}")
        # What a limit refused a moment ago is welcome again.
        if not eventually(self._is_answered, every_s=0.05):
            self.restart(f"{name}: nobody is answered afterwards")
            return
        if (num_lines := len(self.server.new_log_lines())) > MAX_LOG_LINES:
            self.find(f"{name}: {num_lines} lines in the log")
        self.check_server()

    def _check_health(self, name: str) -> None:
        """Ask on a connection of its own, as a supervisor does."""
        assert self.server.process is not None

        def is_healthy() -> bool:
            assert self.server.process is not None
            self.num_requests += 1
            try:
                with client(self.server.process.url, timeout_s=5) as http:
                    return http.get("/health").status_code == 200
            except httpx.HTTPError:
                return False

        if not eventually(is_healthy, every_s=0.05):
            self.find(f"{name}: /health does not answer")

    def _is_answered(self) -> bool:
        assert self.server.process is not None
        self.num_requests += 1
        try:
            with client(self.server.process.url, timeout_s=10) as http:
                return bool(ask(http, MODEL, [{"role": "user", "content": "still there?"}], 4))
        except httpx.HTTPError:
            return False


class _Turn:
    """A turn that has begun, and should come whole."""

    def __init__(self, attack: Attack) -> None:
        said = f"A long story, round {attack.round}."
        self._messages = [{"role": "user", "content": said}]
        self._right = ask(attack.truth.server.http, MODEL, self._messages, _LONG_REPLY)
        assert isinstance(attack, ServerAttack)
        assert attack.server.process is not None
        self._url = attack.server.process.url
        self.is_started = threading.Event()
        self.trouble = ""
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(120)
        if self._thread.is_alive():
            self.trouble = "did not end"

    def _listen(self) -> None:
        body = {**_STREAM, "max_tokens": _LONG_REPLY, "messages": self._messages, "temperature": 0}
        text = ""
        try:
            with (
                client(self._url) as http,
                http.stream("POST", "/v1/chat/completions", json=body) as answer,
            ):
                for line in answer.iter_lines():
                    self.is_started.set()
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        if "choices" not in event:
                            self.trouble = f"ended with {event}"
                            return
                        text += event["choices"][0]["delta"].get("content") or ""
        except httpx.HTTPError as error:
            self.trouble = f"ended with {error!r}"
            return
        if text != self._right:
            self.trouble = f"gave {len(text)} characters, not the right {len(self._right)}"


# -- misuses ----------------------------------------------------------------------------------


def _connect(server: Server, sockets: contextlib.ExitStack, number: int) -> list[socket.socket]:
    assert server.process is not None
    url = httpx.URL(server.process.url)
    made = []
    for _ in range(number):
        one = sockets.enter_context(socket.socket())
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.settimeout(5)
        with contextlib.suppress(OSError):  # a limit may refuse it, as it should
            one.connect((url.host, url.port))
            made.append(one)
    return made


def _send(one: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):
        one.sendall(content)


def _request(body: object = None, *, length: int | None = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    size = len(content) if length is None else length
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        f"content-type: application/json\r\ncontent-length: {size}\r\n\r\n"
    )
    return head.encode() + content


def _silent(server: Server, sockets: contextlib.ExitStack, _: random.Random) -> int:
    return len(_connect(server, sockets, DESCRIPTORS + 100))


def _slow_headers(server: Server, sockets: contextlib.ExitStack, dice: random.Random) -> int:
    made = _connect(server, sockets, 150)
    head = _request({})[: dice.randrange(5, 60)]
    for end in range(len(head)):
        for one in made[:: max(1, end)]:
            _send(one, head[end : end + 1])
    return len(made)


def _slow_body(server: Server, sockets: contextlib.ExitStack, _: random.Random) -> int:
    made = _connect(server, sockets, 100)
    for one in made:
        _send(one, _request(length=1000) + b'{"model":')
    return len(made)


def _half_closed(server: Server, sockets: contextlib.ExitStack, _: random.Random) -> int:
    made = _connect(server, sockets, 40)
    for one in made:
        _send(one, _request({**_STREAM, "max_tokens": 50}))
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_WR)
    return len(made)


def _unread(server: Server, sockets: contextlib.ExitStack, _: random.Random) -> int:
    """Readers that stop reading."""
    made = _connect(server, sockets, 20)
    for one in made:
        _send(one, _request(_STREAM))
    return len(made)


def _reset(server: Server, sockets: contextlib.ExitStack, dice: random.Random) -> int:
    made = _connect(server, sockets, 40)
    for one in made:
        _send(one, _request(_STREAM))
    for one in made:
        with contextlib.suppress(OSError):
            one.recv(dice.choice((1, 200, 2000)))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()
    return len(made)


def _garbage(server: Server, sockets: contextlib.ExitStack, dice: random.Random) -> int:
    made = _connect(server, sockets, 60)
    many = b"".join(b"x-%d: y\r\n" % i for i in range(5000))
    contents = (
        dice.randbytes(2000),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + dice.randbytes(500),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + dice.randbytes(100),
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"a" * 200_000,
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + many + b"\r\n",
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 200,
        b"GET " + b"/x" * 50_000 + b" HTTP/1.1\r\n\r\n",
        _request(length=-5),
        _request({}, length=10**30),
        _request().replace(b"content-length: 0", b"transfer-encoding: chunked") + b"zz\r\nx",
        b"POST /v1/messages HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 50\r\n\r\nabcde",
        b"\r\n" * 10_000,
    )
    for number, one in enumerate(made):
        _send(one, contents[number % len(contents)])
    return len(made)


def _idle(server: Server, sockets: contextlib.ExitStack, _: random.Random) -> int:
    """Connections that are kept alive, and never used again."""
    made = _connect(server, sockets, DESCRIPTORS + 50)
    for one in made:
        _send(one, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    return len(made)


def _churn(server: Server, sockets: contextlib.ExitStack, _: random.Random) -> int:
    num_made = 0
    for _round in range(20):
        made = _connect(server, sockets, 40)
        num_made += len(made)
        for one in made:
            one.close()
    return num_made


MISUSES = (
    _silent,
    _slow_headers,
    _slow_body,
    _half_closed,
    _unread,
    _reset,
    _garbage,
    _idle,
    _churn,
)
