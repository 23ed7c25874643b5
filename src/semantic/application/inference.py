"""A conversation in, a stream of events out: everything between a protocol and the engine."""

import asyncio
import hashlib
import logging
import secrets
from dataclasses import replace

from semantic.application.agent_ledger import AgentLedger, Exchange
from semantic.application.batch_engine import PutAway
from semantic.application.device_thread import DeviceThread, LoadedModel
from semantic.application.generation import Job, monotonic
from semantic.application.rendering import Prompt, render
from semantic.application.replies import OnFinish, ReplyHub
from semantic.application.turn_watch import TurnWatch
from semantic.domain.agents import Pointer, Principal, check_agent_id
from semantic.domain.chat import ChatRequest, Finished, Message, Role, Started, Usage
from semantic.domain.errors import (
    AgentNotFoundError,
    ConflictError,
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    SemanticError,
)
from semantic.domain.sampling import FinishReason
from semantic.ports.inbound import Reply

_log = logging.getLogger(__name__)


class InferenceService:
    """`InferencePort` over one device. Used on the event loop's thread."""

    def __init__(
        self,
        device: DeviceThread,
        hub: ReplyHub,
        agents: AgentLedger,
        *,
        request_timeout_s: float,
        is_synced: bool = False,
        watch: TurnWatch | None = None,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            device: Where replies are computed.
            hub: Hands out what the device says.
            agents: Where turns are logged.
            request_timeout_s: The longest a request may take.
            is_synced: A reply ends when its turn is safe on disk.
            watch: Is shown every reply.
        """
        self._device = device
        self._hub = hub
        self._agents = agents
        self._request_timeout_s = request_timeout_s
        self._is_synced = is_synced
        self._watch = watch

    async def start(self, request: ChatRequest, principal: Principal) -> Reply:
        """Render, tokenise, check and queue a request."""
        model = self._device.ready_model()
        if request.model != model.id:
            raise ModelNotFoundError(
                f"the model {request.model!r} is not served here; this server serves {model.id!r}."
            )
        # A long prompt takes a while to tokenise; other streams go on meanwhile.
        prompt = await asyncio.to_thread(render, request, model.tokenizer)
        job = self._job(request, principal, prompt, model)
        on_finish = self._log_turn(request, principal, job) if _agent_id(request) else None
        started = Started(job.id, model.id, Usage(prompt_tokens=len(prompt.tokens)))
        reply = self._hub.open(job.id, started, self._device.cancel, on_finish)
        try:
            self._device.submit(job)
        except SemanticError:
            self._hub.discard(job.id)
            raise
        if self._watch is not None:
            self._watch.watch(reply, started, principal.tenant, _agent_id(request))
        return reply

    def _log_turn(self, request: ChatRequest, principal: Principal, job: Job) -> OnFinish:
        """Make what logs the turn when the reply is there."""
        agent_id = _agent_id(request) or job.id

        async def log_turn(left: PutAway, finished: Finished, text: str) -> None:
            if finished.reason is FinishReason.CANCELLED:
                return
            pointer = None
            if left.block is not None:
                pointer = Pointer(job.root, left.block, left.num_sealed)
            exchange = Exchange(
                prompt=job.tokens,
                reply=left.tokens,
                messages=(*request.messages, Message.of(Role.ASSISTANT, text)),
                pointer=pointer,
                usage=finished.usage,
                reuse=left.reuse,
                request_id=job.id,
                continuation=request.agent.continuation,
            )
            commit = self._agents.commit
            try:
                _, done = await asyncio.to_thread(commit, principal.tenant, agent_id, exchange)
            except (AgentNotFoundError, ConflictError) as error:
                _log.info("a turn is not logged: %s", error.message)
                return
            if self._is_synced:
                await asyncio.wait_for(asyncio.wrap_future(done), self._request_timeout_s)

        return log_turn

    def _job(
        self, request: ChatRequest, principal: Principal, prompt: Prompt, model: LoadedModel
    ) -> Job:
        job_id = secrets.token_hex(12)
        seed = request.sampling.seed
        sampling = replace(request.sampling, seed=secrets.randbits(63) if seed is None else seed)
        return Job(
            id=job_id,
            agent=f"{principal.tenant}/{_agent_id(request) or job_id}",
            root=model.root(principal),
            tokens=prompt.tokens,
            sampling=sampling,
            stop=request.stop,
            max_tokens=self._max_tokens(
                request, len(prompt.tokens), model.backend.spec.max_context
            ),
            boundaries=prompt.boundaries,
            is_stateful=request.agent.continuation is not None,
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


def _agent_id(request: ChatRequest) -> str | None:
    """The agent a request names; session keys that cannot name one are hashed."""
    hint = request.agent
    if hint.agent_id or not hint.session:
        return hint.agent_id
    try:
        check_agent_id(hint.session, "session_id")
    except InvalidRequestError:
        return f"session-{hashlib.sha256(hint.session.encode()).hexdigest()[:32]}"
    return hint.session
