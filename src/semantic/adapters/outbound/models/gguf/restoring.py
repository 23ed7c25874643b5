"""Undoes what llama.cpp's conversion does to the tensors of Hugging Face's files.

Each function takes the tensors of a GGUF file that one or several tensors of Hugging Face's layout
come from, and the model's config. It returns the arrays of each result. Quantised weights stay
quantised: rows, and whole groups of columns, change places without a change of their numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from semantic.adapters.outbound.models.gguf.weights import (
    Arrays,
    is_grouped,
    quantised,
    read_floats,
    read_tensor,
    to_bfloat16,
)

Config = Mapping[str, Any]
Tensors = Sequence[gguf.ReaderTensor]
Restore = Callable[[Tensors, Config], list[Arrays]]
_Order = npt.NDArray[np.int64]


def unchanged(tensors: Tensors, _config: Config) -> list[Arrays]:
    """Read a tensor as it is."""
    return [read_tensor(tensors[0])]


def in_float32(tensors: Tensors, _config: Config) -> list[Arrays]:
    """For biases that decide between experts."""
    return [{"weight": np.ascontiguousarray(read_floats(tensors[0]), np.float32)}]


def row_in_float32(tensors: Tensors, _config: Config) -> list[Arrays]:
    """Restore [1, columns] from [columns], unrounded."""
    return [{"weight": np.ascontiguousarray(read_floats(tensors[0]), np.float32).reshape(1, -1)}]


def minus_one(tensors: Tensors, _config: Config) -> list[Arrays]:
    """Restore a norm's weight that has 1 added."""
    return [{"weight": to_bfloat16(read_floats(tensors[0]) - 1)}]


def flat(tensors: Tensors, _config: Config) -> list[Arrays]:
    """Restore a vector from a matrix."""
    return [{"weight": to_bfloat16(read_floats(tensors[0]).reshape(-1))}]


def log_of_negative(tensors: Tensors, _config: Config) -> list[Arrays]:
    """Restore A_log from -exp(A_log)."""
    return [{"weight": to_bfloat16(np.log(-read_floats(tensors[0])).reshape(-1))}]


def convolution(tensors: Tensors, _config: Config) -> list[Arrays]:
    """Restore [channels, 1, width] from [channels, width]."""
    return [{"weight": to_bfloat16(read_floats(tensors[0])[:, None, :])}]


def convolution_for_mlx(tensors: Tensors, _config: Config) -> list[Arrays]:
    """Restore mlx-lm's [channels, width, 1] from [channels, width]."""
    return [{"weight": to_bfloat16(read_floats(tensors[0])[:, :, None])}]


def as_row(tensors: Tensors, _config: Config) -> list[Arrays]:
    """Restore [1, columns] from [columns]."""
    return [{"weight": to_bfloat16(read_floats(tensors[0]).reshape(1, -1))}]


# -- attention ------------------------------------------------------------------------------------


def halves_of_queries(tensors: Tensors, config: Config) -> list[Arrays]:
    """Undo the interleaving of the RoPE halves of query heads."""
    return [_separate_halves(tensors[0], config["num_attention_heads"], config["head_dim"])]


def halves_of_keys(tensors: Tensors, config: Config) -> list[Arrays]:
    """Undo the interleaving of the RoPE halves of key heads."""
    return [_separate_halves(tensors[0], config["num_key_value_heads"], config["head_dim"])]


def _separate_halves(tensor: gguf.ReaderTensor, num_heads: int, head_dim: int) -> Arrays:
    num_rows = _num_rows(tensor)
    if num_rows != num_heads * head_dim or head_dim % 2:
        raise ValueError(
            f"has {num_rows} rows; expected {num_heads} heads with an even dimension of {head_dim}"
        )
    places = np.arange(num_rows).reshape(num_heads, head_dim // 2, 2)
    return _take_rows(read_tensor(tensor), places.swapaxes(1, 2).reshape(-1))


def latent_keys_and_values(tensors: Tensors, config: Config) -> list[Arrays]:
    """Restore kv_b_proj from keys [head, latent, key] and values [head, value, latent]."""
    keys, values = (read_floats(tensor) for tensor in tensors)
    joined = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return [_stored(joined.reshape(-1, config["kv_lora_rank"]), tensors)]


# -- gated delta nets -----------------------------------------------------------------------------


def _grouped_values(config: Config, head_dim: int) -> _Order:
    """Order of value heads by key head; GGUF has the first of each key head first."""
    num_keys = config["linear_num_key_heads"]
    places = np.arange(config["linear_num_value_heads"] * head_dim)
    return places.reshape(-1, num_keys, head_dim).swapaxes(0, 1).reshape(-1)


def _after_keys(config: Config) -> _Order:
    """The same order for rows of queries, keys and values."""
    num_before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = _grouped_values(config, config["linear_value_head_dim"])
    return np.concatenate([np.arange(num_before), num_before + values])


def delta_heads(tensors: Tensors, config: Config) -> list[Arrays]:
    """Restore the order of rows, one for each value head."""
    return [_take_rows(read_tensor(tensors[0]), _grouped_values(config, 1))]


def delta_decay(tensors: Tensors, config: Config) -> list[Arrays]:
    """Restore A_log, and the order of its value heads."""
    [decay] = log_of_negative(tensors, config)
    return [_take_rows(decay, _grouped_values(config, 1))]


def delta_gate(tensors: Tensors, config: Config) -> list[Arrays]:
    """Restore the order of rows, several for each value head."""
    order = _grouped_values(config, config["linear_value_head_dim"])
    return [_take_rows(read_tensor(tensors[0]), order)]


def delta_inputs(tensors: Tensors, config: Config) -> list[Arrays]:
    """Restore the order of rows of values, after those of queries and keys."""
    return [_take_rows(read_tensor(tensors[0]), _after_keys(config))]


def delta_convolution(tensors: Tensors, config: Config) -> list[Arrays]:
    """Restore the shape and the order of channels of a convolution."""
    [kernel] = convolution(tensors, config)
    return [_take_rows(kernel, _after_keys(config))]


def delta_output(tensors: Tensors, config: Config) -> list[Arrays]:
    """Restore the order of columns, several for each value head."""
    head_dim = config["linear_value_head_dim"]
    if is_grouped(tensors[0]) and head_dim % 32:
        floats = read_floats(tensors[0])
        return [_stored(floats[:, _grouped_values(config, head_dim)], tensors)]
    order, num_heads = _grouped_values(config, 1), config["linear_num_value_heads"]
    arrays = read_tensor(tensors[0])
    return [
        {
            end: array.reshape(len(array), num_heads, -1)[:, order].reshape(array.shape)
            for end, array in arrays.items()
        }
    ]


def delta_fused_inputs(tensors: Tensors, config: Config) -> list[Arrays]:
    """Restore in_proj_qkvz, ordered by key head, from queries, keys and values, and the gates."""
    num_keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    num_rows = num_keys * key_dim
    heads = [np.arange(num_rows), num_rows + np.arange(num_rows)]
    num_values = _num_rows(tensors[1])
    heads += [
        2 * num_rows + np.arange(num_values),
        2 * num_rows + num_values + np.arange(num_values),
    ]
    order = np.concatenate([part.reshape(num_keys, -1) for part in heads], axis=1)
    return [_take_rows(_join_rows(tensors), order.reshape(-1))]


# -- feed-forward layers --------------------------------------------------------------------------


def joined_rows(tensors: Tensors, _config: Config) -> list[Arrays]:
    """Restore one matrix from several."""
    return [_join_rows(tensors)]


def halves_of_rows(tensors: Tensors, _config: Config) -> list[Arrays]:
    """Split experts [expert, gate and up, column] into gates and ups."""
    arrays = read_tensor(tensors[0])
    half = _num_rows(tensors[0], axis=1) // 2
    gates = {end: array[:, :half] for end, array in arrays.items()}
    ups = {end: array[:, half:] for end, array in arrays.items()}
    return [gates, ups]


def each_of_stack(tensors: Tensors, _config: Config) -> list[Arrays]:
    """Split a stack into its matrices."""
    arrays = read_tensor(tensors[0])
    return [{end: array[i] for end, array in arrays.items()} for i in range(_num_rows(tensors[0]))]


def _join_rows(tensors: Tensors) -> Arrays:
    parts = [read_tensor(tensor) for tensor in tensors]
    shapes = {tuple((end, array.shape[1:]) for end, array in part.items()) for part in parts}
    if len(shapes) > 1:  # quantised with different numbers of bits
        return _stored(np.concatenate([read_floats(tensor) for tensor in tensors]), tensors)
    return {end: np.concatenate([part[end] for part in parts]) for end in parts[0]}


def _stored(values: npt.NDArray[np.float32], origins: Tensors) -> Arrays:
    """Quantise values if one of the tensors that they come from is quantised."""
    if any(is_grouped(origin) for origin in origins):
        return quantised(values)
    return {"weight": to_bfloat16(values)}


def _take_rows(arrays: Arrays, order: _Order) -> Arrays:
    return {end: array[order] for end, array in arrays.items()}


def _num_rows(tensor: gguf.ReaderTensor, axis: int = 0) -> int:
    return int(tensor.shape[::-1][axis])
