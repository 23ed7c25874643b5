"""Prompts that ask for the text between a prefix and a suffix (fill in the middle).

Models that were trained for it mark both texts with special tokens.
"""

from collections.abc import Collection

from semantic.domain.chat import require_whole_characters
from semantic.domain.errors import InvalidRequestError
from semantic.ports.text import TokenizerPort

_PREFIX, _SUFFIX = "{prefix}", "{suffix}"
# The order in which models of a family expect their special tokens and the two texts.
_ORDERS = (
    ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", _PREFIX, "<fim-suffix>", _SUFFIX, "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", _PREFIX, "<｜fim▁hole｜>", _SUFFIX, "<｜fim▁end｜>"),  # noqa: RUF001
    ("<|code_prefix|>", _PREFIX, "<|code_suffix|>", _SUFFIX, "<|code_middle|>"),  # GLM
    ("▁<PRE>", _PREFIX, "▁<SUF>", _SUFFIX, "▁<MID>"),  # Code Llama
    ("<PRE>", _PREFIX, "<SUF>", _SUFFIX, "<MID>"),
    ("<[fim-suffix]>", _SUFFIX, "<[fim-prefix]>", _PREFIX, "<[fim-middle]>"),  # Seed-Coder
    ("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX),  # Codestral
)
# Special tokens that end the middle, besides those that end every reply.
_ENDS = frozenset(
    {
        "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>",
        "<file_sep>", "▁<EOT>", "<EOT>",
    }
)  # fmt: skip


def can_fill_in(special_tokens: Collection[str]) -> bool:
    """Whether a vocabulary has the special tokens of a family."""
    return any(all(mark in special_tokens for mark in _marks(order)) for order in _ORDERS)


def _marks(order: tuple[str, ...]) -> list[str]:
    return [piece for piece in order if piece not in (_PREFIX, _SUFFIX)]


def fill_in_tokens(before: str, after: str, tokenizer: TokenizerPort) -> tuple[int, ...]:
    """Return the prompt for the text between two texts.

    Raises:
        InvalidRequestError: the model has no such special tokens.
    """
    require_whole_characters(before, param="prompt")
    require_whole_characters(after, param="suffix")
    special = tokenizer.special_ids
    texts = {_PREFIX: before, _SUFFIX: after}
    for order in _ORDERS:
        if all(mark in special for mark in _marks(order)):
            tokens = tokenizer.encode_prompt(order[0])
            for piece in order[1:]:
                is_text = piece in texts
                tokens += tokenizer.encode_plain(texts[piece]) if is_text else [special[piece]]
            return tuple(tokens)
    raise InvalidRequestError(
        "the model cannot fill in the middle: its vocabulary has no tokens for a prefix and a "
        "suffix. Leave suffix out, or serve a model that has them, such as Qwen2.5-Coder.",
        param="suffix",
    )


def fill_in_ends(tokenizer: TokenizerPort) -> frozenset[int]:
    """Return the tokens that end the middle, besides those that end every reply."""
    return frozenset(token for text, token in tokenizer.special_ids.items() if text in _ENDS)
