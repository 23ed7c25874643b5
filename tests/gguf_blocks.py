"""Blocks of GGUF's types that the package gguf reads but does not write."""

import numpy as np
import numpy.typing as npt


def encode_q6_k(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Encode rows of a multiple of 256 weights; a block's scales are multiples of one number."""
    blocks = weights.reshape(len(weights), -1, 16, 16)
    far = np.abs(blocks).argmax(axis=-1, keepdims=True)
    scales = np.take_along_axis(blocks, far, axis=-1)[..., 0] / -32
    unit = (np.abs(scales).max(axis=-1, keepdims=True) / 127).astype(np.float16)
    unit = np.maximum(unit, np.float16(2**-24))
    levels = np.rint(scales / unit.astype(np.float32)).astype(np.int8)
    steps = unit.astype(np.float32) * levels
    quotients = np.divide(
        blocks, steps[..., None], out=np.zeros_like(blocks), where=steps[..., None] != 0
    )
    integers = (np.clip(np.rint(quotients), -32, 31) + 32).astype(np.uint8)
    halves = integers.reshape(*blocks.shape[:2], 2, 128)
    low = halves[..., :64] & 15 | (halves[..., 64:] & 15) << 4
    quarters = halves.reshape(*blocks.shape[:2], 2, 4, 32) >> 4
    high = (quarters << np.array([[0], [2], [4], [6]], np.uint8)).sum(axis=-2, dtype=np.uint8)
    flat = (*blocks.shape[:2], -1)
    parts = (low.reshape(flat), high.reshape(flat), levels.view(np.uint8), unit.view(np.uint8))
    return np.concatenate(parts, axis=-1).reshape(len(weights), -1)
