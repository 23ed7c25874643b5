"""A quantised file as it stands against its weights in full: room, exactness.

The starter model, a Q4_1 file, on this CPU: bytes on disk and of the loaded model's tensors, and
the Kullback-Leibler divergence of next-token distributions over English text. Then the same for
GPT-OSS with random weights, against the library's model of the numbers that the file holds.
"""

import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind
from torch.nn import functional

from benchmarks.gpt_oss_file import TOKENS, write_gpt_oss
from benchmarks.starter import prompt_tokens, starter_directory
from semantic.adapters.outbound.backends.torch import cpu
from semantic.adapters.outbound.backends.torch.grouped import has_kleidi, load_grouped
from semantic.adapters.outbound.models.gguf import import_gguf, starter_gguf

NUM_TOKENS, MAX_DIVERGENCE = 256, 1e-3
GPT_OSS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "initializer_range": 0.05,
}


def tensor_bytes() -> int:
    """Bytes of all tensors there are."""
    gc.collect()
    # By its type: to ask each object for its class would wake those that warn of it.
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}
    return sum(sizes.values())


def probabilities(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities after every token."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return functional.log_softmax(logits.float(), dim=-1)


def load(directory: Path, attention: str, *, is_kept: bool) -> Any:
    """A model as the server would have it, and a line of what it takes."""
    before = tensor_bytes()
    model = load_grouped(directory, torch.float32, attention, is_kept=is_kept).eval()
    cpu.pack_grouped(model)
    size, form = tensor_bytes() - before, "as in the file" if is_kept else "in full"
    print(f"{form}: {size / 1e6:.0f} MB")
    return model


def compare(kept: torch.Tensor, full: torch.Tensor) -> float:
    """Print how far two models' log-probabilities are apart; returns the mean divergence."""
    kl = functional.kl_div(kept, full, reduction="none", log_target=True).sum(dim=-1)
    is_same = (kept.argmax(dim=-1) == full.argmax(dim=-1)).float().mean()
    print(f"KL a token: mean {kl.mean():.1e}, greatest {kl.max():.1e}")
    print(f"the likeliest token is the same after {is_same:.1%} of {NUM_TOKENS}")
    return float(kl.mean())


def starter() -> float:
    """The starter model, a Q4_1 file."""
    directory = starter_directory()
    tokens = prompt_tokens(directory, NUM_TOKENS)
    print(f"file {starter_gguf().stat().st_size / 1e6:.0f} MB, imported", end=" ")
    print(f"{(directory / 'model.safetensors').stat().st_size / 1e6:.0f} MB")
    found = [probabilities(load(directory, "sdpa", is_kept=way), tokens) for way in (True, False)]
    return compare(*found)


def gpt_oss() -> float:
    """Random weights in GPT-OSS's form: experts in MXFP4, other linears in Q8_0."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "random.gguf")
        model = write_gpt_oss(file, GPT_OSS, Kind.MXFP4, Kind.Q8_0)
        directory = import_gguf(file, Path(folder, "imported"))
        imported = directory / "model.safetensors"
        print(f"GPT-OSS: file {file.stat().st_size / 1e6:.1f} MB, imported", end=" ")
        print(f"{imported.stat().st_size / 1e6:.1f} MB")
        tokens = [place * 7919 % len(TOKENS) for place in range(NUM_TOKENS)]
        kept = probabilities(load(directory, "eager", is_kept=True), tokens)
        return compare(kept, probabilities(model, tokens))


def main() -> int:
    """Print figures; 1 if a divergence is too large."""
    if not has_kleidi():
        print("this benchmark compares in float32, which needs ARM's kernels")
        return 0
    return 0 if max(starter(), gpt_oss()) < MAX_DIVERGENCE else 1


if __name__ == "__main__":
    sys.exit(main())
