"""From a conversation to the tokens the model reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from semantic.domain.chat import (
    ChatRequest,
    ImagePart,
    JsonObject,
    Message,
    TextPart,
    ThinkingPart,
    ToolMode,
)
from semantic.domain.errors import InvalidRequestError
from semantic.ports.outbound import TokenizerPort


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation.

    Attributes:
        boundaries: Positions worth resuming at.
    """

    tokens: tuple[int, ...]
    boundaries: tuple[int, ...] = ()


def render(request: ChatRequest, tokenizer: TokenizerPort) -> Prompt:
    """Turn a request into a prompt that ends where the reply begins.

    Raises:
        InvalidRequestError: a part cannot be shown to this model, its template refuses, or the
            text cannot be encoded.
    """
    if request.tools and request.tool_choice.mode is not ToolMode.NONE:
        raise InvalidRequestError("tools are not supported yet; leave them out.", param="tools")
    if request.output_format is not None:
        raise InvalidRequestError(
            "structured output is not supported yet; ask for text.", param="response_format"
        )
    text = tokenizer.render_chat(_template_messages(request.messages))
    _require_whole_characters(text)
    return Prompt(tuple(tokenizer.encode(text)))


def _require_whole_characters(text: str) -> None:
    """JSON can spell half a surrogate pair; UTF-8, and so every tokenizer, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            "the text holds half a surrogate pair.", param="messages"
        ) from error


def _template_messages(messages: Sequence[Message]) -> list[JsonObject]:
    return [
        {"role": message.role.value, "content": _text_of(message, index)}
        for index, message in enumerate(messages)
    ]


def _text_of(message: Message, index: int) -> str:
    texts: list[str] = []
    for position, part in enumerate(message.parts):
        match part:
            case TextPart(text):
                texts.append(text)
            case ThinkingPart():
                continue  # templates leave earlier thinking out
            case ImagePart():
                raise InvalidRequestError(
                    "the loaded model cannot see images; send text.",
                    param=f"messages[{index}].content[{position}]",
                )
            case _:
                raise InvalidRequestError(
                    "tool calls and results are not supported yet; send text.",
                    param=f"messages[{index}].content[{position}]",
                )
    return "".join(texts)
