"""Determines what a chat template supports by rendering test conversations.

Templates refuse, drop or move different kinds of messages and do not declare that. The test
conversations consist of unique words; a feature is supported if its words appear in the rendered
text, in the order of the input.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

from semantic.domain.blocks import common_prefix
from semantic.domain.chat import JsonObject, JsonValue
from semantic.domain.errors import InvalidRequestError
from semantic.domain.reply_format import CallNotation, guess_notation
from semantic.ports.text import TokenizerPort

_DAYS = (date(2001, 2, 3), date(2012, 11, 10))
_LONG_IDS = ("call_firstprobe", "call_secondprobe")
_SHORT_IDS = ("probe0001", "probe0002")
_ARGUMENTS: JsonObject = {"word": "probearg"}
_FUNCTION: JsonObject = {
    "name": "probetool",
    "description": "A probe.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "description": "A word."}},
        "required": ["word"],
    },
}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template supports.

    Attributes:
        wants_parts: Content must be a list of parts instead of a string.
        wants_json_text: Arguments of calls must be JSON text instead of an object.
        has_system: A leading system message is shown before the first user message.
        has_system_anywhere: Later system messages are shown at their position.
        is_alternating: Two consecutive messages of one role are refused.
        has_tools: Tools are shown before the first user message, calls and results at their
            position.
        written_calls: The notation of calls if the template shows tools and results, but not
            calls; they must then be written into the text. None otherwise.
        wants_short_ids: Call ids must consist of nine letters and digits.
        keeps_loop_thinking: Thinking since the last user message is shown.
        keeps_old_thinking: Thinking before the last user message is shown.
    """

    wants_parts: bool
    wants_json_text: bool
    has_system: bool
    has_system_anywhere: bool
    is_alternating: bool
    has_tools: bool
    written_calls: CallNotation | None
    has_parallel_calls: bool
    wants_short_ids: bool
    keeps_loop_thinking: bool
    keeps_old_thinking: bool
    shows_date: bool


@dataclass(frozen=True, slots=True)
class ImageTraits:
    """How a chat template shows images.

    Attributes:
        marker: Text of the token that stands for an image.
        in_parts: An image is a part of the content; otherwise its marker is written into the text.
        in_results: Images in tool results are shown; otherwise a user message follows with them.
    """

    marker: str
    in_parts: bool
    in_results: bool


def probe_images(tokenizer: TokenizerPort, traits: TemplateTraits, marker: str) -> ImageTraits:
    """Determine how a tokenizer's chat template shows images."""
    ask = TemplateProbe(
        tokenizer, wants_parts=traits.wants_parts, wants_json_text=traits.wants_json_text
    )
    parts: JsonValue = [{"type": "image"}, {"type": "text", "text": "probeask"}]
    asked: JsonObject = {"role": "user", "content": parts}
    in_parts = ask.text((asked,)).count(marker) == 1
    call_id = _SHORT_IDS[0]
    shown = {**_result(call_id), "content": parts if in_parts else f"{marker}probeask"}
    results = ask.text((_user("probeask"), _calling(call_id), shown), has_tools=True)
    return ImageTraits(marker, in_parts, traits.has_tools and results.count(marker) == 1)


def probe(tokenizer: TokenizerPort) -> TemplateTraits:
    """Determine what a tokenizer's chat template supports."""
    ask = TemplateProbe.of(tokenizer)
    a, b, c = _user("probeask"), _assistant("probesaid"), _user("probeagain")
    system = _message("system", "proberule")
    has_system = ask.shows(system, a, b, c)
    ids = _LONG_IDS if _has_tools(ask, _LONG_IDS, has_system) else _SHORT_IDS
    has_calls = _has_tools(ask, ids, has_system)
    written_calls = None
    if not has_calls and _has_tools(ask, ids, has_system, is_call_shown=False):
        written_calls = guess_notation(tokenizer.chat_template, tokenizer.special_ids)
    has_tools = has_calls or written_calls is not None
    thought = _assistant("probesaid", reasoning_content="probemused", thinking="probemused")
    return TemplateTraits(
        wants_parts=ask.wants_parts,
        wants_json_text=ask.wants_json_text,
        has_system=has_system,
        has_system_anywhere=ask.shows(a, b, system, c) and ask.shows(a, system),
        is_alternating=not ask.shows(a, _user("probemore")),
        has_tools=has_tools,
        written_calls=written_calls,
        has_parallel_calls=(
            written_calls.is_parallel
            if written_calls is not None
            else has_calls and _has_parallel_calls(ask, ids)
        ),
        wants_short_ids=has_calls and ids is _SHORT_IDS,
        keeps_loop_thinking=has_tools and _keeps_loop_thinking(ask, ids[0]),
        keeps_old_thinking=ask.shows(
            a, thought, c, words=("probeask", "probemused", "probesaid", "probeagain")
        ),
        shows_date=_shows_date(ask),
    )


def lost_generation_prompt(
    tokenizer: TokenizerPort, traits: TemplateTraits, *, is_thinking: bool | None
) -> str:
    """Return the end of the generation prompt that the template omits before earlier replies."""
    ask = TemplateProbe(tokenizer, wants_parts=traits.wants_parts)
    a, b, c = _user("probeask"), _assistant("probesaid"), _user("probeagain")
    prompt = ask.text((a,), is_thinking=is_thinking, add_generation_prompt=True)
    later = ask.text((a, b, c), is_thinking=is_thinking)
    return prompt[common_prefix(prompt, later) :]


def generation_prompt(
    tokenizer: TokenizerPort, traits: TemplateTraits, *, is_thinking: bool | None
) -> str:
    """Return the text after the last message that makes the model reply."""
    ask = TemplateProbe(tokenizer, wants_parts=traits.wants_parts)
    messages = (_user("probeask"),)
    prompt = ask.text(messages, is_thinking=is_thinking, add_generation_prompt=True)
    return prompt[common_prefix(prompt, ask.text(messages, is_thinking=is_thinking)) :]


@dataclass(frozen=True, slots=True)
class TemplateProbe:
    """Renders test conversations.

    Attributes:
        functions: The tools of conversations that have tools.
    """

    tokenizer: TokenizerPort
    wants_parts: bool = False
    functions: Sequence[JsonObject] = (_FUNCTION,)
    wants_json_text: bool = False

    @classmethod
    def of(
        cls, tokenizer: TokenizerPort, functions: Sequence[JsonObject] = (_FUNCTION,)
    ) -> "TemplateProbe":
        asked = _user("probeask")
        wants_parts = not cls(tokenizer).shows(asked) and cls(tokenizer, True).shows(asked)
        ask = cls(tokenizer, wants_parts, functions)
        return replace(ask, wants_json_text=ask._refuses_objects())

    def _refuses_objects(self) -> bool:
        """Whether arguments appear as JSON only if they are text: objects fail, or look Python."""
        messages = (_user("probeask"), _calling(_SHORT_IDS[0]))
        shown = self.text(messages, has_tools=True)
        as_text = replace(self, wants_json_text=True).text(messages, has_tools=True)
        return json.dumps(_ARGUMENTS) in as_text and (not shown or repr(_ARGUMENTS) in shown)

    def text(
        self,
        messages: Sequence[JsonObject],
        *,
        has_tools: bool = False,
        is_thinking: bool | None = None,
        add_generation_prompt: bool = False,
        today: date | None = None,
    ) -> str:
        shown = [in_parts(message) if self.wants_parts else message for message in messages]
        if self.wants_json_text:
            shown = [_with_json_text(message) for message in shown]
        try:
            return self.tokenizer.render_chat(
                shown,
                self._tools() if has_tools else (),
                add_generation_prompt=add_generation_prompt,
                is_thinking=is_thinking,
                today=today,
            )
        except InvalidRequestError:
            return ""

    def _tools(self) -> list[JsonObject]:
        return [{"type": "function", "function": function} for function in self.functions]

    def shows(
        self, *messages: JsonObject, words: Sequence[str] = (), has_tools: bool = False
    ) -> bool:
        text, position = self.text(messages, has_tools=has_tools), 0
        for word in words or [str(message["content"]) for message in messages]:
            found = text.find(word, position)
            if found < 0:
                return False
            position = found + len(word)
        return True


def in_parts(message: JsonObject) -> JsonObject:
    """Return a template's message with its content as a list; text becomes one part."""
    if isinstance(message["content"], list):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_json_text(message: JsonObject) -> JsonObject:
    calls = message.get("tool_calls")
    written: list[JsonValue] = [
        {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}
        for call in (calls if isinstance(calls, list) else ())
        if isinstance(call, dict) and isinstance(function := call["function"], dict)
    ]
    return {**message, "tool_calls": written} if written else message


def _has_tools(
    ask: TemplateProbe, ids: Sequence[str], has_system: bool, *, is_call_shown: bool = True
) -> bool:
    messages = [_user("probeask"), _calling(ids[0]), _result(ids[0]), _assistant("probelast")]
    words = [
        "probetool",
        "probeask",
        *(("probetool", "probearg") if is_call_shown else ()),
        "proberesult",
        "probelast",
        "probeagain",
    ]
    if has_system and not ask.shows(
        _message("system", "proberule"), *messages, _user("probeagain"), words=words, has_tools=True
    ):
        return False
    return ask.shows(*messages, _user("probeagain"), words=words, has_tools=True)


def _has_parallel_calls(ask: TemplateProbe, ids: Sequence[str]) -> bool:
    messages = [_user("probeask"), _calling(*ids), _result(ids[0]), _result(ids[1])]
    words = ["probeask", "probearg", "probearg", "proberesult", "proberesult"]
    return ask.shows(*messages, words=words, has_tools=True)


def _keeps_loop_thinking(ask: TemplateProbe, call_id: str) -> bool:
    calling = {**_calling(call_id), "reasoning_content": "probemused", "thinking": "probemused"}
    words = ("probeask", "probemused", "probearg", "proberesult")
    return ask.shows(_user("probeask"), calling, _result(call_id), words=words, has_tools=True)


def _shows_date(ask: TemplateProbe) -> bool:
    asked = (_user("probeask"),)
    return any(
        len({ask.text(asked, has_tools=has_tools, today=day) for day in _DAYS}) > 1
        for has_tools in (False, True)
    )


def _message(role: str, content: str) -> JsonObject:
    return {"role": role, "content": content}


def _user(content: str) -> JsonObject:
    return _message("user", content)


def _assistant(content: str, **more: str) -> JsonObject:
    return {**_message("assistant", content), **more}


def _calling(*ids: str) -> JsonObject:
    calls: list[JsonValue] = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": "probetool", "arguments": _ARGUMENTS},
        }
        for call_id in ids
    ]
    return {**_message("assistant", ""), "tool_calls": calls}


def _result(call_id: str) -> JsonObject:
    return {**_message("tool", "proberesult"), "tool_call_id": call_id, "name": "probetool"}
