"""Converts a request to the messages that a chat template takes, in canonical order.

Tools and leading system messages form the head; all other messages keep their position. Messages
that the template would refuse or misplace are rewritten: see `TemplateTraits`. All text from
clients is guarded here, so that it cannot become a special token.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache

from semantic.application.prompt.special_text import IMAGE, SpecialText
from semantic.application.prompt.template_probe import ImageTraits, TemplateTraits, in_parts
from semantic.domain.chat import (
    ChatRequest,
    ImagePart,
    JsonObject,
    JsonValue,
    Message,
    Role,
    TextPart,
    ThinkingPart,
    ToolReferencePart,
    ToolResultPart,
    ToolSpec,
    ToolUsePart,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.reply_format import HERMES, ArgumentStyle, CallNotation

_PARAGRAPH = "\n\n"
_SCHEMA_ORDER = ("type", "description", "enum", "properties", "items", "required")
# For templates without tool support: the markup most common in the training of open models.
_EXAMPLE = f"{HERMES.before_name}<name>{HERMES.after_name}{{<arguments>}}{HERMES.after_arguments}"
_INTRODUCTION = """\
# Tools

You may call functions to help with the user's request. These are available:
<tools>
%s
</tools>

To call one, write its name and arguments as JSON:
%s
Each result comes back within <tool_response></tool_response>."""


@dataclass(frozen=True, slots=True)
class TemplateMessage:
    """A message as passed to the template.

    Attributes:
        calls: Tool calls in the form that the template takes.
        source: The assistant's message, if this shows all of it and nothing else; else None.
    """

    role: str
    content: str
    thinking: str = ""
    calls: tuple[JsonObject, ...] = ()
    call_id: str = ""
    name: str = ""
    source: Message | None = None

    def fields(self, *, wants_parts: bool, images: ImageTraits | None = None) -> JsonObject:
        """Return the message as the template's JSON; `wants_parts` makes content a list."""
        fields: JsonObject = {"role": self.role, "content": self._content(images)}
        if self.thinking:
            fields |= {"reasoning_content": self.thinking, "thinking": self.thinking}
        if self.calls:
            calls: list[JsonValue] = [*self.calls]
            fields["tool_calls"] = calls
        if self.role == Role.TOOL.value:
            fields |= {"tool_call_id": self.call_id, "name": self.name}
        return in_parts(fields) if wants_parts else fields

    def _content(self, images: ImageTraits | None) -> JsonValue:
        if images is None or IMAGE not in self.content:
            return self.content
        if not images.in_parts:
            return self.content.replace(IMAGE, images.marker)
        first, *others = self.content.split(IMAGE)
        parts: list[JsonValue] = [{"type": "text", "text": first}] if first else []
        for text in others:
            parts.append({"type": "image"})
            if text:
                parts.append({"type": "text", "text": text})
        return parts


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """The input of the template.

    Attributes:
        functions: Tools for the template to show; empty if the head's text introduces them.
        head: Text of the leading system messages, with the tools if the template cannot show them.
        today: The date for templates that show one; None means the current date.
        is_thinking: Whether to think, for templates with such a switch; None means the default.
    """

    functions: tuple[JsonObject, ...]
    head: str
    messages: tuple[TemplateMessage, ...]
    today: date | None
    is_thinking: bool | None


@dataclass(frozen=True, slots=True)
class _ToolIndex:
    """What messages refer to: tools by name, and names of called tools by call id."""

    specs: dict[str, ToolSpec]
    callees: dict[str, str]

    @classmethod
    def of(cls, request: ChatRequest) -> "_ToolIndex":
        uses = (p for m in request.messages for p in m.parts if isinstance(p, ToolUsePart))
        return cls({tool.name: tool for tool in request.tools}, {use.id: use.name for use in uses})


class Composer:
    """Composes the input of one template. Immutable and thread-safe."""

    def __init__(
        self, traits: TemplateTraits, special: SpecialText, images: ImageTraits | None = None
    ) -> None:
        """`images` is None if the model does not accept images."""
        self._traits = traits
        self._images = images
        self._special = special
        # Every turn sends the same tools, which make up most of many prompts.
        self._described = lru_cache(maxsize=4096)(self._describe)

    def compose(self, request: ChatRequest, today: date | None = None) -> TemplateInput:
        """Convert a request; raises InvalidRequestError if the model does not support a part."""
        num_leading = num_leading_system(request.messages)
        functions = tuple(self._function(tool) for tool in request.tools if not tool.is_deferred)
        texts = [
            _joined(self._texts(message, index), "\n")
            for index, message in enumerate(request.messages[:num_leading])
        ]
        if functions and not self._traits.has_tools:
            texts.insert(0, _INTRODUCTION % ("\n".join(map(_line, functions)), _EXAMPLE))
            functions = ()
        head = _joined(texts, _PARAGRAPH)
        tools = _ToolIndex.of(request)
        shown = [
            entry
            for index, message in enumerate(request.messages)
            if index >= num_leading
            for entry in self._show(message, index, tools)
        ]
        thinking = request.thinking
        is_thinking = None if thinking is None else thinking.is_enabled
        if self._images is not None and self._traits.has_tools and not self._images.in_results:
            shown = list(_with_images_after_results(shown))
        messages = tuple(self._arranged(head, shown))
        return TemplateInput(functions, head, messages, today, is_thinking)

    # -- one message ----------------------------------------------------------------------------

    def _show(self, message: Message, index: int, tools: _ToolIndex) -> Iterator[TemplateMessage]:
        match message.role:
            case Role.SYSTEM:
                text = _joined(self._texts(message, index), "\n")
                if self._traits.has_system_anywhere:
                    yield TemplateMessage("system", text)
                else:
                    yield TemplateMessage("user", f"<system>\n{text}\n</system>")
            case Role.ASSISTANT:
                yield self._show_reply(message, index)
            case Role.USER | Role.TOOL:
                yield from self._show_input(message, index, tools)

    def _show_reply(self, message: Message, index: int) -> TemplateMessage:
        text = "".join(self._texts(message, index))
        thinking = "".join(p.text for p in message.parts if isinstance(p, ThinkingPart))
        uses = [part for part in message.parts if isinstance(part, ToolUsePart)]
        whole = TemplateMessage("assistant", text, self._special.guard(thinking), source=message)
        notation = self._traits.written_calls
        is_shown = self._traits.has_tools and notation is None
        if not uses or (is_shown and (len(uses) < 2 or self._traits.has_parallel_calls)):
            return replace(whole, calls=tuple(map(self._call, uses)))
        # Calls go into the text: replay works only if one message stays one message.
        calls = [(self._special.guard(use.name), self._arguments(use)) for use in uses]
        return replace(whole, content=_joined([text, calls_text(calls, notation or HERMES)], "\n"))

    def _call(self, use: ToolUsePart) -> JsonObject:
        arguments = self._arguments(use)
        function: JsonObject = {
            "name": self._special.guard(use.name),
            "arguments": _line(arguments) if self._traits.wants_json_text else arguments,
        }
        return {"id": self._id(use.id), "type": "function", "function": function}

    def _arguments(self, use: ToolUsePart) -> JsonObject:
        written = json.dumps(use.arguments, ensure_ascii=False)
        try:
            written.encode()
        except UnicodeEncodeError:
            # The model wrote a lone surrogate; replaced, since it would fail every later turn.
            return self._special.guard_object(json.loads(written.encode(errors="replace")))
        return self._special.guard_object(use.arguments)

    def _show_input(
        self, message: Message, index: int, tools: _ToolIndex
    ) -> Iterator[TemplateMessage]:
        texts: list[str] = []
        for position, part in enumerate(message.parts):
            where = f"messages[{index}].content[{position}]"
            if not isinstance(part, ToolResultPart):
                texts.extend(self._text(part, where))
                continue
            if texts:
                yield TemplateMessage("user", _flowing(texts))
                texts = []
            yield self._show_result(part, where, tools)
        if texts or not message.parts:
            yield TemplateMessage("user", _flowing(texts))

    def _show_result(
        self, result: ToolResultPart, where: str, tools: _ToolIndex
    ) -> TemplateMessage:
        texts: list[str] = []
        for position, part in enumerate(result.content):
            if isinstance(part, ToolReferencePart):
                texts.append(self._announced(part.tool_name, tools))
            else:
                texts.extend(self._text(part, f"{where}.content[{position}]"))
        text = _flowing(texts)
        if result.is_error and not text.lower().startswith("error"):
            text = f"Error: {text}"
        if not self._traits.has_tools:
            return TemplateMessage("user", f"<tool_response>\n{text}\n</tool_response>")
        name = self._special.guard(tools.callees.get(result.tool_use_id, ""))
        return TemplateMessage("tool", text, call_id=self._id(result.tool_use_id), name=name)

    def _announced(self, name: str, tools: _ToolIndex) -> str:
        found = tools.specs.get(name)
        if found is None:
            return self._special.guard(name)
        return f"<tools>\n{_line(self._function(found))}\n</tools>"

    # -- parts of a message ---------------------------------------------------------------------

    def _texts(self, message: Message, index: int) -> Iterator[str]:
        for position, part in enumerate(message.parts):
            yield from self._text(part, f"messages[{index}].content[{position}]", message.role)

    def _text(self, part: object, where: str, role: Role = Role.USER) -> Iterator[str]:
        match part:
            case TextPart(text):
                yield self._special.guard(text)
            case ThinkingPart():
                return
            case ToolUsePart() if role is Role.ASSISTANT:
                return
            case ImagePart() if self._images is None:
                raise InvalidRequestError(
                    "the loaded model does not accept images; send text.", param=where
                )
            case ImagePart() if role is Role.USER:
                yield IMAGE
            case ImagePart():
                raise InvalidRequestError(
                    f"images are not allowed in {role.value} messages; send them in user messages "
                    "or tool results.",
                    param=where,
                )
            case _:
                raise InvalidRequestError("a part of this kind is not allowed here.", param=where)

    def _function(self, tool: ToolSpec) -> JsonObject:
        return self._described(tool.name, tool.description, json.dumps(tool.parameters))

    def _describe(self, name: str, description: str, parameters: str) -> JsonObject:
        schema = json.loads(parameters) or {"type": "object", "properties": {}}
        return self._special.guard_object(
            {"name": name, "description": description, "parameters": in_schema_order(schema)}
        )

    def _id(self, given: str) -> str:
        if not self._traits.wants_short_ids:
            return self._special.guard(given)
        return hashlib.sha256(given.encode(errors="surrogatepass")).hexdigest()[:9]

    # -- order of messages ----------------------------------------------------------------------

    def _arranged(self, head: str, shown: list[TemplateMessage]) -> Iterator[TemplateMessage]:
        if head and self._traits.has_system:
            yield TemplateMessage("system", head)
        elif head:
            is_user_first = bool(shown) and shown[0].role == "user"
            first = shown.pop(0) if is_user_first else TemplateMessage("user", "")
            shown.insert(0, replace(first, content=_joined([head, first.content], _PARAGRAPH)))
        yield from _merged(shown) if self._traits.is_alternating else shown


def num_leading_system(messages: Sequence[Message]) -> int:
    """Count the system messages at the start of a conversation."""
    others = (i for i, message in enumerate(messages) if message.role is not Role.SYSTEM)
    return next(others, len(messages))


def _merged(shown: Sequence[TemplateMessage]) -> Iterator[TemplateMessage]:
    """Join adjacent messages of one role; user text after a tool result joins the result."""
    last: TemplateMessage | None = None
    for entry in shown:
        if last is not None and _is_joined(last, entry):
            text = _joined([last.content, entry.content], _PARAGRAPH)
            last = replace(last, content=text, calls=last.calls + entry.calls, source=None)
            continue
        if last is not None:
            yield last
        last = entry
    if last is not None:
        yield last


def _is_joined(last: TemplateMessage, entry: TemplateMessage) -> bool:
    if entry.role == "user":
        return last.role in ("user", "tool")
    return entry.role == last.role == "assistant" and not last.calls


def _with_images_after_results(shown: Sequence[TemplateMessage]) -> Iterator[TemplateMessage]:
    """Move the images of tool results into the user message after them."""
    num_images = 0
    for entry in shown:
        if entry.role == "tool":
            num_images += entry.content.count(IMAGE)
            yield replace(entry, content=entry.content.replace(IMAGE, ""))
            continue
        if num_images and entry.role == "user":
            yield replace(entry, content=IMAGE * num_images + entry.content)
        elif num_images:
            yield TemplateMessage("user", IMAGE * num_images)
            yield entry
        else:
            yield entry
        num_images = 0
    if num_images:
        yield TemplateMessage("user", IMAGE * num_images)


def _flowing(texts: Sequence[str]) -> str:
    """Join the parts of a message by line breaks, but none beside an image."""
    whole = ""
    for text in texts:
        is_beside = IMAGE in (text, whole[-len(IMAGE) :])
        whole += text if is_beside or not (whole and text) else f"\n{text}"
    return whole


def _joined(texts: Iterator[str] | Sequence[str], separator: str) -> str:
    return separator.join(text for text in texts if text)


# -- how tools are written down ---------------------------------------------------------------


def calls_text(calls: Sequence[tuple[str, JsonObject]], notation: CallNotation = HERMES) -> str:
    """Return tool calls as text, in a notation with arguments in JSON or Python."""
    is_python = notation.style is ArgumentStyle.PYTHON
    texts = [
        f"{notation.before_name}{json.dumps(name, ensure_ascii=False)[1:-1]}{notation.after_name}"
        f"{_keywords(arguments) if is_python else _line(arguments)}{notation.after_arguments}"
        for name, arguments in calls
    ]
    return notation.start + notation.separator.join(texts) + notation.end


def _keywords(arguments: JsonObject) -> str:
    pairs = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    return f"({', '.join(pairs)})"


def _line(value: JsonObject) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_schema_order(value: JsonValue) -> JsonValue:
    """Sort a schema's keys: customary keys first, then the others alphabetically.

    Clients may send keys in any order; a fixed order keeps the prompt the same.

    Example:
        >>> list(in_schema_order({"required": [], "b": 1, "a": 2, "type": "object"}))
        ['type', 'required', 'a', 'b']
    """
    match value:
        case dict():
            return {key: in_schema_order(value[key]) for key in sorted(value, key=_schema_rank)}
        case list():
            return [in_schema_order(item) for item in value]
        case _:
            return value


def _schema_rank(key: str) -> tuple[int, str]:
    return (_SCHEMA_ORDER.index(key) if key in _SCHEMA_ORDER else len(_SCHEMA_ORDER), key)
