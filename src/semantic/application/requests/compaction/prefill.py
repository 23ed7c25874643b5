"""Computes the KV cache of a prompt before the request that needs it arrives."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import LoadedModel
from semantic.application.engine.request import Job, ReplyState, monotonic
from semantic.application.parsing import ReplyParser
from semantic.application.prompt.renderer import Prompt
from semantic.application.requests.prepare import Preparation, PreparationThreads, block_ends
from semantic.application.requests.reply import LiveReply, ReplyHub
from semantic.domain.agents import Agent, Principal
from semantic.domain.blocks import common_prefix
from semantic.domain.chat import ChatRequest
from semantic.domain.errors import ContextLengthError, SemanticError
from semantic.domain.events import Failed, Finished, Started, Usage
from semantic.domain.reply_format import ReplyFormat
from semantic.domain.sampling import FinishReason, SamplingParams, StopRules


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt whose KV cache is computed."""

    job: Job
    state: ReplyState
    usage: Usage
    model: str


class Prefill:
    """A prompt that is being computed. Used on the event loop's thread."""

    def __init__(self, job: Job, reply: LiveReply, model: str) -> None:
        self._job = job
        self._reply = reply
        self._model = model

    def cancel(self) -> None:
        self._reply.cancel()

    async def result(self) -> Prefilled:
        """Wait for the end; raises its error if it failed or was cancelled."""
        async for event in self._reply:
            if isinstance(event, Failed):
                raise event.error
            state = self._reply.state
            is_computed = isinstance(event, Finished) and event.reason is FinishReason.MAX_TOKENS
            if isinstance(event, Finished) and is_computed and state is not None:
                return Prefilled(self._job, state, event.usage, self._model)
        raise SemanticError("the prompt was cancelled before it was computed.")


class PromptPrefiller:
    """Computes prompts without generating a reply or logging a turn."""

    def __init__(
        self,
        device: DeviceThread,
        hub: ReplyHub,
        preparation: Preparation,
        threads: PreparationThreads,
        timeout_s: float,
    ) -> None:
        self._device = device
        self._hub = hub
        self._preparation = preparation
        self._threads = threads
        self._timeout_s = timeout_s

    async def start(
        self,
        expected: Sequence[ChatRequest],
        principal: Principal,
        model: LoadedModel,
        agent: Agent | None = None,
    ) -> Prefill:
        """Queue the tokens with which the prompts of all `expected` requests begin.

        Args:
            expected: Variants of one request, which differ in what is not known yet.
            agent: The agent that continues with one of them; its quota applies. None if unknown.

        Raises:
            ContextLengthError: the tokens exceed the context.
            InvalidRequestError: the model does not support a part of the request.
            StateQuotaError: the KV cache exceeds the agent's quota.
        """
        job = await self._threads.run(self._prepare, expected, principal, model, agent)
        started = Started(job.id, model.id, Usage(prompt_tokens=len(job.tokens)))
        parser = ReplyParser(ReplyFormat())
        reply = LiveReply(started, parser, on_cancel=lambda: self._device.cancel(job.id))
        self._hub.open(job.id, reply)
        try:
            self._device.submit(job, model)
        except BaseException:
            self._hub.discard(job.id)
            raise
        return Prefill(job, reply, model.id)

    def _prepare(
        self,
        expected: Sequence[ChatRequest],
        principal: Principal,
        model: LoadedModel,
        agent: Agent | None,
    ) -> Job:
        request, preparation = expected[0], self._preparation
        rendered = [preparation.render_dated(one, principal, model) for one in expected]
        prompt = _common([prompt for prompt, _ in rendered])
        limit = min(model.backend.spec.max_context, self._device.longest_sequence)
        if len(prompt.tokens) >= limit:
            raise ContextLengthError(num_prompt=len(prompt.tokens), limit=limit, param="messages")
        day = rendered[0][1]
        if agent is not None and day is not None:
            preparation.keep_day(request, principal, model, day)
        # A name of its own: the engine must not give up another working copy of the agent for it.
        name = agent.id if agent else f"ahead-{secrets.token_hex(8)}"
        return Job(
            id=secrets.token_hex(12),
            agent=f"{principal.tenant}/{name}",
            root=model.root(principal),
            tokens=prompt.tokens,
            sampling=SamplingParams(seed=0).with_defaults(model.defaults),
            stop=StopRules(),
            max_tokens=0,
            boundaries=block_ends(prompt, model.backend.spec),
            service_class=request.service_class,
            weight=principal.weight,
            deadline=monotonic() + self._timeout_s,
            max_kept=preparation.max_kept(agent, len(prompt.tokens), model) if agent else None,
            images=prompt.images,
        )


def _common(prompts: Sequence[Prompt]) -> Prompt:
    first, *others = prompts
    end = min(
        (common_prefix(first.tokens, one.tokens) for one in others), default=len(first.tokens)
    )
    return first.cut(end)
