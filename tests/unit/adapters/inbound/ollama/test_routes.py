"""Ollama's endpoints over canned replies and models that are downloaded."""

import json
from collections.abc import AsyncIterator
from typing import cast

import httpx
import pytest
from fastapi import FastAPI

from semantic.adapters.inbound.http.errors import install_error_handlers
from semantic.adapters.inbound.ollama.routes import OllamaApi
from semantic.adapters.outbound.backends.fake import FakeBackend, FakeModels, FakeTokenizer
from semantic.application.agents.turn_log import PastTurns
from semantic.application.engine.model import LoadedModel
from semantic.application.models.registry import ModelRegistry
from semantic.domain.agents import Principal
from semantic.domain.chat import ServiceClass
from semantic.domain.errors import ModelNotFoundError
from semantic.ports.backend import ModelEntry, OnProgress
from tests.canned_replies import CannedInference
from tests.unit.application.device_rig import ready_device

pytestmark = pytest.mark.unit

MODEL = LoadedModel("fake", FakeBackend(), FakeTokenizer())


class Hub(FakeModels):
    """Has `org/new`, and loses `org/broken` on the way."""

    def find_model(self, source: str) -> ModelEntry:
        return ModelEntry(source, source) if "/" in source else super().find_model(source)

    def fetch(self, entry: ModelEntry, on_progress: OnProgress) -> ModelEntry:
        on_progress(f"downloading {entry.id}: 50 %")
        if entry.id == "org/broken":
            raise ModelNotFoundError("the model is incomplete.")
        return entry


@pytest.fixture
def inference() -> CannedInference:
    return CannedInference()


@pytest.fixture
async def http(inference: CannedInference) -> AsyncIterator[httpx.AsyncClient]:
    hub, app = Hub(), FastAPI()
    install_error_handlers(app)
    with ready_device(MODEL) as (device, _):
        first = hub.find_model("fake")
        models = ModelRegistry(device, hub, lambda *_: MODEL, first, backend_name="fake")
        past = cast("PastTurns", None)
        api = OllamaApi(inference, models, past, lambda: Principal(is_admin=True))
        app.include_router(api.router())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


async def test_a_download_reports_its_progress(http: httpx.AsyncClient) -> None:
    made = await http.post("/api/pull", json={"model": "org/new"})
    assert [json.loads(line)["status"] for line in made.text.splitlines()] == [
        "pulling manifest",
        "downloading org/new: 50 %",
        "success",
    ]
    whole = await http.post("/api/pull", json={"model": "org/new", "stream": False})
    assert whole.json() == {"status": "success"}


async def test_a_download_that_fails_says_why(http: httpx.AsyncClient) -> None:
    made = await http.post("/api/pull", json={"model": "org/broken"})
    assert json.loads(made.text.splitlines()[-1]) == {"error": "the model is incomplete."}
    whole = await http.post("/api/pull", json={"model": "org/broken", "stream": False})
    assert (whole.status_code, whole.json()) == (404, {"error": "the model is incomplete."})


@pytest.mark.parametrize(
    "text, expected",
    [
        ("### Task:\nGenerate a concise title.", ServiceClass.BACKGROUND),
        ("Explain ### Task:", ServiceClass.INTERACTIVE),
    ],
)
async def test_tasks_beside_a_conversation_run_in_the_background(
    http: httpx.AsyncClient, inference: CannedInference, text: str, expected: ServiceClass
) -> None:
    said = [{"role": "user", "content": text}]
    await http.post("/api/chat", json={"model": "fake", "messages": said})
    assert [request.service_class for request in inference.requests] == [expected]
