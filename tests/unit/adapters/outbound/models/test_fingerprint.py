import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from semantic.adapters.outbound.models.fingerprint import fingerprint

pytestmark = pytest.mark.unit


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory as models come in: two shards, one tensor of more than the samples."""
    return make_model(tmp_path / "model", seed=1)


def make_model(directory: Path, seed: int) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text('{"model": {}}')
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "generation_config.json").write_text('{"temperature": 0.7}')
    (directory / "README.md").write_text("a model")
    random = np.random.default_rng(seed)
    save_file(
        {"small": random.random(5), "large": random.random(100_000)},
        directory / "model-00001-of-00002.safetensors",
    )
    save_file({"other": random.random(300)}, directory / "model-00002-of-00002.safetensors")
    return directory


def shard(model: Path) -> Path:
    return model / "model-00001-of-00002.safetensors"


def flip(path: Path, index: int) -> None:
    content = bytearray(path.read_bytes())
    content[index] ^= 1
    path.write_bytes(content)


def test_a_copy_has_the_same_fingerprint(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    found = fingerprint(model, None)
    assert len(bytes.fromhex(found)) == 32
    assert fingerprint(tmp_path / "copy", None) == found


def test_a_sibling_of_equal_geometry_is_another(model: Path, tmp_path: Path) -> None:
    sibling = make_model(tmp_path / "sibling", seed=2)
    assert fingerprint(sibling, None) != fingerprint(model, None)
    assert shard(sibling).stat().st_size == shard(model).stat().st_size


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_any_byte_of_the_small_files_counts(model: Path, name: str) -> None:
    before = fingerprint(model, None)
    flip(model / name, 3)
    changed = fingerprint(model, None)
    assert changed != before
    (model / name).unlink()
    assert fingerprint(model, None) not in (before, changed)


def test_a_file_that_comes_along_counts(model: Path) -> None:
    before = fingerprint(model, None)
    (model / "added_tokens.json").write_text("{}")
    assert fingerprint(model, None) != before


def test_files_that_do_not_affect_tokens_do_not_count(model: Path) -> None:
    before = fingerprint(model, None)
    (model / "generation_config.json").write_text('{"temperature": 0}')
    (model / "README.md").write_text("the same model")
    assert fingerprint(model, None) == before


def test_every_tensor_is_sampled_at_three_places(model: Path) -> None:
    """Tensors of a file come one after the other; the samples' first and last bytes are tried."""
    path = shard(model)
    before = fingerprint(model, None)
    content = path.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:header_end])
    start, end = entries["large"]["data_offsets"]
    middle = (start + end - 4096) // 2
    places = [start, start + 4095, middle, middle + 4095, end - 4096, end - 1]
    places += list(entries["small"]["data_offsets"])[:1]
    for place in places:
        flip(path, header_end + place)
        assert fingerprint(model, None) != before, place
        path.write_bytes(content)
    flip(path, header_end + start + 5000)  # between samples, which is what makes it fast
    assert fingerprint(model, None) == before


def test_the_header_counts(model: Path) -> None:
    before = fingerprint(model, None)
    content = shard(model).read_bytes()
    shard(model).write_bytes(content.replace(b'"small"', b'"smell"'))
    assert fingerprint(model, None) != before


@pytest.mark.parametrize("suffix", [".bin", ".npz", ".safetensors"])
def test_other_formats_are_sampled_at_strides(model: Path, suffix: str) -> None:
    """So is a file that is called safetensors and is none."""
    path = model / f"weights{suffix}"
    path.write_bytes(bytes(3_500_000))
    before = fingerprint(model, None)
    for place in (0, 2**20, 2**20 + 4095, 3 * 2**20, 3_499_999, 3_500_000 - 4096):
        flip(path, place)
        assert fingerprint(model, None) != before, place
        flip(path, place)
    path.write_bytes(bytes(3_500_001))
    assert fingerprint(model, None) != before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 100,
        (2).to_bytes(8, "little") + b"{]" + b"data",
        (2).to_bytes(8, "little") + b"[]" + b"data",
        (32).to_bytes(8, "little") + b'{"a":{"data_offsets":[0,99999]}}' + b"data",
        (31).to_bytes(8, "little") + b'{"a":{"data_offsets":[-9,9999]}}'[:31] + b"data",
        (7).to_bytes(8, "little") + b'{"a":1}' + b"data",
    ],
)
def test_damaged_weights_have_a_fingerprint_too(model: Path, content: bytes) -> None:
    shard(model).write_bytes(content)
    before = fingerprint(model, None)
    shard(model).write_bytes(content + b"!")
    assert fingerprint(model, None) != before


# -- the cache --------------------------------------------------------------------------------


@pytest.fixture
def cache_file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "fingerprints.json"


def test_a_fingerprint_is_cached_by_size_and_time(model: Path, cache_file: Path) -> None:
    found = fingerprint(model, cache_file)
    times = shard(model).stat()
    flip(shard(model), -1)
    os.utime(shard(model), ns=(times.st_atime_ns, times.st_mtime_ns))
    # Nothing tells the file from the one before, so the weights were not read again.
    assert fingerprint(model, cache_file) == found
    assert fingerprint(model, None) != found
    os.utime(shard(model), ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert fingerprint(model, cache_file) == fingerprint(model, None)


def test_several_models_are_kept(model: Path, cache_file: Path, tmp_path: Path) -> None:
    sibling = make_model(tmp_path / "sibling", seed=2)
    found = [fingerprint(directory, cache_file) for directory in (model, sibling)]
    kept = json.loads(cache_file.read_text())["models"]
    assert [entry["fingerprint"] for entry in kept.values()] == found
    assert list(cache_file.parent.iterdir()) == [cache_file]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 0}',
        '{"version": 1, "models": []}',
        '{"version": 1, "models": {"%s": {"files": {}, "fingerprint": 7}}}',
        '{"version": 1, "models": {"%s": 7}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_cache_is_computed_anew(model: Path, cache_file: Path, content: str) -> None:
    found = fingerprint(model, cache_file)
    cache_file.write_text(content.replace("%s", str(model)))
    assert fingerprint(model, cache_file) == found
    assert found in cache_file.read_text()


def test_a_kept_result_without_a_value_is_computed_anew(model: Path, cache_file: Path) -> None:
    found = fingerprint(model, cache_file)
    cache_file.write_text(cache_file.read_text().replace(f'"{found}"', "null"))
    assert fingerprint(model, cache_file) == found


def test_a_cache_that_cannot_be_written_is_done_without(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert fingerprint(model, tmp_path / "file" / "cache.json") == fingerprint(model, None)


def test_changed_files_of_a_known_model_are_logged(
    model: Path, cache_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fingerprint(model, cache_file)
    os.utime(model / "config.json", ns=(1, 1))
    fingerprint(model, cache_file)
    assert "changed" not in caplog.text
    (model / "chat_template.jinja").write_text("{{ other }}")
    fingerprint(model, cache_file)
    assert "the files of model changed" in caplog.text
