"""The prompt that follows a tool call, as far as it is known before the tool's result arrives.

The assistant's turn and the header of the tool message are certain. Results are predicted: an agent
that makes the same call again, such as reading the same file, often gets the same result.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

from semantic.application.prompt.renderer import Prompt
from semantic.application.prompt.replay import canonical_json
from semantic.domain.blocks import common_prefix
from semantic.domain.chat import (
    ChatRequest,
    Message,
    Role,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    ToolUsePart,
)

# Texts that a tokenizer merges with preceding text in different ways, if at all.
_UNKNOWN = ("\ufdd3", "a", "1")


def calls_of(reply: Message) -> list[ToolUsePart]:
    """Return the tool calls of a reply; none if it was cut off, as clients do not execute those."""
    calls = [part for part in reply.parts if isinstance(part, ToolUsePart)]
    return [] if any(call.is_cut for call in calls) else calls


def next_prompt(
    request: ChatRequest, reply: Message, render: Callable[[ChatRequest], Prompt]
) -> Prompt:
    """Return the beginning of the prompt that answers the calls of a reply.

    It ends before the first result that cannot be predicted. If all can, only the last token of the
    whole prompt is left out, which the request itself must compute.
    """
    request = request.without_beginning
    calls = calls_of(reply)
    known = _known_results(request, calls)
    said = (*request.messages, _as_sent_back(reply, request))
    unknown = [call.id for call in calls[len(known) :]]

    def prompt_with(text: str) -> Prompt:
        results = [*known, *(ToolResultPart(call_id, (TextPart(text),)) for call_id in unknown)]
        answers = (Message(Role.TOOL, (result,)) for result in results)
        return render(replace(request, messages=(*said, *answers), num_marked=None))

    if not unknown:
        whole = prompt_with("")
        return whole.cut(len(whole.tokens) - 1)
    first, *others = map(prompt_with, _UNKNOWN)
    return first.cut(min(common_prefix(first.tokens, other.tokens) for other in others))


def _known_results(request: ChatRequest, calls: list[ToolUsePart]) -> list[ToolResultPart]:
    """Return the latest results of the same calls, up to the first call that is new."""
    parts = [part for message in request.messages for part in message.parts]
    results = {part.tool_use_id: part for part in parts if isinstance(part, ToolResultPart)}
    latest = {
        _key(part): results[part.id]
        for part in parts
        if isinstance(part, ToolUsePart) and part.id in results
    }
    again = takewhile(lambda call: _key(call) in latest, calls)
    return [replace(latest[_key(call)], tool_use_id=call.id) for call in again]


def _key(call: ToolUsePart) -> str:
    return canonical_json([call.name, call.arguments])


def _as_sent_back(reply: Message, request: ChatRequest) -> Message:
    """Return a reply without its thinking if the client left out that of all earlier replies."""
    earlier = [message for message in request.messages if message.role is Role.ASSISTANT]
    if not earlier or any(isinstance(p, ThinkingPart) for m in earlier for p in m.parts):
        return reply
    return replace(reply, parts=tuple(p for p in reply.parts if not isinstance(p, ThinkingPart)))
