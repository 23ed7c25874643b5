"""A draft model beside the served one: how it is chosen, refused, swapped and reported."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from experiments.exp_swap import other_model
from semantic.adapters.config.settings import Settings
from semantic.adapters.outbound.models.catalogue import ModelCatalogue
from semantic.adapters.outbound.models.source import LocalModelSource
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError
from semantic.entrypoints.loading import ModelLoader
from semantic.ports.telemetry import NoTelemetry
from tests.contract.head_models import write_head_model
from tests.http_server import make_settings, run_server

pytestmark = pytest.mark.integration

QUESTION = [{"role": "user", "content": "Tell me of the rivers and the town. " * 20}]


@pytest.fixture(scope="module")
def home(tiny_starter_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny models with one tokenizer, one with another tokenizer, and a large one."""
    models = tmp_path_factory.mktemp("drafts") / "models"
    shutil.copytree(tiny_starter_dir, models / "one")
    for name in ("two", "foreign", "large"):
        other_model(models / "one", models / name)
    tokenizer = json.loads((models / "foreign" / "tokenizer.json").read_text())
    tokenizer["added_tokens"][-1]["content"] = "<|other|>"
    (models / "foreign" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with (models / "large" / "more.safetensors").open("wb") as sparse:
        sparse.truncate(2**30)
    return models.parent


def loader(home: Path, **settings: Any) -> ModelLoader:
    usual = {"backend": "torch", "dtype": "float32", "threads": 1, "model": "one"}
    given = make_settings(home, **{**usual, **settings})
    return ModelLoader(given, "torch", "raw", NoTelemetry())


def ask(http: httpx.Client, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 120, **fields}
    reply = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    return reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens_details"]


def draft_model(http: httpx.Client) -> str:
    """The draft model of the served model, as all endpoints name it."""
    listed = http.get("/v1/models").raise_for_status().json()["data"]
    assert all(not model["draft_model"] for model in listed[1:])
    told: str = http.get("/health").json()["draft_model"]
    assert listed[0]["draft_model"] == told
    return told


def test_replies_are_the_same_and_say_where_drafts_came_from(tmp_path: Path) -> None:
    found = []
    for wanted in ("off", "fake"):
        settings = make_settings(tmp_path / wanted, draft_model=wanted)
        with run_server(settings) as running, running.client() as http:
            assert draft_model(http) == wanted.removeprefix("off")
            found.append([ask(http), ask(http, temperature=0.8, seed=3)])
    for (plain, _), (drafted, details) in zip(*found, strict=True):
        assert drafted == plain
        assert details["accepted_by_source"]["draft_model"] > 20


def test_a_swap_swaps_the_draft_model(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, draft_model="fake")
    with run_server(settings) as running, running.client() as http:
        first = running.server.device.ready_model().draft
        text, _ = ask(http)
        http.post("/admin/models/swap", json={"model": "fake-2"}).raise_for_status()
        assert draft_model(http) == "fake"
        assert running.server.device.ready_model().draft is not first
        assert ask(http)[0] != text
        http.post("/admin/models/swap", json={"model": "fake"}).raise_for_status()
        assert ask(http)[0] == text


def test_a_draft_model_that_does_not_fit_the_model_is_refused(home: Path) -> None:
    made = loader(home, draft_model="foreign")
    refused = "foreign and one have different tokenizers; choose"
    with pytest.raises(InvalidRequestError, match=refused) as raised:
        made.load(made.first, lambda _: None)
    assert raised.value.param == "draft_model"
    made = loader(home, draft_model="nowhere/at-all")
    with pytest.raises(ModelNotFoundError, match="nowhere/at-all"):
        made.load(made.first, lambda _: None)
    made = loader(home, draft_model="two", shards=2)
    with pytest.raises(InvalidRequestError, match="cannot draft for shards"):
        made.load(made.first, lambda _: None)


def test_a_swap_to_a_model_with_another_tokenizer_goes_on_without_a_draft(home: Path) -> None:
    made = loader(home, draft_model="two")
    first = made.load(made.first, lambda _: None)
    assert first.draft is not None
    assert first.draft.id == "two"
    assert made.load(made.find_model("foreign"), lambda _: None).draft is None


def test_auto_takes_a_model_that_fits_and_pays(home: Path) -> None:
    def chosen(served: str, room: int = 2**32) -> str | None:
        source = LocalModelSource(home / "models", "starter")
        catalogue = ModelCatalogue(source, starter_model="starter", room=lambda: room)
        found = catalogue.draft_for(catalogue.find_model(served))
        return None if found is None else found.id

    assert chosen("large") in ("one", "two")
    assert chosen("large", room=2**30) is None
    assert chosen("one") is None
    assert chosen("foreign") is None


def write_headed(tiny_starter_dir: Path, home: Path) -> Path:
    """Write a model with a head for draft tokens."""
    directory = home / "models" / "headed"
    shutil.copytree(tiny_starter_dir, directory)
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    write_head_model(directory, "glm4-moe", share=0.0, vocab_size=vocab_size)
    return directory


def headed_settings(home: Path) -> Settings:
    given = {"backend": "torch", "dtype": "float32", "threads": 1, "model": "headed"}
    return make_settings(home, **given, draft_model="auto")


def test_a_model_whose_files_lack_the_head_says_so(tiny_starter_dir: Path, tmp_path: Path) -> None:
    file = write_headed(tiny_starter_dir, tmp_path) / "model.safetensors"
    kept = {name: weight for name, weight in load_file(file).items() if "layers.2." not in name}
    save_file(kept, file, {"format": "pt"})
    with run_server(headed_settings(tmp_path)) as running, running.client() as http:
        assert draft_model(http) == ""
        served, *others = http.get("/v1/models").json()["data"]
        assert "no MTP head" in served["draft_note"]
        assert not any(model["draft_note"] for model in others)


def test_auto_takes_the_own_head_of_a_model(tiny_starter_dir: Path, tmp_path: Path) -> None:
    write_headed(tiny_starter_dir, tmp_path)
    made = loader(tmp_path, model="headed")
    assert made.load(made.first, lambda _: None).drafts_by == ""
    with run_server(headed_settings(tmp_path)) as running, running.client() as http:
        assert not http.get("/v1/models").json()["data"][0]["draft_note"]
        assert draft_model(http) == "mtp"
        _, details = ask(http, temperature=1, seed=3, ignore_eos=True)
        assert details["accepted_by_source"]["mtp"] > 0
