"""What tests against a server's own OpenAPI document share; each brings its server, `running`."""

from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.http_server import RunningServer


@pytest.fixture(scope="module")
def document(running: RunningServer) -> dict[str, Any]:
    with running.client() as http:
        found: dict[str, Any] = http.get("/openapi.json").json()
    return found


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as made:
        made.trust_env = False
        yield made
