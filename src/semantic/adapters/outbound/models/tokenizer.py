"""A model directory's tokenizer and chat template, without loading transformers.

Reads `tokenizer.json`, `tokenizer_config.json`, `generation_config.json` and, where present,
`chat_template.jinja`. Byte-level and SentencePiece-style vocabularies are understood.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Decoder

from semantic.domain.chat import JsonObject
from semantic.domain.errors import InvalidRequestError
from semantic.ports.text import SpecialToken

_DICT_ATTRIBUTES = frozenset(dir(dict))
_HARMLESS_METHODS = frozenset({"startswith", "endswith", "strip", "lstrip", "rstrip", "split"})
_SWITCHES = ("enable_thinking", "thinking")


class ChatTemplate:
    """One compiled template, or the absence of one. Immutable, safe on any thread."""

    def __init__(self, source: str | None, values: Mapping[str, str]) -> None:
        """Compile.

        Args:
            source: Jinja; None for a model without a template.
            values: The texts of the special tokens that templates name.

        Raises:
            InvalidRequestError: it is not valid Jinja.
        """
        self._values = dict(values)
        self._template = _compile(source) if source is not None else None

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] = (),
        *,
        add_generation_prompt: bool = True,
        today: date | None = None,
        is_thinking: bool | None = None,
    ) -> str:
        """Apply the template.

        Raises:
            InvalidRequestError: it refuses the conversation, or there is none.
        """
        if self._template is None:
            raise InvalidRequestError("this model has no chat template.", param="messages")
        # Models disagree about the switch's name; a template ignores what it does not know.
        switches = {} if is_thinking is None else dict.fromkeys(_SWITCHES, is_thinking)
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=_clock(today),
                **switches,
                **self._values,
            )
        except Exception as error:  # a stranger's code may raise whatever it likes
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(
                f"the model's chat template refuses this conversation: {reason}", param="messages"
            ) from error


def template_source(directory: Path, config: JsonObject) -> str | None:
    """Find a model's template: in a file of its own, or in its tokenizer's config."""
    beside = directory / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text("utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        by_name = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = by_name.get("default")
    return source if isinstance(source, str) else None


def _clock(today: date | None) -> Callable[[str], str]:
    """Return what templates call `strftime_now`, at a day that may be fixed."""

    def strftime_now(pattern: str) -> str:
        now = datetime.now().astimezone()
        return (datetime.combine(today, time(), now.tzinfo) if today else now).strftime(pattern)

    return strftime_now


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a short way to what templates read most: messages' keys, their own names.

    A key that is no attribute of a dict needs none of the sandbox's checks, nor does what Jinja
    itself makes for a template: loops and namespaces hold nothing of Python's.
    """

    def getattr(self, obj: object, attribute: str) -> object:
        """As the sandbox does."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        if type(obj) is str and attribute in _HARMLESS_METHODS:
            return getattr(obj, attribute)
        if type(obj) in (LoopContext, Namespace) and not attribute.startswith("_"):
            with suppress(AttributeError):
                return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _GenerationTag(Extension):
    """`{% generation %}`: marks what training counts as the model's own; here it shows its body."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Read up to the end tag; variables set in between end with it."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _compile(source: str) -> jinja2.Template:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except Exception as error:  # Jinja raises more than it declares
        raise InvalidRequestError(
            f"the model's chat template is not valid: {error}", param="model"
        ) from error


def _to_json(value: object, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


_SPACE_MARK = "\u2581"  # SentencePiece writes a space as this
_BEFORE = "\ufdd0before\ufdd0"  # stands for what comes before a run of text


class HFTokenizer:
    """`TokenizerPort` over a Hugging Face model directory."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InvalidRequestError(
                f"{directory} has no tokenizer.json; only fast tokenizers are supported.",
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
        self.render_chat = ChatTemplate(self.chat_template, values).render
        self._special = set(self.special_ids.values())
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)

    def encode(self, text: str) -> list[int]:
        """Tokenise; special tokens in the text become their ids, none is added."""
        return _joined_ids(self._tokenizer, self._cut(text))

    def encode_prompt(self, text: str) -> list[int]:
        """Tokenise a whole prompt, after the token that begins texts where there is one."""
        ids = self.encode(text)
        begun = self._tokenizer.encode("", add_special_tokens=True).ids[:1]
        is_begun = not begun or begun[0] in self.eos_ids or ids[:1] == begun
        return ids if is_begun else [*begun, *ids]

    def encode_plain(self, text: str, *, is_start: bool = False) -> list[int]:
        """Tokenise text as it is: no id of the result is special."""
        return self._plain.encode(text, is_start=is_start)

    def _token_bytes(self, token: int) -> bytes:
        """Return what a token contributes to the text."""
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
    """The same vocabulary, blind to special tokens."""

    def __init__(self, path: Path, special: Sequence[SpecialToken], cut: "Cutter") -> None:
        self._cut = cut
        self._tokenizer = _load(path)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.add_tokens([AddedToken(_BEFORE, normalized=False)])
        # A vocabulary may have nothing but the unknown token for a character.
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
        # Its ordinary vocabulary holds a special token's text: cut each spelling in two.
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


# -- long texts: encoded in pieces, side by side --------------------------------------------------

_PIECE = 4096  # characters
_WORDS = "the city lay where two rivers met and its people had always traded"
_BETWEEN_WORDS = re.compile("(?<=[a-z])(?= [a-z])")
_HAS_WORDS = re.compile("^ ?[a-z]|[a-z] [a-z]|[a-z]$")

Cutter: TypeAlias = Callable[[str], list[str]]


def _load(path: Path) -> Tokenizer:
    """Read a tokenizer; what it says of lengths is about training, not about prompts."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise InvalidRequestError(
            f"{path} is damaged or of an unknown kind ({error}); fetch the model again.",
            param="model",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _joined_ids(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    """Encode pieces of a text on all cores; other threads run meanwhile, as `encode` lets none."""
    encoded = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    return encoded[0].ids if len(encoded) == 1 else [id_ for each in encoded for id_ in each.ids]


def _cutter(tokenizer: Tokenizer) -> Cutter:
    """How to cut a text so that its pieces have the tokens that the whole has: between words.

    That is right where a vocabulary is applied to each word with the space before it, whatever
    stands around it; texts of other vocabularies are left whole.
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
    """A token is written as a string, or as an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _piece_decoder(decoder: Decoder | None) -> Callable[[str], bytes]:
    """Choose how vocabulary pieces turn into bytes, by the tokenizer's own decoder."""
    # Its state is JSON; the file's, with the whole vocabulary, takes longer to parse.
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
