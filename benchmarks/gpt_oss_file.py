"""GPT-OSS with random weights as a GGUF file, and the library's model with the same numbers.

Names, layout and metadata are those of llama.cpp's conversion.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers
from transformers import GptOssConfig, GptOssForCausalLM

Floats = npt.NDArray[np.float32]

SPECIAL = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|call|>", "<|message|>"]
WORDS = ["Ġ", "h", "e", "he", "'", "s", "'s", "1", "2", "12", "3", "123"]
LETTERS = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c not in WORDS]
TOKENS = [*WORDS, *LETTERS, *SPECIAL]
_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, 4)


def write_gpt_oss(
    path: Path, sizes: dict[str, Any], experts: Kind, linears: Kind, rope_factor: float = 32.0
) -> Any:
    """Write a random model; returns the library's model with the numbers that the file has."""
    torch.manual_seed(5)
    config = GptOssConfig(**sizes, vocab_size=len(TOKENS), max_position_embeddings=4096)
    config.rope_parameters["factor"] = rope_factor
    model = GptOssForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "sinks" in name:
                parameter.normal_()
            parameter.copy_(parameter.bfloat16())  # what a file has in full is read as that
    writer = gguf.GGUFWriter(path, "gpt-oss")
    _add_metadata(writer, config)
    written: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(model).items():
        is_plain = tensor.ndim == 1 or name.endswith("bias") or "ffn_gate_inp" in name
        kind = experts if "exps.weight" in name else Kind.F32 if is_plain else linears
        stored = gguf.quantize(tensor, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        written[name] = torch.from_numpy(np.array(gguf.dequantize(stored, kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _take(name, parameter, written)
    return model


def _gguf_name(name: str) -> str:
    full = f"{name}.weight" if name.endswith("sinks") else name
    return str(_NAMES.get_name(full, (".weight", ".bias")))


def _tensors(model: Any) -> dict[str, Floats]:
    found: dict[str, Floats] = {}
    for name, tensor in model.state_dict().items():
        if "experts" not in name:
            found[_gguf_name(name)] = tensor.numpy()
            continue
        layer, part = name.split(".")[2], name.rpartition(".")[2]
        end = "bias" if part.endswith("_bias") else "weight"
        rows = tensor if end == "bias" else tensor.transpose(1, 2)
        if part.startswith("down"):
            found[f"blk.{layer}.ffn_down_exps.{end}"] = rows.contiguous().numpy()
        else:
            found[f"blk.{layer}.ffn_gate_exps.{end}"] = rows[:, ::2].contiguous().numpy()
            found[f"blk.{layer}.ffn_up_exps.{end}"] = rows[:, 1::2].contiguous().numpy()
    return found


def _take(name: str, parameter: torch.Tensor, written: dict[str, torch.Tensor]) -> None:
    if "experts" not in name:
        parameter.copy_(written[_gguf_name(name)])
        return
    before = f"blk.{name.split('.')[2]}"
    if name.endswith("gate_up_proj"):
        for place, part in enumerate(("gate", "up")):
            rows = written[f"{before}.ffn_{part}_exps.weight"]
            parameter[:, :, place::2] = rows.transpose(1, 2)
    elif name.endswith("down_proj"):
        parameter.copy_(written[f"{before}.ffn_down_exps.weight"].transpose(1, 2))


def _add_metadata(writer: gguf.GGUFWriter, config: GptOssConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_sliding_window(config.sliding_window)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - len(SPECIAL)) + [3] * len(SPECIAL))
    writer.add_token_merges(["h e", "' s", "1 2", "12 3"])
    writer.add_bos_token_id(TOKENS.index("<|startoftext|>"))
    writer.add_eos_token_id(TOKENS.index("<|return|>"))
    writer.add_pad_token_id(TOKENS.index("<|endoftext|>"))
    writer.add_chat_template("{{ strftime_now('%Y') }}<|message|>{{ messages[0].content }}")
