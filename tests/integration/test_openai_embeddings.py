"""Embeddings by the official client."""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.http_server import RunningServer

pytestmark = pytest.mark.integration

TEXTS = ["hello", "a longer text, which says more"]


@pytest.fixture
def client(running: RunningServer) -> Iterator[openai.OpenAI]:
    """The official one; checking answers strictly, it refuses the base64 it asks for."""
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_texts_have_vectors_of_length_one(client: openai.OpenAI) -> None:
    """The client itself asks for base64 unless told otherwise."""
    packed = client.embeddings.create(model="fake", input=TEXTS)
    plain = client.embeddings.create(model="fake", input=TEXTS, encoding_format="float")
    assert [each.index for each in packed.data] == [0, 1]
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == sum(map(len, TEXTS))
    assert packed.model == "fake"
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.hypot(*other.embedding) == pytest.approx(1)
    assert plain.data[0].embedding != pytest.approx(plain.data[1].embedding)


def test_all_forms_of_one_text_have_one_vector(client: openai.OpenAI) -> None:
    ids = list(b"hello")
    forms: list[Any] = ["hello", ["hello"], ids, [ids]]
    vectors = [client.embeddings.create(model="fake", input=form).data for form in forms]
    assert all(len(data) == 1 for data in vectors)
    assert len({tuple(data[0].embedding) for data in vectors}) == 1


def test_dimensions_cut_a_vector_and_keep_its_length(client: openai.OpenAI) -> None:
    whole, cut = (
        client.embeddings.create(model="fake", input="hello", dimensions=dimensions)
        for dimensions in (16, 4)
    )
    ratios = {
        round(a / b, 4)
        for a, b in zip(cut.data[0].embedding, whole.data[0].embedding, strict=False)
    }
    assert len(cut.data[0].embedding) == 4
    assert len(ratios) == 1
    assert math.hypot(*cut.data[0].embedding) == pytest.approx(1)


def test_a_vector_that_is_not_normalised_is_the_mean(http: httpx.Client) -> None:
    def embed(**fields: Any) -> list[list[float]]:
        answer = http.post("/v1/embeddings", json={"model": "fake", **fields})
        assert answer.status_code == 200, answer.text
        return [each["embedding"] for each in answer.json()["data"]]

    ids = list(b"hello")
    ((one,), (unit,)) = embed(input=[ids], normalize=False), embed(input=[ids])
    length = math.hypot(*one)
    assert length != pytest.approx(1, abs=0.05)
    assert [value / length for value in one] == pytest.approx(unit)
    assert embed(input=[ids], normalize=False, dimensions=4) == [one[:4]]


@pytest.mark.parametrize(
    "value, words",
    [
        ([7, 99999, 8], "token 1 of input 0 is 99999"),
        ([[7], [8, 9, -1]], "token 2 of input 1 is -1"),
        ([[7], ["x"]], "entry 1"),
        (["x", 7], "list of strings"),
        ([7, True], "list of strings"),
        (7.5, "list of strings"),
    ],
)
def test_a_refusal_names_the_place(http: httpx.Client, value: Any, words: str) -> None:
    error = http.post("/v1/embeddings", json={"model": "fake", "input": value}).json()["error"]
    assert words in error["message"]
    assert error["param"] == "input"


@pytest.mark.parametrize(
    "changes, param",
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": [[99999]]}, "input"),
        ({"input": [1] * 200_000}, "input"),
        ({"input": {"text": "x"}}, "input"),
        ({"dimensions": 17}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
def test_a_refusal_names_the_field(http: httpx.Client, changes: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/embeddings", json={"model": "fake", "input": "hello", **changes})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split(".")[0] == param


def test_another_model_is_not_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="text-embedding-3-small", input="x")


def test_streams_go_on_while_a_text_is_embedded(running: RunningServer) -> None:
    with running.client() as http:
        body = {"model": "fake", "prompt": "go on", "max_tokens": 50, "temperature": 0}
        alone = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            with running.client() as other:
                long = {"model": "fake", "input": "x" * 20_000}
                assert other.post("/v1/embeddings", json=long).status_code == 200
            lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    texts = [httpx.Response(200, text=line).json()["choices"] for line in lines]
    assert "".join(choices[0]["text"] for choices in texts if choices) == alone
