"""Checks responses and stream events against the types of the Open Responses specification."""

import inspect
from typing import Any

from openresponses_types import types
from pydantic import BaseModel

# OpenAI's names, which its packages and Codex know; the specification has kept the older ones.
_RENAMED = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}


def _event_types() -> dict[str, type[BaseModel]]:
    found: dict[str, type[BaseModel]] = {}
    kinds: list[tuple[str, Any]] = inspect.getmembers(types, inspect.isclass)
    for name, kind in kinds:
        if name.endswith("StreamingEvent"):
            (only,) = kind.model_fields["type"].annotation
            found[str(only)] = kind
    return found


_EVENTS = _event_types()


def check_event(event: dict[str, Any]) -> None:
    """Fail if the specification has no such event, or another form of it."""
    name = _RENAMED.get(event["type"], event["type"])
    _EVENTS[name].model_validate({**event, "type": name})


def check_response(response: dict[str, Any]) -> None:
    """Fail if a response does not follow the specification."""
    types.ResponseResource.model_validate(response)
