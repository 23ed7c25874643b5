"""Where models are found."""

import json
from pathlib import Path

import huggingface_hub.constants
import pytest

from semantic.adapters.outbound.models.source import LocalModelSource
from semantic.domain.errors import ModelNotFoundError
from tests.unit.adapters.outbound.models.test_gguf import Tiny

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def quiet(_: str) -> None:
    return


def make_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def cache_model(cache: Path, model: str) -> Path:
    """Lay a model out as Hugging Face's library does."""
    repository = cache / f"models--{model.replace('/', '--')}"
    revision = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(revision)
    return make_model(repository / "snapshots" / revision)


def source(tmp_path: Path) -> LocalModelSource:
    return LocalModelSource(tmp_path / "models", "starter", tmp_path / "hub-cache")


def test_a_directory_or_a_name_in_the_models_directory(tmp_path: Path) -> None:
    elsewhere = make_model(tmp_path / "elsewhere")
    named = make_model(tmp_path / "models/mine")
    assert source(tmp_path).resolve(str(elsewhere), quiet) == elsewhere
    assert source(tmp_path).resolve("mine", quiet) == named


@pytest.mark.parametrize("written", [None, {"eos_token_id": 2}])
def test_a_starter_model_that_was_imported_before_gets_its_authors_defaults(
    tmp_path: Path, written: dict[str, object] | None
) -> None:
    directory = make_model(tmp_path / "models/starter")
    path = directory / "generation_config.json"
    if written:
        path.write_text(json.dumps(written))
    assert source(tmp_path).resolve("starter", quiet) == directory
    advised = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
    assert json.loads(path.read_text()) == {**(written or {}), **advised}


@pytest.mark.parametrize("content", ['{"temperature": 1.0}', "{"])
def test_what_someone_wrote_for_the_starter_model_stays(tmp_path: Path, content: str) -> None:
    path = make_model(tmp_path / "models/starter") / "generation_config.json"
    path.write_text(content)
    source(tmp_path).resolve("starter", quiet)
    assert path.read_text() == content


def test_a_hub_id_in_the_librarys_cache_or_in_ours(tmp_path: Path) -> None:
    theirs = cache_model(tmp_path / "hub-cache", "org/theirs")
    ours = cache_model(tmp_path / "models/hub", "org/ours")
    assert source(tmp_path).resolve("org/theirs", quiet) == theirs
    assert source(tmp_path).resolve("org/ours", quiet) == ours


def test_a_cached_model_without_weights_is_not_used(tmp_path: Path) -> None:
    directory = cache_model(tmp_path / "hub-cache", "org/partial")
    (directory / "model.safetensors").unlink()
    steps: list[str] = []
    with pytest.raises(ModelNotFoundError, match="org/partial"):
        source(tmp_path).resolve("org/partial", steps.append)
    assert steps == ["downloading org/partial"]


def test_an_unknown_hub_id_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="could not be fetched from Hugging Face"):
        source(tmp_path).resolve("org/nowhere", quiet)


def test_anything_else_is_answered_with_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"\.gguf file.*'starter'"):
        source(tmp_path).resolve("nowhere", quiet)
    (tmp_path / "a/b").mkdir(parents=True)
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        source(tmp_path).resolve(str(tmp_path / "a/b"), quiet)


def test_a_gguf_file_is_imported_once(tmp_path: Path) -> None:
    gguf = Tiny().write(tmp_path / "mine.gguf")
    models = source(tmp_path)
    first = models.resolve(str(gguf), quiet)
    assert first == tmp_path / "models/mine"
    before = (first / "model.safetensors").stat().st_mtime_ns
    assert models.resolve(str(gguf), quiet) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == before
