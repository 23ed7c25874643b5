"""Prompts for the text between two texts, in the order that a model's special tokens tell."""

from collections.abc import Mapping

import pytest

from semantic.adapters.outbound.backends.fake import VOCAB_SIZE, FakeTokenizer
from semantic.application.prompt.fill_in import fill_in_ends, fill_in_tokens
from semantic.domain.errors import InvalidRequestError

pytestmark = pytest.mark.unit


class MarkedTokenizer(FakeTokenizer):
    """A byte vocabulary with more special tokens, and one that begins every prompt."""

    BEGIN = 999

    def __init__(self, *texts: str) -> None:
        self.special_ids: Mapping[str, int] = {t: VOCAB_SIZE + i for i, t in enumerate(texts)}

    def encode_prompt(self, text: str) -> list[int]:
        return [self.BEGIN, self.special_ids[text]]


@pytest.mark.parametrize(
    "texts, order",
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"), "0P1S2"),
        (("<fim_prefix>", "<fim_middle>", "<fim_suffix>"), "0P2S1"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "0P1S2"),  # noqa: RUF001
        (("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), "0P1S2"),
        (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), "1S0P"),
    ],
)
def test_the_order_of_a_family(texts: tuple[str, ...], order: str) -> None:
    tokenizer = MarkedTokenizer(*texts)
    before, after = "if <|fim_suffix|>:", "[PREFIX]ä"
    pieces = {"P": list(before.encode()), "S": list(after.encode())}
    wanted = [t for place in order for t in pieces.get(place) or [VOCAB_SIZE + int(place)]]
    assert fill_in_tokens(before, after, tokenizer) == (MarkedTokenizer.BEGIN, *wanted)


def test_tokens_that_end_the_middle() -> None:
    tokenizer = MarkedTokenizer("<|fim_prefix|>", "<|endoftext|>", "<|im_end|>", "<|file_sep|>")
    assert fill_in_ends(tokenizer) == {VOCAB_SIZE + 1, VOCAB_SIZE + 3}


def test_a_model_without_all_of_them_refuses() -> None:
    with pytest.raises(InvalidRequestError, match="has no tokens") as caught:
        fill_in_tokens("a", "b", MarkedTokenizer("<|fim_prefix|>", "<|fim_suffix|>"))
    assert caught.value.param == "suffix"
