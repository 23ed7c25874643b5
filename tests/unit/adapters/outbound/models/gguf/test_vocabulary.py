"""Byte-level tokenizers by the names of their pre-tokenizers.

The golden file has texts of llama.cpp's own tests of vocabularies, with the tokens that these tests
expect. The vocabularies are cut down to these tokens and the merges that they need.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from semantic.adapters.outbound.models.gguf.splitting import SPLITTINGS
from semantic.adapters.outbound.models.gguf.vocabulary import GgufVocabulary, build_tokenizer

pytestmark = pytest.mark.unit

GOLDEN: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[5] / "golden" / "gguf_tokenizers.json").read_text("utf-8")
)
TEXT = "It's 1234567 fooBar HTTPServer, 中文abc é\n\n  x\t!?"


def vocabulary(pre: str, tokens: list[str], merges: list[str]) -> GgufVocabulary:
    return GgufVocabulary(
        source=Path("model.gguf"),
        model="gpt2",
        pre=pre,
        tokens=[*sorted(ByteLevel.alphabet()), *tokens],
        token_types=(),
        merges=merges,
        scores=(),
        adds_space=None,
        adds_bos=None,
        bos=None,
        ends=(),
        pad=None,
        unk=None,
        chat_template=None,
        max_length=512,
    )


@pytest.mark.parametrize("pre", sorted(GOLDEN))
def test_texts_become_the_tokens_that_llama_cpp_expects(pre: str) -> None:
    golden = GOLDEN[pre]
    tokenizer = build_tokenizer(vocabulary(pre, golden["tokens"], golden["merges"]))
    assert len(golden["cases"]) > 40
    for text, expected in golden["cases"]:
        assert tokenizer.encode(text).tokens == expected, repr(text)


@pytest.mark.parametrize("pre", sorted(SPLITTINGS))
def test_pieces_cover_the_whole_text(pre: str) -> None:
    pieces = SPLITTINGS[pre].pre_tokenizer().pre_tokenize_str(TEXT)
    places = [place for _, place in pieces]
    assert [start for start, _ in places] == [0, *(end for _, end in places[:-1])]
    assert places[-1][1] == len(TEXT)
    assert len(pieces) > 5


@pytest.mark.parametrize(
    "pre, text, pieces",
    [
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("glm4", "1234", ["123", "4"]),
        ("tiny_aya", "1234", ["1", "234"]),
        ("exaone4", "1234", ["1234"]),
        ("seed-coder", "!\n", ["!", "\n"]),
        ("qwen2", "!\n", ["!\n"]),
        ("tekken", "fooBar's", ["foo", "Bar", "'s"]),
        ("minimax-m2", "fooBar's", ["foo", "Bar's"]),
        ("kimi-k2", "中文abc", ["中文", "abc"]),
        ("gpt-4o", "中文abc", ["中文abc"]),
        ("deepseek-v3", "中文abc", ["中文", "abc"]),
        ("bailingmoe", "a\n\nb", ["a", "\n\n", "b"]),
    ],
)
def test_a_pre_tokenizer_splits_as_its_models_do(pre: str, text: str, pieces: list[str]) -> None:
    found = SPLITTINGS[pre].pre_tokenizer().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == pieces
