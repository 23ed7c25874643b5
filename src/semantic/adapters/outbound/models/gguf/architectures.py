"""The table of architectures that can be imported."""

from semantic.adapters.outbound.models.gguf import layers as the
from semantic.adapters.outbound.models.gguf import restoring as restore
from semantic.adapters.outbound.models.gguf.header import GgufFile
from semantic.adapters.outbound.models.gguf.hybrids import HYBRIDS
from semantic.adapters.outbound.models.gguf.layers import Architecture, always, maybe, part

_LLAMA = (
    the.NORMS,
    the.ATTENTION,
    maybe(*the.QKV_BIASES, "self_attn.o_proj.bias"),
    always(*the.MLP),
)
_QWEN3 = (the.NORMS, always(*the.QKVO, *the.QK_NORMS), always(*the.MLP))
_QWEN3_MOE = (the.NORMS, always(*the.QKVO, *the.QK_NORMS), the.MLP_EXPERTS)
_LATENT = (
    the.NORMS,
    *the.LATENT,
    (the.MLP, *the.MLP_EXPERTS),
    maybe(*the.shared("mlp.shared_experts")),
    maybe(the.EXPERT_BIAS),
)
_LAST_NORMS = (the.LAST_NORMS, always(*the.QKVO, *the.QK_NORMS), always(*the.MLP))
_COHERE = (the.FIRST_NORM, the.ATTENTION, always(*the.MLP))
_GEMMA_PER_LAYER = maybe(
    part("model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight"),
    part("model.per_layer_model_projection.weight", "per_layer_model_proj.weight"),
    part("model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
)

_ALL = (
    # Of several entries with one name, the first whose `needs` are met is used.
    Architecture(
        "llama",
        "mixtral",
        "MixtralForCausalLM",
        (the.NORMS, the.ATTENTION, the.SPARSE_EXPERTS),
        {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        needs="expert_count",
        is_permuted=True,
    ),
    Architecture(
        "llama",
        "llama",
        "LlamaForCausalLM",
        _LLAMA,
        constants={"mlp_bias": False},
        is_permuted=True,
    ),
    Architecture(
        "mistral3",
        "ministral3",
        "Ministral3ForCausalLM",
        _LLAMA,
        needs="attention.temperature_scale",
        is_permuted=True,
    ),
    Architecture("mistral3", "mistral", "MistralForCausalLM", _LLAMA, is_permuted=True),
    Architecture(
        "qwen2",
        "qwen2",
        "Qwen2ForCausalLM",
        (the.NORMS, always(*the.QKVO, *the.QKV_BIASES), always(*the.MLP)),
    ),
    Architecture(
        "qwen2moe",
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        (
            the.NORMS,
            the.ATTENTION,
            maybe(*the.QKV_BIASES),
            the.MLP_EXPERTS,
            always(*the.GATED_SHARED),
        ),
        the.MOE_KEYS | the.SHARED_KEY,
        the.EVERY_LAYER | {"norm_topk_prob": False},
    ),
    Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", _QWEN3),
    Architecture("qwen3vl", "qwen3", "Qwen3ForCausalLM", _QWEN3),
    *(
        Architecture(
            name,
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _QWEN3_MOE,
            the.MOE_KEYS,
            the.EVERY_LAYER | {"norm_topk_prob": True},
        )
        for name in ("qwen3moe", "qwen3vlmoe")
    ),
    Architecture(
        "gemma",
        "gemma",
        "GemmaForCausalLM",
        _LLAMA,
        constants=the.GEMMA | {"hidden_act": "gelu_pytorch_tanh"},
        is_shifted=True,
    ),
    Architecture(
        "gemma2",
        "gemma2",
        "Gemma2ForCausalLM",
        (the.FOUR_NORMS, the.ATTENTION, always(*the.MLP)),
        the.GEMMA_KEYS,
        the.GEMMA | the.NO_CAPS,
        is_shifted=True,
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        "Gemma3ForCausalLM",
        (the.FOUR_NORMS, always(*the.QKVO, *the.QK_NORMS), always(*the.MLP)),
        the.GEMMA_KEYS,
        the.GEMMA | the.NO_CAPS,
        is_shifted=True,
    ),
    Architecture(
        "gemma3n",
        "gemma3n",
        "Gemma3nForConditionalGeneration",
        (
            the.FOUR_NORMS,
            always(*the.QKVO, *the.QK_NORMS),
            always(*the.MLP),
            the.PER_LAYER_INPUTS,
            always(
                part("altup.correct_output_scale", "altup_correct_scale.weight"),
                part("altup.correction_coefs.weight", "altup_correct_coef.weight"),
                part("altup.modality_router.weight", "altup_router.weight"),
                part("altup.prediction_coefs.weight", "altup_predict_coef.weight"),
                part("altup.router_norm.weight", "altup_router_norm.weight"),
                part("laurel.linear_left.weight", "laurel_l.weight"),
                part("laurel.linear_right.weight", "laurel_r.weight"),
                part("laurel.post_laurel_norm.weight", "laurel_post_norm.weight"),
            ),
        ),
        the.GEMMA_KEYS
        | {
            "altup_active_idx": "altup.active_idx",
            "altup_num_inputs": "altup.num_inputs",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "num_kv_shared_layers": "attention.shared_kv_layers",
        },
        the.GEMMA | {"altup_coef_clip": 120.0, "altup_correct_scale": True},
        is_nested=True,
        root="model.language_model",
        model=(
            *the.MODEL,
            _GEMMA_PER_LAYER,
            always(
                *(
                    part(
                        " ".join(f"model.altup_{name}.{i}.weight" for i in range(3)),
                        f"altup_{source}.weight",
                        restore.each_of_stack,
                    )
                    for name, source in (
                        ("projections", "proj"),
                        ("unembed_projections", "unembd_proj"),
                    )
                )
            ),
        ),
    ),
    Architecture(
        "gemma4",
        "gemma4_text",
        "Gemma4ForCausalLM",
        (
            the.FOUR_NORMS,
            always("self_attn.q_proj", "self_attn.o_proj", "self_attn.q_norm"),
            maybe("self_attn.k_proj", "self_attn.k_norm"),
            maybe("self_attn.v_proj"),
            always(*the.MLP),
            maybe(part("layer_scalar", "layer_output_scale.weight")),
            the.PER_LAYER_INPUTS,
            (*the.experts("router.proj", "experts.switch_glu"), ()),
            maybe(
                part("router.scale", "ffn_gate_inp.scale"),
                part("router.per_expert_scale", "ffn_down_exps.scale"),
                part("post_feedforward_layernorm_1.weight", "post_ffw_norm_1.weight"),
                part("post_feedforward_layernorm_2.weight", "post_ffw_norm_2.weight"),
                part("pre_feedforward_layernorm_2.weight", "pre_ffw_norm_2.weight"),
            ),
        ),
        {
            "sliding_window": "attention.sliding_window",
            "final_logit_softcapping": "final_logit_softcapping?",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "head_dim": "attention.key_length_swa",
            "global_head_dim": "attention.key_length",
            "num_experts": "expert_count?",
            "top_k_experts": "expert_used_count?",
            "moe_intermediate_size": "expert_feed_forward_length?",
        },
        the.GEMMA | {"final_logit_softcapping": None},
        model=(*the.MODEL, _GEMMA_PER_LAYER),
    ),
    Architecture(
        "gpt-oss",
        "gpt_oss",
        "GptOssForCausalLM",
        (
            the.NORMS,
            always(
                *the.QKVO,
                *the.QKV_BIASES,
                "self_attn.o_proj.bias",
                part("self_attn.sinks", "attn_sinks.weight"),
            ),
            always(
                *(f"mlp.experts.{name}_proj{end}" for end in ("", ".bias") for name in the.GATES),
                "mlp.router",
                "mlp.router.bias",
            ),
        ),
        {
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
            "sliding_window": "attention.sliding_window",
        },
        {"attention_bias": True},
    ),
    Architecture(
        "deepseek2",
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _LATENT,
        the.LATENT_KEYS,
        the.ROUTED | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        needs="expert_gating_func=2",
    ),
    Architecture(
        "deepseek2",
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        _LATENT,
        the.LATENT_KEYS,
        the.ROUTED,
    ),
    Architecture(
        "phi3",
        "phi3",
        "Phi3ForCausalLM",
        (
            the.NORMS,
            always(
                "self_attn.qkv_proj",
                "self_attn.o_proj",
                part("mlp.gate_up_proj.weight", "ffn_up.weight"),
                "mlp.down_proj",
            ),
        ),
        {"original_max_position_embeddings": "rope.scaling.original_context_length?"},
        is_partial=True,
    ),
    Architecture(
        "glm4moe",
        "glm4_moe",
        "Glm4MoeForCausalLM",
        (
            the.NORMS,
            the.ATTENTION,
            maybe(*the.QKV_BIASES),
            maybe(*the.QK_NORMS),
            (the.MLP, *the.MLP_EXPERTS),
            maybe(*the.shared("mlp.shared_experts")),
            maybe(the.EXPERT_BIAS),
        ),
        the.ROUTED_KEYS,
        the.ROUTED | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_scaling": None},
        is_partial=True,
    ),
    Architecture(
        "minimax-m2",
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        (
            the.NORMS,
            always(*the.QKVO, *the.QK_NORMS),
            the.SPARSE_EXPERTS,
            always(
                part(
                    "block_sparse_moe.e_score_correction_bias",
                    "exp_probs_b.bias",
                    restore.in_float32,
                )
            ),
        ),
        {
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "rotary_dim": "rope.dimension_count",
        },
        {
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "use_routing_bias": True,
            "shared_intermediate_size": 0,
        },
        is_partial=True,
    ),
    Architecture(
        "granite",
        "granite",
        "GraniteForCausalLM",
        _LLAMA,
        the.GRANITE_KEYS,
        {"attention_bias": False, "mlp_bias": False},
        is_permuted=True,
    ),
    Architecture(
        "granitemoe",
        "granitemoe",
        "GraniteMoeForCausalLM",
        (the.NORMS, the.ATTENTION, the.GRANITE_EXPERTS),
        the.GRANITE_KEYS
        | {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        {"attention_bias": False},
        is_permuted=True,
    ),
    Architecture(
        "smollm3",
        "smollm3",
        "SmolLM3ForCausalLM",
        _LLAMA,
        constants={"no_rope_layer_interval": 4},
        is_permuted=True,
    ),
    Architecture(
        "seed_oss",
        "seed_oss",
        "SeedOssForCausalLM",
        (the.NORMS, the.ATTENTION, maybe(*the.QKV_BIASES), always(*the.MLP)),
        constants={"attention_out_bias": False, "mlp_bias": False},
    ),
    Architecture(
        "ernie4_5",
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        _LLAMA,
        constants={"use_bias": False},
    ),
    Architecture(
        "ernie4_5-moe",
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        (
            the.NORMS,
            the.ATTENTION,
            (the.MLP, *the.MLP_EXPERTS),
            maybe(*the.shared("mlp.shared_experts")),
            maybe(
                part(
                    "mlp.moe_statics.e_score_correction_bias",
                    "exp_probs_b.bias",
                    restore.row_in_float32,
                )
            ),
        ),
        {
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        {"use_bias": False},
    ),
    Architecture(
        "hunyuan-dense",
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        (
            the.NORMS,
            always(
                *the.QKVO,
                part("self_attn.query_layernorm.weight", "attn_q_norm.weight"),
                part("self_attn.key_layernorm.weight", "attn_k_norm.weight"),
            ),
            always(*the.MLP),
        ),
        constants={"use_qk_norm": True},
    ),
    Architecture(
        "hunyuan-moe",
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        (
            the.NORMS,
            always(
                *the.QKVO,
                part("self_attn.query_layernorm.weight", "attn_q_norm.weight"),
                part("self_attn.key_layernorm.weight", "attn_k_norm.weight"),
            ),
            the.experts("mlp.gate.wg", "mlp.switch_mlp"),
            always(*the.shared("mlp.shared_mlp")),
        ),
        {
            "num_experts": "expert_count",
            "moe_topk": "expert_used_count",
            "num_shared_expert": "expert_shared_count",
        },
        {"use_qk_norm": True},
    ),
    Architecture(
        "olmo2",
        "olmo3",
        "Olmo3ForCausalLM",
        _LAST_NORMS,
        {"sliding_window": "attention.sliding_window"},
        needs="attention.sliding_window",
    ),
    Architecture("olmo2", "olmo2", "Olmo2ForCausalLM", _LAST_NORMS),
    Architecture(
        "exaone4",
        "exaone4",
        "Exaone4ForCausalLM",
        _LAST_NORMS,
        {"sliding_window": "attention.sliding_window?"},
        {"sliding_window": None, "sliding_window_pattern": None, "rope_scaling": None},
    ),
    Architecture(
        "glm4",
        "glm4",
        "Glm4ForCausalLM",
        (
            always(
                "input_layernorm",
                part("post_self_attn_layernorm.weight", "post_attention_norm.weight"),
                part("post_attention_layernorm.weight", "ffn_norm.weight"),
                part("post_mlp_layernorm.weight", "post_ffw_norm.weight"),
                *the.QKVO,
                part("mlp.gate_up_proj.weight", "ffn_up.weight"),
                "mlp.down_proj",
            ),
            maybe(*the.QKV_BIASES),
        ),
        is_partial=True,
    ),
    Architecture(
        "olmoe",
        "olmoe",
        "OlmoeForCausalLM",
        _QWEN3_MOE,
        {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        {"norm_topk_prob": False},
    ),
    Architecture(
        "command-r",
        "cohere",
        "CohereForCausalLM",
        (*_COHERE, maybe(*the.QK_NORMS)),
        the.LAYER_NORM,
    ),
    Architecture(
        "cohere2",
        "cohere2",
        "Cohere2ForCausalLM",
        _COHERE,
        the.LAYER_NORM | {"sliding_window": "attention.sliding_window"},
        {"sliding_window_pattern": 4},
    ),
    *HYBRIDS,
)
_PROJECTOR = "clip"  # of mmproj files
ARCHITECTURES = tuple(dict.fromkeys(architecture.name for architecture in _ALL))


def find_architecture(file: GgufFile) -> Architecture:
    """Return the architecture of a file; rejects one that is not supported."""
    name = file.architecture
    for architecture in _ALL:
        if architecture.name == name and _is_met(file, architecture.needs):
            return architecture
    if name == _PROJECTOR:
        raise file.refusal(
            "it is the vision tower of another model (mmproj), and GGUF models take no images "
            "here. Serve the language model's own file for text, or a version of the model with "
            "safetensors files for images"
        )
    known = ", ".join(sorted(ARCHITECTURES))
    raise file.refusal(
        f"architecture {name!r} is not supported; supported are {known}. Use a version of the "
        "model with safetensors files instead, such as its Hugging Face or mlx-community one"
    )


def _is_met(file: GgufFile, needs: str) -> bool:
    key, _, wanted = needs.partition("=")
    value = file.fields.get(f"{file.architecture}.{key}")
    return not needs or (str(value) == wanted if wanted else bool(value))
