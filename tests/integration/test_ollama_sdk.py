"""Ollama's own Python client."""

import math
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from pydantic import BaseModel

from tests.http_server import RunningServer
from tests.no_tls import NO_TLS

pytestmark = pytest.mark.integration

MODEL = "fake"
HI = [{"role": "user", "content": "hi"}]
SHORT = {"num_predict": 4, "temperature": 0}


class Answer(BaseModel):
    """What a reply must be."""

    city: str


@pytest.fixture
def client(running: RunningServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=running.url, trust_env=False, verify=NO_TLS) as made:
        yield made


def test_models(client: ollama.Client) -> None:
    (listed,) = client.list().models
    assert (listed.model, listed.details and listed.details.family) == (MODEL, "fake")
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo
    assert shown.modelinfo["fake.context_length"] == 131_072
    (running,) = client.ps().models
    assert (running.model, running.context_length) == (MODEL, 131_072)
    assert client.pull(MODEL).status == "success"
    assert [step.status for step in client.pull(MODEL, stream=True)][-1] == "success"
    with pytest.raises(ollama.ResponseError, match="model 'x' not found") as refused:
        client.chat("x", HI)
    assert refused.value.status_code == 404


def test_chat_whole_and_streamed(client: ollama.Client) -> None:
    whole = client.chat(MODEL, HI, options=SHORT)
    pieces = list(client.chat(MODEL, HI, options=SHORT, stream=True))
    text = "".join(piece.message.content or "" for piece in pieces)
    assert whole.message.content == text
    assert pieces[-1].done_reason == whole.done_reason == "length"
    assert pieces[-1].eval_count == 4
    said: list[Any] = [*HI, whole.message, {"role": "user", "content": "go on"}]
    again = client.chat(MODEL, said, options=SHORT)
    assert again.prompt_eval_count


def test_generate_by_context(client: ollama.Client) -> None:
    first = client.generate(MODEL, "Name a river.", options=SHORT)
    assert first.context
    second = client.generate(MODEL, "Another.", context=first.context, options=SHORT)
    said: list[Any] = [
        {"role": "user", "content": "Name a river."},
        {"role": "assistant", "content": first.response},
        {"role": "user", "content": "Another."},
    ]
    assert second.response == client.chat(MODEL, said, options=SHORT).message.content


def test_a_schema_and_embeddings(client: ollama.Client) -> None:
    made = client.chat(MODEL, HI, format=Answer.model_json_schema(), options={"temperature": 0})
    assert isinstance(Answer.model_validate_json(made.message.content or ""), Answer)
    found = client.embed(MODEL, ["a", "b"])
    assert [math.hypot(*vector) for vector in found.embeddings] == pytest.approx([1, 1])
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        client.chat(MODEL, HI, think=True)
