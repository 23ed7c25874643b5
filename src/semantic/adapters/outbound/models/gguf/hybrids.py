"""The architectures with recurrent layers or short convolutions beside attention."""

from semantic.adapters.outbound.models.gguf import layers as the
from semantic.adapters.outbound.models.gguf import restoring as restore
from semantic.adapters.outbound.models.gguf.layers import Architecture, always, maybe, part

_DELTA_OR_ATTENTION = (the.DELTA, (*the.QKVO, *the.QK_NORMS))
_NEMOTRON = (
    always(part("norm.weight", "attn_norm.weight")),
    (
        the.mamba("mixer"),
        tuple(
            part(f"mixer.{name}_proj.weight", f"attn_{source}.weight")
            for name, source in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))
        ),
        (
            part("mixer.up_proj.weight", "ffn_up.weight"),
            part("mixer.down_proj.weight", "ffn_down.weight"),
        ),
        (
            part("mixer.gate.weight", "ffn_gate_inp.weight"),
            part("mixer.gate.e_score_correction_bias", "exp_probs_b.bias", restore.in_float32),
            part("mixer.switch_mlp.fc1.weight", "ffn_up_exps.weight"),
            part("mixer.switch_mlp.fc2.weight", "ffn_down_exps.weight"),
            part("mixer.shared_experts.up_proj.weight", "ffn_up_shexp.weight"),
            part("mixer.shared_experts.down_proj.weight", "ffn_down_shexp.weight"),
        ),
    ),
    *the.mamba_extras("mixer"),
)
_NEMOTRON_MODEL = (
    always(part("model.embeddings.weight", "token_embd.weight")),
    always(part("model.norm_f.weight", "output_norm.weight")),
    maybe("lm_head"),
)
_NEMOTRON_KEYS = {
    "layer_norm_epsilon": "attention.layer_norm_epsilon?",
    "conv_kernel": "ssm.conv_kernel",
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "mamba_num_heads": "ssm.time_step_rank",
}
_NEMOTRON_CONSTANTS = {
    "attention_bias": False,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "mlp_hidden_act": "relu2",
}
_GRANITE_HYBRID = (
    the.NORMS,
    (the.mamba("mamba"), the.QKVO),
    *the.mamba_extras("mamba"),
)
_GRANITE_SHARED = (
    part(
        "shared_mlp.input_linear.weight",
        "ffn_gate_shexp.weight ffn_up_shexp.weight",
        restore.joined_rows,
    ),
    part("shared_mlp.output_linear.weight", "ffn_down_shexp.weight"),
)
_GRANITE_HYBRID_KEYS = the.GRANITE_KEYS | {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
    "num_local_experts": "expert_count?",
    "num_experts_per_tok": "expert_used_count?",
}
_GRANITE_HYBRID_CONSTANTS = {
    "attention_bias": False,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "position_embedding_type": "nope",
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
}
_LFM2_MODEL = (
    the.EMBEDDING,
    always(part("model.embedding_norm.weight", "token_embd_norm.weight")),
    maybe("lm_head"),
)
_LFM2 = (
    always(
        part("operator_norm.weight", "attn_norm.weight"),
        part("ffn_norm.weight", "ffn_norm.weight"),
    ),
    (the.SHORT_CONVOLUTION, the.SHORT_ATTENTION),
)
_FALCON_MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
    "mlp_multipliers": [1.0] * 2,
    "ssm_multipliers": [1.0] * 5,
}

HYBRIDS = (
    Architecture(
        "qwen3next",
        "qwen3_next",
        "Qwen3NextForCausalLM",
        (
            the.NORMS,
            (the.NEXT_DELTA, (*the.QKVO, *the.QK_NORMS)),
            the.MLP_EXPERTS,
            always(*the.GATED_SHARED),
        ),
        the.MOE_KEYS | the.SHARED_KEY | the.DELTA_KEYS,
        the.EVERY_LAYER | {"norm_topk_prob": True},
        is_partial=True,
    ),
    Architecture(
        "qwen35",
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        (the.NORMS, _DELTA_OR_ATTENTION, always(*the.MLP)),
        the.DELTA_KEYS,
        is_shifted=True,
        is_nested=True,
        is_partial=True,
    ),
    Architecture(
        "qwen35moe",
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        (the.NORMS, _DELTA_OR_ATTENTION, the.MLP_EXPERTS, always(*the.GATED_SHARED)),
        the.MOE_KEYS | the.SHARED_KEY | the.DELTA_KEYS,
        the.EVERY_LAYER | {"norm_topk_prob": True},
        is_shifted=True,
        is_nested=True,
        is_partial=True,
    ),
    Architecture(
        "nemotron_h_moe",
        "nemotron_h",
        "NemotronHForCausalLM",
        _NEMOTRON,
        _NEMOTRON_KEYS
        | {
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "n_shared_experts": "expert_shared_count",
            "n_group": "expert_group_count?",
            "topk_group": "expert_group_used_count?",
            "norm_topk_prob": "expert_weights_norm",
            "routed_scaling_factor": "expert_weights_scale",
        },
        _NEMOTRON_CONSTANTS | {"n_group": 1, "topk_group": 1},
        model=_NEMOTRON_MODEL,
        root="backbone",
    ),
    Architecture(
        "nemotron_h",
        "nemotron_h",
        "NemotronHForCausalLM",
        _NEMOTRON,
        _NEMOTRON_KEYS,
        _NEMOTRON_CONSTANTS,
        model=_NEMOTRON_MODEL,
        root="backbone",
    ),
    Architecture(
        "lfm2",
        "lfm2",
        "Lfm2ForCausalLM",
        (
            *_LFM2,
            always(
                part("feed_forward.w1.weight", "ffn_gate.weight"),
                part("feed_forward.w2.weight", "ffn_down.weight"),
                part("feed_forward.w3.weight", "ffn_up.weight"),
            ),
        ),
        {
            "norm_eps": "attention.layer_norm_rms_epsilon",
            "conv_L_cache": "shortconv.l_cache",
            "block_dim": "embedding_length",
        },
        {
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        model=_LFM2_MODEL,
    ),
    Architecture(
        "lfm2moe",
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        (
            *_LFM2,
            (
                tuple(
                    part(f"feed_forward.{name}_proj.weight", f"ffn_{name}.weight")
                    for name in the.GATES
                ),
                *the.experts("feed_forward.gate", "feed_forward.switch_mlp"),
            ),
            maybe(part("feed_forward.expert_bias", "exp_probs_b.bias", restore.in_float32)),
        ),
        the.MOE_KEYS
        | {
            "norm_eps": "attention.layer_norm_rms_epsilon",
            "conv_L_cache": "shortconv.l_cache",
            "num_dense_layers": "leading_dense_block_count",
        },
        {
            "conv_bias": False,
            "use_expert_bias": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        model=_LFM2_MODEL,
    ),
    Architecture(
        "granitehybrid",
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        (*_GRANITE_HYBRID, the.GRANITE_EXPERTS, always(*_GRANITE_SHARED)),
        _GRANITE_HYBRID_KEYS | {"shared_intermediate_size": "expert_shared_feed_forward_length"},
        _GRANITE_HYBRID_CONSTANTS,
        needs="expert_count",
        is_permuted=True,
    ),
    Architecture(
        "granitehybrid",
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        (*_GRANITE_HYBRID, always(*the.MLP)),
        _GRANITE_HYBRID_KEYS | {"shared_intermediate_size": "feed_forward_length"},
        _GRANITE_HYBRID_CONSTANTS,
        is_permuted=True,
        is_for_mlx=True,
    ),
    Architecture(
        "falcon-h1",
        "falcon_h1",
        "FalconH1ForCausalLM",
        (
            always(
                "input_layernorm",
                part("pre_ff_layernorm.weight", "ffn_norm"),
                *the.QKVO,
                *the.mamba("mamba", restore.convolution_for_mlx),
            ),
            *the.mamba_extras("mamba"),
            always(
                *(
                    part(f"feed_forward.{name}_proj.weight", f"ffn_{name}.weight")
                    for name in the.GATES
                )
            ),
        ),
        {
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_d_ssm": "ssm.inner_size",
            "mamba_d_state": "ssm.state_size",
            "mamba_n_groups": "ssm.group_count",
            "mamba_n_heads": "ssm.time_step_rank",
        },
        # The conversion multiplies the weights by the multipliers.
        _FALCON_MULTIPLIERS
        | {
            "attention_bias": False,
            "mlp_bias": False,
            "mamba_proj_bias": False,
            "projectors_bias": False,
            "mamba_norm_before_gate": False,
        },
        is_for_mlx=True,
        model=(
            the.EMBEDDING,
            always(part("model.final_layernorm.weight", "output_norm.weight")),
            maybe("lm_head"),
        ),
    ),
)
