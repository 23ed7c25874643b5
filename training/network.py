"""The tower and connector as transformers builds them, and the frozen text model."""

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from safetensors import safe_open
from torch import nn
from transformers import Idefics3Config
from transformers.models.idefics3.modeling_idefics3 import (
    Idefics3Connector,
    Idefics3VisionTransformer,
)

from training.prompts import IMAGE_TOKEN_ID

VISION = {
    "model_type": "idefics3_vision",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "image_size": 192,
    "patch_size": 12,
}
SCALE_FACTOR = 2
_NUM_LAYERS = 30
TEXT = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": _NUM_LAYERS,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
}
_HEAD, _NUM_HEADS, _NUM_KV, _EPS, _THETA = 64, 9, 3, 1e-5, 100_000.0


class Eyes(nn.Module):
    """The vision tower and connector: the only parts that are trained."""

    def __init__(self) -> None:
        super().__init__()
        config = Idefics3Config(
            vision_config=VISION,
            text_config=TEXT,
            scale_factor=SCALE_FACTOR,
            image_token_id=IMAGE_TOKEN_ID,
        )
        config.vision_config._attn_implementation = "sdpa"
        self.vision_model = Idefics3VisionTransformer(config.vision_config)
        self.connector = Idefics3Connector(config)

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tower's features of patches, and the connector's embeddings.

        Args:
            pictures: Bytes, ``[batch, height, width, channel]``.
        """
        # As the image processor does it: scaled to -1 … 1.
        pixels = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
        tower = self.vision_model
        # The positions of a whole square picture are in order.
        patches = tower.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        hidden = patches + tower.embeddings.position_embedding.weight
        for layer in tower.encoder.layers:
            hidden = layer(hidden, None)
        features = tower.post_layernorm(hidden)
        return features, self.connector(features)


class FrozenText:
    """The starter's text model with its weights expanded; gradients pass through it."""

    def __init__(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype, device: str) -> None:
        def get(name: str) -> torch.Tensor:
            return tensors[name].to(device, dtype)

        self.embedding = get("model.embed_tokens.weight")
        self.norm = get("model.norm.weight")
        self.layers = []
        for index in range(_NUM_LAYERS):
            name = f"model.layers.{index}."
            join = [get(f"{name}self_attn.{part}_proj.weight") for part in "qkv"]
            gates = [get(f"{name}mlp.{part}_proj.weight") for part in ("gate", "up")]
            self.layers.append(
                (
                    get(f"{name}input_layernorm.weight"),
                    torch.cat(join),
                    get(f"{name}self_attn.o_proj.weight"),
                    get(f"{name}post_attention_layernorm.weight"),
                    torch.cat(gates),
                    get(f"{name}mlp.down_proj.weight"),
                )
            )
        self.run_layer = _run_layer

    def hidden(self, embeddings: torch.Tensor) -> torch.Tensor:
        """The last hidden states, normalised, of sequences of embeddings."""
        length = embeddings.shape[1]
        steps = torch.arange(0, _HEAD, 2, device=embeddings.device).float() / _HEAD
        angles = torch.arange(length, device=embeddings.device)[:, None] / _THETA**steps
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(embeddings.dtype), angles.sin().to(embeddings.dtype)
        hidden = embeddings
        for layer in self.layers:
            hidden = self.run_layer(hidden, cos, sin, *layer)
        return _rms_norm(hidden, self.norm)


def read_text_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Read the starter's imported weights and expand their groups: integer * scale + bias."""
    packed: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            packed |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expanded = {}
    for name, tensor in packed.items():
        if not name.endswith(".weight"):
            continue
        scales = packed.get(name.replace(".weight", ".scales"))
        if scales is None:
            expanded[name] = tensor
            continue
        biases = packed[name.replace(".weight", ".biases")]
        rows, groups = scales.shape
        columns = groups * 32
        bits = tensor.shape[1] * 32 // columns
        stored = tensor.view(torch.uint8)
        if bits == 4:
            stored = torch.stack((stored & 15, stored >> 4), -1)
        numbers = stored.reshape(rows, groups, 32).float()
        values = numbers * scales.float()[..., None] + biases.float()[..., None]
        expanded[name] = values.reshape(rows, columns)
    return expanded


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)).to(x.dtype)


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _run_layer(  # noqa: PLR0913, PLR0917 - a layer's weights
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    qkv: torch.Tensor,
    out: torch.Tensor,
    mlp_norm: torch.Tensor,
    gates: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    batch, length, width = x.shape
    heads = F.linear(_rms_norm(x, norm), qkv).view(batch, length, -1, _HEAD).transpose(1, 2)
    query, key, value = torch.split(heads, [_NUM_HEADS, _NUM_KV, _NUM_KV], 1)
    query, key = _rope(query, cos, sin), _rope(key, cos, sin)
    shared = _NUM_HEADS // _NUM_KV
    key, value = (one.repeat_interleave(shared, 1) for one in (key, value))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + F.linear(attended.transpose(1, 2).reshape(batch, length, width), out)
    gate, up = F.linear(_rms_norm(x, mlp_norm), gates).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)
