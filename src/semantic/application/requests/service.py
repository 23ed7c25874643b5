"""The inference service: takes conversations from protocols and returns streams of events."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from semantic.application.agents.comparison import CacheFacts
from semantic.application.agents.feed import EventFeed
from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.running_turns import TurnWatch
from semantic.application.agents.turn_log import FinishedTurn, turn_id
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import LoadedModel
from semantic.application.engine.request import EmbeddingJob
from semantic.application.models.gate import ModelGate
from semantic.application.parsing import ReplyParser
from semantic.application.prompt.replay import (
    ReplayStore,
    emitted_tokens,
    keys_to_remember,
    prompt_digest,
)
from semantic.application.requests.ahead import PrefillAhead
from semantic.application.requests.compaction.clients import ClientCompactions
from semantic.application.requests.compaction.prefill import Prefill, PromptPrefiller
from semantic.application.requests.embeddings.texts import mean_vector, text_tokens
from semantic.application.requests.explain import CacheExplainer, PromptComparison
from semantic.application.requests.identity import BusyAgents, Claim, Identities
from semantic.application.requests.limits import Admission, RateLimits
from semantic.application.requests.prepare import Preparation, PreparationThreads, PreparedRequest
from semantic.application.requests.reply import (
    FinishedReply,
    LiveReply,
    ReplyHub,
    UnloggedReplyError,
)
from semantic.application.requests.rewriting.repairs import PromptRepairs, RepairingPreparation
from semantic.application.requests.truncation import without_oldest
from semantic.domain.agents import Agent, Pointer, Principal, Reuse, Turn
from semantic.domain.blocks import BlockName
from semantic.domain.chat import (
    ChatRequest,
    Message,
    ServiceClass,
    ToolUsePart,
)
from semantic.domain.errors import (
    AgentNotFoundError,
    CachePersistenceError,
    ConflictError,
    ContextLengthError,
    GenerationTimeoutError,
    SemanticError,
)
from semantic.domain.events import Failed, Started, TextDelta, Usage
from semantic.domain.sampling import FinishReason
from semantic.domain.volatile.rules import AppliedRepairs
from semantic.ports.inbound import EmbeddingRequest, Embeddings, Reply
from semantic.ports.telemetry import NoTelemetry

_log = logging.getLogger(__name__)
_MAX_BACKGROUND = 4  # expected prompts that are computed at once
_WHOLE = (FinishReason.END_TURN, FinishReason.STOP_SEQUENCE)
_PREPARE_S = 60  # the longest time to prepare a request before it is queued


class InferenceService:
    """`InferencePort` over one device. Used on the event loop's thread.

    Attributes:
        limits: Returns the rate limits; None while nothing is limited, as by default.
        image_texts: See `Preparation`.
        learn: Looks up which blocks of a prompt other servers have computed; called in a thread
            before the request is queued. None on a single server.
    """

    def __init__(
        self,
        device: DeviceThread,
        hub: ReplyHub,
        agents: AgentLedger,
        replays: ReplayStore,
        *,
        gate: ModelGate,
        is_durable: Callable[[str, str], bool] | None = None,
        watch: TurnWatch | None = None,
    ) -> None:
        """Create the service; starts no thread.

        Args:
            gate: Makes requests wait for their model; defines the request timeout.
            is_durable: Whether a written turn, given by tenant and id, is durable on disk. If set,
                replies end after their turn is written and report the result; None reports nothing.
            watch: Records every request for feed and telemetry; None discards the records.
        """
        self.gate = gate
        gate.on_refused = self._refused
        self._device = device
        self._hub = hub
        self._agents = agents
        self._replays = replays
        self._identities = Identities(agents)
        self._keep_repairs: Callable[[AppliedRepairs], None] = lambda _: None
        self._preparation = Preparation(
            device, agents, self._identities, replays, request_timeout_s=gate.timeout_s
        )
        self.image_texts = self._preparation.image_texts
        self._explainer = CacheExplainer(agents)
        self._threads = PreparationThreads(min(gate.timeout_s, _PREPARE_S))
        self._ahead = PrefillAhead(device, self._preparation, self._threads)
        self._prefiller = PromptPrefiller(
            device, hub, self._preparation, self._threads, gate.timeout_s
        )
        self._request_timeout_s = gate.timeout_s
        self._is_durable = is_durable
        self._watch = watch or TurnWatch(EventFeed(), NoTelemetry())
        self._busy = BusyAgents(agents.leases)
        self._background: set[asyncio.Task[None]] = set()
        self._compactions = ClientCompactions(self.expect)
        self.limits: Callable[[], RateLimits | None] = lambda: None
        self.learn: Callable[[BlockName, Sequence[int]], None] | None = None

    def repair_prompts(self, repairs: PromptRepairs) -> None:
        """Apply rules to all later requests before they are rendered."""
        self._preparation = RepairingPreparation(self._preparation, repairs)
        self._keep_repairs = repairs.keep

    def note_remote_turn(self, tenant: str, agent_id: str, turn_id: str) -> None:
        """Remember a turn that another server logged. Thread-safe."""
        self._identities.note_remote_turn(tenant, agent_id, turn_id)

    @property
    def problem(self) -> str:
        """Why requests cannot be prepared, to report in `/health`; empty if they can."""
        return self._threads.problem

    async def start(self, request: ChatRequest, principal: Principal) -> Reply:
        return await self.gate.reply(request.model, lambda: self.begin(request, principal))

    def _refused(self, error: SemanticError) -> None:
        model = self._device.model
        self._watch.refuse(model.id if model else "", error)

    def _admit(self, principal: Principal) -> Admission | None:
        limits = self.limits()
        return None if limits is None else limits.admit(principal)

    async def begin(self, request: ChatRequest, principal: Principal) -> LiveReply:
        """Render, tokenise, check and queue a request whose model is already loaded."""
        while True:
            try:
                return await self._begin(request, principal)
            except ContextLengthError as refusal:
                shorter = without_oldest(request, refusal) if request.drops_oldest else None
                if shorter is None:
                    raise
                request = shorter

    async def _begin(self, request: ChatRequest, principal: Principal) -> LiveReply:
        received = time.monotonic()
        model = self.gate.model_for(request.model)
        admission = self._admit(principal)
        claim = self._busy.claim(principal.tenant)
        try:
            # In a thread: tokenising a long prompt would stall other streams.
            with self._device.expecting():
                prepared = await self._threads.run(
                    self._preparation.prepare, request, principal, model, claim
                )
                if self.learn is not None:
                    await self._threads.run(self.learn, prepared.job.root, prepared.job.tokens)
            prepared.job.trace.received = received
            if admission is not None:
                admission.charge(prepared.identity.agent_id, len(prepared.job.tokens))
            compared = None
            if request.agent.comparison is not None:
                compared = await self._threads.run(self._explainer.compare, prepared)
            reply = self._submit(prepared, claim, compared)
            if admission is not None:
                reply.on_end(admission.end)
        except BaseException:
            claim.release()
            if admission is not None:
                admission.refund()
            raise
        else:
            return reply

    def _submit(
        self, prepared: PreparedRequest, claim: Claim, compared: PromptComparison | None
    ) -> LiveReply:
        job, shape = prepared.job, prepared.shape
        model, usage = prepared.model, Usage(prompt_tokens=len(job.tokens))
        started = Started(
            job.id,
            model.id,
            usage,
            job.sampling,
            model.system_fingerprint,
            prepared.prompt.num_marked,
            compared.change if compared else None,
        )
        parser = ReplyParser(
            shape.format,
            shape.allowed_tools,
            is_thinking_open=shape.is_thinking_open,
            is_parallel=shape.tool_choice.is_parallel,
            must_call=shape.must_call,
        )
        parser.push(TextDelta(shape.opening))
        reply = LiveReply(
            started,
            parser,
            on_cancel=lambda: self._device.cancel(job.id),
            log=None
            if job.is_ephemeral
            else lambda finished: self._log_turn(prepared, finished, claim.epoch),
            thinking=prepared.thinking,
            beginning=prepared.request.beginning,
        )
        reply.report = compared.report if compared else None
        self._hub.open(job.id, reply)
        if not job.is_ephemeral:
            self._ahead.expected.pop(job.agent, None)
        job.trace.queued, job.trace.max_tokens = time.monotonic(), job.max_tokens
        try:
            self._device.submit(job, model)
        except BaseException:
            self._hub.discard(job.id)
            raise
        reply.on_end(lambda *_: claim.release())
        reply.on_end(lambda *_: self._resume_ahead())
        tenant, agent_id = prepared.principal.tenant, prepared.identity.agent_id
        is_published = not job.is_ephemeral
        reply.on_end(
            self._watch.begin(started, tenant, agent_id, job.trace, is_published=is_published)
        )
        return reply

    def _expect_results(self, prepared: PreparedRequest, reply: Message) -> None:
        """Have the prompt after a reply with tool calls computed ahead, within the rate limits."""
        if self._has_allowance(prepared.principal):
            self._ahead.add(prepared, reply)

    def _has_allowance(self, principal: Principal) -> bool:
        limits = self.limits()
        return limits is None or all(left.remaining for left in limits.allowances(principal))

    def _resume_ahead(self) -> None:
        if self._ahead.expected:
            self._ahead.resume()

    def max_context(self, name: str) -> int:
        """Return how many tokens of prompt and reply fit a model that is loaded."""
        spec = self.gate.model_for(name).backend.spec
        return min(spec.max_context, self._device.longest_sequence)

    async def prefill(
        self, expected: Sequence[ChatRequest], principal: Principal, agent: Agent | None = None
    ) -> Prefill:
        """Compute what the prompts of all `expected` requests begin with; logs no turn.

        See `PromptPrefiller.start`.
        """
        model = self.gate.model_for(expected[0].model)
        return await self._prefiller.start(expected, principal, model, agent)

    def expect(self, expected: Sequence[ChatRequest], principal: Principal) -> None:
        """Compute in the background what one of the requests will begin with, as `prefill` does.

        Returns at once. Requests of clients take precedence, and a failure is only logged.
        """
        later = [replace(request, service_class=ServiceClass.BACKGROUND) for request in expected]
        if len(self._background) < _MAX_BACKGROUND and self._has_allowance(principal):
            task = asyncio.create_task(self._compute_ahead(later, principal))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    @property
    def num_background(self) -> int:
        """Expected prompts that are being computed."""
        return len(self._background)

    async def _compute_ahead(self, expected: Sequence[ChatRequest], principal: Principal) -> None:
        try:
            await (await self.prefill(expected, principal)).result()
        except SemanticError as error:
            _log.info("an expected prompt was not computed ahead: %s", error.message)

    async def count_tokens(self, request: ChatRequest, principal: Principal) -> int:
        model = await self.gate.model(request.model)
        admission = self._admit(principal)
        try:
            render = self._preparation.render
            return len((await self._threads.run(render, request, principal, model)).tokens)
        finally:
            if admission is not None:
                admission.release()

    async def embed(self, request: EmbeddingRequest, principal: Principal) -> Embeddings:
        model = await self.gate.model(request.model)
        admission = self._admit(principal)
        try:
            longest = self._device.longest_sequence
            texts = await self._threads.run(text_tokens, request, model, longest)
            num_tokens = sum(map(len, texts))
            if admission is not None:
                admission.charge(None, num_tokens)
            sums = [await self._sum(EmbeddingJob(tokens), model) for tokens in texts]
        except SemanticError as error:
            if admission is not None:
                admission.end(Failed(error), Reuse())
            raise
        finally:
            if admission is not None:
                admission.release()
        pairs = zip(sums, texts, strict=True)
        vectors = tuple(mean_vector(each, len(tokens), request) for each, tokens in pairs)
        return Embeddings(model.id, vectors, num_tokens)

    async def _sum(self, job: EmbeddingJob, model: LoadedModel) -> tuple[float, ...]:
        self._device.submit(job, model)
        try:
            async with asyncio.timeout(self._request_timeout_s):
                return await asyncio.wrap_future(job.result)
        except TimeoutError:
            raise GenerationTimeoutError(
                f"a text took more than {self._request_timeout_s:g} s; send a shorter one."
            ) from None
        finally:
            job.result.cancel()

    async def decode(self, tokens: Sequence[int]) -> str:
        token_bytes = (await self.gate.model("")).tokenizer.token_bytes
        return b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")

    async def _log_turn(
        self, prepared: PreparedRequest, finished: FinishedReply, epoch: int | None
    ) -> bool | None:
        """Log a turn, and store its tokens for replay when the client sends the reply again.

        A reply that its reader stopped is a turn too, unless nothing of it was written.

        Returns whether the turn is durable on disk; None if the server does not report that.
        Raises `UnloggedReplyError` if agents are shared with other servers and logging fails:
        those servers would continue without the turn, so the reply must fail.
        """
        is_unsafe = None if self._is_durable is None else False
        if finished.event.reason is FinishReason.CANCELLED and not finished.message.parts:
            return is_unsafe
        try:
            turn, done = await asyncio.to_thread(self._commit, prepared, finished, epoch)
            self._watch.persist(prepared.job.trace, done)
        except (AgentNotFoundError, ConflictError, CachePersistenceError) as error:
            if self._agents.is_shared:
                raise UnloggedReplyError(error) from error
            if isinstance(error, CachePersistenceError):
                raise
            _log.info("turn not logged: %s", error.message)
            return is_unsafe
        if any(isinstance(part, ToolUsePart) for part in finished.message.parts):
            self._expect_results(prepared, finished.message)
        if prepared.request.agent.client_key and finished.event.reason in _WHOLE:
            self._compactions.note(prepared.request, finished.message, prepared.principal)
        if self._is_durable is None:
            return None
        # The reply succeeds even if the log cannot be written; the disk reports the error.
        with contextlib.suppress(CachePersistenceError, TimeoutError):
            async with asyncio.timeout(self._request_timeout_s):
                await asyncio.wrap_future(done)
            tenant = prepared.principal.tenant
            return await asyncio.to_thread(self._is_durable, tenant, turn.id)
        return False

    def _commit(
        self, prepared: PreparedRequest, finished: FinishedReply, epoch: int | None
    ) -> tuple[Turn, Future[None]]:
        job, left, tenant = prepared.job, finished.state, prepared.principal.tenant
        self._remember(prepared, finished)
        block, request = left.block, prepared.request
        messages = (
            () if request.raw_prompt else (*request.without_beginning.messages, finished.message)
        )
        record = FinishedTurn(
            prompt=job.tokens,
            reply=left.tokens,
            messages=messages,
            pointer=None if block is None else Pointer(job.root, block, left.num_sealed),
            usage=finished.event.usage,
            reuse=left.reuse,
            turn_id=turn_id(job.id),
            is_stored=request.is_stored,
            continuation=(continuation := request.agent.continuation),
            epoch=continuation.epoch if continuation else epoch,
            model=prepared.model.id,
            reason=finished.event.reason,
            num_dropped=request.num_dropped,
            tools=request.tools,
            is_thinking=request.thinking.is_enabled if request.thinking else None,
            facts=CacheFacts(job.root, left.reuse, left.num_stored, left.is_damaged),
            previous=self._likely_previous(prepared),
            num_head=prepared.prompt.num_head,
            repairs=prepared.repairs.rules,
            timing=job.trace.timing,
        )
        identity = prepared.identity
        turn, done = self._agents.commit(
            tenant,
            identity.agent_id,
            record,
            is_anonymous=identity.is_anonymous,
            fork=identity.fork,
        )
        ending = (*job.tokens[-16:], *left.tokens[-16:])
        self._identities.note(tenant, identity.agent_id, turn, ending)
        return turn, done

    def _likely_previous(self, prepared: PreparedRequest) -> str | None:
        """Return the turn that the first turn of a new agent seems to continue, if any."""
        tenant, identity = prepared.principal.tenant, prepared.identity
        if identity.fork or self._agents.find_agent(tenant, identity.agent_id):
            return None
        turn = self._agents.likely_previous(tenant, prepared.request.messages)
        return turn.id if turn else None

    def _remember(self, prepared: PreparedRequest, finished: FinishedReply) -> None:
        tokens, stop = finished.state.tokens, prepared.request.stop
        if finished.event.reason is FinishReason.STOP_SEQUENCE:
            tokens = emitted_tokens(tokens, finished.raw_text, prepared.model.tokenizer)
        elif tokens and tokens[-1] in stop.token_ids:
            tokens = tokens[:-1]
        if prepared.request.raw_prompt is not None:
            return  # no chat template renders this reply again
        num_asked = len(prepared.job.tokens) - prepared.prompt.num_begun
        asked, begun = prepared.job.tokens[:num_asked], prepared.job.tokens[num_asked:]
        prompt = prompt_digest(prepared.model.text_root(prepared.principal), asked)
        for key in keys_to_remember(prompt, finished.message):
            self._replays.remember(key, (*begun, *tokens))
        self._keep_repairs(prepared.repairs)
        if (day := prepared.day) is not None:
            self._preparation.keep_day(prepared.request, prepared.principal, prepared.model, day)
