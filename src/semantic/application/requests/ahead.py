"""Computes the next prompts of agents while their tools run.

A reply that ends in tool calls is followed by a request with their results. The beginning of its
prompt is rendered and computed as soon as no request needs the device or a thread.
"""

import asyncio
import logging
from collections import OrderedDict

from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.request import AheadJob
from semantic.application.prompt.renderer import Prompt
from semantic.application.prompt.tool_turns import calls_of, next_prompt
from semantic.application.requests.prepare import Preparation, PreparationThreads, PreparedRequest
from semantic.domain.chat import ChatRequest, Message
from semantic.domain.errors import SemanticError

_log = logging.getLogger(__name__)
_MAX_EXPECTED = 16


class PrefillAhead:
    """Passes expected prompts to the engine, latest first. Event loop's thread only.

    Attributes:
        expected: Turns that ended in tool calls and whose next prompt is not rendered yet, by
            agent, with their replies. The agent's next request removes its entry.
    """

    def __init__(
        self, device: DeviceThread, preparation: Preparation, threads: PreparationThreads
    ) -> None:
        self._device, self._preparation, self._threads = device, preparation, threads
        self.expected: OrderedDict[str, tuple[PreparedRequest, Message]] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    def add(self, prepared: PreparedRequest, reply: Message) -> None:
        """Expect a request with the results of a reply's tool calls; see `resume`."""
        is_on = self._device.limits.ahead_tokens > 0
        # If messages were dropped to make room, the next prompt drops others.
        if is_on and calls_of(reply) and not prepared.request.num_dropped:
            self.expected[prepared.job.agent] = prepared, reply
            if len(self.expected) > _MAX_EXPECTED:
                self.expected.popitem(last=False)

    def resume(self) -> None:
        """Render the expected prompts, if no request runs; call it when a request has ended."""
        if self._task is None and self.expected and self._device.is_idle:
            self._task = asyncio.create_task(self._render_expected())
            self._task.add_done_callback(self._end)

    def _end(self, _: asyncio.Task[None]) -> None:
        self._task = None

    async def _render_expected(self) -> None:
        while self.expected and self._device.is_idle:
            agent, turn = next(reversed(self.expected.items()))
            prompt: Prompt | None = None
            try:
                prompt = await self._threads.run(self._next_prompt, *turn)
            except SemanticError as error:
                _log.debug("cannot render the next prompt of %s: %s", agent, error.message)
            except Exception:  # noqa: BLE001 - no request waits for it
                _log.exception("cannot render the next prompt of %s", agent)
            if self.expected.get(agent) is not turn:
                continue  # the agent's next request was faster
            del self.expected[agent]
            if prompt is not None and prompt.tokens:
                job = AheadJob(agent, turn[0].job.root, prompt.tokens, prompt.images)
                self._device.compute_ahead(job)

    def _next_prompt(self, prepared: PreparedRequest, reply: Message) -> Prompt | None:
        if prepared.model is not self._device.model:
            return None

        def render(request: ChatRequest) -> Prompt:
            return self._preparation.render(request, prepared.principal, prepared.model)

        return next_prompt(prepared.request, reply, render)
