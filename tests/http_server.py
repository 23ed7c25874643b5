"""A real HTTP server in this process, for tests that talk to it over a socket."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from semantic.adapters.config.keys import KeyFile, TenantEntry, edit_key_file
from semantic.adapters.config.settings import Settings
from semantic.adapters.config.sources import load_settings
from semantic.entrypoints.bootstrap import Server, bootstrap
from semantic.entrypoints.server import create_app
from semantic.ports.inbound import ModelState
from tests.native_cache import share_native
from tests.no_tls import NO_TLS
from tests.waiting import await_that


@dataclass(frozen=True)
class RunningServer:
    """A listening server and its wired application."""

    url: str
    server: Server

    @property
    def model(self) -> str:
        return self.server.model_id

    def client(self, **options: Any) -> httpx.Client:
        usual = {"timeout": 300, "verify": NO_TLS}
        return httpx.Client(base_url=self.url, trust_env=False, **{**usual, **options})


def make_settings(home: Path, **overrides: Any) -> Settings:
    """Settings for tests: use only files in `home`, and allow time to flush them at shutdown.

    Text recognition is off, whether or not it is installed.
    """
    usual = {"port": 0, "batch_window_ms": 0, "backend": "fake", "default_max_tokens": 1024}
    given = {"home": home, "shutdown_timeout_s": 120, "ocr": "off", **usual, **overrides}
    if given["backend"] == "torch":
        share_native(home)
    return load_settings(given, config_dir=home / "no-config")


def give_keys(home: Path, *tenants: str, limits: TenantEntry | None = None) -> dict[str, str]:
    """Create a key for each tenant in the key file of `home`; that of `admin` is an admin key."""
    secrets: dict[str, str] = {}

    def add(file: KeyFile) -> KeyFile:
        for name in tenants:
            file, _, secrets[name] = file.with_key(
                name, limits or TenantEntry(), is_admin=name == "admin"
            )
        return file

    edit_key_file(home / "keys.json", add)
    return secrets


@contextlib.contextmanager
def run_server(settings: Settings, *, is_ready: bool = True) -> Iterator[RunningServer]:
    """Run a server until the context ends; with `is_ready`, first waits for the model."""
    server = bootstrap(settings)
    config = uvicorn.Config(
        create_app(server), port=settings.port, log_config=None, timeout_graceful_shutdown=3
    )
    http = uvicorn.Server(config)
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    await_that(lambda: http.started, 300)
    if is_ready:
        await_that(lambda: server.device.state is not ModelState.LOADING, 300)
    port = http.servers[0].sockets[0].getsockname()[1]
    try:
        yield RunningServer(f"http://127.0.0.1:{port}", server)
    finally:
        server.request_stop()
        http.should_exit = True
        thread.join(300)
        assert not thread.is_alive(), "it does not stop"
