"""Models with real weights that are swapped while a server runs: what is refused, what stays."""

import json
import re
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from experiments.exp_swap import megabytes, other_model
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from tests.http_server import RunningServer, make_settings, run_server
from tests.waiting import await_that

pytestmark = pytest.mark.integration

TALK = [{"role": "user", "content": "Tell me of the rivers and the town. " * 30}]


@pytest.fixture(scope="module")
def home(tiny_starter_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny models that differ, and three that cannot be loaded."""
    models = tmp_path_factory.mktemp("swaps") / "models"
    shutil.copytree(tiny_starter_dir, models / "one")
    for name in ("two", "cut", "odd", "huge"):
        other_model(models / "one", models / name)
    weights = models / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1_000_000])
    config = json.loads((models / "odd" / "config.json").read_text())
    (models / "odd" / "config.json").write_text(json.dumps({**config, "model_type": "odd"}))
    with (models / "huge" / "more.safetensors").open("wb") as sparse:
        sparse.truncate(2**34)
    return models.parent


@pytest.fixture(scope="module")
def running(home: Path) -> Iterator[RunningServer]:
    settings = make_settings(
        home, backend="torch", dtype="float32", model="one", model_budget_mb=100, threads=1
    )
    with run_server(settings) as made:
        yield made


def ask(http: httpx.Client, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12}
    made: dict[str, Any] = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    return made


def said(reply: dict[str, Any]) -> tuple[str, str]:
    return reply["model"], reply["choices"][0]["message"]["content"]


def cached(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def swap(http: httpx.Client, model: str) -> httpx.Response:
    return http.post("/admin/models/swap", json={"model": model})


@pytest.mark.parametrize(
    "model, status, reason",
    [
        ("cut", 400, "cut could not be loaded.*damaged or incomplete.*one is served again"),
        (
            "odd",
            400,
            "does not support model_type 'odd'. Use .* of transformers; one is served again",
        ),
        ("huge", 400, "huge does not fit"),
        ("/nowhere/at/all", 404, "there is no model"),
        ("org/unknown", 404, "downloading org/unknown from Hugging Face failed"),
    ],
    ids=lambda value: str(value).replace("/", "-")[:12],
)
def test_a_model_that_cannot_be_loaded_leaves_the_one_before_it(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, model: str, status: int, reason: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = ask(http, TALK)
    answer = swap(http, model)
    assert answer.status_code == status, answer.text
    assert re.search(reason, answer.json()["error"]["message"], re.S)
    after = ask(http, TALK)
    assert said(after) == said(before)
    assert cached(after) > 200


def test_nothing_refers_to_a_model_that_was_unloaded(
    http: httpx.Client, running: RunningServer
) -> None:
    ask(http, TALK)
    model = running.server.device.ready_model()
    assert isinstance(model.backend, TorchBackend)
    weights = list(model.backend._model.parameters())
    left = [weakref.ref(each) for each in (model.backend, *weights)]
    del model, weights
    http.post("/admin/models/unload").raise_for_status()
    await_that(lambda: not any(ref() is not None for ref in left))
    ask(http, TALK)  # which loads it again


def test_what_is_on_this_machine_is_listed(http: httpx.Client) -> None:
    listed = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert listed["one"]["state"] == "loaded"
    assert (listed["two"]["state"], listed["two"]["family"]) == ("on_disk", "llama")
    assert listed["two"]["size_bytes"] == listed["one"]["size_bytes"] > 10**6
    assert (listed["two"]["fits"], listed["huge"]["fits"]) == (True, False)
    assert "smollm2-135m-instruct" in listed


def test_a_conversation_goes_on_with_the_other_model_and_back_as_if_computed_fresh(
    http: httpx.Client, home: Path, tmp_path: Path
) -> None:
    first = ask(http, TALK)
    longer = [*TALK, first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    swap(http, "two").raise_for_status()
    other = ask(http, longer)
    assert said(other)[0] == "two"
    assert cached(other) < 50  # what its template says first, if another test has asked it before
    swap(http, "one").raise_for_status()
    back = ask(http, longer)
    assert cached(back) >= first["usage"]["total_tokens"] - 2
    settings = make_settings(
        tmp_path, backend="torch", dtype="float32", model=str(home / "models/one"), threads=1
    )
    with run_server(settings) as fresh, fresh.client() as alone:
        assert said(ask(alone, longer)) == said(back)
    http.post("/v1/cache/gc", json={"orphan_age_s": 0})


def test_swaps_take_no_more_memory_than_the_first(http: httpx.Client) -> None:
    """EXP-011 swaps twenty times; what stayed of a model would show after six, too."""
    sizes = []
    for turn in range(6):
        swap(http, "one" if turn % 2 else "two").raise_for_status()
        ask(http, [{"role": "user", "content": "Hello."}])
        sizes.append(megabytes())
    assert sizes[-1] <= 1.05 * max(sizes[:2])
