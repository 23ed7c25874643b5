"""A model directory's tokenizer and chat template, without loading transformers.

Reads `tokenizer.json`, `tokenizer_config.json`, `generation_config.json` and, where present,
`chat_template.jinja`. Byte-level and SentencePiece-style vocabularies are understood.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from semantic.domain.chat import JsonObject
from semantic.domain.errors import InvalidRequestError

_SPACE_MARK = "\u2581"  # SentencePiece writes a space as this


class HFTokenizer:
    """`TokenizerPort` over a Hugging Face model directory."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InvalidRequestError(
                f"{directory} has no tokenizer.json; only fast tokenizers are supported.",
                param="model",
            )
        self._tokenizer = Tokenizer.from_file(str(path))
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._special_tokens = {added[token_id].content: token_id for token_id in self._special}
        self._piece_bytes = _piece_decoder(json.loads(path.read_text("utf-8")).get("decoder"))
        config = _read_json(directory / "tokenizer_config.json")
        self._eos_ids = self._find_eos(config, _read_json(directory / "generation_config.json"))
        self._template_values = {
            key: _token_text(config.get(key))
            for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        self._chat_template = _template_source(directory, config)
        self._template = _compile_template(self._chat_template)
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a reply."""
        return self._eos_ids

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Texts that are single ids and no part of a reply's text."""
        return self._special_tokens

    @property
    def chat_template(self) -> str | None:
        """The template's source."""
        return self._chat_template

    def encode(self, text: str) -> list[int]:
        """Tokenise; special tokens in the text become their ids, none is added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _token_bytes(self, token: int) -> bytes:
        """Return what a token contributes to the text."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None or token in self._special:
            return b""
        return self._piece_bytes(piece)

    def render_chat(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Apply the model's chat template."""
        if self._template is None:
            raise InvalidRequestError("this model has no chat template.", param="messages")
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **self._template_values,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses this conversation: {error}", param="messages"
            ) from error

    def _find_eos(self, config: JsonObject, generation: JsonObject) -> frozenset[int]:
        ids = generation.get("eos_token_id")
        found = {i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)}
        named = self._tokenizer.token_to_id(_token_text(config.get("eos_token")))
        return frozenset(found | ({named} if named is not None else set()))


def _read_json(path: Path) -> JsonObject:
    content = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def _token_text(value: object) -> str:
    """A token is written as a string, or as an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _template_source(directory: Path, config: JsonObject) -> str | None:
    beside = directory / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text("utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        by_name = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = by_name.get("default")
    return source if isinstance(source, str) else None


def _compile_template(source: str | None) -> jinja2.Template | None:
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: (
        datetime.now().astimezone().strftime(pattern)
    )
    return environment.from_string(source)


def _to_json(value: object, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _piece_decoder(decoder: object) -> Callable[[str], bytes]:
    """Choose how vocabulary pieces turn into bytes, by the tokenizer's own decoder."""
    kinds = _decoder_kinds(decoder)
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
        return piece.encode()  # an added token, written as itself


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace(_SPACE_MARK, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level vocabularies write for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _byte_alphabet()
