"""Sends image files and URLs that take all memory, mislead a parser, or lead elsewhere.

Promised: each that is no picture is refused with a 400 that names its field, the server does not
grow beyond a few images, nothing that a request names is connected to, and other clients notice
nothing. Rounds alternate between a model that accepts only text and refuses every image, and one
that takes them.
"""

import json
import random
import socket
import struct
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
from PIL import Image

from tests.attack.schemas import resident_bytes
from tests.attack.site import MAX_TOKENS, SETTINGS, Server, ServerAttack
from tests.chaos.talk import ask
from tests.pictures import base64_of, data_uri, picture, saved

_NUM_AT_ONCE = 8
_MAX_GROWTH = 2**30  # two images of 40 million pixels are decoded at once
_PNG = b"\x89PNG\r\n\x1a\n"
_SVG = (
    b'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg>&x;</svg>'
)


def png_chunk(name: bytes, body: bytes) -> bytes:
    """A chunk of a PNG file, with its checksum."""
    named = name + body
    return struct.pack(">I", len(body)) + named + struct.pack(">I", zlib.crc32(named))


def _with_chunk(name: bytes, body: bytes) -> bytes:
    whole = picture()
    end = len(_PNG) + 25  # after the header
    return whole[:end] + png_chunk(name, body) + whole[end:]


def _header_only(dice: random.Random) -> bytes:
    width, height = dice.choice(((2**31 - 1,) * 2, (65_000, 65_000), (50_000, 1000), (0, 5)))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return _PNG + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", zlib.compress(bytes(1000)))


def _bomb(dice: random.Random) -> bytes:
    """Some kilobytes that decode to many million pixels."""
    side = dice.choice((6300, 8000, 20_000))
    form = dice.choice(("PNG", "GIF", "WEBP")) if side < 7000 else "PNG"
    return saved(Image.new("1", (side, side)).convert("1" if form == "PNG" else "L"), form)


def _text_bomb(dice: random.Random) -> bytes:
    packed = zlib.compress(bytes(100 * 2**20), 9)
    if dice.random() < 0.5:
        return _with_chunk(b"zTXt", b"comment\0\0" + packed)
    return _with_chunk(b"iCCP", b"profile\0\0" + packed)


def _truncated(dice: random.Random) -> bytes:
    whole = picture((200, 100), form=dice.choice(("PNG", "JPEG", "GIF", "WEBP", "BMP")))
    return whole[: dice.randrange(len(whole) * 9 // 10)]


def _mutated(dice: random.Random) -> bytes:
    whole = bytearray(picture((60, 40), form=dice.choice(("PNG", "JPEG", "GIF", "WEBP", "BMP"))))
    for _ in range(dice.choice((1, 5, 50))):
        whole[dice.randrange(len(whole))] = dice.randrange(256)
    return bytes(whole)


def _polyglot(dice: random.Random) -> bytes:
    start = dice.choice((b"%PDF-1.4\n", b"<html>", b"PK\3\4", b"GIF89a/*", b"MZ", _SVG))
    return start + picture() if dice.random() < 0.7 else picture() + start


_NO_PICTURES: tuple[Callable[[random.Random], bytes], ...] = (
    _header_only,
    _truncated,
    lambda _: _SVG,
    lambda _: picture((1, 100_000)),
    lambda dice: dice.randbytes(dice.choice((0, 1, 40, 5000))),
)
# Some of these can be shown: what matters is what they take.
_ODD_PICTURES: tuple[Callable[[random.Random], bytes], ...] = (
    _bomb,
    _text_bomb,
    _mutated,
    _polyglot,
    lambda dice: picture(dice.choice(((1, 200), (200, 1), (1, 1), (3, 599)))),
)


def _odd_source(dice: random.Random) -> str:
    encoded = base64_of(picture())
    return dice.choice(
        (
            "",
            "A" * dice.choice((1, 5, 29 * 2**20)),
            encoded[:-7] + "!",
            encoded + "\ud800",
            "data:",
            "data:,",
            "data:image/png;base64",
            f"data:image/png;base64;base64,{encoded[1:]}",
            "data:image/png," + "%00" * 1000,
            "data:image/svg+xml,%3Csvg%20onload=alert(1)%3E",
            "javascript:alert(1)",
            "file:///etc/passwd",
            "\x00http://localhost/",
        )
    )


def _url(dice: random.Random, port: int) -> str:
    """A URL of the trap, which listens on loopback."""
    hosts = (
        "127.0.0.1", "localhost", "LOCALHOST.", "2130706433", "0x7f000001", "0177.1", "127.1", "0",
        "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "user@127.0.0.1", "img.example@127.0.0.1",
        "127.0.0.1.nip.example", "①②⑦.0.0.1",
    )  # fmt: skip
    scheme = dice.choice(("http", "https", "HTTP", " http"))
    return f"{scheme}://{dice.choice(hosts)}:{port}/a.png"


def _bodies(source: str, model: str) -> dict[str, Any]:
    """A request of each protocol with an image."""
    chat = {"type": "image_url", "image_url": {"url": source}}
    kind = "url" if "://" in source else "base64"
    block = {"type": "image", "source": {"type": kind, "url": source, "data": source}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    item = {"type": "input_image", "image_url": source}
    output = {"type": "function_call_output", "call_id": "c", "output": [item]}
    said = {"role": "user", "content": "x", "images": [source]}
    new = {"role": "user", "content": [{"type": "image", "source": source}]}
    return {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [chat]}]},
        "/v1/messages": {"messages": [{"role": "user", "content": [result]}], "max_tokens": 4},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": [block]}]},
        "/v1/responses": {"input": [{"role": "user", "content": [item]}]},
        "/v1/responses/input_tokens": {"input": [output]},
        "/api/chat": {"model": model, "messages": [said]},
        "/api/generate": {"model": model, "prompt": "x", "images": [source]},
        "/v1/agents/looker/generate": {"messages": [new]},
    }


@dataclass(frozen=True)
class _Sent:
    """A request, and whether its image must be refused."""

    path: str
    body: Any
    is_refused: bool


class HostileImages(ServerAttack):
    """Each round several images at once, each by any protocol, to one of the models."""

    kind: ClassVar[str] = "images"
    settings: ClassVar[Mapping[str, Any]] = {**SETTINGS, "ocr": "off"}
    models: ClassVar[tuple[str, ...]] = ("fake", "fake-vision")

    def open(self) -> None:
        self._servers: dict[str, Server] = {}
        self._replies: dict[str, str] = {}
        self._trap = socket.create_server(("127.0.0.1", 0), backlog=16)
        self._trap.setblocking(False)

    def close(self) -> None:
        self._trap.close()
        for server in self._servers.values():
            self.server = server
            super().close()

    def run_round(self, dice: random.Random) -> None:
        self._model = self.models[self.round % len(self.models)]
        if self._model not in self._servers:
            self._servers[self._model] = self._start(self._model)
        self.server = self._servers[self._model]
        before = resident_bytes(self.server.pid)
        sent = [self._choose(dice) for _ in range(_NUM_AT_ONCE)]
        with ThreadPoolExecutor(len(sent)) as threads:
            for found in threads.map(self._send, sent):
                if found:
                    self.find(found)
        growth = resident_bytes(self.server.pid) - before
        if growth > _MAX_GROWTH:
            self.find(f"the server grew by {growth >> 20} MB")
        try:
            self._trap.accept()
        except BlockingIOError:
            pass
        else:
            self.find("the server connected to an address that a request named")
        self.check_server()

    def check_witness(self) -> None:
        if self._model == "fake":
            super().check_witness()
        elif (reply := self._say(self.server)) != self._replies[self._model]:
            self.find(f"a bystander's reply is wrong: {reply!r}")

    def _start(self, model: str) -> Server:
        server = Server(self.work / model, "--model", model, settings=self.settings).start()
        server.http.post("/v1/agents", json={"id": "looker"}).raise_for_status()
        self._replies[model] = self._say(server)
        return server

    def _say(self, server: Server) -> str:
        """The reply of a model to a text that has nothing to do with images."""
        said = [{"role": "user", "content": "What do you see out there?"}]
        return ask(server.http, "", said, MAX_TOKENS)

    def _choose(self, dice: random.Random) -> _Sent:
        chance, is_refused = dice.random(), True
        if chance < 0.2:
            source = _url(dice, self._trap.getsockname()[1])
        elif chance < 0.4:
            source = _odd_source(dice)
        else:
            is_refused = dice.random() < 0.5
            data = dice.choice(_NO_PICTURES if is_refused else _ODD_PICTURES)(dice)
            media_type = dice.choice(("image/png", "image/jpeg", "text/html", "x" * 1000, ""))
            source = base64_of(data) if dice.random() < 0.5 else data_uri(data, media_type)
        path, body = dice.choice(list(_bodies(source, self._model).items()))
        if path == "/v1/chat/completions" and chance > 0.9:
            parts = body["messages"][0]["content"]
            body["messages"][0]["content"] = parts * (many := dice.choice((20, 101, 10_001)))
            is_refused |= many > 100
        return _Sent(path, body, is_refused or self._model == "fake")

    def _send(self, sent: _Sent) -> str:
        """Send a request; returns what is wrong with the answer, if anything."""
        self.num_requests += 1
        try:
            content = json.dumps(sent.body)  # escapes half surrogates, which httpx cannot send
            headers = {"content-type": "application/json"}
            answer = self.server.http.post(sent.path, content=content, headers=headers)
        except httpx.HTTPError as error:
            return f"{sent.path}: {error!r}; {str(sent.body)[:300]}"
        # A request whose body is too large is refused before its images are read.
        allowed = (400, 413) if sent.is_refused else (200, 400, 413)
        if answer.status_code in allowed:
            return ""
        shown = f"{answer.status_code} {answer.text[:200]}; {str(sent.body)[:300]}"
        return f"{self._model} {sent.path}: {shown}"
