"""Prompts without a template, and those that ask for the text between a prefix and a suffix.

Models that were trained to fill in the middle mark both texts with special tokens.
"""

from collections.abc import Collection

from semantic.domain.chat import RawPrompt, require_whole_characters
from semantic.domain.errors import InvalidRequestError
from semantic.ports.text import TokenizerPort

_MAX_SCORES = 1_000_000  # log-probabilities of a prompt's tokens and of their alternatives
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


def raw_tokens(prompt: RawPrompt, num_top: int, tokenizer: TokenizerPort) -> tuple[int, ...]:
    """Return the tokens of a prompt without a template.

    Args:
        num_top: How many alternatives of each token are scored, if the prompt is.

    Raises:
        InvalidRequestError: the prompt is empty, has unknown token ids, or is too long to score.
    """
    content = prompt.content
    if isinstance(content, str) and prompt.suffix:
        return fill_in_tokens(content, prompt.suffix, tokenizer)
    if isinstance(content, str):
        require_whole_characters(content, param="prompt")
        content = tuple(tokenizer.encode_prompt(content))
    if not content:
        raise InvalidRequestError("the prompt is empty.", param="prompt")
    size = tokenizer.vocab_size
    if min(content) < 0 or max(content) >= size:
        raise InvalidRequestError(f"a token id is not in [0, {size}).", param="prompt")
    num_scores = len(content) * (1 + num_top)
    if prompt.is_scored and num_scores > _MAX_SCORES:
        raise InvalidRequestError(
            f"a prompt of {len(content)} tokens has {num_scores} log-probabilities, more than "
            f"{_MAX_SCORES}; send a shorter prompt or ask for fewer.",
            param="logprobs",
        )
    return content
