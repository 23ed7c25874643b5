"""Rebuilds a BPE tokenizer, byte-level or SentencePiece, from a GGUF file's token lists.

Writes ``tokenizer.json`` and ``tokenizer_config.json``.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Strip
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Replace as ReplaceDecoder
from tokenizers.decoders import Sequence as Decoders
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, Prepend, Replace
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.processors import TemplateProcessing

from semantic.adapters.outbound.models.gguf.header import GgufFile
from semantic.adapters.outbound.models.gguf.splitting import SPLITTINGS, Splitting
from semantic.domain.errors import InvalidRequestError

_ORDINARY, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_SPACE = "\u2581"  # SentencePiece's character for a space
_SENTENCEPIECE, _SENTENCEPIECE_MERGES = "llama", "gemma4"
# Models that end a reply with any of these; GGUF names only the first.
_MORE_ENDS = {
    "gpt-oss": ("<|return|>", "<|call|>", "<|endoftext|>"),
    "gemma4": ("<eos>", "<turn|>", "<|tool_response>"),
}


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A tokenizer as described by GGUF metadata.

    Attributes:
        source: Path of the GGUF file, for messages.
        model: GGUF's name of the algorithm: ``gpt2``, byte-level BPE, ``llama``, SentencePiece, or
            ``gemma4``, SentencePiece with merges.
        pre: GGUF's name of the pre-tokenizer.
        tokens: All tokens, indexed by id.
        token_types: One GGUF token type per token; if empty, all are ordinary.
        merges: ``"left right"`` pairs, best first; SentencePiece has none.
        scores: SentencePiece's scores, one per token; the highest is merged first.
        adds_space: Whether SentencePiece puts a space before a text; None: it does.
        adds_bos: Whether text starts with the BOS token; None: the pre-tokenizer's default.
        ends: Ids of the tokens that end a reply, the EOS token first.
        pad: Id of the padding token; None: the EOS token.
        max_length: The model's maximum context length, in tokens.
    """

    source: Path
    model: str
    pre: str
    tokens: Sequence[str]
    token_types: Sequence[int]
    merges: Sequence[str]
    scores: Sequence[float]
    adds_space: bool | None
    adds_bos: bool | None
    bos: int | None
    ends: tuple[int, ...]
    pad: int | None
    unk: int | None
    chat_template: str | None
    max_length: int

    @property
    def eos(self) -> int | None:
        return self.ends[0] if self.ends else None

    @property
    def filler(self) -> int | None:
        return self.eos if self.pad is None else self.pad

    def special_ids(self) -> dict[str, object]:
        """The ids under the keys of ``config.json`` and ``generation_config.json``."""
        ids: dict[str, object] = {
            "bos_token_id": self.bos,
            "eos_token_id": list(self.ends) if len(self.ends) > 1 else self.eos,
            "pad_token_id": self.filler,
        }
        return {key: value for key, value in ids.items() if value is not None}


def read_vocabulary(file: GgufFile) -> GgufVocabulary:
    """Read the tokenizer's metadata."""
    ends = [file.find(f"tokenizer.ggml.{end}_token_id", int) for end in ("eos", "eot", "eom")]
    model = file.get("tokenizer.ggml.model", str)
    tokens = [str(token) for token in file.get("tokenizer.ggml.tokens", list)]
    ends += [tokens.index(end) for end in _MORE_ENDS.get(file.architecture, ()) if end in tokens]
    has_merges = model != _SENTENCEPIECE
    return GgufVocabulary(
        source=file.path,
        model=model,
        pre=file.find("tokenizer.ggml.pre", str) or "default",
        tokens=tokens,
        token_types=file.find("tokenizer.ggml.token_type", list) or (),
        merges=[str(m) for m in file.get("tokenizer.ggml.merges", list)] if has_merges else [],
        scores=file.find("tokenizer.ggml.scores", list) or (),
        adds_space=file.find("tokenizer.ggml.add_space_prefix", bool),
        adds_bos=file.find("tokenizer.ggml.add_bos_token", bool),
        bos=file.find("tokenizer.ggml.bos_token_id", int),
        ends=tuple(dict.fromkeys(end for end in ends if end is not None)),
        pad=file.find("tokenizer.ggml.padding_token_id", int),
        unk=file.find("tokenizer.ggml.unknown_token_id", int),
        chat_template=file.find("tokenizer.chat_template", str),
        max_length=file.get_here("context_length", int),
    )


def write_tokenizer(vocabulary: GgufVocabulary, directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into an existing directory."""
    build_tokenizer(vocabulary).save(str(directory / "tokenizer.json"))
    config = json.dumps(_tokenizer_config(vocabulary), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """Build the tokenizer; `InvalidRequestError` if it is unsupported or inconsistent."""
    adds_bos = True
    if vocabulary.model == _SENTENCEPIECE:
        tokenizer = _sentencepiece(vocabulary, _merges_by_score(vocabulary))
    elif vocabulary.model == _SENTENCEPIECE_MERGES:
        tokenizer = _sentencepiece(vocabulary, [_pair(vocabulary, m) for m in vocabulary.merges])
    else:
        splitting = _splitting(vocabulary)
        adds_bos = splitting.adds_bos
        tokenizer = Tokenizer(_bpe(vocabulary, splitting))
        tokenizer.pre_tokenizer = splitting.pre_tokenizer()
        tokenizer.decoder = ByteLevelDecoder()
        if splitting.is_nfc:
            tokenizer.normalizer = NFC()
    tokenizer.add_special_tokens(_added_tokens(vocabulary, (_UNKNOWN, _CONTROL), is_special=True))
    tokenizer.add_tokens(_added_tokens(vocabulary, (_USER_DEFINED,), is_special=False))
    adds_bos = adds_bos if vocabulary.adds_bos is None else vocabulary.adds_bos
    bos = _token(vocabulary, vocabulary.bos)
    if adds_bos and bos is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", f"{bos}:1", "$B:1"],
            special_tokens=[(bos, vocabulary.bos)],
        )
    return tokenizer


def _splitting(vocabulary: GgufVocabulary) -> Splitting:
    if vocabulary.model != "gpt2":
        known = f"'gpt2', {_SENTENCEPIECE!r} and {_SENTENCEPIECE_MERGES!r} are"
        why = f"tokenizer model {vocabulary.model!r} is not supported; {known}"
        raise _refusal(vocabulary, why)
    if vocabulary.pre not in SPLITTINGS:
        known = ", ".join(sorted(SPLITTINGS))
        why = f"pre-tokenizer {vocabulary.pre!r} is not supported; supported are {known}"
        raise _refusal(vocabulary, why)
    return SPLITTINGS[vocabulary.pre]


def _bpe(vocabulary: GgufVocabulary, splitting: Splitting) -> BPE:
    # Unused entries only pad the embedding matrix; they never occur in text.
    unused = {i for i, kind in enumerate(vocabulary.token_types) if kind == _UNUSED}
    ids = {token: i for i, token in enumerate(vocabulary.tokens) if i not in unused}
    merges = [_pair(vocabulary, merge) for merge in vocabulary.merges]
    try:
        return BPE(vocab=ids, merges=merges, ignore_merges=splitting.ignores_merges)
    except Exception as error:  # tokenizers raises no narrower type
        raise _refusal(vocabulary, f"its tokenizer is damaged ({error})") from error


def _sentencepiece(vocabulary: GgufVocabulary, merges: list[tuple[str, str]]) -> Tokenizer:
    """BPE over text whose spaces are visible; unknown characters become byte tokens."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    model = BPE(
        vocab=ids,
        merges=merges,
        unk_token=_token(vocabulary, vocabulary.unk),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    has_prefix = vocabulary.adds_space is not False
    spaces = Replace(" ", _SPACE)
    tokenizer.normalizer = Normalizers([Prepend(_SPACE), spaces]) if has_prefix else spaces
    steps = [ReplaceDecoder(_SPACE, " "), ByteFallback(), Fuse()]
    tokenizer.decoder = Decoders([*steps, Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _merges_by_score(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that form an ordinary token, best score first."""
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise _refusal(vocabulary, "its tokenizer is damaged (tokens and scores differ in number)")
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    kinds = vocabulary.token_types or [_ORDINARY] * len(vocabulary.tokens)
    for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, kinds, strict=False):
        if kind not in (_ORDINARY, _USER_DEFINED):
            continue
        pairs = [(token[:end], token[end:]) for end in range(1, len(token))]
        merges += [
            (-score, ids[left], ids[right], left, right)
            for left, right in pairs
            if left in ids and right in ids
        ]
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _pair(vocabulary: GgufVocabulary, merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator:
        raise _refusal(vocabulary, f"its tokenizer is damaged (merge {merge!r} is not a pair)")
    return left, right


def _added_tokens(
    vocabulary: GgufVocabulary, kinds: tuple[int, ...], *, is_special: bool
) -> list[AddedToken]:
    return [
        AddedToken(token, special=is_special, normalized=False)
        for token, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=False)
        if kind in kinds
    ]


def _tokenizer_config(vocabulary: GgufVocabulary) -> dict[str, object]:
    named = {
        "bos_token": _token(vocabulary, vocabulary.bos),
        "eos_token": _token(vocabulary, vocabulary.eos),
        "pad_token": _token(vocabulary, vocabulary.filler),
        "unk_token": _token(vocabulary, vocabulary.unk),
        "chat_template": vocabulary.chat_template,
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": vocabulary.max_length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **{key: value for key, value in named.items() if value is not None},
    }


def _token(vocabulary: GgufVocabulary, token_id: int | None) -> str | None:
    if token_id is None:
        return None
    if not 0 <= token_id < len(vocabulary.tokens):
        raise _refusal(vocabulary, f"its tokenizer is damaged (no token has the id {token_id})")
    return vocabulary.tokens[token_id]


def _refusal(vocabulary: GgufVocabulary, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"cannot import {vocabulary.source}: {why}.", param="model")
