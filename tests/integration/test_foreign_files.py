"""Exported agents of untrusted origin: what an import takes over, and what it does not."""

import contextlib
import gzip
import io
import json
import socket
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from semantic.adapters.inbound.http import uploads
from semantic.adapters.outbound.blocks.agent_archive import AgentFile, ExportKeys
from semantic.adapters.outbound.blocks.format import KVCodec
from semantic.ports.storage import ExportItem, ExportPart
from tests.agent_files import Edit, changed, with_fields, with_member_fields
from tests.http_server import RunningServer, give_keys, make_settings, run_server
from tests.integration.test_direct_api import get, make, say, texts
from tests.waiting import await_that

pytestmark = pytest.mark.integration

LONG = "a long system prompt, " * 40


@pytest.fixture
def exported(tmp_path: Path) -> bytes:
    """An agent with two turns, as another server wrote it."""
    with run_server(make_settings(tmp_path / "theirs")) as running, running.client() as http:
        make(http, id="a", system=LONG)
        say(http, "a", "one")
        say(http, "a", "two")
        return http.get("/v1/agents/a/export").content


@pytest.fixture
def http(tmp_path: Path) -> Iterator[httpx.Client]:
    with run_server(make_settings(tmp_path / "ours")) as running, running.client() as client:
        yield client


def take_in(http: httpx.Client, content: bytes, **query: str) -> httpx.Response:
    return http.post("/v1/agents/import", params=query, content=content)


def test_a_signing_key_that_was_lost_is_reported(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    with run_server(settings) as running, running.client() as http:
        make(http, id="a", system=LONG)
    with capture_logs() as logs, run_server(settings):
        pass
    assert not any("signs exported agents" in entry["event"] for entry in logs)
    settings.export_key_file.unlink()
    with capture_logs() as logs, run_server(settings):
        pass
    assert any("signs exported agents was missing" in entry["event"] for entry in logs)


def poisoned(content: bytes) -> bytes:
    """The file with another KV cache under the same names; every checksum is right."""
    file = AgentFile(KVCodec(), ExportKeys(b"a stranger's key"))

    def items() -> Iterator[ExportItem]:
        for item in file.read([content], has_parts=True):
            if isinstance(item, ExportPart):
                buffers = tuple(
                    replace(buffer, source=bytes(byte ^ 1 for byte in bytes(buffer.data)))
                    for buffer in item.payload.buffers
                )
                yield replace(item, payload=replace(item.payload, buffers=buffers))
            else:
                yield item

    return b"".join(file.write(items()))


def first_words(http: httpx.Client, name: str) -> list[str]:
    make(http, id=name, system=LONG)
    said = [say(http, name, "one")["text"], say(http, name, "two")["text"]]
    http.delete(f"/v1/agents/{name}")
    return said


def test_imported_state_of_an_untrusted_signer_is_not_shared(
    exported: bytes, tmp_path: Path
) -> None:
    with run_server(make_settings(tmp_path / "clean")) as running, running.client() as clean:
        make(clean, id="a", system=LONG)
        expected = [say(clean, "a", "one")["text"], say(clean, "a", "two")["text"]]
        third = say(clean, "a", "three")["text"]

    settings = make_settings(tmp_path / "ours")
    with run_server(settings) as running, running.client() as http:
        taken = take_in(http, poisoned(exported), id="evil")
        assert taken.status_code == 201
        assert first_words(http, "b") == expected
        assert taken.json()["import_state"] == "recomputed"
        assert "trusted_export_keys" in taken.json()["import_reason"]
        assert taken.json()["state"]["tier"] == "cold"
        # What was said is there, and is gone on from as if it had been said here.
        assert say(http, "evil", "three")["text"] == third
        http.delete("/v1/agents/evil")
        assert first_words(http, "c") == expected
    with run_server(settings) as running, running.client() as http:
        assert first_words(http, "d") == expected


def test_imported_tokens_of_an_untrusted_signer_are_not_replayed(
    exported: bytes, http: httpx.Client
) -> None:
    other = changed(exported, with_member_fields("turn", tokens="07000000" * 40, num_tokens=40))
    lying = changed(other, with_fields("turn", num_messages=10**9))

    taken = take_in(http, lying).json()
    reply = say(http, "a", "three")

    assert (taken["turns"], taken["tokens"]) == (2, 0)
    log = get(http, "/v1/agents/a/turns")["data"]
    assert texts(log)[1::2][:2] == ["one", "two"]
    assert reply["usage"]["prompt_tokens"] > 40


DEEP: Any = 1
for _ in range(400):
    DEEP = [DEEP]
CALL = {"type": "tool_use", "id": "c", "name": "n"}


def says(*parts: Any) -> Edit:
    return with_fields("turn", messages=[{"role": "user", "parts": list(parts)}])


# One of each kind; all that may be wrong is tried where files are read.
HOSTILE: dict[str, Edit] = {
    "labels": with_fields("agent", labels=[["a", {"x": 1}]]),
    "half a character": with_fields("agent", profile__system="half \ud800"),
    "name": with_member_fields("agent", id="../up"),
    "huge count": with_member_fields("turn", num_tokens=2**70),
    "deep arguments": says(CALL | {"arguments": {"a": DEEP}}),
}


@pytest.fixture(scope="module")
def shared_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("shared")
    with run_server(make_settings(home)) as running, running.client() as client:
        make(client, id="a", system="s")
        say(client, "a", "one")
        yield client


@pytest.mark.parametrize("what", HOSTILE)
def test_a_field_that_no_client_could_set_is_refused(shared_http: httpx.Client, what: str) -> None:
    http = shared_http
    hostile = changed(http.get("/v1/agents/a/export").content, HOSTILE[what])
    for query in ({"id": "b"}, {"id": "b", "messages_only": "true"}):
        answer = take_in(http, hostile, **query)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "file"
    assert [agent["id"] for agent in get(http, "/v1/agents")["data"]] == ["a"]
    assert json.loads(http.get("/health").content)["problem"] == ""


# -- files that cost more than they are worth ------------------------------------------------------


def bomb(num_bytes: int) -> bytes:
    """A file of one block of zeros, compressed to a thousandth."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", format=tarfile.USTAR_FORMAT) as archive:
        header = tarfile.TarInfo(f"blocks/{'0' * 64}.full.safetensors")
        header.size = num_bytes
        archive.addfile(header, io.BytesIO(bytes(num_bytes)))
    return out.getvalue()


def test_a_file_that_expands_too_much_is_refused(shared_http: httpx.Client) -> None:
    headers = {"content-encoding": "gzip"}
    answer = shared_http.post("/v1/agents/import", content=bomb(2**26), headers=headers)
    assert answer.status_code == 413
    assert "50 times" in answer.json()["error"]["message"]


def test_a_file_that_expands_as_files_do_is_imported(shared_http: httpx.Client) -> None:
    content = gzip.compress(shared_http.get("/v1/agents/a/export").content)
    headers = {"content-encoding": "gzip"}
    query = {"id": "packed"}
    answer = shared_http.post("/v1/agents/import", params=query, content=content, headers=headers)
    shared_http.delete("/v1/agents/packed")
    assert answer.status_code == 201


def test_an_upload_that_trickles_in_is_refused(
    shared_http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_UPLOAD_GRACE_S", 0.05)

    def pieces() -> Iterator[bytes]:
        yield b"begin"
        time.sleep(0.1)
        yield b"end"

    answer = shared_http.post("/v1/agents/import", content=pieces())
    assert answer.status_code == 400
    assert "the upload is too slow: 8 bytes" in answer.json()["error"]["message"]


class Upload:
    """An import whose file never ends."""

    def __init__(self, running: RunningServer, secret: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", httpx.URL(running.url).port or 0))
        self._socket.sendall(
            b"POST /v1/agents/import HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999\r\n"
            + f"x-api-key: {secret}\r\n\r\n".encode()
            + b"begin"
        )

    def close(self) -> None:
        self._socket.close()


def test_imports_at_once_are_limited_by_tenant_and_overall(tmp_path: Path) -> None:
    secrets = give_keys(tmp_path, "a", "b", "c")
    with run_server(make_settings(tmp_path)) as running, contextlib.ExitStack() as stack:

        def import_as(tenant: str) -> int:
            headers = {"x-api-key": secrets[tenant]}
            with running.client(headers=headers) as http:
                return take_in(http, b"not an agent").status_code

        def is_at_limit(tenant: str) -> bool:
            return import_as(tenant) == 429

        uploads = []
        for tenant in ("a", "b"):
            assert import_as(tenant) == 400
            for _ in range(2):
                uploads.append(upload := Upload(running, secrets[tenant]))
                stack.callback(upload.close)
            await_that(partial(is_at_limit, tenant))
            assert import_as("c") == (400 if tenant == "a" else 503)
        for upload in uploads:
            upload.close()
        await_that(lambda: {import_as(tenant) for tenant in secrets} == {400})
