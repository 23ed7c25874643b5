"""Models that see, against transformers: prepared pixels, prompt tokens, and greedy replies."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.adapters.outbound.vision.pixels import from_buffer
from semantic.domain.images.spans import is_image_id
from tests.contract.conftest import make_mlx, require_mlx
from tests.contract.driver import begin
from tests.contract.seeing_library import inputs_of, library_reply
from tests.contract.seeing_models import (
    SEEING_FAMILIES,
    SeeingTinyModel,
    picture,
    seeing_model,
)

pytestmark = pytest.mark.contract

SIZES = ((24, 24), (50, 20), (17, 61), (9, 7), (200, 150))


@pytest.fixture(params=SEEING_FAMILIES)
def model(request: pytest.FixtureRequest) -> SeeingTinyModel:
    return seeing_model(request.param)


@pytest.mark.parametrize("size", SIZES)
def test_pixels_and_tokens_equal_those_of_transformers(
    model: SeeingTinyModel, size: tuple[int, int]
) -> None:
    data = picture(*size)
    expected = inputs_of(model, "say {} now", [data])
    tokens, [span] = model.prompt(f"say {model.marker} now", [data])
    settings = model.vision.settings
    found = settings.scale.apply(
        from_buffer(span.image.pixels[0]), colour_axis=settings.processor.colour_axis
    )
    if model.family.startswith("qwen"):
        found = np.broadcast_to(found[:, :, None], (*found.shape[:2], 2, *found.shape[2:]))
        _, rows, columns = expected["image_grid_thw"][0].tolist()
        assert span.image.grid == (1, rows // 2, columns // 2)
    pixels = expected["pixel_values"].numpy()
    assert np.array_equal(found.reshape(pixels.shape), pixels)
    ids = expected["input_ids"][0].tolist()
    image_id = transformers.AutoConfig.from_pretrained(model.directory).image_token_id
    assert [image_id if is_image_id(token) else token for token in tokens] == ids


TEXT = "Look: {} and at {}, please."


@pytest.mark.parametrize("is_native", [True, False])
def test_replies_of_torch_equal_those_of_transformers(
    model: SeeingTinyModel, native: NativeBuild, is_native: bool
) -> None:
    images = [picture(40, 30), picture(20, 33, seed=1)]
    tokens, spans = model.prompt(TEXT.format(model.marker, model.marker), images)
    options = TorchOptions("float32", native=native if is_native else None)
    backend = TorchBackend(model.directory, model.spec, options)

    reply = begin(backend, 0, tokens, images=spans).finish(12)

    assert reply == library_reply(model, TEXT, images, 12)


def test_replies_of_mlx_equal_those_of_transformers(model: SeeingTinyModel) -> None:
    require_mlx()
    images = [picture(40, 30), picture(20, 33, seed=1)]
    tokens, spans = model.prompt(TEXT.format(model.marker, model.marker), images)

    reply = begin(make_mlx(model), 0, tokens, images=spans).finish(12)

    assert reply == library_reply(model, TEXT, images, 12)


def as_mlx_vlm(model: SeeingTinyModel, directory: Path) -> Path:
    """Write a model as mlx-vlm does: its names, kernels with colours last, 8-bit linears."""
    import mlx.core as mx

    shutil.copytree(model.directory, directory)
    weights: dict[str, Any] = {}
    for name, weight in mx.load(str(directory / "model.safetensors")).items():
        short = name.removeprefix("model.").replace("text_model.", "language_model.")
        short = f"language_model.{short}" if short.startswith("lm_head.") else short
        is_linear = weight.ndim == 2 and "_proj." in short and short.startswith("language_model.")
        if "patch_embedding.weight" in short:
            weights[short] = weight.transpose(0, 2, 3, 1)
        elif is_linear:
            parts = mx.quantize(weight, group_size=32, bits=8)
            names = ("weight", "scales", "biases")
            weights |= {short.replace("weight", n): p for n, p in zip(names, parts, strict=True)}
        else:
            weights[short] = weight
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    config = json.loads((directory / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 8}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_files_of_mlx_vlm_with_quantised_weights_run_on_both_backends(
    tmp_path: Path, native: NativeBuild
) -> None:
    require_mlx()
    model = seeing_model("smolvlm")
    written = replace(model, directory=as_mlx_vlm(model, tmp_path / "quantised"))
    asked = written.prompt(TEXT.format("<image>", "<image>"), [picture(40, 30), picture(9, 9, 1)])

    by_mlx = begin(make_mlx(written), 0, asked[0], images=asked[1]).finish()
    options = TorchOptions("float32", weights="full", native=native)
    backend = TorchBackend(written.directory, written.spec, options)

    assert begin(backend, 0, asked[0], images=asked[1]).finish() == by_mlx
    check_quantised(written, TorchOptions(native=native))


def test_quantising_a_model_leaves_its_tower_exact(native: NativeBuild) -> None:
    options = TorchOptions("float32", weights="int8", native=native)
    check_quantised(seeing_model("smolvlm"), options)


def check_quantised(model: SeeingTinyModel, options: TorchOptions) -> None:
    """Whether the language model is quantised, its tower is not, and chunks do not matter."""
    tokens, spans = model.prompt(f"See {model.marker}!", [picture(40, 30)])
    backend = TorchBackend(model.directory, model.spec, options)
    run, whole = (begin(backend, seq, tokens, images=spans) for seq in (0, 1))
    while run.num_held < len(tokens) - 1:
        run.compute(min(run.num_held + 7, len(tokens) - 1))

    assert run.finish() == whole.finish()
    kinds = [{type(part).__name__ for part in each.modules()} for each in parts_of(backend)]
    assert "GroupedLinear" in kinds[0]
    assert "GroupedLinear" not in kinds[1]


def parts_of(backend: TorchBackend) -> tuple[Any, Any]:
    """The language model and the tower."""
    assert backend._tower is not None
    return backend._model, backend._tower._model
