"""The starter model on the torch backend as the server runs it: bfloat16, faster modules."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from semantic.adapters.outbound.hf_tokenizer import HFTokenizer
from semantic.adapters.outbound.torch_backend import TorchBackend
from semantic.adapters.outbound.torch_loading import TorchOptions
from semantic.domain.sampling import SamplingParams
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.outbound import LAST_SAMPLED, Chunk, Draw, Sampled, SequenceId, Step

pytestmark = pytest.mark.integration

# What the library answers in bfloat16, greedily.
RECORDED = {
    "What is the capital of France? Answer in one sentence.": "The capital of France is Paris.",
    "What is 2 + 2? Answer with one number.": "The answer is 4.",
}


@pytest.fixture(scope="module")
def backend(starter_model_dir: Path) -> Iterator[TorchBackend]:
    config = json.loads((starter_model_dir / "config.json").read_text())
    options = TorchOptions(dtype="bfloat16")
    made = TorchBackend(starter_model_dir, ModelCacheSpec.from_config(config), options)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def tokenizer(starter_model_dir: Path) -> HFTokenizer:
    return HFTokenizer(starter_model_dir)


@pytest.fixture(scope="module")
def library(starter_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(starter_model_dir, dtype=torch.bfloat16).eval()


def prompt_of(tokenizer: HFTokenizer, question: str) -> list[int]:
    return tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question}]))


def greedy_text(backend: TorchBackend, tokenizer: HFTokenizer, prompt: list[int]) -> str:
    draw = Draw(SamplingParams(temperature=0, seed=0), len(prompt))
    seq, reply = SequenceId(0), b""
    backend.open(seq, prompt)
    chunk = Chunk(seq, 0, tuple(prompt), draw)
    for length in range(len(prompt), len(prompt) + 40):
        (row,) = backend.collect(backend.launch(Step((chunk,)))).rows
        assert isinstance(row, Sampled)
        if row.token in tokenizer.eos_ids:
            break
        reply += tokenizer.token_bytes(row.token)
        chunk = Chunk(seq, length, LAST_SAMPLED, draw)
    backend.close(seq)
    return reply.decode()


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


def test_logits_are_the_librarys_within_bfloat16s_rounding(
    backend: TorchBackend, tokenizer: HFTokenizer, library: Any
) -> None:
    """In chunks and at the end of a text: the likeliest tokens and their probabilities agree."""
    tokens = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 12)
    with torch.inference_mode():
        expected = library(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    draw = Draw(SamplingParams(temperature=0, seed=0, top_logprobs=5), len(tokens))
    seq = SequenceId(1)
    backend.open(seq, tokens)
    for start in range(0, len(tokens), 17):
        chunk = Chunk(seq, start, tuple(tokens[start : start + 17]), draw)
        (row,) = backend.collect(backend.launch(Step((chunk,)))).rows
        assert isinstance(row, Sampled)
        assert row.logprob is not None
        last = start + chunk.num_tokens - 1
        for token, logprob in row.logprob.top:
            assert logprob == pytest.approx(float(expected[last, token]), abs=0.35)
    backend.close(seq)
