"""Agents recorded on each kind of machine continue on this one with the same tokens."""

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING

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


@pytest.fixture
def home(tmp_path: Path, native_directory: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "native").symlink_to(native_directory)
    return tmp_path / "home"


def test_a_machine_was_recorded(library: "Library") -> None:
    assert library.variant
    assert RECORDED
    assert machine_kind() in {"x86_64", "aarch64"}


@pytest.mark.parametrize("variant", VARIANTS_HERE)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("recording", RECORDED, ids=lambda file: file.stem)
def test_an_agent_continues_as_where_it_was_recorded(
    recording: Path, weights: str, variant: str, model: Path, home: Path, native_directory: Path
) -> None:
    try:
        NativeBuild(native_directory, variant).library()
    except InvalidRequestError as error:
        pytest.skip(str(error))
    expected = json.loads(recording.read_text())[weights]
    archive = recording.with_name(f"{recording.stem}-{weights}.tar").read_bytes()
    with serving(home, model, weights, variant) as http:
        taken = http.post("/v1/agents/import", content=archive).raise_for_status().json()
        assert taken["import_state"] == "imported", taken
        reply = say(http, TURNS[-1])
        assert reply["text"] == expected[-1]
        assert reply["usage"]["cached_tokens"] >= taken["tokens"] - 1
        # And what this machine computes itself.
        http.delete("/v1/agents/a").raise_for_status()
        http.post("/v1/cache/gc", json={"orphan_age_s": 0}).raise_for_status()
        assert replies(http) == expected


@pytest.mark.parametrize("recording", RECORDED, ids=lambda file: file.stem)
def test_the_starter_model_answers_as_where_it_was_recorded(
    recording: Path, starter_model_dir: Path, home: Path
) -> None:
    with serving(home, starter_model_dir, "auto") as http:
        assert answers(http) == json.loads(recording.read_text())["starter"]
