"""A coding agent's conversation through the whole core: each turn computes only what is new."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from semantic.adapters.config.sources import load_settings
from semantic.application.parsing import fold_message
from semantic.domain.agents import Principal
from semantic.domain.chat import (
    ChatRequest,
    JsonObject,
    Message,
    Part,
    Role,
    ToolChoice,
    ToolMode,
    ToolResultPart,
    ToolUsePart,
)
from semantic.domain.events import Finished, Usage
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.entrypoints.bootstrap import Server, bootstrap
from semantic.ports.inbound import ModelState
from tests.conversations import coding
from tests.waiting import await_that

pytestmark = pytest.mark.integration


@pytest.fixture(params=["fake", "torch"])
async def server(
    request: pytest.FixtureRequest, tiny_starter_dir: Path, tmp_path: Path
) -> AsyncIterator[Server]:
    model = "fake" if request.param == "fake" else str(tiny_starter_dir)
    settings = load_settings({"backend": request.param, "model": model, "home": str(tmp_path)})
    made = bootstrap(settings)
    made.device.start()
    await asyncio.to_thread(await_that, lambda: made.device.state is not ModelState.LOADING)
    assert made.device.state is ModelState.READY, made.device.detail
    yield made
    made.device.request_stop()
    made.device.join(10)
    made.memory.close(10)


@dataclass(frozen=True)
class Answer:
    message: Message
    usage: Usage

    def echo(self) -> Message:
        """As a client tells it again: the arguments' keys in another order."""
        return Message(Role.ASSISTANT, tuple(_turned(part) for part in self.message.parts))


def _turned(part: Part) -> Part:
    if not isinstance(part, ToolUsePart):
        return part
    turned: JsonObject = dict(reversed(part.arguments.items()))
    return replace(part, arguments=turned)


async def ask(server: Server, request: ChatRequest) -> Answer:
    events = [event async for event in await server.inference.start(request, Principal())]
    final = events[-1]
    assert isinstance(final, Finished), final
    return Answer(fold_message(events), final.usage)


def told(request: ChatRequest, answers: list[Answer]) -> ChatRequest:
    """A request of the script, with the replies that were really given."""
    given = iter(answers)
    call_ids: list[str] = []
    messages: list[Message] = []
    for message in request.messages:
        if message.role is Role.ASSISTANT:
            echo = next(given).echo()
            call_ids = [part.id for part in echo.parts if isinstance(part, ToolUsePart)]
            messages.append(echo)
            continue
        parts = (
            replace(part, tool_use_id=call_ids[0]) if isinstance(part, ToolResultPart) else part
            for part in message.parts
        )
        messages.append(Message(message.role, tuple(parts)))
    return replace(request, messages=tuple(messages))


async def test_each_turn_reuses_everything_up_to_the_last_reply(server: Server) -> None:
    answers: list[Answer] = []
    for exchange in coding():
        calls = [part for part in exchange.reply.parts if isinstance(part, ToolUsePart)]
        choice = ToolChoice(ToolMode.NAMED, calls[0].name) if calls else ToolChoice(ToolMode.NONE)
        request = replace(
            told(exchange.request, answers),
            model=server.model_id,
            tool_choice=choice,
            sampling=SamplingParams(temperature=0.8, seed=len(answers)),
            stop=StopRules(max_tokens=160 if calls else 12),
        )
        answer = await ask(server, request)
        if calls:
            assert any(isinstance(part, ToolUsePart) for part in answer.message.parts), answer
        if answers:
            before = answers[-1].usage
            # All of the last prompt and its reply but the token that was sampled last.
            known = before.prompt_tokens + before.completion_tokens - 1
            assert answer.usage.cache_read_tokens >= known, len(answers)
        answers.append(answer)
    (agent,) = server.memory.agents.agents("local")
    assert agent.num_turns == len(answers)
