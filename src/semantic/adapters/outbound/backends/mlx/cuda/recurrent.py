"""Mamba 2's recurrence in operations that MLX's CUDA build computes right.

If several sequences share a step, or a prompt continues, mlx-lm's function for the recurrence makes
MLX 0.32.4 read or write other memory on CUDA while the device is shared with other processes:
logits are wrong, or the device reports an illegal access (docs/mlx.md). Here a token's products are
sums, and those of several tokens with a state are one product for each sequence and group of heads,
without the broadcast batches of the library's.
"""

import sys
from typing import Any, NamedTuple

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array
from semantic.adapters.outbound.backends.mlx.runtime import import_library

_UPDATE = "ssm_update"
_STEP = 256  # tokens whose products with each other are computed at once, as in mlx-lm


def use_custom_recurrence() -> None:
    """Replace the recurrence in every imported library model."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models") and hasattr(module, _UPDATE):
            setattr(module, _UPDATE, update_state)


class _Given(NamedTuple):
    """Arguments of the library's function: `x` to `d` as in the paper, by row, token and head."""

    x: Array
    a_log: Array
    b: Array
    c: Array
    d: Array
    dt: Array
    dt_bias: Array
    state: Array | None = None
    time_step_limit: tuple[float, float] = (0.001, 100.0)
    mask: Array | None = None
    lengths: Array | None = None


def update_state(*arguments: Any, **named: Any) -> tuple[Array, Array]:
    """Return outputs and the next state, as the library's function does.

    With a mask or lengths, which this backend does not pass, the library's code runs.
    """
    given = _Given(*arguments, **named)
    library = import_library("mlx_lm.models.ssm")
    if given.mask is not None or given.lengths is not None:
        found: tuple[Array, Array] = library.ssm_attn(*given)
        return found
    steps = library.compute_dt(given.dt, given.dt_bias, given.time_step_limit)
    decays = -mx.exp(given.a_log).astype(steps.dtype) * steps
    num_tokens, state = given.x.shape[1], given.state
    if num_tokens == 1 and state is not None:
        return _next_token(given, state, steps, decays)
    outputs = []
    for place in (slice(start, start + _STEP) for start in range(0, num_tokens, _STEP)):
        names = ("x", "b", "c", "dt")
        piece = given._replace(
            state=None, **{name: getattr(given, name)[:, place] for name in names}
        )
        out, added = library.ssm_attn(*piece)
        if state is not None:
            kept = mx.exp(mx.cumsum(decays[:, place], axis=1))
            out = out + (kept[..., None] * _read(state, piece.c)).astype(out.dtype)
            added = added + kept[:, -1, :, None, None] * state
        outputs.append(out)
        state = added
    return mx.concatenate(outputs, axis=1), state


def _next_token(given: _Given, state: Array, steps: Array, decays: Array) -> tuple[Array, Array]:
    """Compute one token of each row."""
    num_rows, _, num_heads, dim = given.x.shape
    num_groups = given.b.shape[2]
    heads = (num_rows, num_groups, num_heads // num_groups)
    b, c = (array.reshape(num_rows, num_groups, 1, 1, -1) for array in (given.b, given.c))
    scaled = steps.reshape(*heads, 1, 1) * given.x.reshape(*heads, dim, 1)
    kept = mx.exp(decays).reshape(*heads, 1, 1) * state.reshape(*heads, dim, -1)
    made = kept + scaled * b
    out = mx.sum(made * c, axis=-1).reshape(given.x.shape).astype(given.x.dtype)
    return out + given.x * given.d.reshape(1, 1, num_heads, 1), made.reshape(state.shape)


def _read(state: Array, c: Array) -> Array:
    """Multiply a state ``[rows, heads, dim, size]`` by C ``[rows, tokens, groups, size]``."""
    num_rows, num_heads, dim, size = state.shape
    num_tokens, num_groups = c.shape[1:3]
    # With a single batch axis, MLX passes cuBLAS a stride instead of a table of addresses.
    states = state.reshape(num_rows * num_groups, -1, size)
    tokens = c.swapaxes(1, 2).reshape(num_rows * num_groups, num_tokens, size)
    read = (tokens @ states.swapaxes(1, 2)).reshape(num_rows, num_groups, num_tokens, -1, dim)
    return read.swapaxes(1, 2).reshape(num_rows, num_tokens, num_heads, dim)
