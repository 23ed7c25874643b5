"""What a response repeats of its request, and responses made again from the log of turns."""

import json

from semantic.adapters.inbound.openai.reply_set import Json
from semantic.adapters.inbound.responses.schema import ResponsesRequest
from semantic.adapters.inbound.responses.writer import ResponseWriter
from semantic.domain.chat import (
    Event,
    Finished,
    Message,
    Started,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingEnded,
    ThinkingPart,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    ToolUsePart,
)
from semantic.domain.sampling import FinishReason
from semantic.ports.inbound import PastTurn

_DEFAULTS: Json = {
    "background": False,
    "conversation": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}


def settings_of(body: ResponsesRequest) -> Json:
    """Repeat a request's settings, with defaults where it says nothing."""
    names = (
        "background", "instructions", "max_output_tokens", "metadata", "parallel_tool_calls",
        "previous_response_id", "prompt_cache_key", "safety_identifier", "store",
        "top_logprobs", "user",
    )  # fmt: skip
    given = {name: getattr(body, name) for name in names}
    choice = body.tool_choice
    made: Json = {
        **{name: value for name, value in given.items() if value is not None},
        "text": _text(body),
        "tool_choice": choice if isinstance(choice, str) or choice is None else choice.model_dump(),
        "tools": [_tool(tool.model_dump()) for tool in body.functions],
        "reasoning": body.reasoning.model_dump() if body.reasoning else None,
    }
    return _spelled(
        {**_DEFAULTS, **{name: value for name, value in made.items() if value is not None}}
    )


def _spelled(settings: Json) -> Json:
    """Leave out what a client's JSON may hold and ours may not: half characters, NaN, infinity."""
    text = json.dumps(settings, ensure_ascii=False).encode("utf-8", "replace")
    made: Json = json.loads(text, parse_constant=lambda _: None)
    return made


def _text(body: ResponsesRequest) -> Json:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type != "json_schema":
        return {"format": {"type": wanted.type if wanted else "text"}}
    name, is_strict = wanted.name or "response", bool(wanted.strict)
    made: Json = {"type": "json_schema", "name": name, "strict": is_strict}
    return {"format": made | {"description": wanted.description, "schema": wanted.schema_}}


def _tool(tool: Json) -> Json:
    return {**tool, "parameters": tool["parameters"] or {}, "strict": bool(tool["strict"])}


def response_of(request_id: str, past: PastTurn, served: str) -> Json:
    """Make a response again from the turn that was logged; its settings are not kept there.

    Args:
        request_id: What the response is called.
        past: The turn.
        served: The model that is served now, where the turn does not say which one replied.
    """
    writer = ResponseWriter(dict(_DEFAULTS))
    writer.feed(Started(request_id, past.model or served, past.usage))
    for event in _events_of(past.reply):
        writer.feed(event)
    writer.feed(Finished(past.reason or FinishReason.END_TURN, past.usage))
    at = int(past.created_at)
    ended = {"completed_at": at} if writer.response["status"] == "completed" else {}
    unknown = {"temperature": None, "top_p": None}
    return writer.response | {"created_at": at} | unknown | ended


def _events_of(message: Message) -> list[Event]:
    events: list[Event] = []
    num_calls = 0
    for part in message.parts:
        match part:
            case TextPart(text):
                events.append(TextDelta(text))
            case ThinkingPart(text, signature):
                events += [ThinkingDelta(text), ThinkingEnded(signature)]
            case ToolUsePart(name, called, arguments):
                written = json.dumps(arguments, ensure_ascii=False)
                events += [
                    ToolCallStarted(num_calls, name, called),
                    ToolCallDelta(num_calls, written),
                    ToolCallEnded(num_calls),
                ]
                num_calls += 1
            case _:
                pass
    return events
