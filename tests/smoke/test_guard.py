"""A guarded server process: keys and certificates that change while it runs."""

import datetime
import ipaddress
import signal
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from semantic.entrypoints.cli.app import main
from tests.http_server import give_keys
from tests.smoke.server_process import ServerProcess, StartFailedError, serve_forked

pytestmark = pytest.mark.smoke


def make_certificate(directory: Path, name: str = "one") -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, for an hour; returns its file and its key's."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = directory / f"{name}.pem", directory / f"{name}.key"
    encoding = serialization.Encoding.PEM
    files[0].write_bytes(certificate.public_bytes(encoding))
    files[1].write_bytes(
        key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


def client(server: ServerProcess, certificate: Path) -> httpx.Client:
    return server.client(verify=ssl.create_default_context(cafile=certificate))


def test_keys_and_certificate_are_read_again_on_a_signal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, log = tmp_path / "home", tmp_path / "log"
    home.mkdir()
    old = give_keys(home, "acme")["acme"]
    first, key = make_certificate(tmp_path)
    given = ("--backend", "fake", "--tls-cert", str(first), "--tls-key", str(key))
    remote = ("--host", "0.0.0.0", "--allow-remote")  # noqa: S104 - that is the point
    with serve_forked(home, log, *given, *remote, is_ready=False) as server:
        assert server.url.startswith("https://")
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104
        server.await_ready(verify=ssl.create_default_context(cafile=first))
        port = server.url.rpartition(":")[2]
        flags = ("--home", str(home), "--port", port, "--native", "off")
        assert main(["doctor", "--json", *flags]) == 0
        assert f"a server is on 127.0.0.1:{port}: fake, ready" in capsys.readouterr().out
        with client(server, first) as http:
            assert http.get("/v1/models").status_code == 401
            assert http.get("/v1/models", headers={"x-api-key": old}).status_code == 200
            new = give_keys(home, "acme")["acme"]
            assert http.get("/v1/models", headers={"x-api-key": new}).status_code == 401
        second, new_key = make_certificate(tmp_path, "two")
        first_text = first.read_bytes()
        first.write_bytes(second.read_bytes())
        key.write_bytes(new_key.read_bytes())
        server.process.send_signal(signal.SIGHUP)
        server.await_line("reloaded keys and limits")
        with client(server, second) as http:
            assert http.get("/v1/models", headers={"x-api-key": new}).status_code == 200
        # What cannot be read changes nothing.
        first.write_bytes(first_text)
        server.process.send_signal(signal.SIGHUP)
        server.await_line("reloading keys and limits failed")
        with client(server, second) as http:
            assert http.get("/v1/models", headers={"x-api-key": new}).status_code == 200
        assert server.stop() == 0


def test_a_server_without_its_certificate_does_not_start(tmp_path: Path) -> None:
    arguments = ("--backend", "fake", "--tls-cert", "gone.pem", "--tls-key", "gone.key")
    with (
        pytest.raises(StartFailedError) as failure,
        serve_forked(tmp_path / "home", tmp_path / "log", *arguments),
    ):
        pass
    assert failure.value.status == 2
    assert "tls_cert gone.pem" in failure.value.output
    assert "Traceback" not in failure.value.output
