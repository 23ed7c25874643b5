"""The model types that take images, by how they do."""

from collections.abc import Mapping
from typing import Final

TILED: Final = frozenset({"idefics3", "smolvlm"})  # they see each tile of an image by itself
IN_GRIDS: Final = frozenset({"qwen2_5_vl", "qwen3_vl"})  # positions follow the grid of patches
BIDIRECTIONAL: Final = frozenset({"gemma3"})  # an image's positions attend to each other


def takes_images(config: Mapping[str, object]) -> bool:
    """Whether this server can give images to models of a config's type."""
    has_tower = isinstance(config.get("vision_config"), dict)
    return has_tower and config.get("model_type") in TILED | IN_GRIDS | BIDIRECTIONAL
