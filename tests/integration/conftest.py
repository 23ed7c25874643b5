"""A server on the fake backend for each module, and the clients that talk to it.

A module changes the server's settings with `SETTINGS`, or brings a `running` of its own; its
`client` is the official one that it names as `SDK`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import requests

from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from tests.http_server import RunningServer, make_settings, run_server
from tests.no_tls import NO_TLS


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    changes = getattr(request.module, "SETTINGS", {})
    with run_server(make_settings(tmp_path_factory.mktemp("home"), **changes)) as server:
        yield server


@pytest.fixture
def http(running: RunningServer) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client


def sdk_client(sdk: Any, running: RunningServer) -> Any:
    """An official client, `openai.OpenAI` or `anthropic.Anthropic`, which checks all answers."""
    is_openai = sdk is openai.OpenAI
    url = f"{running.url}/v1" if is_openai else running.url
    http = (openai if is_openai else anthropic).DefaultHttpxClient(verify=NO_TLS)
    return sdk(
        base_url=url,
        api_key="any",
        max_retries=0,
        http_client=http,
        _strict_response_validation=True,
    )


@pytest.fixture
def client(request: pytest.FixtureRequest, running: RunningServer) -> Iterator[Any]:
    with sdk_client(request.module.SDK, running) as client:
        yield client


@pytest.fixture
def openai_client(running: RunningServer) -> Iterator[openai.OpenAI]:
    with sdk_client(openai.OpenAI, running) as client:
        yield client


@pytest.fixture
def anthropic_client(running: RunningServer) -> Iterator[anthropic.Anthropic]:
    with sdk_client(anthropic.Anthropic, running) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(starter_model_dir: Path) -> HFTokenizer:
    """The starter model's tokenizer."""
    return HFTokenizer(starter_model_dir)


@pytest.fixture(scope="module")
def document(running: RunningServer) -> dict[str, Any]:
    """The server's OpenAPI document."""
    with running.client() as http:
        found: dict[str, Any] = http.get("/openapi.json").json()
    return found


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as made:
        made.trust_env = False
        yield made
