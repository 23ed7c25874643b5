"""A quantised file compared with its full weights: size and exactness.

For the starter model, a Q4_1 file, on this CPU: bytes on disk and of the loaded tensors, and
the Kullback-Leibler divergence of next-token distributions over English text; also the divergence
if full weights are quantised, as `--weights int8` and `int4` do. Then the same for GPT-OSS with
random weights, compared with the library's model with the numbers in the file.
"""

import functools
import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind
from torch.nn import functional

from benchmarks.gpt_oss_file import TOKENS, write_gpt_oss
from benchmarks.report import Report, run
from benchmarks.starter import prompt_tokens, starter_directory
from semantic.adapters.config.sources import load_settings
from semantic.adapters.outbound.backends.torch import cpu
from semantic.adapters.outbound.backends.torch.grouped import quantise_linears
from semantic.adapters.outbound.backends.torch.native.library import Library
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.adapters.outbound.backends.torch.reading import load_grouped
from semantic.adapters.outbound.models.gguf.importing import import_gguf, starter_gguf

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


@functools.cache
def native() -> NativeBuild:
    """Load the native library, as a server chooses it."""
    return NativeBuild(load_settings().home_dir / "native")


def library() -> Library:
    """Return the native library, which `measure` checks for."""
    found = native().library()
    assert found is not None
    return found


def tensor_bytes() -> int:
    """Return the bytes of all existing tensors."""
    gc.collect()
    # By its type: to ask each object for its class would wake those that warn of it.
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}
    return sum(sizes.values())


def probabilities(model: Any, tokens: list[int]) -> torch.Tensor:
    """Return log-probabilities after every token."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return functional.log_softmax(logits.float(), dim=-1)


def load(report: Report, name: str, directory: Path, *, is_kept: bool) -> Any:
    """Load a model as the server does; reports its size."""
    before = tensor_bytes()
    model = load_grouped(directory, torch.float32, is_kept=is_kept).eval()
    cpu.pack_grouped(model, library())
    form = "as in the file" if is_kept else "in full"
    report.add(f"{name}, tensors {form}", (tensor_bytes() - before) / 1e6, "MB")
    return model


def compare(report: Report, name: str, kept: torch.Tensor, full: torch.Tensor) -> None:
    """Compare two models' log-probabilities."""
    kl = functional.kl_div(kept, full, reduction="none", log_target=True).sum(dim=-1)
    same = (kept.argmax(dim=-1) == full.argmax(dim=-1)).float().mean()
    report.add(f"{name}, KL in the mean", float(kl.mean()), "nats a token", most=MAX_DIVERGENCE)
    report.add(f"{name}, KL at most", float(kl.max()), "nats a token")
    report.add(f"{name}, likeliest token the same", 100 * float(same), "%")


def sizes(report: Report, name: str, file: Path, directory: Path) -> None:
    """Report a file's size on disk, before and after the import."""
    report.add(f"{name}, GGUF", file.stat().st_size / 1e6, "MB")
    imported = directory / "model.safetensors"
    report.add(f"{name}, imported", imported.stat().st_size / 1e6, "MB")


def starter(report: Report) -> None:
    """Measure the starter model, a Q4_1 file."""
    directory = starter_directory()
    tokens = prompt_tokens(directory, NUM_TOKENS)
    sizes(report, "starter", starter_gguf(), directory)
    kept, full = (
        probabilities(load(report, "starter", directory, is_kept=way), tokens)
        for way in (True, False)
    )
    compare(report, "starter", kept, full)
    for bits in (8, 4):
        model = load_grouped(directory, torch.float32, is_kept=False).eval()
        quantise_linears(model, bits)
        cpu.pack_grouped(model, library())
        found = probabilities(model, tokens)
        kl = functional.kl_div(found, full, reduction="none", log_target=True).sum(dim=-1)
        report.add(f"--weights int{bits}, KL in the mean", float(kl.mean()), "nats a token")


def gpt_oss(report: Report) -> None:
    """Measure random weights in GPT-OSS's format: experts in MXFP4, other linears in Q8_0."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "random.gguf")
        model = write_gpt_oss(file, GPT_OSS, Kind.MXFP4, Kind.Q8_0)
        directory = import_gguf(file, Path(folder, "imported"))
        sizes(report, "GPT-OSS", file, directory)
        tokens = [place * 7919 % len(TOKENS) for place in range(NUM_TOKENS)]
        kept = probabilities(load(report, "GPT-OSS", directory, is_kept=True), tokens)
        compare(report, "GPT-OSS", kept, probabilities(model, tokens))


def measure(report: Report) -> None:
    """Measure both files."""
    if native().library() is None:
        report.note(f"SKIP: needs the native library: {native().reason}")
        return
    starter(report)
    gpt_oss(report)


if __name__ == "__main__":
    sys.exit(run("quantised", measure))
