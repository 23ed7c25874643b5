"""A conversation in, a stream of events out: everything between a protocol and the engine."""

import asyncio
import secrets
from dataclasses import replace

from semantic.application.device_thread import DeviceThread, LoadedModel
from semantic.application.frozen_dates import FrozenDates
from semantic.application.generation import Job, monotonic
from semantic.application.rendering import Prompt, Renderer
from semantic.application.replies import ReplyHub
from semantic.domain.agents import Principal
from semantic.domain.blocks import BlockNamespace
from semantic.domain.chat import ChatRequest, Started, Usage
from semantic.domain.errors import ContextLengthError, ModelNotFoundError, SemanticError
from semantic.ports.inbound import Reply


class InferenceService:
    """`InferencePort` over one device. Used on the event loop's thread."""

    def __init__(self, device: DeviceThread, hub: ReplyHub, *, request_timeout_s: float) -> None:
        self._device = device
        self._hub = hub
        self._request_timeout_s = request_timeout_s
        self._renderer: Renderer | None = None
        self._dates = FrozenDates()

    async def start(self, request: ChatRequest, principal: Principal) -> Reply:
        """Render, tokenise, check and queue a request."""
        model = self._device.ready_model()
        if request.model != model.id:
            raise ModelNotFoundError(
                f"the model {request.model!r} is not served here; this server serves {model.id!r}."
            )
        # A long prompt takes a while to tokenise; other streams go on meanwhile.
        prompt = await asyncio.to_thread(self._render, request, principal, model)
        job = self._job(request, principal, prompt, model)
        started = Started(job.id, model.id, Usage(prompt_tokens=len(prompt.tokens)))
        reply = self._hub.open(job.id, started, self._device.cancel)
        try:
            self._device.submit(job)
        except SemanticError:
            self._hub.discard(job.id)
            raise
        return reply

    def _render(self, request: ChatRequest, principal: Principal, model: LoadedModel) -> Prompt:
        renderer = self._renderer
        if renderer is None or renderer.tokenizer is not model.tokenizer:
            renderer = self._renderer = Renderer(model.tokenizer)
        agent = request.agent.agent_id or request.agent.session
        today = self._dates.of(f"{principal.tenant}/{agent}") if agent else None
        return renderer.render(request, today=today)

    def _job(
        self, request: ChatRequest, principal: Principal, prompt: Prompt, model: LoadedModel
    ) -> Job:
        job_id = secrets.token_hex(12)
        seed = request.sampling.seed
        sampling = replace(request.sampling, seed=secrets.randbits(63) if seed is None else seed)
        traits = model.backend.traits
        namespace = BlockNamespace(model.id, traits.kv_abi, principal.salt)
        return Job(
            id=job_id,
            agent=request.agent.agent_id or request.agent.session or job_id,
            root=namespace.root(),
            tokens=prompt.tokens,
            sampling=sampling,
            stop=request.stop,
            max_tokens=self._max_tokens(
                request, len(prompt.tokens), model.backend.spec.max_context
            ),
            boundaries=prompt.boundaries,
            service_class=request.service_class,
            weight=principal.weight,
            deadline=monotonic() + self._request_timeout_s,
        )

    def _max_tokens(self, request: ChatRequest, num_prompt: int, max_context: int) -> int:
        limit, limited_by = max_context, "the model's context"
        if self._device.longest_sequence < limit:
            limit, limited_by = self._device.longest_sequence, "this server's memory"
        wanted = request.stop.max_tokens
        if num_prompt >= limit:
            raise ContextLengthError(
                num_prompt=num_prompt, limit=limit, limited_by=limited_by, param="messages"
            )
        if wanted is None:
            return min(self._device.limits.default_max_tokens, limit - num_prompt)
        if num_prompt + wanted > limit:
            raise ContextLengthError(
                num_prompt=num_prompt,
                max_tokens=wanted,
                limit=limit,
                limited_by=limited_by,
                param="max_tokens",
            )
        return wanted
