"""GGUF files of GPT-OSS: experts in MXFP4, and the same logits as the library's own model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch.nn import functional

from benchmarks.gpt_oss_file import TOKENS, write_gpt_oss
from semantic.adapters.outbound.backends.torch import cpu
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.backends.torch.native.library import Library
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.adapters.outbound.backends.torch.reading import load_grouped
from semantic.adapters.outbound.models.gguf.importing import import_gguf
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.domain.errors import InvalidRequestError
from semantic.domain.spec import LayerKind, ModelCacheSpec
from tests.contract.driver import check_batch, prompt
from tests.contract.models import spec_of

pytestmark = pytest.mark.contract

EXPERTS, HIDDEN, INNER, HEADS = 4, 64, 96, 4
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": 12,
    "initializer_range": 0.3,
}


@dataclass(frozen=True)
class Pair:
    """A GGUF file's directory, and the library's model of the numbers that the file holds."""

    directory: Path
    model: Any

    @property
    def spec(self) -> ModelCacheSpec:
        return spec_of(self.directory, block_tokens=8)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = self.model(tokens).logits[0]
        return found


def make_pair(folder: Path, experts: Kind, linears: Kind, rope_factor: float = 32.0) -> Pair:
    model = write_gpt_oss(folder / "tiny.gguf", SIZES, experts, linears, rope_factor)
    return Pair(import_gguf(folder / "tiny.gguf", folder / "model"), model)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """As most downloads are: experts in MXFP4, the other linears in Q8_0."""
    return make_pair(tmp_path_factory.mktemp("published"), Kind.MXFP4, Kind.Q8_0)


def divergence(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The mean Kullback-Leibler divergence of the next token's distribution."""
    logs, others = (functional.log_softmax(logits, dim=-1) for logits in (found, expected))
    kl = functional.kl_div(logs, others, reduction="none", log_target=True)
    return float(kl.sum(dim=-1).mean())


TEXT = torch.tensor([[token % len(TOKENS) for token in prompt(40)]])


@pytest.mark.parametrize(
    "experts, linears",
    [(Kind.MXFP4, Kind.F32), (Kind.BF16, Kind.BF16)],
    ids=["MXFP4", "in full"],
)
def test_the_same_logits_as_the_librarys_model(
    experts: Kind, linears: Kind, tmp_path: Path
) -> None:
    """Every number is exact: MXFP4's are integers times a power of two."""
    pair = make_pair(tmp_path, experts, linears)
    loaded = load_grouped(pair.directory, torch.float32, is_kept=False).eval()
    with torch.inference_mode():
        found = loaded(TEXT).logits[0]
    torch.testing.assert_close(found, pair.logits(TEXT), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("experts", [Kind.MXFP4, Kind.Q4_0], ids=["MXFP4", "Q4_0"])
def test_kept_experts_are_near_the_expanded_ones(
    library: Library, experts: Kind, tmp_path: Path
) -> None:
    pair = make_pair(tmp_path, experts, Kind.Q8_0)
    loaded = load_grouped(pair.directory, torch.float32, is_kept=True).eval()
    cpu.pack_grouped(loaded, library)
    with torch.inference_mode():
        found = loaded(TEXT).logits[0]
    assert divergence(found, pair.logits(TEXT)) < 5e-3


def test_experts_stay_in_four_bits_on_disk(published: Pair) -> None:
    tensors = load_file(published.directory / "model.safetensors")
    owner = "model.layers.1.mlp.experts.up_proj"
    assert tensors[f"{owner}.weight"].shape == (EXPERTS, INNER, HIDDEN // 8)
    assert tensors[f"{owner}.scales"].shape == (EXPERTS, INNER, HIDDEN // 32)
    assert tensors[f"{owner}.scales"].dtype == torch.uint8
    assert f"{owner}.biases" not in tensors
    assert tensors["model.layers.0.self_attn.sinks"].shape == (HEADS,)
    kinds = [layer.kind for layer in published.spec.layers]
    assert kinds == [LayerKind.WINDOW, LayerKind.FULL]


def test_a_batch_gives_what_each_gives_alone(native: NativeBuild, published: Pair) -> None:
    backend = TorchBackend(published.directory, published.spec, TorchOptions(native=native))
    assert (backend._decoder is None) == (native.library() is None)
    texts = [[token % len(TOKENS) for token in prompt(12 + n, seed=n)] for n in range(3)]
    check_batch(backend, texts)


def test_the_tokenizer_cuts_as_gpt_4o_and_the_reply_has_three_ends(published: Pair) -> None:
    tokenizer = HFTokenizer(published.directory)
    pieces = [TOKENS[token] for token in tokenizer.encode("he's 123123<|call|>")]
    assert pieces == ["he", "'s", "Ġ", "123", "123", "<|call|>"]
    assert {TOKENS[end] for end in tokenizer.eos_ids} == {"<|return|>", "<|call|>", "<|endoftext|>"}
    rendered = tokenizer.render_chat([{"role": "user", "content": "he"}])
    assert rendered.endswith("<|message|>he")
    assert tokenizer.encode_prompt("he") == [TOKENS.index("he")]


def test_what_is_not_gpt_oss_in_all_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "old.gguf", "gptoss")  # another program's own dialect
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidRequestError, match=r"'gptoss' is not supported; .*gpt-oss"):
        import_gguf(tmp_path / "old.gguf", tmp_path / "model")
