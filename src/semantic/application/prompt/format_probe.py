"""Determines how a model writes thinking and tool calls by rendering test conversations.

Names, arguments and ids of the rendered calls are unique words, so the text between them is the
notation's. What surrounds a second call shows which texts belong to each call and which enclose all
of them.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from semantic.application.prompt.template_probe import TemplateProbe
from semantic.domain.blocks import common_prefix
from semantic.domain.chat import JsonObject, JsonValue
from semantic.domain.reply_format import (
    CDATA,
    HARMONY,
    MISTRAL_ARGS,
    SLOT,
    ArgumentStyle,
    CallNotation,
    Markers,
    ReplyFormat,
    detect_reply_format,
)
from semantic.ports.text import TokenizerPort

_IDS = ("probe0001", "probe0002")  # short enough for every template
_NAMES = ("probetool", "probeother")
_KEYS = ("probekey", "probesize")
_VALUES = ("probeword", "8675309")
_ARGUMENTS: JsonObject = {_KEYS[0]: _VALUES[0], _KEYS[1]: int(_VALUES[1])}
_ASK: JsonObject = {"role": "user", "content": "probeask"}
_SAID, _MUSED = "probesaid", "probemused"
_THOUGHT: JsonObject = {"reasoning_content": _MUSED, "thinking": _MUSED}
_FUNCTIONS: tuple[JsonObject, ...] = tuple(
    {
        "name": name,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {
                _KEYS[0]: {"type": "string", "description": "A word."},
                _KEYS[1]: {"type": "integer", "description": "A number."},
            },
            "required": [*_KEYS],
        },
    }
    for name in _NAMES
)
# A tag, or the beginning of one at the end of the text.
_TAG = re.compile(r"<[^<>\n{}]*(>|\Z)|\[/?[A-Z_]+\]")
_NUMBER = re.compile(r"(?<![\w.-])\d+(?![\w.-])")


def probe_reply_format(tokenizer: TokenizerPort) -> ReplyFormat:
    """Determine a model's reply format.

    What the template does not render is guessed from its words: see `detect_reply_format`.
    """
    guessed = detect_reply_format(tokenizer.chat_template, tokenizer.special_ids)
    if guessed.tools == HARMONY or tokenizer.chat_template is None:
        return guessed
    probe = _FormatProbe.of(tokenizer)
    thinking = probe.thinking() or guessed.thinking
    tools = probe.notation(thinking) or guessed.tools
    if guessed.tools == MISTRAL_ARGS and tools.opener == MISTRAL_ARGS.opener:
        # The tokens decide: some templates still show the notation of older models.
        tools = tools if not tools.is_json_object else MISTRAL_ARGS
    return ReplyFormat(tools, thinking)


def _calling(num_calls: int) -> JsonObject:
    calls: list[JsonValue] = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": _ARGUMENTS}}
        for call_id, name in zip(_IDS[:num_calls], _NAMES, strict=False)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _speaking() -> JsonObject:
    return {"role": "assistant", "content": _SAID}


@dataclass(frozen=True, slots=True)
class _FormatProbe:
    """Renders replies of one template.

    Attributes:
        ends: Texts of the tokens that end a reply.
        prompt: What precedes a reply.
        answer: A conversation that ends with a plain answer.
    """

    probe: TemplateProbe
    ends: Sequence[str]
    prompt: str
    answer: str

    @classmethod
    def of(cls, tokenizer: TokenizerPort) -> "_FormatProbe":
        probe = TemplateProbe.of(tokenizer, _FUNCTIONS)
        special = tokenizer.special_tokens
        return cls(
            probe,
            [token.text for token in special if token.id in tokenizer.eos_ids],
            probe.text((_ASK,), has_tools=True, add_generation_prompt=True),
            probe.text((_ASK, _speaking()), has_tools=True),
        )

    def thinking(self) -> Markers | None:
        """Return the tags around thinking; None if it is not shown between tags."""
        before_answer = _last_tag(self.answer.partition(_SAID)[0])
        for message in (_speaking(), _calling(1)):
            shown = self.probe.text((_ASK, {**message, **_THOUGHT}), has_tools=True)
            before, found, after = shown.partition(_MUSED)
            start, end = _last_tag(before), _TAG.match(after.lstrip())
            if found and start and end and start != before_answer and end[0] not in self.ends:
                return Markers(start, end[0])
        return None

    def notation(self, thinking: Markers | None) -> CallNotation | None:
        """Return the notation of calls; None if the template does not show it."""
        alone = _RenderedCall.find(self._reply(_calling(1), thinking))
        paired = _RenderedCall.find(self._reply(_calling(2), thinking))
        if alone is None:
            return None
        between, is_parallel, _ = paired.after.partition(_NAMES[1]) if paired else ("", "", "")
        notation = alone.repeated(between) if is_parallel else alone.notation()
        has_cdata = CDATA.start in (self.probe.tokenizer.chat_template or "")
        notation = replace(self._addressed(notation), has_cdata=has_cdata)
        return notation if _is_usable(notation) else None

    def _addressed(self, notation: CallNotation) -> CallNotation:
        """Add the markup of text, if the prompt ends with what precedes every name."""
        marker = notation.separator
        before_text = self.answer.removeprefix(self.prompt).partition(_SAID)[0]
        is_addressed = (
            not (notation.start + notation.before_name)
            and bool(marker.strip())
            and self.prompt.endswith(marker)
            and self.answer.startswith(self.prompt + before_text)
            and re.fullmatch(r"\w+", before_text.removesuffix(notation.after_name)) is not None
        )
        if not is_addressed:
            return notation
        return replace(notation, before_name=marker, separator="", before_text=before_text)

    def _reply(self, message: JsonObject, thinking: Markers | None) -> str:
        """Render a reply, without thinking and without what every reply ends with."""
        text = self.probe.text((_ASK, message), has_tools=True)
        begin = max(_common_prefix(text, self.prompt), _common_prefix(text, self.answer))
        ending = self.answer.rpartition(_SAID)[2]
        reply = text[begin : len(text) - len(_common_suffix(text[begin:], ending))]
        for end in self.ends:
            reply = reply.partition(end)[0]
        if thinking is not None and thinking.end in reply:
            reply = reply.partition(thinking.end)[2]
        for call_id in _IDS:
            reply = reply.replace(call_id, SLOT)
        return reply.strip()


@dataclass(frozen=True, slots=True)
class _RenderedCall:
    """The first call of a reply.

    Attributes:
        before: The reply up to the call's name.
        after: The reply after the call's arguments.
        parts: What is between name and arguments, and in the arguments.
    """

    before: str
    after: str
    parts: CallNotation

    @classmethod
    def find(cls, reply: str) -> "_RenderedCall | None":
        before, found, rest = reply.rpartition(_NAMES[0])
        read = _read_json(rest) or _read_python(rest) or _read_tags(rest)
        if not found or read is None:
            return None
        parts, size = read
        return cls(_without_numbers(before), _without_numbers(rest[size:]), parts)

    def notation(self) -> CallNotation:
        """Return the notation of a template that shows one call only."""
        return replace(
            self.parts, before_name=self.before, after_arguments=self.after, is_parallel=False
        )

    def repeated(self, between: str) -> CallNotation:
        """Return the notation, given the text between the arguments and the next call's name."""
        before_name = _common_suffix(self.before, between)
        start = self.before[: len(self.before) - len(before_name)]
        rest = between[: len(between) - len(before_name)]
        after = rest[: _common_prefix(rest, self.after)].rstrip()
        return replace(
            self.parts,
            start=start,
            before_name=before_name,
            after_arguments=after,
            separator=rest[len(after) :],
            end=self.after[len(after) :].rstrip(),
        )


def _read_json(rest: str) -> tuple[CallNotation, int] | None:
    """Read what follows a name: the text before a JSON object, and the object."""
    begin = rest.find("{")
    try:
        value, end = json.JSONDecoder().raw_decode(rest, max(0, begin))
    except ValueError:
        return None
    if value != _ARGUMENTS:
        return None
    is_spaced = rest[begin:end] != json.dumps(_ARGUMENTS)
    return CallNotation(after_name=_without_numbers(rest[:begin]), is_json_spaced=is_spaced), end


def _read_python(rest: str) -> tuple[CallNotation, int] | None:
    match = re.match(rf"\({_KEYS[0]}=(['\"]){_VALUES[0]}\1, {_KEYS[1]}={_VALUES[1]}\)", rest)
    return (CallNotation(ArgumentStyle.PYTHON, quote=match[1]), match.end()) if match else None


def _read_tags(rest: str) -> tuple[CallNotation, int] | None:
    """Read arguments in tags: what precedes both keys is the tag before a key."""
    words = ("", _KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1])
    match = re.match("(.*?)".join(words), rest, re.DOTALL)
    if match is None:
        return None
    before, before_value, between, before_other = match.groups()
    before_key = _common_suffix(before, between)
    after_value = between.removesuffix(before_key).replace(_KEYS[0], SLOT)
    closing = after_value.replace(SLOT, _KEYS[1])
    if not before_key or not after_value.strip() or not rest.startswith(closing, match.end()):
        return None
    notation = CallNotation(
        ArgumentStyle.TAGS,
        after_name=_without_numbers(before.removesuffix(before_key)),
        before_key=before_key,
        before_value=before_value,
        before_other=before_other,
        after_value=after_value,
    )
    return notation, match.end() + len(closing)


def _is_usable(notation: CallNotation) -> bool:
    """Whether the texts hold no words of the conversation, and tell a call from text."""
    words = (*_NAMES, *_KEYS, *_VALUES, _SAID, "probeask")
    is_clean = not any(word in text for word in words for text in notation.texts)
    return is_clean and bool(notation.opener or notation.is_json_object)


def _without_numbers(text: str) -> str:
    """Replace numbers of calls by slots."""
    return _NUMBER.sub(SLOT, text)


def _last_tag(text: str) -> str:
    tags = list(_TAG.finditer(text.rstrip()))
    return tags[-1][0] if tags and tags[-1].end() == len(text.rstrip()) else ""


def _common_prefix(one: str, other: str) -> int:
    """Return the length of the common prefix that ends outside of tags."""
    size = common_prefix(one, other)
    for text in (one, other):
        size = next((t.start() for t in _TAG.finditer(text) if t.start() < size < t.end()), size)
    return size


def _common_suffix(one: str, other: str) -> str:
    """Return the common suffix that begins outside of tags."""
    size = common_prefix(one[::-1], other[::-1])
    for text in (one, other):
        at = len(text) - size
        inside = (len(text) - t.end() for t in _TAG.finditer(text) if t.start() < at < t.end())
        size = next(inside, size)
    return one[len(one) - size :]
