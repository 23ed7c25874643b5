"""How a model's files say that it takes images, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from PIL import Image

from semantic.adapters.outbound.backends.images import (
    FeatureCache,
    ImageFeatures,
    grid_positions,
    rope_axes,
    runs,
)
from semantic.adapters.outbound.models.chat_template import template_source
from semantic.adapters.outbound.models.gguf.importing import import_gguf
from semantic.adapters.outbound.models.source import read_config
from semantic.adapters.outbound.vision.families import takes_images
from semantic.adapters.outbound.vision.pixels import to_buffer
from semantic.adapters.outbound.vision.processors import VisionSettings, read_vision_settings
from semantic.domain.errors import InvalidRequestError
from semantic.domain.images.spans import ImageSpan, PreparedImage, image_ids

pytestmark = pytest.mark.unit

SMOLVLM = {"model_type": "smolvlm", "vision_config": {"patch_size": 16}, "scale_factor": 4}
# As in the files of SmolVLM-256M.
SETTINGS = {
    "do_image_splitting": True,
    "image_processor_type": "SmolVLMImageProcessor",
    "max_image_size": {"longest_edge": 512},
    "size": {"longest_edge": 2048},
    "video_sampling": None,
}


def write(directory: Path, name: str, content: dict[str, Any]) -> None:
    (directory / name).write_text(json.dumps(content))


def settings_of(directory: Path, config: dict[str, Any] | None = None) -> VisionSettings:
    found = read_vision_settings(directory, config or SMOLVLM)
    assert found is not None
    return found


def test_settings_stand_in_either_file(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", SETTINGS)
    older = settings_of(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    write(tmp_path, "processor_config.json", {"image_processor": SETTINGS, "image_seq_len": 64})

    assert settings_of(tmp_path).fingerprint == older.fingerprint


@pytest.mark.parametrize(
    "change", [{"image_std": [0.2, 0.5, 0.5]}, {"resample": 2}, {"do_image_splitting": False}]
)
def test_the_fingerprint_changes_with_every_setting(change: Any, tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", SETTINGS)
    before = settings_of(tmp_path).fingerprint
    write(tmp_path, "preprocessor_config.json", {**SETTINGS, **change})

    assert settings_of(tmp_path).fingerprint != before


@pytest.mark.parametrize(
    "content", [None, "{", '{"size": {"width": 3}}', '{"size": 5}', '{"image_mean": "x"}', "[]"]
)
def test_a_model_with_damaged_settings_takes_only_text(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "preprocessor_config.json").write_text(content)

    assert read_vision_settings(tmp_path, SMOLVLM) is None


def test_only_known_types_with_a_tower_take_images() -> None:
    assert takes_images(SMOLVLM)
    assert not takes_images({"model_type": "smolvlm"})
    assert not takes_images({"model_type": "llava", "vision_config": {}})


def test_a_screenshot_of_smolvlm_has_64_tokens_for_each_tile(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", SETTINGS)
    processor = settings_of(tmp_path).processor

    pixels, grid = processor.pixels(Image.new("RGB", (1920, 1080)))

    assert (pixels.shape, grid) == ((13, 3, 512, 512), (3, 4))
    text = processor.text(grid)
    assert text.count("<image>") == 13 * 64
    assert text.startswith("<fake_token_around_image><row_1_col_1><image>")
    assert "<image>\n\n<fake_token_around_image><global-img><image>" in text


def test_an_image_that_is_too_narrow_for_qwen_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", {"size": {"shortest_edge": 1, "longest_edge": 9}})
    config = {"model_type": "qwen3_vl", "vision_config": {}}
    processor = settings_of(tmp_path, config).processor

    with pytest.raises(InvalidRequestError, match="at most 200 times its shorter side; crop it"):
        processor.pixels(Image.new("RGB", (1, 300)))


def span_at(start: int, rows: int, columns: int) -> ImageSpan:
    digest = bytes(32)
    tokens = image_ids(digest, rows * columns)
    return ImageSpan.placed(PreparedImage(digest, tokens, (), (1, rows, columns), 1, 1), start)


def test_positions_follow_the_grids_of_images() -> None:
    spans = [span_at(2, 2, 3), span_at(9, 1, 2)]

    whole = grid_positions(spans, 0, 13)

    assert whole.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8, 9],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 8, 9],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9],
    ]
    for cut in range(1, 13):
        parts = [grid_positions(spans, 0, cut), grid_positions(spans, cut, 13)]
        assert np.array_equal(np.concatenate(parts, axis=1), whole)


def test_frequencies_of_positions() -> None:
    assert rope_axes("qwen2_5_vl", (1, 2, 1)).tolist() == [0, 1, 1, 2]
    assert rope_axes("qwen3_vl_text", (2, 1, 1)).tolist() == [0, 1, 2, 0]
    assert np.bincount(rope_axes("qwen3_vl")).tolist() == [24, 20, 20]


def test_runs_of_rows() -> None:
    assert runs([2, 3, 4, 7, 8]) == ((2, 5), (7, 9))


def test_paligemma_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"model_type": "paligemma"})

    with pytest.raises(InvalidRequestError, match="PaliGemma is not supported: all tokens"):
        read_config(tmp_path)


def test_the_tower_of_a_gguf_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mmproj-model-f16.gguf"
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_tensor("v.patch_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(InvalidRequestError, match=r"vision tower of another model \(mmproj\)"):
        import_gguf(path, tmp_path / "target")


def test_older_models_have_their_template_in_the_processors_file(tmp_path: Path) -> None:
    write(tmp_path, "chat_template.json", {"chat_template": "of the processor"})

    assert template_source(tmp_path, {"chat_template": "of the tokenizer"}) == "of the processor"


class CountedTower(FeatureCache[Any]):
    """Features are the means of tiles; remembers what it computed."""

    def __init__(self, settings: VisionSettings, max_bytes: int) -> None:
        super().__init__(settings, max_bytes)
        self.num_computed = 0

    def compute(self, pixels: Any, image: PreparedImage) -> ImageFeatures[Any]:
        self.num_computed += 1
        assert pixels.shape[1:] == image.pixels[0].shape[1:]
        return ImageFeatures(np.full((64, 2), pixels.mean(), np.float32))


def test_features_are_computed_by_tile_when_needed_and_kept_within_bounds(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", SETTINGS)
    settings, size = settings_of(tmp_path), 64 * 2 * 4
    tower = CountedTower(settings, max_bytes=3 * size)
    pixels, grid = settings.processor.pixels(Image.new("RGB", (1024, 512)))
    ids = image_ids(bytes(32), 64 * len(pixels))
    image = PreparedImage(bytes(32), ids, (to_buffer(pixels),), (), 1024, 512)
    span = ImageSpan.placed(image, 10)
    assert grid == (2, 4)

    rows, pieces = tower.find([span], 0, 75)
    assert (rows, tower.num_computed) == ([*range(10, 75)], 2)
    assert [len(piece.embeddings) for piece in pieces] == [64, 1]
    tower.find([span], 70, 76)
    assert tower.num_computed == 2
    tower.find([span], 74, 10 + 64 * 9)
    assert (tower.num_computed, tower.nbytes) == (9, 3 * size)
    tower.find([span], 0, 11)
    assert tower.num_computed == 10

    other = replace(span, image=replace(image, tenant="another"))
    tower.find([other], 0, 11)
    assert tower.num_computed == 11

    tiny = CountedTower(settings, max_bytes=1)
    tiny.find([span], 0, 11)
    tiny.find([span], 0, 12)
    assert (tiny.num_computed, tiny.nbytes) == (1, size)


def test_an_image_of_another_model_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", SETTINGS)
    settings = settings_of(tmp_path)
    pixels, _ = settings.processor.pixels(Image.new("RGB", (9, 9)))
    image = PreparedImage(bytes(32), image_ids(bytes(32), 7), (to_buffer(pixels),), (), 9, 9)

    with pytest.raises(InvalidRequestError, match="prepared for another model"):
        CountedTower(settings, 1).find([ImageSpan.placed(image, 0)], 0, 7)
