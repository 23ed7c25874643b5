"""What architectures consist of: parts of layers, and metadata keys of config values.

A layer is a list of choices. Each choice has one or several alternatives, and an alternative is a
list of parts. A part that is only a name has the GGUF name that the gguf package gives to this
Hugging Face name. The names of experts are mlx-lm's, which stacks them as GGUF does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf

from semantic.adapters.outbound.models.gguf import restoring as restore
from semantic.adapters.outbound.models.gguf.restoring import Restore


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Tensors of Hugging Face's layout, and the GGUF tensors that they are restored from."""

    hf: tuple[str, ...]
    gguf: tuple[str, ...]
    restore: Restore = restore.unchanged


Alternative = tuple[str | LayerPart, ...]
Choice = tuple[Alternative, ...]


def part(hf: str, source: str, how: Restore = restore.unchanged) -> LayerPart:
    """Names separated by spaces, with suffixes; ``how`` restores the first from the second."""
    return LayerPart(tuple(hf.split()), tuple(source.split()), how)


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture of GGUF files becomes a model of Hugging Face's layout.

    Attributes:
        name: GGUF's name.
        keys: GGUF's metadata key of each config key; one that ends in ``?`` may be missing.
        constants: Config values that GGUF omits, because the architecture implies them.
        needs: A metadata key that must be present and not zero, to tell models of one GGUF
            architecture apart.
        is_permuted: Whether the RoPE halves of queries and keys are interleaved.
        is_shifted: Whether norms are stored with 1 added.
        is_nested: Whether the config has the text model's values in ``text_config``.
        is_partial: Whether RoPE may cover only a part of each head.
        is_for_mlx: Whether tensors besides experts have mlx-lm's layout in place of the original.
        model: Tensors outside of layers.
        root: What names start with in place of ``model``.
    """

    name: str
    model_type: str
    hf_class: str
    layer: tuple[Choice, ...]
    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
    is_permuted: bool = False
    is_shifted: bool = False
    is_nested: bool = False
    is_partial: bool = False
    is_for_mlx: bool = False
    model: tuple[Choice, ...] = ()
    root: str = "model"

    @property
    def gguf_arch(self) -> gguf.MODEL_ARCH:
        return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self.name)


def always(*parts: str | LayerPart) -> Choice:
    """Parts that every layer has."""
    return (parts,)


def maybe(*parts: str | LayerPart) -> Choice:
    """Parts that a layer has all of, or none."""
    return (parts, ())


# -- parts of layers ------------------------------------------------------------------------------

EMBEDDING = always("model.embed_tokens")
MODEL = (EMBEDDING, always("model.norm"), maybe("lm_head"))
NORMS = always("input_layernorm", "post_attention_layernorm")
FIRST_NORM = always("input_layernorm")
LAST_NORMS = always("post_attention_layernorm", "post_feedforward_layernorm")
FOUR_NORMS = always(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
QKVO = tuple(f"self_attn.{name}_proj" for name in "qkvo")
ATTENTION = always(*QKVO)
QKV_BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
GATES = ("gate", "up", "down")
MLP = tuple(f"mlp.{name}_proj" for name in GATES)
EXPERT_BIAS = part("mlp.gate.e_score_correction_bias", "exp_probs_b.bias", restore.in_float32)


def experts(router: str, stack: str) -> Choice:
    """Experts, with gates and ups in two tensors or in one."""
    routed = part(f"{router}.weight", "ffn_gate_inp.weight")
    gate, up, down = (f"{stack}.{name}_proj.weight" for name in GATES)
    downs = part(down, "ffn_down_exps.weight")
    separate = (part(gate, "ffn_gate_exps.weight"), part(up, "ffn_up_exps.weight"), downs)
    fused = part(f"{gate} {up}", "ffn_gate_up_exps.weight", restore.halves_of_rows)
    return ((routed, *separate), (routed, fused, downs))


def shared(owner: str) -> tuple[LayerPart, ...]:
    """An expert that every token uses."""
    return tuple(part(f"{owner}.{name}_proj.weight", f"ffn_{name}_shexp.weight") for name in GATES)


MLP_EXPERTS = experts("mlp.gate", "mlp.switch_mlp")
SPARSE_EXPERTS = experts("block_sparse_moe.gate", "block_sparse_moe.switch_mlp")
GRANITE_EXPERTS = experts("block_sparse_moe.router.layer", "block_sparse_moe.switch_mlp")
GATED_SHARED = (
    *shared("mlp.shared_expert"),
    part("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight", restore.as_row),
)


def mamba(owner: str, convolution: Restore = restore.convolution) -> tuple[LayerPart, ...]:
    """A Mamba 2 mixer, apart from `mamba_extras`."""
    return (
        part(f"{owner}.A_log", "ssm_a", restore.log_of_negative),
        part(f"{owner}.D", "ssm_d", restore.flat),
        part(f"{owner}.dt_bias", "ssm_dt.bias"),
        part(f"{owner}.conv1d.weight", "ssm_conv1d.weight", convolution),
        part(f"{owner}.in_proj.weight", "ssm_in.weight"),
        part(f"{owner}.out_proj.weight", "ssm_out.weight"),
    )


def mamba_extras(owner: str) -> tuple[Choice, Choice]:
    """Parts that some Mamba 2 mixers have."""
    return (
        maybe(part(f"{owner}.conv1d.bias", "ssm_conv1d.bias")),
        maybe(part(f"{owner}.norm.weight", "ssm_norm.weight", restore.flat)),
    )


DELTA = (
    part("linear_attn.in_proj_qkv.weight", "attn_qkv.weight", restore.delta_inputs),
    part("linear_attn.in_proj_z.weight", "attn_gate.weight", restore.delta_gate),
    part("linear_attn.in_proj_a.weight", "ssm_alpha.weight", restore.delta_heads),
    part("linear_attn.in_proj_b.weight", "ssm_beta.weight", restore.delta_heads),
    part("linear_attn.conv1d.weight", "ssm_conv1d.weight", restore.delta_convolution),
    part("linear_attn.dt_bias", "ssm_dt.bias", restore.delta_heads),
    part("linear_attn.A_log", "ssm_a", restore.delta_decay),
    part("linear_attn.norm.weight", "ssm_norm.weight"),
    part("linear_attn.out_proj.weight", "ssm_out.weight", restore.delta_output),
)
# mlx-lm takes stacked experts as a sign that all tensors of Qwen3-Next have its own layout.
NEXT_DELTA = (
    part(
        "linear_attn.in_proj_qkvz.weight",
        "attn_qkv.weight attn_gate.weight",
        restore.delta_fused_inputs,
    ),
    part("linear_attn.in_proj_ba.weight", "ssm_ba.weight"),
    part("linear_attn.conv1d.weight", "ssm_conv1d.weight", restore.convolution_for_mlx),
    part("linear_attn.dt_bias", "ssm_dt.bias"),
    part("linear_attn.A_log", "ssm_a", restore.log_of_negative),
    part("linear_attn.norm.weight", "ssm_norm.weight"),
    part("linear_attn.out_proj.weight", "ssm_out.weight"),
)
LATENT_KV: Choice = (
    (
        part(
            "self_attn.kv_b_proj.weight",
            "attn_k_b.weight attn_v_b.weight",
            restore.latent_keys_and_values,
        ),
    ),
    (part("self_attn.kv_b_proj.weight", "attn_kv_b.weight"),),
)
LATENT_Q: Choice = (
    ("self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj"),
    ("self_attn.q_proj",),
)
LATENT = (
    LATENT_Q,
    LATENT_KV,
    always("self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.o_proj"),
)
PER_LAYER_INPUTS = maybe(
    "per_layer_input_gate",
    "per_layer_projection",
    part("post_per_layer_input_norm.weight", "post_norm.weight"),
)
SHORT_CONVOLUTION = (
    part("conv.conv.weight", "shortconv.conv.weight", restore.convolution),
    part("conv.in_proj.weight", "shortconv.in_proj.weight"),
    part("conv.out_proj.weight", "shortconv.out_proj.weight"),
)
SHORT_ATTENTION: Alternative = (
    *QKVO[:3],
    part("self_attn.out_proj.weight", "attn_output.weight"),
    part("self_attn.q_layernorm.weight", "attn_q_norm.weight"),
    part("self_attn.k_layernorm.weight", "attn_k_norm.weight"),
)

# -- metadata keys --------------------------------------------------------------------------------

MOE_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
SHARED_KEY = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
ROUTED_KEYS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale?",
    "norm_topk_prob": "expert_weights_norm?",
    "n_group": "expert_group_count?",
    "topk_group": "expert_group_used_count?",
}
DELTA_KEYS = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval?",
}
GRANITE_KEYS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
LATENT_KEYS = ROUTED_KEYS | {
    "q_lora_rank": "attention.q_lora_rank?",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
}
ROUTED = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}
GEMMA_KEYS = {
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping?",
    "final_logit_softcapping": "final_logit_softcapping?",
}
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
LAYER_NORM = {"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"}
EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}
