"""The starter model on torch, its weights in full and as the server keeps them, and on MLX."""

from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.adapters.outbound.backends.torch.reading import load_grouped
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.domain.sampling import SamplingParams
from semantic.ports.backend import Chunk, Draw, ModelBackendPort
from tests.contract.conftest import make_mlx, require_mlx
from tests.contract.driver import begin, finish, sampled, step
from tests.contract.models import TinyModel, spec_of
from tests.number_formats import needs_bfloat16

pytestmark = pytest.mark.integration

# What the library answers greedily, in bfloat16 and in float32.
RECORDED = {
    "What is the capital of France? Answer in one sentence.": "The capital of France is Paris.",
    "What is 2 + 2? Answer with one number.": "The answer is 4.",
}

QUESTIONS = (
    *RECORDED,
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "Name three animals that live in the sea, and say how they breathe.",
    "Translate 'good morning' to Spanish.",
    "What is the capital of France?",
)


@pytest.fixture(scope="module")
def backend(starter_model_dir: Path) -> Iterator[TorchBackend]:
    made = make_backend(starter_model_dir, TorchOptions(weights="full"))
    yield made
    made.shutdown()


def make_backend(directory: Path, options: TorchOptions) -> TorchBackend:
    return TorchBackend(directory, spec_of(directory), options)


@pytest.fixture(scope="module")
def library(starter_model_dir: Path, backend: TorchBackend) -> Any:
    assert backend.traits.compute is not None
    dtype = getattr(torch, backend.traits.compute.dtype)
    return load_grouped(starter_model_dir, dtype, is_kept=False).eval()


def prompt_of(tokenizer: HFTokenizer, question: str) -> list[int]:
    return tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question}]))


def greedy_text(backend: TorchBackend, tokenizer: HFTokenizer, prompt: list[int]) -> str:
    run = begin(backend, 0, prompt)
    text = run.say(tokenizer)
    backend.close_sequence(run.seq)
    return text


def library_text(library: Any, tokenizer: HFTokenizer, prompt: list[int]) -> str:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = library.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False
        )
    return b"".join(tokenizer.token_bytes(t) for t in output[0, len(prompt) :].tolist()).decode()


@pytest.mark.parametrize("question", RECORDED)
def test_greedy_text_is_the_librarys(
    backend: TorchBackend, tokenizer: HFTokenizer, library: Any, question: str
) -> None:
    prompt = prompt_of(tokenizer, question)
    text = greedy_text(backend, tokenizer, prompt)
    assert text == RECORDED[question]
    assert text == library_text(library, tokenizer, prompt)


def top_logprobs(backend: TorchBackend, tokens: list[int]) -> Iterator[tuple[int, int, float]]:
    """Place, token and log-probability of the likeliest after every 17 tokens and at the end."""
    draw = Draw(SamplingParams(temperature=0, seed=0, top_logprobs=5), len(tokens))
    run = begin(backend, 1, tokens)
    for start in range(0, len(tokens), 17):
        chunk = Chunk(run.seq, start, tuple(tokens[start : start + 17]), draw)
        logprob = sampled(*step(backend, chunk)).logprob
        assert logprob is not None
        for token, value in logprob.top:
            yield start + chunk.num_tokens - 1, token, value
    backend.close_sequence(run.seq)


def library_logprobs(library: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = library(torch.tensor([tokens])).logits[0]
    return logits.float().log_softmax(-1)


def test_logits_are_the_librarys_within_its_rounding(
    backend: TorchBackend, tokenizer: HFTokenizer, library: Any
) -> None:
    """In chunks and at the end of a text: the likeliest tokens and their probabilities agree."""
    tokens = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 12)
    expected = library_logprobs(library, tokens)
    tolerance = 0.001 if library.dtype == torch.float32 else 0.35
    for last, token, logprob in top_logprobs(backend, tokens):
        assert logprob == pytest.approx(float(expected[last, token]), abs=tolerance)


@pytest.mark.slow
@needs_bfloat16
def test_log_probabilities_are_closer_to_float32_than_the_librarys(
    tokenizer: HFTokenizer, starter_model_dir: Path
) -> None:
    """Both in bfloat16, whichever format this CPU would choose by itself."""
    backend = make_backend(starter_model_dir, TorchOptions(dtype="bfloat16", weights="full"))
    exact, rounding = (
        load_grouped(starter_model_dir, dtype, is_kept=False).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    ours, librarys = [], []
    for question in QUESTIONS:
        tokens = prompt_of(tokenizer, question)
        expected, rounded = (library_logprobs(model, tokens) for model in (exact, rounding))
        for last, token, logprob in top_logprobs(backend, tokens):
            ours.append(abs(logprob - float(expected[last, token])))
            librarys.append(abs(float(rounded[last, token] - expected[last, token])))
    backend.shutdown()
    assert mean(ours) < 0.8 * mean(librarys)


# -- weights as in the file -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def quantised(native: NativeBuild, starter_model_dir: Path) -> Iterator[TorchBackend]:
    if native.library() is None:
        pytest.skip(f"no kernels for quantised weights: {native.reason}")
    made = make_backend(starter_model_dir, TorchOptions(native=native))
    yield made
    made.shutdown()


def test_a_quantised_file_runs_quantised_unless_asked_otherwise(
    quantised: TorchBackend, backend: TorchBackend
) -> None:
    """Their KV cache is never mixed."""
    compute = quantised.traits.compute
    assert compute is not None
    assert "quantised as in the file" in compute.kernels
    assert quantised.traits.kv_abi == f"torch.v1.{compute.dtype}.grouped"
    assert backend.traits.kv_abi in ("torch.v1.float32", "torch.v1.bfloat16")


@pytest.mark.parametrize("question", RECORDED)
def test_quantised_weights_answer_as_full_ones(
    quantised: TorchBackend, tokenizer: HFTokenizer, question: str
) -> None:
    assert greedy_text(quantised, tokenizer, prompt_of(tokenizer, question)) == RECORDED[question]


def test_quantised_weights_give_nearly_the_probabilities_of_full_ones(
    quantised: TorchBackend, tokenizer: HFTokenizer, library: Any
) -> None:
    off = []
    for question in QUESTIONS[2:4]:
        tokens = prompt_of(tokenizer, question)
        expected = library_logprobs(library, tokens)
        found = top_logprobs(quantised, tokens)
        off += [abs(logprob - float(expected[last, token])) for last, token, logprob in found]
    assert mean(off) < (0.01 if library.dtype == torch.float32 else 0.2)


# -- on MLX ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_text_on_mlx_as_on_torch_in_float32(
    starter_model_dir: Path, tokenizer: HFTokenizer
) -> None:
    require_mlx()
    # MLX takes a tenth of a second for each token on a Linux CPU.
    prompts = [tokenizer.encode(text) for text in ("Grass is green, snow is", "One, two, three,")]

    def replies(backend: ModelBackendPort) -> list[list[int]]:
        runs = [begin(backend, seq, prompt) for seq, prompt in enumerate(prompts)]
        finish(runs, 4)
        backend.shutdown()
        return [run.reply for run in runs]

    expected = replies(make_backend(starter_model_dir, TorchOptions(dtype="float32")))
    assert replies(make_mlx(TinyModel(starter_model_dir, spec_of(starter_model_dir)))) == expected
