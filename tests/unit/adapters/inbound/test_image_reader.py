"""The same picture, sent by any protocol and in any encoding, is the same part of a message."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from semantic.adapters.images.fetch import MediaFetcher
from semantic.adapters.images.files import ImageLimits, read_image
from semantic.adapters.images.sources import ImageSources
from semantic.adapters.inbound.agents.requests import Generate
from semantic.adapters.inbound.anthropic.requests import CountRequest
from semantic.adapters.inbound.images import ImageReader
from semantic.adapters.inbound.ollama.requests import GenerateRequest, OllamaChatRequest
from semantic.adapters.inbound.openai.requests import ChatCompletionRequest
from semantic.adapters.inbound.responses.requests import ResponsesRequest
from semantic.adapters.inbound.wire import client_params, with_images
from semantic.domain.agents import Principal
from semantic.domain.chat import AgentHint, ImagePart, Message, ToolResultPart
from semantic.domain.errors import InvalidRequestError
from tests.pictures import (
    anthropic_image,
    base64_of,
    data_uri,
    openai_image,
    picture,
    responses_image,
)

pytestmark = pytest.mark.unit

LIMITS = ImageLimits(max_images=4)
DATA = picture((40, 30), form="WEBP")
PART = read_image(DATA, LIMITS)
TEXT: dict[str, Any] = {"type": "text", "text": "Look:"}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
Sent = tuple[Any, Callable[..., str | None], tuple[object, ...]]


def reader(tenants: Iterator[str]) -> ImageReader:
    sources = ImageSources(LIMITS, MediaFetcher((), LIMITS.max_bytes))
    stored = {("a", PART.digest): DATA}
    return ImageReader(
        LIMITS, sources, lambda: Principal(next(tenants)), lambda *key: stored.get(key)
    )


def openai(*messages: dict[str, Any]) -> Sent:
    body = ChatCompletionRequest.model_validate({"messages": list(messages)})
    return body.to_domain(AgentHint()), body.client_param, ()


def anthropic(*messages: dict[str, Any], **more: Any) -> Sent:
    body = CountRequest.model_validate({"messages": list(messages), **more})
    request = body.to_domain({})
    return request, body.client_param, (request,)


def responses(*items: dict[str, Any], **more: Any) -> Sent:
    body = ResponsesRequest.model_validate({"input": list(items), **more})
    return body.to_domain(AgentHint(), None), body.client_param, (None,)


def ollama(*messages: dict[str, Any]) -> Sent:
    body = OllamaChatRequest.model_validate({"model": "m", "messages": list(messages)})
    return body.to_domain("m", AgentHint()), body.client_param, ()


def generate(**fields: Any) -> Sent:
    body = GenerateRequest.model_validate({"model": "m", **fields})
    return body.to_domain("m", AgentHint(), None), body.client_param, ()


def agent(*messages: dict[str, Any]) -> Sent:
    body = Generate.model_validate({"messages": list(messages)})
    return body.to_domain(), body.client_param, ()


def said(*content: dict[str, Any], role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": list(content), **more}


def forms(data: bytes) -> dict[str, tuple[Callable[[], Sent], str]]:
    """Where each protocol takes images, and the name of that field."""
    call, hi = said(role="assistant", tool_calls=[CALL]), {"role": "user", "content": "hi"}
    used = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, anthropic_image(data)]}
    asked = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    item_text = {"type": "input_text", "text": "Look:"}
    output = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [item_text, responses_image(data)],
    }
    new_image = {"type": "image", "source": base64_of(data)}
    ollama_image = {"role": "user", "content": "Look:", "images": [base64_of(data)]}
    ollama_call = {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}
    return {
        "openai, user": (
            lambda: openai(said(TEXT, openai_image(data))),
            "messages[0].content[1].image_url",
        ),
        "openai, system": (
            lambda: openai(said(TEXT, openai_image(data), role="system"), hi),
            "messages[0].content[1].image_url",
        ),
        "openai, tool": (
            lambda: openai(hi, call, said(TEXT, openai_image(data), role="tool", tool_call_id="c")),
            "messages[2].content[1].image_url",
        ),
        "anthropic, user": (
            lambda: anthropic(hi, said(TEXT, anthropic_image(data)), system="Be terse."),
            "messages[1].content[1].source",
        ),
        "anthropic, wrong type": (
            lambda: anthropic(said(TEXT, anthropic_image(data, "image/gif"))),
            "messages[0].content[1].source",
        ),
        "anthropic, result": (
            lambda: anthropic(hi, said(used, role="assistant"), said(TEXT, result), system="x"),
            "messages[2].content[1].content[1].source",
        ),
        "responses, user": (
            lambda: responses(said(item_text, responses_image(data)), instructions="Be terse."),
            "input[0].content[1].image_url",
        ),
        "responses, output": (
            lambda: responses(hi, asked, output, instructions="Be terse."),
            "input[2].output[1].image_url",
        ),
        "ollama, user": (lambda: ollama(hi, ollama_image), "messages[1].images[0]"),
        "ollama, tool": (
            lambda: ollama(hi, ollama_call, {**ollama_image, "role": "tool", "tool_name": "look"}),
            "messages[2].images[0]",
        ),
        "ollama, data URI": (
            lambda: ollama({**ollama_image, "images": [data_uri(data)]}),
            "messages[0].images[0]",
        ),
        "ollama, generate": (
            lambda: generate(prompt="Look:", system="x", images=[base64_of(data)]),
            "images[0]",
        ),
        "agent, user": (
            lambda: agent(said(TEXT, new_image)),
            "messages[0].content[1].source",
        ),
        "agent, tool": (
            lambda: agent(said(TEXT, new_image, role="tool", tool_call_id="c")),
            "messages[0].content[1].source",
        ),
    }


NAMES = list(forms(DATA))


def read(sent: Sent) -> Any:
    request, client_param, about = sent
    with client_params(client_param, *about):
        return asyncio.run(with_images(request, reader(itertools.repeat("a")).read))


def images(messages: tuple[Message, ...]) -> list[object]:
    parts = [part for message in messages for part in message.parts]
    inner = [each for part in parts if isinstance(part, ToolResultPart) for each in part.content]
    return [part for part in [*parts, *inner] if isinstance(part, ImagePart)]


@pytest.mark.parametrize("name", NAMES)
def test_every_protocol_makes_the_same_part(name: str) -> None:
    made = images(read(forms(DATA)[name][0]()).messages)
    assert made == [PART]
    assert [type(part) for part in made] == [ImagePart]
    assert [part.data for part in made if isinstance(part, ImagePart)] == [DATA]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "data, reason", [(b"<svg/>", "SVG"), (DATA[:50], "damaged")], ids=["SVG", "truncated"]
)
def test_an_error_names_the_field_as_the_client_does(name: str, data: bytes, reason: str) -> None:
    make, field = forms(data)[name]
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        read(make())
    assert caught.value.param == field


def test_the_first_image_too_many_is_named() -> None:
    many = said(TEXT, *[openai_image(DATA)] * 5)
    with pytest.raises(InvalidRequestError, match=r"5 images; at most 4.*max_images") as caught:
        read(openai(many))
    assert caught.value.param == "messages[0].content[5].image_url"


def test_an_image_that_a_tenant_repeats_is_decoded_once() -> None:
    """A client sends the images of earlier turns again."""
    images_ = reader(iter("aab"))
    request, *_ = openai(said(openai_image(DATA)))
    read_ones = [asyncio.run(images_.read(request.messages)) for _ in range(3)]
    assert read_ones[0] == read_ones[1] == read_ones[2]
    assert images_._known.weight == 2


def test_a_stored_image_is_named_by_its_digest() -> None:
    named = said(TEXT, {"type": "image", "source": f"sha256:{PART.digest}"})
    assert images(read(agent(named)).messages) == [PART]
    with pytest.raises(InvalidRequestError, match="no image with this digest") as caught:
        read(agent(said({"type": "image", "source": "sha256:../etc"})))
    assert caught.value.param == "messages[0].content[0].source"


@pytest.mark.parametrize(
    "source, reason",
    [
        ({"type": "file", "file_id": "file_1"}, "stores no files"),
        ({"type": "base64"}, "type base64 with data"),
        ({"type": "url", "url": 1}, "type base64 with data"),
        ({}, "type base64 with data"),
    ],
)
def test_other_sources_of_anthropic_are_refused(source: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        anthropic(said({"type": "image", "source": source}))
    assert caught.value.param == "messages[0].content[0].source"
