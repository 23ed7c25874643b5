"""Tiny models that see, with random weights, and the files that the hub would hold beside them."""

import atexit
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.adapters.outbound.vision.preparing import HFVision, load_vision
from semantic.domain.images.spans import ImageSpan
from semantic.ports.backend import ModelBackendPort
from tests.contract.conftest import make_mlx, require_mlx
from tests.contract.models import BLOCK_TOKENS, WINDOW, TinyModel, spec_of
from tests.contract.vision_models import VisionSubject

_TILE_TOKENS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
_TOKENS = {
    "smolvlm": ("<image>", *_TILE_TOKENS, *_ROWS),
    "idefics3": ("<image>", *_TILE_TOKENS, *_ROWS),
    "qwen2_5_vl": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "qwen3_vl": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
}
_FIRST_SPECIAL = 256
_TEXT: Mapping[str, Any] = {
    "vocab_size": 280,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.3,
}
_PATCHES: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 3,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
}
_TILE_SETTINGS = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
_PATCH_SETTINGS = {
    "size": {"shortest_edge": 16 * 16, "longest_edge": 40 * 40},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
_SETTINGS = {
    "smolvlm": {"image_processor_type": "SmolVLMImageProcessor", **_TILE_SETTINGS},
    "idefics3": {"image_processor_type": "Idefics3ImageProcessor", **_TILE_SETTINGS},
    "qwen2_5_vl": {"image_processor_type": "Qwen2VLImageProcessor", **_PATCH_SETTINGS},
    "qwen3_vl": {"image_processor_type": "Qwen2VLImageProcessor", **_PATCH_SETTINGS},
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 24, "width": 24},
    },
}
SEEING_FAMILIES = tuple(_SETTINGS)


def _config(family: str) -> Any:
    import transformers

    ids = {text: _FIRST_SPECIAL + i for i, text in enumerate(_TOKENS[family])}
    if family in ("smolvlm", "idefics3"):
        kind = transformers.SmolVLMConfig if family == "smolvlm" else transformers.Idefics3Config
        text = {"model_type": "llama", **_TEXT}
        config = kind(text_config=text, vision_config=dict(_VISION), scale_factor=2)
        config.image_token_id = ids["<image>"]
        return config
    if family == "gemma3":
        text = {
            **_TEXT,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
        }
        return transformers.Gemma3Config(
            text_config=text,
            vision_config={**_VISION, "image_size": 24, "vision_use_head": False},
            mm_tokens_per_image=9,
            tie_word_embeddings=False,
            image_token_id=ids["<image_soft_token>"],
            boi_token_id=ids["<start_of_image>"],
            eoi_token_id=ids["<end_of_image>"],
        )
    tokens = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    if family == "qwen3_vl":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        vision = {**_PATCHES, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        text = {**_TEXT, "rope_parameters": {**rope, "mrope_interleaved": True}}
        return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {**_PATCHES, "window_size": 16, "fullatt_block_indexes": [1]}
    text = {**_TEXT, "rope_parameters": rope}
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)


def _write_tokenizer(directory: Path, family: str) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: place for place, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _TOKENS[family]])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")


@cache
def seeing_model(family: str) -> "SeeingTinyModel":
    """Return a model with random weights, its tokenizer and its processor settings."""
    from transformers import AutoModelForImageTextToText

    directory = Path(tempfile.mkdtemp(prefix=f"{family}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)

    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(_config(family), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "projection_weight" in name:  # the library begins with zeros
            torch.nn.init.normal_(parameter, std=1.0)
    model.save_pretrained(directory)
    _write_tokenizer(directory, family)
    (directory / "preprocessor_config.json").write_text(json.dumps(_SETTINGS[family]))
    return SeeingTinyModel(directory, spec_of(directory, BLOCK_TOKENS), family)


@dataclass(frozen=True)
class SeeingTinyModel(TinyModel):
    """A directory with the files of images too."""

    family: str

    @cached_property
    def tokenizer(self) -> HFTokenizer:
        return HFTokenizer(self.directory)

    @cached_property
    def vision(self) -> HFVision:
        vision = load_vision(self.directory, self.tokenizer)
        assert vision is not None
        return vision

    def prompt(
        self, text: str, images: Sequence[bytes]
    ) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
        """Return the tokens and images of a text with a marker for each image."""
        tokens: list[int] = []
        spans: list[ImageSpan] = []
        files = iter(images)
        for token in self.tokenizer.encode(text):
            if token != self.vision.marker_id:
                tokens.append(token)
                continue
            prepared = self.vision.prepare(next(files))
            spans.append(ImageSpan.placed(prepared, len(tokens)))
            tokens += prepared.tokens
        return tuple(tokens), tuple(spans)

    @property
    def library_marker(self) -> str:
        """The text that stands for an image, as the processor of transformers reads it."""
        if self.family.startswith("qwen"):
            return "<|vision_start|><|image_pad|><|vision_end|>"
        return "<start_of_image>" if self.family == "gemma3" else "<image>"

    @property
    def marker(self) -> str:
        """The text that stands for an image, as the chat template writes it here."""
        is_gemma = self.family == "gemma3"  # its processor writes blank lines around an image
        return f"\n\n{self.library_marker}\n\n" if is_gemma else self.library_marker


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """Return a PNG file of random pixels."""
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


class _Pooled:
    """A backend that goes back to its pool instead of shutting down: loading takes longer."""

    def __init__(self, backend: Any, pool: "list[_Pooled]") -> None:
        self._backend, self._pool = backend, pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def shutdown(self) -> None:
        for seq in [*self._backend._sequences]:
            self._backend.close_sequence(seq)
        self._pool.append(self)


def pooled(make: Callable[[], ModelBackendPort]) -> Callable[[], ModelBackendPort]:
    """Return a factory of backends that are loaded once and have no sequences."""
    pool: list[_Pooled] = []
    return lambda: cast("ModelBackendPort", pool.pop() if pool else _Pooled(make(), pool))


def torch_subject(family: str, native: NativeBuild) -> VisionSubject:
    model, options = seeing_model(family), TorchOptions("float32", native=native)
    make = pooled(lambda: TorchBackend(model.directory, model.spec, options))
    return VisionSubject(make, model.vision, _picture_of)


def mlx_subject(family: str) -> VisionSubject:
    require_mlx()
    model = seeing_model(family)
    has_windows = model.spec.num_window > 0
    return VisionSubject(
        pooled(lambda: make_mlx(model)), model.vision, _picture_of, cuts_anywhere=not has_windows
    )


def _picture_of(seed: int, size: tuple[int, int]) -> bytes:
    return picture(*size, seed)
