from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.domain.errors import InvalidRequestError
from semantic.domain.spec import DEFAULT_BLOCK_TOKENS, LayerKind, LayerSpec, ModelCacheSpec

pytestmark = pytest.mark.unit

MIB = 2**20

Config = Mapping[str, object]


def config(
    model_type: str, hidden: int, layers: int, heads: tuple[int, int], vocab: int, context: int
) -> dict[str, object]:
    """What most config.json files say; `heads` are those of queries and of keys."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        "max_position_embeddings": context,
    }


def gemma3(**text: int) -> Config:
    vision = {"model_type": "siglip_vision_model", "num_hidden_layers": 27}
    inner = {"model_type": "gemma3_text", "sliding_window": 1024, **text}
    return {"model_type": "gemma3", "text_config": inner, "vision_config": vision}


# The attributes that matter of the models' published config.json files.
LLAMA_31_8B: Config = {
    **config("llama", 4096, 32, (32, 8), 128256, 131072),
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
}
SMOLLM2_135M: Config = config("llama", 576, 30, (9, 3), 49152, 8192)
MISTRAL_7B_V01: Config = {
    **config("mistral", 4096, 32, (32, 8), 32000, 32768),
    "sliding_window": 4096,
}
QWEN25_7B: Config = {
    **config("qwen2", 3584, 28, (28, 4), 152064, 32768),
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 28,
}
QWEN3_30B_A3B: Config = {
    **config("qwen3_moe", 2048, 48, (32, 4), 151936, 40960),
    "head_dim": 128,
    "num_experts": 128,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 48,
}
GEMMA2_2B: Config = {
    **config("gemma2", 2304, 26, (8, 4), 256000, 8192),
    "head_dim": 256,
    "sliding_window": 4096,
}
GEMMA3_4B = gemma3(hidden_size=2560, num_hidden_layers=34)
GEMMA3_12B = gemma3(
    hidden_size=3840, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8
)
GPT_OSS_20B: Config = {
    **config("gpt_oss", 2880, 24, (64, 8), 201088, 131072),
    "head_dim": 64,
    "num_local_experts": 32,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK_V2_LITE: Config = {
    **config("deepseek_v2", 2048, 27, (16, 16), 102400, 163840),
    **LATENT,
    "q_lora_rank": None,
}
DEEPSEEK_V2: Config = {
    **config("deepseek_v2", 5120, 60, (128, 128), 102400, 163840),
    **LATENT,
    "q_lora_rank": 1536,
}
DEEPSEEK_V3: Config = {
    **config("deepseek_v3", 7168, 61, (128, 128), 129280, 163840),
    **LATENT,
    "q_lora_rank": 1536,
}
FALCON_H1_1B: Config = {
    **config("falcon_h1", 2048, 24, (8, 2), 65537, 131072),
    "head_dim": 128,
    "mamba_chunk_size": 256,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
}
QWEN3_NEXT_80B: Config = {
    **config("qwen3_next", 2048, 48, (16, 2), 151936, 262144),
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
UNKNOWN: Config = {**LLAMA_31_8B, "model_type": "brand_new"}


def read(config: Config, **changes: object) -> ModelCacheSpec:
    return ModelCacheSpec.from_config({**config, **changes})


def without(config: Config, *names: str) -> dict[str, object]:
    return {name: value for name, value in config.items() if name not in names}


def kinds(spec: ModelCacheSpec) -> str:
    return "".join(layer.kind.name[0] for layer in spec.layers)


@pytest.mark.parametrize(
    "config, pattern, bytes_per_token",
    [
        pytest.param(LLAMA_31_8B, "F" * 32, 131072, id="Llama-3.1-8B"),
        pytest.param(SMOLLM2_135M, "F" * 30, 23040, id="SmolLM2-135M"),
        pytest.param(MISTRAL_7B_V01, "W" * 32, 131072, id="Mistral-7B-v0.1"),
        pytest.param(QWEN25_7B, "F" * 28, 57344, id="Qwen2.5-7B"),
        pytest.param(QWEN3_30B_A3B, "F" * 48, 98304, id="Qwen3-30B-A3B"),
        pytest.param(GEMMA2_2B, "WF" * 13, 106496, id="Gemma-2-2B"),
        pytest.param(GEMMA3_4B, "WWWWWF" * 5 + "WWWW", 139264, id="Gemma-3-4B"),
        pytest.param(GEMMA3_12B, "WWWWWF" * 8, 393216, id="Gemma-3-12B"),
        pytest.param(GPT_OSS_20B, "WF" * 12, 49152, id="GPT-OSS-20B"),
        pytest.param(DEEPSEEK_V2_LITE, "F" * 27, 276480, id="DeepSeek-V2-Lite"),
        pytest.param(DEEPSEEK_V2, "F" * 60, 4915200, id="DeepSeek-V2"),
        pytest.param(DEEPSEEK_V3, "F" * 61, 70272, id="DeepSeek-V3"),
        pytest.param(QWEN3_NEXT_80B, "SSSF" * 12, 24576, id="Qwen3-Next-80B-A3B"),
    ],
)
def test_real_models(config: Config, pattern: str, bytes_per_token: int) -> None:
    spec = read(config)

    assert kinds(spec) == pattern
    assert spec.num_layers == len(pattern)
    assert (spec.num_window, spec.num_state) == (pattern.count("W"), pattern.count("S"))
    for bits, expected in ((16, bytes_per_token), (8, bytes_per_token // 2)):
        assert spec.bytes_per_context(1, bits) - spec.bytes_per_context(0, bits) == expected


def test_llama_spec_in_full() -> None:
    spec = read(LLAMA_31_8B)

    assert spec == ModelCacheSpec(
        model_type="llama",
        layers=(LayerSpec(LayerKind.FULL, 8, 128, 128),) * 32,
        vocab_size=128256,
        max_context=131072,
        block_tokens=DEFAULT_BLOCK_TOKENS,
    )


def test_gemma3_12b_at_8k_is_512_and_320_megabytes() -> None:
    spec = read(GEMMA3_12B)

    assert spec.model_type == "gemma3_text"
    assert spec.layers[0] == LayerSpec(LayerKind.WINDOW, 8, 256, 256, 1024)
    assert spec.kind_bytes(LayerKind.FULL, 8192) == 512 * MIB
    assert spec.kind_bytes(LayerKind.WINDOW, 8192) == 320 * MIB
    assert spec.bytes_per_context(8192) == 832 * MIB
    assert spec.bytes_per_context(8192, bits=8) == 416 * MIB


def test_gemma3_4b_relies_on_the_familys_defaults() -> None:
    spec = read(GEMMA3_4B)

    assert spec.layers[5] == LayerSpec(LayerKind.FULL, 4, 256, 256)
    assert (spec.vocab_size, spec.max_context) == (262208, 131072)


def test_gpt_oss_alternates_without_a_list_too() -> None:
    bare = without(GPT_OSS_20B, "layer_types", "sliding_window", "head_dim", "num_key_value_heads")

    assert read(bare) == read(GPT_OSS_20B)
    assert read(bare).layers[0] == LayerSpec(LayerKind.WINDOW, 8, 64, 64, 128)
    assert read(bare).kind_bytes(LayerKind.WINDOW, 100_000) == 3 * MIB


def test_deepseek_v2_keeps_expanded_heads_and_v3_the_latent() -> None:
    assert read(DEEPSEEK_V2_LITE).layers[0] == LayerSpec(LayerKind.FULL, 16, 192, 128)
    assert read(DEEPSEEK_V2).layers[0] == LayerSpec(LayerKind.FULL, 128, 192, 128)
    assert read(DEEPSEEK_V3).layers[0] == LayerSpec(LayerKind.FULL, 1, 512, 64)


def test_falcon_h1_keeps_a_state_and_keys_side_by_side() -> None:
    spec = read(FALCON_H1_1B)
    convolution, recurrent = 3 * (3072 + 2 * 256), 48 * 64 * 256

    assert spec.layers[:2] == (
        LayerSpec(LayerKind.STATE, state_elements=convolution + recurrent),
        LayerSpec(LayerKind.FULL, 2, 128, 128),
    )
    assert kinds(spec) == "SF" * 24
    assert spec.kind_bytes(LayerKind.FULL, 1) == 24 * 2 * 2 * 128 * 2
    expanded = {**FALCON_H1_1B, "mamba_d_ssm": None, "mamba_expand": 2, "mamba_n_heads": 64}
    assert read(expanded).layers[0].state_elements == 3 * (4096 + 2 * 256) + 4096 * 256


def test_qwen3_next_state_does_not_grow() -> None:
    spec = read(QWEN3_NEXT_80B)
    convolution, recurrent = 3 * (2 * 16 * 128 + 32 * 128), 32 * 128 * 128

    assert spec.layers[0] == LayerSpec(LayerKind.STATE, state_elements=convolution + recurrent)
    assert spec.layers[3] == LayerSpec(LayerKind.FULL, 2, 256, 256)
    assert spec.bytes_per_context(0) == 36 * 548864 * 2


@pytest.mark.parametrize(
    "config, pattern",
    [
        (without(QWEN3_NEXT_80B, "full_attention_interval"), "SSSF" * 12),
        ({**QWEN3_NEXT_80B, "full_attention_interval": 2}, "SF" * 24),
        ({**GEMMA3_12B, "text_config": {"sliding_window_pattern": 2}}, "WF" * 13),
        ({"model_type": "gemma3_text"}, "WWWWWF" * 4 + "WW"),
        ({**MISTRAL_7B_V01, "sliding_window": None}, "F" * 32),
        (without(MISTRAL_7B_V01, "sliding_window"), "F" * 32),
        ({**QWEN25_7B, "use_sliding_window": True, "max_window_layers": 21}, "F" * 21 + "W" * 7),
        ({**QWEN25_7B, "use_sliding_window": True, "max_window_layers": 0}, "W" * 28),
        ({**QWEN25_7B, "use_sliding_window": True, "sliding_window": None}, "F" * 28),
        (without(QWEN25_7B, "use_sliding_window"), "F" * 28),
        ({**LLAMA_31_8B, "sliding_window": 4096}, "F" * 32),
    ],
)
def test_rules_for_configs_that_list_no_layers(config: Config, pattern: str) -> None:
    assert kinds(read(config)) == pattern


@pytest.mark.parametrize(
    "config, second",
    [
        (LLAMA_31_8B, "sliding_attention"),
        (QWEN25_7B, "sliding_attention"),
        (GEMMA2_2B, "full_attention"),
        (QWEN3_NEXT_80B, "linear_attention"),
        (UNKNOWN, "sliding_attention"),
    ],
)
def test_listed_layer_types_win(config: Config, second: str) -> None:
    types = ["full_attention", second]

    spec = read(config, num_hidden_layers=2, sliding_window=64, layer_types=types)

    initial = {"full_attention": "F", "sliding_attention": "W", "linear_attention": "S"}
    assert kinds(spec) == "F" + initial[second]


def test_qwen3_default_head_dim_is_not_derived() -> None:
    assert read(QWEN25_7B, model_type="qwen3", hidden_size=1792).layers[0].key_dim == 128


def test_text_config_without_a_model_type_takes_the_outer_one() -> None:
    assert read({"model_type": "gemma3", "text_config": {}}).model_type == "gemma3"
    assert read({"model_type": "shell", "text_config": LLAMA_31_8B}) == read(LLAMA_31_8B)
    assert read({"text_config": {"text_config": LLAMA_31_8B}}) == read(LLAMA_31_8B)
    assert read(LLAMA_31_8B, text_config=None) == read(LLAMA_31_8B)


@pytest.mark.parametrize(
    "changes, pattern, dim",
    [
        ({}, "F" * 32, 128),
        ({"head_dim": 64}, "F" * 32, 64),
        ({"head_dim": None}, "F" * 32, 128),
        ({"sliding_window": 2047}, "W" * 32, 128),
        ({"sliding_window": 4096, "sliding_window_pattern": 4}, "WWWF" * 8, 128),
        ({"sliding_window": 4096, "use_sliding_window": False}, "F" * 32, 128),
        (
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 30},
            "F" * 30 + "WW",
            128,
        ),
        ({"mamba_d_state": None, "num_kv_shared_layers": 0}, "F" * 32, 128),
    ],
)
def test_unknown_types_fall_back_on_standard_attributes(
    changes: dict[str, object], pattern: str, dim: int
) -> None:
    spec = read(UNKNOWN, **changes)

    assert spec.model_type == "brand_new"
    assert kinds(spec) == pattern
    assert {layer.key_dim for layer in spec.layers} == {dim}


def test_without_grouped_heads_every_head_has_its_own_keys() -> None:
    assert read(without(UNKNOWN, "num_key_value_heads")).layers[0].num_kv_heads == 32


def refusal(config: Config) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        ModelCacheSpec.from_config(config)
    assert refused.value.param == "model"
    return refused.value.message


@pytest.mark.parametrize(
    "config, name",
    [
        (UNKNOWN, "num_hidden_layers"),
        (UNKNOWN, "num_attention_heads"),
        (UNKNOWN, "hidden_size"),
        (UNKNOWN, "vocab_size"),
        (LLAMA_31_8B, "num_hidden_layers"),
        (DEEPSEEK_V2, "v_head_dim"),
        (DEEPSEEK_V3, "kv_lora_rank"),
        (QWEN3_NEXT_80B, "linear_num_value_heads"),
    ],
)
def test_without_an_attribute_the_layers_are_unknown_until_the_model_is_loaded(
    config: Config, name: str
) -> None:
    planned = read(without(config, name))

    assert not planned.is_known
    assert planned.bytes_per_context(100) == 0
    layer = LayerSpec(LayerKind.FULL, 2, 8, 8)
    loaded = planned.completed([layer], vocab_size=77)
    assert (loaded.layers, loaded.is_known) == ((layer,), True)
    assert loaded.vocab_size == config["vocab_size"] if name != "vocab_size" else 77


def test_a_config_without_a_context_length_gets_a_moderate_one() -> None:
    assert read(without(UNKNOWN, "max_position_embeddings")).max_context == 32_768


@pytest.mark.parametrize(
    "config",
    [
        {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024},
        {"num_layers": 12, "num_heads": 12, "d_model": 768, "max_seq_len": 1024},
        {"n_layers": 12, "n_heads": 12, "dim": 768, "n_ctx": 1024, "n_kv_heads": 12},
    ],
)
def test_older_names_of_attributes_are_read(config: Config) -> None:
    spec = read({"model_type": "gpt2", "vocab_size": 50257, **config})

    assert spec.layers == (LayerSpec(LayerKind.FULL, 12, 64, 64),) * 12
    assert (spec.vocab_size, spec.max_context) == (50257, 1024)


def test_the_usual_name_wins_over_older_ones() -> None:
    assert read(LLAMA_31_8B, n_positions=7, n_layer=3) == read(LLAMA_31_8B)


def test_layers_that_differ_from_the_config_tag_the_kv_abi() -> None:
    planned = read(DEEPSEEK_V3)
    expanded = planned.completed([LayerSpec(LayerKind.FULL, 128, 192, 128)] * 61)
    other = planned.completed([LayerSpec(LayerKind.FULL, 128, 192, 127)] * 61)

    assert planned.completed(planned.layers).layout_tag(planned) == ""
    assert expanded.layout_tag(planned) == expanded.layout_tag(read(UNKNOWN, kv_lora_rank=512))
    assert len({"", expanded.layout_tag(planned), other.layout_tag(planned)}) == 3


@pytest.mark.parametrize("value", ["32", True, 0, -1, 32.0])
@pytest.mark.parametrize(
    "config, name",
    [
        (LLAMA_31_8B, "num_hidden_layers"),
        (LLAMA_31_8B, "num_key_value_heads"),
        (LLAMA_31_8B, "vocab_size"),
        (MISTRAL_7B_V01, "sliding_window"),
        (QWEN3_NEXT_80B, "linear_conv_kernel_dim"),
        (UNKNOWN, "head_dim"),
        (UNKNOWN, "max_position_embeddings"),
    ],
)
def test_a_wrong_value_is_named(config: Config, name: str, value: object) -> None:
    message = refusal({**config, name: value})

    assert f"{name} must be an integer of at least 1, got {value!r}" in message


@pytest.mark.parametrize(
    "config, said",
    [
        ({}, "has no model_type"),
        (without(LLAMA_31_8B, "model_type"), "has no model_type"),
        ({**LLAMA_31_8B, "model_type": 7}, "has no model_type"),
        ({**LLAMA_31_8B, "text_config": "inner"}, "text_config must be an object"),
        ({**QWEN25_7B, "use_sliding_window": "no"}, "use_sliding_window must be true or false"),
        ({**QWEN25_7B, "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ({**UNKNOWN, "layer_types": "full_attention"}, "layer_types must be a list"),
    ],
)
def test_other_refusals(config: Config, said: str) -> None:
    assert said in refusal(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 4097},
        {"num_key_value_heads": [8, 4]},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["chunked_attention"] * 32},
        {"layer_types": ["sliding_attention"] * 32},
        {"layer_types": [*["full_attention"] * 31, "mamba"]},
        {"sliding_window": 64, "sliding_window_pattern": "LLLG"},
        {"mamba_d_state": 128},
        {"ssm_cfg": {"layer": "Mamba2"}},
        {"rwkv_version": 6},
        {"linear_num_value_heads": 32},
        {"conv_L_cache": 3},
        {"layers_block_type": ["mamba", "attention"]},
        {"kv_lora_rank": 512},
        {"num_kv_shared_layers": 15},
        {"multi_query": True},
        {"model_type": "mamba2"},
        {"model_type": "rwkv7"},
        {"model_type": "granitemoehybrid"},
        {"model_type": "kimi_linear"},
        {"model_type": "llama", "layer_types": ["linear_attention"] * 32},
    ],
)
def test_misleading_attributes_leave_the_layers_unknown(changes: Config) -> None:
    assert not read(UNKNOWN, **changes).is_known


@pytest.mark.parametrize(
    "kind, dims, said",
    [
        (
            LayerKind.FULL,
            (0, 64, 64, 0, 0),
            "num_kv_heads of a full layer must be at least 1, got 0",
        ),
        (LayerKind.FULL, (8, -1, 64, 0, 0), "key_dim of a full layer must be at least 1, got -1"),
        (LayerKind.FULL, (8, 64, -1, 0, 0), "value_dim .* must be at least 0"),
        (LayerKind.FULL, (8, 64, 64, 128, 0), "window of a full layer must be 0, got 128"),
        (LayerKind.WINDOW, (8, 64, 64, 0, 0), "window .* must be at least 1"),
        (LayerKind.WINDOW, (8, 64, 64, 128, 1), "state_elements .* must be 0"),
        (LayerKind.STATE, (0, 0, 0, 0, 0), "state_elements .* must be at least 1"),
        (LayerKind.STATE, (8, 0, 0, 0, 9), "num_kv_heads .* must be 0"),
    ],
)
def test_a_layer_that_makes_no_sense(
    kind: LayerKind, dims: tuple[int, int, int, int, int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        LayerSpec(kind, *dims)


FULL_LAYER = LayerSpec(LayerKind.FULL, 1, 3, 2)


def test_a_spec_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="vocab_size must be at least 1"):
        ModelCacheSpec("tiny", (FULL_LAYER,), 0, 10)
    with pytest.raises(ValueError, match="max_context must be at least 1"):
        ModelCacheSpec("tiny", (FULL_LAYER,), 10, -1)
    with pytest.raises(ValueError, match="block_tokens must be at least 1"):
        ModelCacheSpec.from_config(LLAMA_31_8B, block_tokens=0)


def test_negative_tokens_and_odd_bits_are_refused() -> None:
    spec = ModelCacheSpec("tiny", (FULL_LAYER,), 10, 10)

    with pytest.raises(ValueError, match="num_tokens must not be negative"):
        spec.bytes_per_context(-1)
    for bits in (0, 3, -8, 64):
        with pytest.raises(ValueError, match="bits must be one of"):
            spec.bytes_per_context(1, bits)


def test_half_bytes_are_rounded_up_once_per_part() -> None:
    window = LayerSpec(LayerKind.WINDOW, 1, 3, 2, window=1)
    state = LayerSpec(LayerKind.STATE, state_elements=7)
    spec = ModelCacheSpec("tiny", (FULL_LAYER, FULL_LAYER, window, state), 10, 10, block_tokens=3)

    assert spec.kind_bytes(LayerKind.FULL, 3, bits=4) == 15  # 30 numbers
    assert spec.kind_bytes(LayerKind.WINDOW, 3, bits=4) == 3  # 5 numbers
    assert spec.kind_bytes(LayerKind.STATE, 3, bits=4) == 4  # 7 numbers
    assert spec.bytes_per_context(3, bits=4) == 22


dims = st.integers(1, 64)
full_layers = st.builds(LayerSpec, st.just(LayerKind.FULL), dims, dims, dims)
window_layers = st.builds(
    LayerSpec, st.just(LayerKind.WINDOW), dims, dims, dims, st.integers(1, 2000)
)
state_layers = st.builds(LayerSpec, st.just(LayerKind.STATE), state_elements=st.integers(1, 10**6))


def specs(layers: st.SearchStrategy[LayerSpec]) -> st.SearchStrategy[ModelCacheSpec]:
    return st.builds(
        ModelCacheSpec,
        st.just("any"),
        st.lists(layers, min_size=1, max_size=6).map(tuple),
        st.just(1000),
        st.just(4096),
        st.integers(1, 600),
    )


any_specs = specs(full_layers | window_layers | state_layers)
lengths = st.integers(0, 5000)
widths = st.sampled_from([4, 8, 16, 32])


@given(any_specs, lengths, lengths, widths)
def test_a_longer_context_is_never_smaller(
    spec: ModelCacheSpec, one: int, other: int, bits: int
) -> None:
    shorter, longer = sorted((one, other))

    assert spec.bytes_per_context(shorter, bits) <= spec.bytes_per_context(longer, bits)


@given(any_specs, st.integers(0, 2**40), widths)
def test_no_longer_context_fits_the_same_bytes(
    spec: ModelCacheSpec, nbytes: int, bits: int
) -> None:
    longest = spec.tokens_within(nbytes, bits)

    assert longest == 0 or spec.bytes_per_context(longest, bits) <= nbytes
    assert longest == spec.max_context or spec.bytes_per_context(longest + 1, bits) > nbytes


@given(specs(full_layers), lengths, st.sampled_from([8, 16, 32]))
def test_full_layers_grow_by_the_token(spec: ModelCacheSpec, length: int, bits: int) -> None:
    assert spec.bytes_per_context(length, bits) == length * spec.bytes_per_context(1, bits)


@given(specs(window_layers), st.integers(0, 10**6), widths)
def test_windows_are_capped(spec: ModelCacheSpec, extra: int, bits: int) -> None:
    narrowest = min(layer.window for layer in spec.layers)
    widest = max(layer.window for layer in spec.layers)

    assert spec.bytes_per_context(widest + extra, bits) == spec.bytes_per_context(widest, bits)
    assert spec.bytes_per_context(narrowest, 8) == narrowest * spec.bytes_per_context(1, 8)
