"""A model directory's tokenizer, without loading transformers.

Reads `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`. Supports byte-level
and SentencePiece-style vocabularies.
"""

import filecmp
import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Decoder

from semantic.adapters.outbound.models.chat_template import ChatTemplate, template_source
from semantic.domain.chat import JsonObject
from semantic.domain.errors import InvalidRequestError
from semantic.domain.images.spans import IMAGE_ID
from semantic.ports.text import SpecialToken

_SPACE_MARK = "\u2581"  # SentencePiece's character for a space
# Gemma's processor, not its template, writes blank lines around an image.
_AROUND_IMAGES = ("'<start_of_image>'", "'\n\n<start_of_image>\n\n'")
_BEFORE = "\ufdd0before\ufdd0"  # placeholder for whatever precedes a text


class HFTokenizer:
    """`TokenizerPort` over a Hugging Face model directory."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InvalidRequestError(
                f"{directory} has no tokenizer.json, which is required.",
                param="model",
            )
        self._tokenizer = _load(path)
        self._cut = _cutter(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = tuple(
            SpecialToken(token_id, token.content, token.lstrip, token.rstrip)
            for token_id, token in added.items()
            if token.special
        )
        self.special_ids = {token.text: token.id for token in self.special_tokens}
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._plain = _PlainEncoder(path, self.special_tokens, self._cut)
        self._piece_bytes = _piece_decoder(self._tokenizer.decoder)
        config = _read_json(directory / "tokenizer_config.json")
        self.eos_ids = self._find_eos(config, _read_json(directory / "generation_config.json"))
        named = ("bos_token", "eos_token", "pad_token", "unk_token")
        self.chat_template = template_source(directory, config)
        values = {key: _token_text(config.get(key)) for key in named}
        source = self.chat_template and self.chat_template.replace(*_AROUND_IMAGES)
        self.render_chat = ChatTemplate(source, values).render
        self._special = set(self.special_ids.values())
        self._known_bytes = lru_cache(maxsize=None)(self._token_bytes)

    def encode(self, text: str) -> list[int]:
        return _joined_ids(self._tokenizer, self._cut(text))

    def encode_prompt(self, text: str) -> list[int]:
        ids = self.encode(text)
        begun = self._tokenizer.encode("", add_special_tokens=True).ids[:1]
        is_begun = not begun or begun[0] in self.eos_ids or ids[:1] == begun
        return ids if is_begun else [*begun, *ids]

    def encode_plain(self, text: str, *, is_start: bool = False) -> list[int]:
        return self._plain.encode(text, is_start=is_start)

    def token_bytes(self, token: int) -> bytes:
        # The cache has no key ids of images, which are of no use to it and without number.
        return self._known_bytes(token) if token < IMAGE_ID else b""

    def _token_bytes(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None or token in self._special:
            return b""
        return self._piece_bytes(piece)

    def _find_eos(self, config: JsonObject, generation: JsonObject) -> frozenset[int]:
        ids = generation.get("eos_token_id")
        found = {i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)}
        named = self._tokenizer.token_to_id(_token_text(config.get("eos_token")))
        return frozenset(found | ({named} if named is not None else set()))


class _PlainEncoder:
    """The same vocabulary, but special tokens in a text are encoded as ordinary text."""

    def __init__(self, path: Path, special: Sequence[SpecialToken], cut: "Cutter") -> None:
        self._cut = cut
        self._tokenizer = _load(path)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.add_tokens([AddedToken(_BEFORE, normalized=False)])
        # Exempt the unknown token: some characters have no other token.
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        forbidden = [token.text for token in special if token.text != unknown] + [_BEFORE]
        self._forbidden = {self._tokenizer.token_to_id(text) for text in forbidden}
        self._first_letters = re.compile(
            "|".join(f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in forbidden)
        )

    def encode(self, text: str, *, is_start: bool) -> list[int]:
        ids = self._ids(text, is_start=is_start)
        if self._forbidden.isdisjoint(ids):
            return ids
        # The ordinary vocabulary contains a special token's text: split each occurrence.
        pieces = self._first_letters.split(text)
        ids = [
            token
            for number, piece in enumerate(pieces)
            for token in self._ids(piece, is_start=is_start and number == 0)
        ]
        return [token for token in ids if token not in self._forbidden]

    def _ids(self, text: str, *, is_start: bool) -> list[int]:
        first, *others = self._cut(text)
        pieces = [first if is_start else _BEFORE + first, *others]
        return _joined_ids(self._tokenizer, pieces)[0 if is_start else 1 :]


# -- long texts: split into pieces that are encoded in parallel -----------------------------------

_PIECE = 4096  # characters
_WORDS = "the city lay where two rivers met and its people had always traded"
_BETWEEN_WORDS = re.compile("(?<=[a-z])(?= [a-z])")
_HAS_WORDS = re.compile("^ ?[a-z]|[a-z] [a-z]|[a-z]$")

Cutter: TypeAlias = Callable[[str], list[str]]


def _load(path: Path) -> Tokenizer:
    """Load a tokenizer without its truncation and padding, which are meant for training."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise InvalidRequestError(
            f"{path} is damaged or of an unknown kind ({error}); download the model again.",
            param="model",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _joined_ids(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    """Encode pieces on all cores. Unlike `encode`, the batch method releases the GIL."""
    encoded = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    return encoded[0].ids if len(encoded) == 1 else [id_ for each in encoded for id_ in each.ids]


def _cutter(tokenizer: Tokenizer) -> Cutter:
    """Return a function that splits a text between words without changing its tokens.

    That is correct if each word is tokenised with the space before it, independently of its
    context. For other vocabularies, the function returns the text unsplit.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    is_kept = normalizer is None or normalizer.normalize_str(_WORDS) == _WORDS
    words = splitter.pre_tokenize_str(_WORDS) if splitter is not None else []
    starts = [start for _, (start, _) in words]
    between = [match.start() for match in _BETWEEN_WORDS.finditer(_WORDS)]
    is_by_words = is_kept and starts == [0, *between]
    if not is_by_words or any(_HAS_WORDS.search(token.content) for token in added):
        return lambda text: [text]
    return _cut_between_words


def _cut_between_words(text: str) -> list[str]:
    pieces, start = [], 0
    while len(text) - start > 2 * _PIECE:
        cut = _BETWEEN_WORDS.search(text, start + _PIECE)
        if cut is None:
            break
        pieces.append(text[start : cut.start()])
        start = cut.start()
    return [*pieces, text[start:]]


def _read_json(path: Path) -> JsonObject:
    content = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def _token_text(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _piece_decoder(decoder: Decoder | None) -> Callable[[str], bytes]:
    # The decoder's state is JSON; parsing the file with its whole vocabulary would take longer.
    kinds = _decoder_kinds(None if decoder is None else json.loads(decoder.__getstate__()))
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return _sentencepiece_bytes
    raise InvalidRequestError(
        f"tokenizers with the decoder {sorted(kinds) or 'none'} are not supported.", param="model"
    )


def _decoder_kinds(decoder: object) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    kinds = {str(decoder.get("type"))}
    for inner in decoder.get("decoders") or ():
        kinds |= _decoder_kinds(inner)
    return kinds


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in piece)
    except KeyError:
        return piece.encode()  # an added token, stored as plain text


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace(_SPACE_MARK, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level vocabularies use for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _byte_alphabet()


def have_same_tokens(left: Path, right: Path) -> bool:
    """Whether the tokenizers of two model directories have the same ids for the same tokens."""
    one, other = (directory / "tokenizer.json" for directory in (left, right))
    if not one.is_file() or not other.is_file():
        return False
    if filecmp.cmp(one, other, shallow=False):
        return True
    vocabulary = _load(one).get_vocab(with_added_tokens=True)
    return vocabulary == _load(other).get_vocab(with_added_tokens=True)
