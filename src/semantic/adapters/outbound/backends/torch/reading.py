"""Reads models from their files into transformers models.

Grouped weights stay grouped, or are expanded if the model runs in full numbers. Linears and
embeddings of the transformers model are replaced by grouped ones.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from semantic.adapters.outbound.backends.mtp.names import HeadNames
from semantic.adapters.outbound.backends.mtp.torch_head import TorchHead
from semantic.adapters.outbound.backends.torch.experts import (
    Experts,
    clamped_gate,
    expert_sizes,
    is_silu,
    is_stacked,
    write_stacked,
)
from semantic.adapters.outbound.backends.torch.grouped import (
    BITS,
    GROUP,
    FixedLinear,
    GroupedEmbedding,
    GroupedLinear,
    GroupedWeight,
)
from semantic.domain.errors import InvalidRequestError

_Tensors = dict[str, torch.Tensor]

# Parts of multimodal models that text does not pass through.
_OTHER_PARTS = ("vision_tower", "visual", "vision_model", "audio_tower")
_WHOLE = ("emu3",)  # transformers does not find the weights of its language model alone
# mlx-lm's names, which are those of the original files, and the names of transformers' modules.
_SPARSE = (("block_sparse_moe.", "mlp."),)
_ROUTER = (("router.layer.", "router."),)
_NAMES = {
    "mixtral": _SPARSE,
    "minimax_m2": _SPARSE,
    "granitemoe": _ROUTER,
    "granitemoehybrid": (*_ROUTER, (".mlp.down_proj.", ".shared_mlp.output_linear.")),
    "ernie4_5_moe": ((".moe_statics.", ".gate.moe_statics."),),
    "nemotron_h": (
        ("backbone.", "model."),
        ("switch_mlp.fc1.", "experts.up_proj."),
        ("switch_mlp.fc2.", "experts.down_proj."),
    ),
    "lfm2_moe": tuple(
        (f"feed_forward.{name}_proj.", f"feed_forward.w{i}.")
        for i, name in ((1, "gate"), (2, "down"), (3, "up"))
    ),
}
# A model with one layer like that of a head: with experts, if the model has them, and attention.
_FIRST, _NUM_IDS = "model.layers.0.", 8
_SHARED_MATRICES = ("model.embed_tokens", "lm_head")
_ONE_LAYER: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "mlp_layer_types": ["sparse"],
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "vocab_size": _NUM_IDS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_SHIFTED_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_SHIFTED = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")


def is_grouped(config: Mapping[str, Any]) -> bool:
    """Whether a model's config declares grouped weights."""
    return isinstance(config.get("quantization"), Mapping)


def load_grouped(
    directory: Path, dtype: torch.dtype, *, is_kept: bool, names: HeadNames | None = None
) -> Any:
    """Load a model with grouped weights; keep them grouped or expand them.

    Args:
        names: Of the weights of its head for draft tokens, which are left out.

    Raises:
        InvalidRequestError: they do not have 4, 5, 6 or 8 bits, or do not match the model.
    """
    model, tensors = empty_model(directory, dtype), dict(read_tensors(directory))
    if names is not None:
        tensors = {n: w for n, w in tensors.items() if not n.startswith(names.prefix)}
    fill_model(model, tensors, dtype, is_kept=is_kept)
    return model


def fill_model(
    model: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, *, is_kept: bool
) -> None:
    """Load tensors of a file into an empty model; grouped ones stay grouped, or are expanded.

    Raises:
        InvalidRequestError: see `load_grouped`.
    """
    tensors = _for_transformers(tensors, model.config.model_type)
    for name, module in list(model.named_modules()):
        if is_stacked(module) and _experts_in_file(name, tensors) is not None:
            _load_experts(model, name, tensors, is_kept=is_kept)
        elif f"{name}.scales" in tensors:
            [weight] = take_weights(tensors, name, module.weight.shape[1])
            if is_kept and isinstance(module, nn.Linear | nn.Embedding):
                model.set_submodule(name, _kept(weight, module, tensors.pop(f"{name}.bias", None)))
            else:
                expanded = weight.expanded().to(dtype)
                module.weight = nn.Parameter(expanded, requires_grad=False)
                tensors[f"{name}.weight"] = module.weight
    _expand_rest(model, tensors)
    load_rest(model, tensors)


def auto_class(config: Any) -> Any:
    """Return the class of transformers that loads a model which generates text.

    Raises:
        InvalidRequestError: there is none.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    if type(config) in AutoModelForCausalLM._model_mapping and config.model_type not in _WHOLE:
        return AutoModelForCausalLM
    if type(config) in AutoModelForMultimodalLM._model_mapping:
        return AutoModelForMultimodalLM
    raise InvalidRequestError(
        f"the torch backend cannot run {config.model_type}: models of this type do not generate "
        "text token by token. Use a causal language model.",
        param="model",
    )


def _for_transformers(tensors: Mapping[str, torch.Tensor], model_type: str) -> _Tensors:
    """Give tensors that are not experts the names and layouts of transformers, not mlx-lm's."""
    found: _Tensors = {}
    for name, tensor in tensors.items():
        renamed = name
        for old, new in _NAMES.get(model_type, ()):
            renamed = renamed.replace(old, new)
        found[renamed] = tensor
    kernels = [name for name in found if name.endswith("conv1d.weight")]
    if model_type in _SHIFTED_TYPES and any(found[name].shape[-1] == 1 for name in kernels):
        norms = [name for name in found if name.removesuffix(".weight").endswith(_SHIFTED)]
        found |= {name: (found[name].float() - 1).to(found[name].dtype) for name in norms}
    for name in kernels:
        if found[name].shape[-1] == 1:  # mlx-lm has the channels last
            found[name] = found[name].transpose(1, 2)
    for name in [name for name in found if ".mlp.gate_proj." in name]:
        if model_type == "granitemoehybrid":
            both = [found.pop(name), found.pop(name.replace("gate_proj", "up_proj"))]
            found[name.replace("mlp.gate_proj", "shared_mlp.input_linear")] = torch.cat(both)
    return found


def _expand_rest(model: nn.Module, tensors: _Tensors) -> None:
    """Expand experts without gates, which are parameters of modules of transformers."""
    for name, parameter in model.named_parameters():
        if f"{name}.scales" in tensors:
            weights = take_weights(tensors, name, parameter.shape[-1])
            tensors[name] = torch.stack([weight.expanded() for weight in weights])
        elif f"{name}.weight" in tensors:
            tensors[name] = tensors.pop(f"{name}.weight")


def empty_model(directory: Path, dtype: torch.dtype) -> Any:
    """Create the transformers model with uninitialised weights, which take no memory yet."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # written by mlx-lm; transformers does not support it
    with _uninitialised():
        return auto_class(config).from_config(config, dtype=dtype)


def _uninitialised() -> AbstractContextManager[None]:
    """Return a context in which transformers does not initialise weights."""
    from transformers.initialization import no_init_weights

    context: AbstractContextManager[None] = no_init_weights()
    return context


def take_weights(tensors: _Tensors, name: str, num_columns: int) -> list[GroupedWeight]:
    """Remove a linear's weight from `tensors` and return it, or one per expert.

    Raises:
        InvalidRequestError: the quantisation is not supported.
    """
    packed, scales = tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.scales")
    biases = tensors.pop(f"{name}.biases", None)
    bits, group = packed.shape[-1] * 32 // num_columns, num_columns // scales.shape[-1]
    is_mxfp4 = scales.dtype == torch.uint8 and (bits, group) == (4, GROUP)
    is_known = is_mxfp4 if biases is None else bits in BITS
    if not is_known or num_columns % (scales.shape[-1] * GROUP):
        raise InvalidRequestError(
            f"the torch backend does not support the quantisation of {name} ({bits} bits in groups "
            f"of {group}); it reads 4, 5, 6 and 8 bits and MXFP4. Use another file, or "
            "--backend mlx.",
            param="model",
        )
    if packed.ndim == 2:
        return [GroupedWeight(packed, scales, biases, num_columns)]
    each = biases if biases is not None else [None] * len(packed)
    return [
        GroupedWeight(*arrays, num_columns) for arrays in zip(packed, scales, each, strict=True)
    ]


def _load_experts(model: nn.Module, name: str, tensors: _Tensors, *, is_kept: bool) -> None:
    """Load a layer's experts in mlx-lm's format: gate, up and down with a row per output."""
    module: Any = model.get_submodule(name)
    source = _experts_in_file(name, tensors)
    hidden, inner = expert_sizes(module)
    names = [f"{source}.{part}_proj" for part in ("gate", "up", "down")]
    dtype = module.down_proj.dtype
    has_biases = f"{names[0]}.bias" in tensors
    biases = [tensors.pop(f"{part}.bias").to(dtype) for part in names] if has_biases else None
    columns = zip(names, (hidden, hidden, inner), strict=True)
    matrices = [_expert_matrices(tensors, part, num_columns) for part, num_columns in columns]
    if (
        is_kept
        and is_silu(module)
        and all(isinstance(first, GroupedWeight) for first, *_ in matrices)
    ):
        gates, ups, downs = (
            [
                GroupedLinear(weight, None if biases is None else biases[part][expert])
                for expert, weight in enumerate(weights)
            ]
            for part, weights in enumerate(matrices)
        )
        model.set_submodule(name, Experts(gates, ups, downs, clamped_gate(module)))
        return
    full = [[_expanded(matrix) for matrix in part] for part in matrices]
    tensors |= {
        f"{name}.{part}": getattr(module, part) for part in write_stacked(module, full, biases)
    }


def _experts_in_file(name: str, tensors: Mapping[str, torch.Tensor]) -> str | None:
    names = (name, name.removesuffix("experts") + "switch_mlp", f"{name}.switch_glu")
    return next((given for given in names if f"{given}.gate_proj.weight" in tensors), None)


def _expert_matrices(tensors: _Tensors, name: str, num_columns: int) -> Sequence[Any]:
    if f"{name}.scales" in tensors:
        return take_weights(tensors, name, num_columns)
    return list(tensors.pop(f"{name}.weight"))


def _expanded(matrix: GroupedWeight | torch.Tensor) -> torch.Tensor:
    return matrix.expanded() if isinstance(matrix, GroupedWeight) else matrix


def _kept(
    weight: GroupedWeight, module: nn.Linear | nn.Embedding, bias: torch.Tensor | None
) -> nn.Module:
    if isinstance(module, nn.Embedding):
        scale = getattr(module, "embed_scale", None)
        return GroupedEmbedding(weight, module.weight.dtype, scale)
    return GroupedLinear(weight, None if bias is None else bias.to(module.weight.dtype))


def load_rest(
    model: Any, tensors: Mapping[str, torch.Tensor], *, is_assigned: bool = False
) -> None:
    """Load all weights that are not grouped, and tie the head to the embedding if the model does.

    Args:
        is_assigned: Assign the tensors as parameters instead of copying them.

    Raises:
        InvalidRequestError: they do not match the model.
    """
    result = model.load_state_dict(tensors, strict=False, assign=is_assigned)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    missing = set(result.missing_keys)
    if model.config.tie_word_embeddings:
        missing.discard("lm_head.weight")
        if isinstance(embedding, GroupedEmbedding):
            model.set_output_embeddings(GroupedLinear(embedding.grouped, head.bias))
        else:
            model.tie_weights()
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    unexpected = {
        key for key in result.unexpected_keys if not any(pattern.search(key) for pattern in ignored)
    }
    if wrong := sorted(missing | unexpected):
        raise InvalidRequestError(
            f"the model's weights do not match its config.json: {wrong[0]}", param="model"
        )


def read_full(directory: Path, dtype: torch.dtype) -> Any:
    """Load a model whose weights are not grouped.

    Raises:
        InvalidRequestError: weights are missing.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    model, report = auto_class(config).from_pretrained(
        directory, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    _check_report(report)
    for name in _OTHER_PARTS:
        if getattr(model.base_model, name, None) is not None:
            setattr(model.base_model, name, None)
    return model


def _check_report(report: Mapping[str, Any]) -> None:
    if missing := sorted(report["missing_keys"]):  # the library makes them up
        raise InvalidRequestError(
            f"the model's files have no weights for {missing[0]}; download the model again, or use "
            "another one",
            param="model",
        )


def read_head(
    model: Any, directory: Path, names: HeadNames, dtype: torch.dtype, *, is_kept: bool
) -> TorchHead:
    """Read a model's head for draft tokens.

    transformers drops its weights. Here they become the layer of a model of the same class with one
    layer, in all formats that the library and `fill_model` read.

    Raises:
        InvalidRequestError: as `load_grouped` and `read_full`.
    """
    tensors = {n: w for n, w in read_tensors(directory) if n.startswith(names.prefix)}
    first, second, pair, last = names.others
    if names.is_converted:
        shifted = [n for n in tensors if n in (first, second) or n.endswith("norm.weight")]
        tensors |= {name: tensors[name].float() - names.norm_offset for name in shifted}
    norms = [tensors.pop(name) for name in (first, second, last)]
    size = model.config.hidden_size
    projection = _projection(tensors, pair, 2 * size, dtype, is_kept=is_kept)
    config = copy.deepcopy(model.config)
    for name, value in _ONE_LAYER.items():
        if hasattr(config, name):
            setattr(config, name, value)
    given = {
        _FIRST + name.removeprefix(names.layer): weight
        for name, weight in tensors.items()
        if name.startswith(names.layer) and not name.startswith(names.repeated)
    }
    # The head has no embedding, last norm and output layer of its own.
    given |= {f"{name}.weight": torch.zeros(_NUM_IDS, size) for name in _SHARED_MATRICES}
    given["model.norm.weight"] = torch.zeros(size)
    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    if any(name.endswith(".scales") or ".switch_mlp." in name for name in given):
        with _uninitialised():
            single = type(model)._from_config(config, **options)
        fill_model(single, given, dtype, is_kept=is_kept)
    else:
        single, report = type(model).from_pretrained(
            None, config=config, state_dict=given, output_loading_info=True, **options
        )
        _check_report(report)
    return TorchHead(model, single.base_model.layers[0], norms, projection)


def _projection(
    tensors: _Tensors, name: str, num_columns: int, dtype: torch.dtype, *, is_kept: bool
) -> nn.Module:
    stem = name.removesuffix(".weight")
    if f"{stem}.scales" not in tensors:
        return FixedLinear(tensors.pop(name).to(dtype), None)
    [weight] = take_weights(tensors, stem, num_columns)
    return (
        GroupedLinear(weight, None) if is_kept else FixedLinear(weight.expanded().to(dtype), None)
    )


def read_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a model's files; their data is read on access."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                yield name, file.get_tensor(name)
