"""A quantised file as it stands against its weights in full: room, exactness.

The starter model, a Q4_1 file, on this CPU: bytes on disk and of the loaded model's tensors, and
the Kullback-Leibler divergence of next-token distributions over English text.
"""

import gc
import sys
from typing import Any

import torch
from torch.nn import functional

from benchmarks.starter import prompt_tokens, starter_directory
from semantic.adapters.outbound.backends.torch import cpu
from semantic.adapters.outbound.backends.torch.grouped import has_kleidi, load_grouped
from semantic.adapters.outbound.models.gguf import starter_gguf

NUM_TOKENS, MAX_DIVERGENCE = 256, 1e-3


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


def main() -> int:
    """Print figures; 1 if the divergence is too large."""
    directory = starter_directory()
    if not has_kleidi():
        print("this benchmark compares in float32, which needs ARM's kernels")
        return 0
    tokens = prompt_tokens(directory, NUM_TOKENS)
    print(f"file {starter_gguf().stat().st_size / 1e6:.0f} MB, imported", end=" ")
    print(f"{(directory / 'model.safetensors').stat().st_size / 1e6:.0f} MB")
    found = []
    for is_kept in (True, False):
        before = tensor_bytes()
        model = load_grouped(directory, torch.float32, "sdpa", is_kept=is_kept).eval()
        cpu.pack_grouped(model)
        size, form = tensor_bytes() - before, "as in the file" if is_kept else "in full"
        print(f"{form}: {size / 1e6:.0f} MB")
        found.append(probabilities(model, tokens))
        del model
    kept, full = found
    kl = functional.kl_div(kept, full, reduction="none", log_target=True).sum(dim=-1)
    is_same = (kept.argmax(dim=-1) == full.argmax(dim=-1)).float().mean()
    print(f"KL a token: mean {kl.mean():.1e}, greatest {kl.max():.1e}")
    print(f"the likeliest token is the same after {is_same:.1%} of {NUM_TOKENS}")
    return 0 if float(kl.mean()) < MAX_DIVERGENCE else 1


if __name__ == "__main__":
    sys.exit(main())
