"""Agents recorded on each kind of machine continue on this one with the same tokens."""

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from semantic.adapters.outbound.backends.torch.native.variants import (
    SCALAR,
    VARIANTS,
    NativeBuild,
)
from semantic.domain.errors import InvalidRequestError
from tests.machines import (
    RECORDINGS,
    TURNS,
    WEIGHTS,
    answers,
    machine_kind,
    make_model,
    replies,
    say,
    serving,
)

if TYPE_CHECKING:
    from semantic.adapters.outbound.backends.torch.native.library import Library

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("library")]

RECORDED = sorted(RECORDINGS.glob("*.json"))
VARIANTS_HERE = [
    one.name for one in VARIANTS if platform.machine() in one.machines and one is not SCALAR
]


@pytest.fixture(scope="module")
def model(starter_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(starter_model_dir, tmp_path_factory.mktemp("machines") / "tiny")


def home_in(place: Path, native_directory: Path) -> Path:
    """A server's directory, with the native libraries that were compiled before."""
    (place / "home").mkdir()
    (place / "home" / "native").symlink_to(native_directory)
    return place / "home"


def test_a_machine_was_recorded(library: "Library") -> None:
    assert library.variant
    assert RECORDED
    assert machine_kind() in {"x86_64", "aarch64"}


@pytest.fixture(
    scope="module",
    params=[(weights, variant) for weights in WEIGHTS for variant in VARIANTS_HERE],
    ids="-".join,
)
def served(
    request: pytest.FixtureRequest,
    model: Path,
    native_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, httpx.Client]]:
    """How the model's weights are quantised, and its server with a variant of the library."""
    weights, variant = request.param
    try:
        NativeBuild(native_directory, variant).library()
    except InvalidRequestError as error:
        pytest.skip(str(error))
    home = home_in(tmp_path_factory.mktemp(variant), native_directory)
    with serving(home, model, weights, variant) as http:
        yield weights, http


@pytest.mark.parametrize("recording", RECORDED, ids=lambda file: file.stem)
def test_an_agent_continues_as_where_it_was_recorded(
    recording: Path, served: tuple[str, httpx.Client]
) -> None:
    weights, http = served
    expected = json.loads(recording.read_text())[weights]
    archive = recording.with_name(f"{recording.stem}-{weights}.tar").read_bytes()
    taken = http.post("/v1/agents/import", content=archive).raise_for_status().json()
    assert taken["import_state"] == "imported", taken
    reply = say(http, TURNS[-1])
    assert reply["text"] == expected[-1]
    assert reply["usage"]["cached_tokens"] >= taken["tokens"] - 1
    # And what this machine computes itself.
    forget(http)
    assert replies(http) == expected
    forget(http)


def forget(http: httpx.Client) -> None:
    """Delete the agent and its KV cache."""
    http.delete("/v1/agents/a").raise_for_status()
    http.post("/v1/cache/gc", json={"orphan_age_s": 0}).raise_for_status()
    found = http.get("/v1/cache").raise_for_status().json()
    assert found["memory"]["blocks"] == found["disk"]["files"] == 0


@pytest.fixture(scope="module")
def starter_answers(
    starter_model_dir: Path, native_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    home = home_in(tmp_path_factory.mktemp("starter"), native_directory)
    with serving(home, starter_model_dir, "auto") as http:
        return answers(http)


@pytest.mark.parametrize("recording", RECORDED, ids=lambda file: file.stem)
def test_the_starter_model_answers_as_where_it_was_recorded(
    recording: Path, starter_answers: list[str]
) -> None:
    assert starter_answers == json.loads(recording.read_text())["starter"]
