"""A model of Qwen3.5's architecture with random weights and a head for draft tokens, on MLX."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.head_steps import SCALE, head_config
from semantic.adapters.outbound.backends.mlx import runtime
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.backend import ModelBackendPort

runtime.prepare()
import mlx.core as mx  # noqa: E402 - after the BLAS it is to use

from semantic.adapters.outbound.backends.mlx.backend import MlxBackend  # noqa: E402
from semantic.adapters.outbound.backends.mlx.cuda import tuning  # noqa: E402
from semantic.adapters.outbound.backends.mlx.device_limits import device_room  # noqa: E402
from semantic.adapters.outbound.backends.mlx.loading import MlxModel, choose_device  # noqa: E402
from semantic.adapters.outbound.backends.mtp.mlx_head import HeadModules, MlxHead  # noqa: E402


@contextlib.contextmanager
def open_head(shape: str) -> Iterator[ModelBackendPort]:
    """Build the model on the device; nothing is written to disk."""
    choose_device("auto")
    is_on_cpu = mx.default_device() == mx.Device(mx.cpu)
    dtype = mx.float32 if is_on_cpu else mx.bfloat16

    def random(_path: str, array: Any) -> Any:
        if array.ndim == 1:
            return array.astype(dtype)
        return mx.random.normal(array.shape, dtype, scale=SCALE)

    library, utils, cache = (
        runtime.import_library(name)
        for name in ("mlx_lm.models.qwen3_5", "mlx.utils", "mlx_lm.models.cache")
    )
    config = head_config(shape)
    model = library.Model(library.ModelArgs.from_dict(config))
    text = model.language_model
    one = replace(text.args, num_hidden_layers=1, full_attention_interval=1)
    layer = type(text)(one).model.layers[0]
    size = text.args.hidden_size
    weights = {f"layer.{name}": array for name, array in utils.tree_flatten(layer.parameters())}
    norms = ("embedding_norm", "hidden_norm", "norm")
    weights |= {f"{name}.weight": mx.ones(size) for name in norms}
    weights["projection.weight"] = mx.zeros((size, 2 * size))
    model.mtp = HeadModules(layer, weights, text.args.rms_norm_eps)
    model.update(utils.tree_map_with_path(random, model.parameters()))
    tuning.tune(model, device_room(0).total)
    mx.eval(model.parameters())
    make_caches = partial(cache.make_prompt_cache, model)
    spec, head = ModelCacheSpec.from_config(config), MlxHead(model, model.mtp)
    backend = MlxBackend(MlxModel(model, spec, make_caches, head=head))
    yield backend
    backend.shutdown()
