"""Responses and items that are rebuilt from logged turns, and settings that a response repeats."""

import base64
import json
from collections.abc import Sequence
from typing import cast

from semantic.adapters.inbound.http.streaming import Json
from semantic.adapters.inbound.openai.custom_tools import format_json
from semantic.adapters.inbound.openai.fields import outer_call_id
from semantic.adapters.inbound.responses.events import ResponseWriter
from semantic.adapters.inbound.responses.requests import ResponsesRequest, ResponsesTool
from semantic.adapters.inbound.wire import STORED_IMAGE
from semantic.application.agents.turn_log import PastTurns
from semantic.domain.agents import Principal
from semantic.domain.chat import (
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ThinkingPart,
    ToolReferencePart,
    ToolResultPart,
    ToolUsePart,
)
from semantic.domain.events import (
    Event,
    Finished,
    Started,
    TextDelta,
    ThinkingDelta,
    ThinkingEnded,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from semantic.domain.sampling import FinishReason
from semantic.ports.inbound import PastTurn

_DEFAULTS: Json = {
    "background": False,
    "conversation": None,
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


def settings_of(body: ResponsesRequest) -> Json:
    """Return a request's settings, with defaults for absent fields."""
    repeated = set(_DEFAULTS) - {"conversation", "reasoning", "text", "tools"}
    reasoning = body.reasoning
    made: Json = {
        **_DEFAULTS,
        **body.model_dump(include=repeated, exclude_none=True),
        "reasoning": reasoning.model_dump() if reasoning else _DEFAULTS["reasoning"],
        "text": _text(body),
        "tools": [_tool(tool) for tool in body.offered],
    }
    return _spelled(made)


def _spelled(settings: Json) -> Json:
    """Replace values that JSON and UTF-8 cannot express: lone surrogates, NaN, infinity."""
    text = json.dumps(settings, ensure_ascii=False).encode("utf-8", "replace")
    made: Json = json.loads(text, parse_constant=lambda _: None)
    return made


def _text(body: ResponsesRequest) -> Json:
    text_format = body.text.format if body.text else None
    if text_format is None or text_format.type != "json_schema":
        return {"format": {"type": text_format.type if text_format else "text"}}
    name, is_strict = text_format.name or "response", bool(text_format.strict)
    made: Json = {"type": "json_schema", "name": name, "strict": is_strict}
    return {
        "format": made | {"description": text_format.description, "schema": text_format.schema_}
    }


def _tool(tool: ResponsesTool) -> Json:
    shown: Json = {"type": tool.type, "name": tool.name, "description": tool.description}
    if tool.type == "custom":
        return shown | {"format": format_json(tool.format)}
    return shown | {"parameters": tool.parameters or {}, "strict": bool(tool.strict)}


def response_of(request_id: str, past: PastTurn, served: str) -> Json:
    """Rebuild a response from its logged turn, with default settings because none are logged.

    Args:
        request_id: The response's id, without prefix.
        served: The currently served model, used if the turn does not name its model.
    """
    writer = ResponseWriter(dict(_DEFAULTS))
    _write(writer, request_id, past, served)
    at = int(past.created_at)
    is_completed = writer.response["status"] == "completed"
    return writer.response | {"created_at": at, "completed_at": at if is_completed else None}


def items_of(request_id: str, messages: Sequence[Message]) -> list[Json]:
    """Translate messages to the items that a client would send."""
    items: list[Json] = []
    parts = [part for message in messages for part in message.parts]
    custom = {part.id for part in parts if isinstance(part, ToolUsePart) and part.is_custom}
    for number, message in enumerate(messages):
        name = f"{request_id}_in{number}"
        if message.role is Role.ASSISTANT:
            items += _output_of(name, message)
            continue
        content = _content(message.parts)
        if content:
            head: Json = {"id": f"msg_{name}", "type": "message", "role": message.role.value}
            items.append(head | {"status": "completed", "content": content})
        for part in message.parts:
            if isinstance(part, ToolResultPart):
                kind = "custom_tool_call" if part.tool_use_id in custom else "function_call"
                items.append(_result(f"{kind}_output", f"{name}_{len(items)}", part))
    return items


def _output_of(name: str, message: Message) -> list[Json]:
    """Translate a reply to items, with the handles of its thinking."""
    past = PastTurn(name, (), message, Usage(0), 0.0, "", None)
    writer = ResponseWriter({}, wants_handles=True)
    _write(writer, name, past, "")
    return cast("list[Json]", writer.response["output"])


def _content(parts: Sequence[Part | ToolReferencePart]) -> list[Json]:
    """Translate texts and images; other parts are left out."""
    content: list[Json] = []
    for part in parts:
        if isinstance(part, TextPart):
            content.append({"type": "input_text", "text": part.text})
        elif isinstance(part, ImagePart):
            url = f"{STORED_IMAGE}{part.digest}"
            if part.data:
                encoded = base64.b64encode(part.data).decode()
                url = f"data:{part.media_type};base64,{encoded}"
            content.append({"type": "input_image", "image_url": url, "detail": "auto"})
    return content


def _result(kind: str, name: str, part: ToolResultPart) -> Json:
    output: str | list[Json] = _content(part.content)
    if not any(isinstance(piece, ImagePart) for piece in part.content):
        output = "".join(piece.text for piece in part.content if isinstance(piece, TextPart))
    prefix = "fco" if kind == "function_call_output" else "ctco"
    return {
        "id": f"{prefix}_{name}",
        "type": kind,
        "call_id": outer_call_id(part.tool_use_id),
        "output": output,
        "status": "completed",
    }


def _write(writer: ResponseWriter, request_id: str, past: PastTurn, served: str) -> None:
    writer.feed(Started(request_id, past.model or served, past.usage))
    for event in _events_of(past.reply):
        writer.feed(event)
    writer.feed(Finished(past.reason or FinishReason.END_TURN, past.usage))


def _events_of(message: Message) -> list[Event]:
    events: list[Event] = []
    num_calls = 0
    for part in message.parts:
        match part:
            case TextPart(text):
                events.append(TextDelta(text))
            case ThinkingPart(text, signature):
                events += [ThinkingDelta(text), ThinkingEnded(signature)]
            case ToolUsePart(call_id, name, arguments):
                whole = json.dumps(arguments, ensure_ascii=False)
                written = part.written if part.is_cut else whole
                events += [ToolCallStarted(num_calls, call_id, name, part.is_custom)]
                events += [ToolCallDelta(num_calls, written)]
                events += [] if part.is_cut else [ToolCallEnded(num_calls)]
                num_calls += 1
            case _:
                pass
    return events


class StoredItems:
    """Items of stored responses. Not thread-safe; reads the log, which may take long."""

    def __init__(self, turns: PastTurns, principal: Principal) -> None:
        self._turns = turns
        self._principal = principal
        self._read: dict[tuple[str, bool], dict[object, Json]] = {}

    def find_item(self, item_id: str) -> Json | None:
        """Return an input or output item as a client would send it; None if it is not stored."""
        _, _, name = item_id.partition("_")
        request_id, _, place = name.partition("_")
        key = request_id, place.startswith("in")
        if key not in self._read:
            self._read[key] = {item["id"]: item for item in self._items(*key)}
        return self._read[key].get(item_id)

    def _items(self, request_id: str, is_input: bool) -> list[Json]:
        if is_input:  # with the whole conversation, while a reply is in its own turn
            past = self._turns.find_turn(request_id, self._principal)
            return items_of(request_id, past.messages[:-1]) if past else []
        reply = self._turns.find_reply(request_id, self._principal)
        return _output_of(request_id, reply) if reply else []
