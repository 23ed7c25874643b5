"""A guarded server process: keys and certificates that change while it runs."""

import signal
import ssl
from pathlib import Path

import httpx
import pytest

from semantic.entrypoints.cli.app import main
from tests.certificates import make_certificate
from tests.http_server import add_key
from tests.smoke.server_process import ServerProcess, StartFailedError, serve

pytestmark = pytest.mark.smoke


def client(server: ServerProcess, certificate: Path) -> httpx.Client:
    return server.client(verify=ssl.create_default_context(cafile=certificate))


def test_keys_and_certificate_are_read_again_on_a_signal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, log = tmp_path / "home", tmp_path / "log"
    home.mkdir()
    old = add_key(home)
    first, key = make_certificate(tmp_path)
    given = ("--backend", "fake", "--tls-cert", str(first), "--tls-key", str(key))
    remote = ("--host", "0.0.0.0", "--allow-remote")  # noqa: S104 - that is the point
    with serve(home, log, *given, *remote, is_ready=False) as server:
        assert server.url.startswith("https://")
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104
        server.await_ready(verify=ssl.create_default_context(cafile=first))
        port = server.url.rpartition(":")[2]
        assert main(["doctor", "--json", "--home", str(home), "--port", port]) == 0
        assert f"a server is on 127.0.0.1:{port}: fake, ready" in capsys.readouterr().out
        with client(server, first) as http:
            assert http.get("/v1/models").status_code == 401
            assert http.get("/v1/models", headers={"x-api-key": old}).status_code == 200
            new = add_key(home)
            assert http.get("/v1/models", headers={"x-api-key": new}).status_code == 401
        second, new_key = make_certificate(tmp_path, "two")
        first_text = first.read_bytes()
        first.write_bytes(second.read_bytes())
        key.write_bytes(new_key.read_bytes())
        server.process.send_signal(signal.SIGHUP)
        server.await_line("keys and limits were reloaded")
        with client(server, second) as http:
            assert http.get("/v1/models", headers={"x-api-key": new}).status_code == 200
        # What cannot be read changes nothing.
        first.write_bytes(first_text)
        server.process.send_signal(signal.SIGHUP)
        server.await_line("keys and limits could not be reloaded")
        with client(server, second) as http:
            assert http.get("/v1/models", headers={"x-api-key": new}).status_code == 200
        assert server.stop() == 0


def test_a_server_without_its_certificate_does_not_start(tmp_path: Path) -> None:
    arguments = ("--backend", "fake", "--tls-cert", "gone.pem", "--tls-key", "gone.key")
    with (
        pytest.raises(StartFailedError) as failure,
        serve(tmp_path / "home", tmp_path / "log", *arguments),
    ):
        pass
    assert failure.value.status == 2
    assert "tls_cert gone.pem" in failure.value.output
    assert "Traceback" not in failure.value.output
