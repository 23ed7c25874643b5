"""The service between protocols and the engine, on a real device thread with the fake backend."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer
from semantic.adapters.outbound.grammar.compiler import LLGuidanceGrammar
from semantic.application.agents.ledger import AgentLedger
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import LoadedModel
from semantic.application.engine.request import AheadJob
from semantic.application.prompt.renderer import render
from semantic.application.prompt.replay import ReplayKey, ReplayStore
from semantic.application.requests.identity import BusyAgents, Identities
from semantic.application.requests.limits import RateLimits
from semantic.application.requests.prepare import NUM_THREADS, PastConversations, Preparation
from semantic.application.requests.reply import ReplyHub
from semantic.application.requests.service import InferenceService
from semantic.application.settings import EngineLimits
from semantic.domain.access import KeyRing, Rate
from semantic.domain.agents import Agent, Principal, Quota
from semantic.domain.chat import (
    AgentHint,
    ChatRequest,
    JsonFormat,
    JsonObject,
    Message,
    RawPrompt,
    RegexFormat,
    Role,
    Thinking,
    ToolChoice,
    ToolMode,
    ToolSpec,
    ToolUsePart,
)
from semantic.domain.errors import (
    CachePersistenceError,
    ContextLengthError,
    DrainingError,
    GenerationTimeoutError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    QuotaExceededError,
)
from semantic.domain.events import Event, Failed, Finished, Started, TextDelta, ThinkingDelta
from semantic.domain.reply_format import HARMONY, Markers, ReplyFormat, ReplyShape
from semantic.domain.sampling import (
    DEFAULT_REPLY_TOKENS,
    UNSET_SAMPLING,
    FinishReason,
    SamplingDefaults,
    SamplingParams,
    StopRules,
)
from semantic.ports.inbound import EmbeddingRequest, Reply
from semantic.ports.storage import LedgerChange
from tests.notations import FUNCTIONARY
from tests.unit.application.device_rig import gate_to, hold, ready_device
from tests.unit.application.ledger_rig import agents_of
from tests.waiting import await_that

pytestmark = pytest.mark.unit

ME = Principal()
REQUEST = ChatRequest("fake", (Message.of(Role.USER, "hello"),))


def nested(depth: int) -> JsonObject:
    value: JsonObject = {}
    for _ in range(depth):
        value = {"items": [value]}
    return value


@pytest.fixture
def device() -> Iterator[tuple[DeviceThread, ReplyHub]]:
    tokenizer = FakeTokenizer()
    model = LoadedModel("fake", FakeBackend(), tokenizer, grammar=LLGuidanceGrammar(tokenizer))
    with ready_device(model) as made:
        yield made


@pytest.fixture
def agents() -> AgentLedger:
    return agents_of()


@pytest.fixture
def service(device: tuple[DeviceThread, ReplyHub], agents: AgentLedger) -> InferenceService:
    return InferenceService(*device, agents, ReplayStore(), gate=gate_to(device[0]))


async def read(reply: Reply) -> list[Event]:
    return [event async for event in reply]


async def ask(
    service: InferenceService, request: ChatRequest = REQUEST, principal: Principal = ME
) -> list[Event]:
    """The events of a request's reply."""
    return await read(await service.start(request, principal))


def finished(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def replied(request: ChatRequest, events: list[Event]) -> tuple[Message, ...]:
    """A conversation with its reply, and the same question again."""
    return (*request.messages, Message.of(Role.ASSISTANT, text_of(events)), *request.messages)


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@pytest.mark.parametrize("default", [9, None])
@pytest.mark.parametrize("asked", [None, 200_000])
def test_how_long_a_reply_may_be(
    device: tuple[DeviceThread, ReplyHub],
    agents: AgentLedger,
    default: int | None,
    asked: int | None,
) -> None:
    thread, _ = device
    thread.reconfigure(EngineLimits(default_max_tokens=default))
    identities = Identities(agents)
    preparation = Preparation(thread, agents, identities, ReplayStore(), request_timeout_s=60)
    request, model = replace(REQUEST, stop=StopRules(max_tokens=asked)), thread.ready_model()
    job = preparation.prepare(request, ME, model, BusyAgents().claim("local")).job
    fitting = min(model.backend.spec.max_context, thread.longest_sequence) - len(job.tokens)
    assert job.max_tokens == min(asked or default or DEFAULT_REPLY_TOKENS, fitting)


@pytest.mark.parametrize("given", [None, 0.7])
async def test_a_model_has_its_own_way_of_sampling(
    agents: AgentLedger, given: float | None
) -> None:
    defaults = SamplingDefaults(temperature=0.2, top_p=0.9, max_tokens=5)
    model = LoadedModel("fake", FakeBackend(), FakeTokenizer(), defaults=defaults)
    unset = UNSET_SAMPLING - ({"temperature"} if given else set())
    sampling = SamplingParams(temperature=given or 1.0, unset=unset)
    request = replace(REQUEST, sampling=sampling, stop=StopRules(ignore_eos=True))
    with ready_device(model) as device:
        device[0].reconfigure(EngineLimits(default_max_tokens=None))
        service = InferenceService(*device, agents, ReplayStore(), gate=gate_to(device[0]))
        events = await ask(service, request)
    assert isinstance(events[0], Started)
    used = events[0].sampling
    assert (used.temperature, used.top_p) == (given or 0.2, 0.9)
    assert isinstance(events[-1], Finished)
    assert events[-1].usage.completion_tokens == 5


class _ThinkingTokenizer(FakeTokenizer):
    """A model whose template always opens its thinking."""

    def render_chat(self, *args: Any, **options: Any) -> str:
        text = super().render_chat(*args, **options)
        return text + "<think>\n" if options.get("add_generation_prompt", True) else text


async def test_thinking_is_separated_if_the_server_lists_the_tools(agents: AgentLedger) -> None:
    thinking = ReplyFormat(thinking=Markers("<think>", "</think>"))
    model = LoadedModel("fake", FakeBackend(), _ThinkingTokenizer(), reply_format=thinking)
    request = replace(
        REQUEST,
        tools=(ToolSpec("send", "", {"type": "object"}),),
        stop=StopRules(max_tokens=9, ignore_eos=True),
    )
    with ready_device(model) as device:
        service = InferenceService(*device, agents, ReplayStore(), gate=gate_to(device[0]))
        events = await ask(service, request)
    assert any(isinstance(event, ThinkingDelta) for event in events)
    assert not any(isinstance(event, TextDelta) for event in events)


@pytest.mark.parametrize(
    "reply_format,opening",
    [
        (ReplyFormat(thinking=Markers("<think>", "</think>")), "\n</think>\n\n"),
        (ReplyFormat(HARMONY), "<|channel|>final<|message|>"),
        (ReplyFormat(FUNCTIONARY), "all\n"),
        (ReplyFormat(), ""),
    ],
)
async def test_a_reply_that_was_begun_is_an_answer(
    agents: AgentLedger, reply_format: ReplyFormat, opening: str
) -> None:
    tokenizer = _ThinkingTokenizer() if reply_format.thinking else FakeTokenizer()
    model = LoadedModel("fake", FakeBackend(), tokenizer, reply_format=reply_format)
    begun = Message.of(Role.ASSISTANT, "Yes, ")
    request = replace(
        REQUEST,
        messages=(*REQUEST.messages, begun),
        is_continued=True,
        sampling=SamplingParams(temperature=0),
        stop=StopRules(max_tokens=9, ignore_eos=True),
        thinking=Thinking(is_enabled=True, budget=2),
    )
    tokens = (
        *render(REQUEST, tokenizer).tokens,
        *tokenizer.encode(opening),
        *tokenizer.encode_plain("Yes, "),
    )
    with ready_device(model) as device:
        service = InferenceService(*device, agents, ReplayStore(), gate=gate_to(device[0]))
        assert await service.count_tokens(request, ME) == len(tokens)
        events = await ask(service, request)
        (agent,) = agents.agents("local")
        turn = agents.turns(agent)[0]
    assert turn.tokens[: len(tokens)] == tokens
    text = text_of(events)
    assert text
    assert [message.text for message in turn.messages] == ["hello", "Yes, " + text]


async def test_a_seed_decides_and_its_absence_does_not(service: InferenceService) -> None:
    async def seeded(seed: int | None) -> str:
        sampling = SamplingParams(temperature=2, seed=seed)
        request = replace(REQUEST, sampling=sampling, stop=StopRules(ignore_eos=True))
        return text_of(await ask(service, request))

    assert await seeded(1) == await seeded(1)
    assert len({await seeded(None) for _ in range(5)}) > 1


@pytest.mark.parametrize(
    "change,error,param",
    [
        ({"model": "other"}, ModelNotFoundError, None),
        ({"messages": (Message.of(Role.USER, "x" * 140_000),)}, ContextLengthError, "messages"),
        ({"output_format": RegexFormat("(")}, InvalidRequestError, "response_format"),
        ({"tools": (ToolSpec("f", "", nested(400)),)}, InvalidRequestError, None),
        (
            {"messages": (Message(Role.ASSISTANT, (ToolUsePart("id", "f", nested(400)),)),)},
            InvalidRequestError,
            None,
        ),
    ],
)
async def test_refusals_come_before_the_reply(
    service: InferenceService,
    change: dict[str, object],
    error: type[InvalidRequestError],
    param: str | None,
) -> None:
    with pytest.raises(error) as caught:
        await service.start(replace(REQUEST, **change), ME)  # type: ignore[arg-type]
    assert getattr(caught.value, "param", None) == param


async def test_a_prompt_as_long_as_the_context_leaves_no_room_for_a_reply(
    service: InferenceService,
) -> None:
    def asking(text: str) -> ChatRequest:
        return replace(REQUEST, messages=(Message.of(Role.USER, text),))

    num_around = len(render(asking("x"), FakeTokenizer()).tokens) - 1
    with pytest.raises(ContextLengthError):
        await service.start(asking("x" * (131_072 - num_around)), ME)


async def test_a_request_has_a_deadline(
    device: tuple[DeviceThread, ReplyHub], agents: AgentLedger
) -> None:
    service = InferenceService(*device, agents, ReplayStore(), gate=gate_to(device[0], 0.5))
    request = replace(REQUEST, stop=StopRules(max_tokens=100_000, ignore_eos=True))
    async with asyncio.timeout(20):
        final = (await ask(service, request))[-1]
    assert isinstance(final, Failed)
    assert isinstance(final.error, GenerationTimeoutError)


@pytest.mark.parametrize("is_stopping", [True, False])
async def test_a_refused_submission_leaves_no_reply_behind(
    service: InferenceService, device: tuple[DeviceThread, ReplyHub], is_stopping: bool
) -> None:
    thread, hub = device
    limits = RateLimits(lambda: KeyRing(rate=Rate(tokens=1000)), lambda: 0.0)
    service.limits = lambda: limits
    thread.reconfigure(EngineLimits(max_batch_size=1, max_queue=0, batch_window_ms=0))
    endless = StopRules(max_tokens=100_000, ignore_eos=True)
    running = await service.start(replace(REQUEST, stop=endless), ME)
    (before,) = limits.allowances(ME)
    if is_stopping:
        thread.request_stop()
    refusal = DrainingError if is_stopping else OverloadedError
    with pytest.raises(refusal):
        await service.start(REQUEST, ME)
    with pytest.raises(refusal):
        await service.embed(EmbeddingRequest("fake", ("hello",)), ME)
    (after,) = limits.allowances(ME)
    assert before.remaining == after.remaining < 1000
    running.cancel()
    assert isinstance((await read(running))[-1], Failed if is_stopping else Finished)
    assert hub.num_open == 0


async def test_a_raw_prompt_is_taken_as_it_stands(
    service: InferenceService, agents: AgentLedger
) -> None:
    greedy = replace(REQUEST, sampling=SamplingParams(temperature=0))
    prompt = render(REQUEST, FakeTokenizer()).tokens
    by_chat = await ask(service, greedy)
    texts = []
    for content in (prompt, "<|start|>user\nhello<|end|><|start|>assistant\n"):
        raw = replace(greedy, messages=(), raw_prompt=RawPrompt(content))
        texts.append(text_of(await ask(service, raw)))
    assert texts == [text_of(by_chat)] * 2
    assert await service.decode(list(b"hello")) == "hello"
    head = agents.agents("local")[0].head
    turn = agents.turn("local", head or "")
    assert turn is not None
    assert turn.messages == ()


@pytest.mark.parametrize(
    "error,is_on_disk,said",
    [
        (None, None, None),  # turns are written behind
        (None, True, True),
        (None, False, False),  # the row is written, and the KV cache is not
        (CachePersistenceError("No space left on device"), True, False),
    ],
)
async def test_a_reply_tells_whether_its_turn_is_safe(
    device: tuple[DeviceThread, ReplyHub],
    error: Exception | None,
    is_on_disk: bool | None,
    said: bool | None,
) -> None:
    def write(*_: LedgerChange) -> Future[None]:
        done: Future[None] = Future()
        done.set_exception(error) if error else done.set_result(None)
        return done

    service = InferenceService(
        *device,
        agents_of(write=write),
        ReplayStore(),
        gate=gate_to(device[0]),
        is_durable=None if is_on_disk is None else lambda *_: is_on_disk,
    )
    final = finished(await ask(service))
    assert final.is_durable is said


# -- whose turn it is, and what a request that is refused leaves behind -------------------------


async def test_of_requests_that_name_one_agent_at_once_one_becomes_it(
    service: InferenceService, device: tuple[DeviceThread, ReplyHub], agents: AgentLedger
) -> None:
    request = replace(REQUEST, agent=AgentHint(agent_id="coder"))
    may_go_on = hold(device[0])
    replies = await asyncio.gather(*(service.start(request, ME) for _ in range(8)))
    may_go_on.set()
    await asyncio.gather(*map(read, replies))
    assert len(agents.agents("local")) == 8
    await ask(service, request)
    assert len(agents.agents("local")) == 8


async def test_a_request_that_is_cancelled_while_it_is_prepared_leaves_its_agent_free(
    device: tuple[DeviceThread, ReplyHub], agents: AgentLedger
) -> None:
    replays = StuckReplays()
    service = InferenceService(*device, agents, replays, gate=gate_to(device[0]))
    said = (*REQUEST.messages, Message.of(Role.ASSISTANT, "yes"), *REQUEST.messages)
    request = replace(REQUEST, messages=said, agent=AgentHint(agent_id="coder"))
    starting = asyncio.create_task(service.start(request, ME))
    try:
        assert await asyncio.to_thread(replays.is_read.wait, 60)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    finally:
        replays.gate.set()
    await ask(service, request)
    assert [agent.id for agent in agents.agents("local")] == ["coder"]


class StuckReplays(ReplayStore):
    """Finds nothing until its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.is_read = threading.Event(), threading.Event()

    def lookup(self, key: ReplayKey, *, is_used: bool = True) -> tuple[int, ...] | None:
        self.is_read.set()
        assert self.gate.wait(60)
        return super().lookup(key, is_used=is_used)


async def test_a_request_that_does_not_fit_leaves_no_fork_behind(
    service: InferenceService, agents: AgentLedger
) -> None:
    said = replied(REQUEST, await ask(service))
    endless = StopRules(max_tokens=100_000, ignore_eos=True)
    going_on = replace(REQUEST, messages=said, stop=endless)
    running = await service.start(going_on, ME)
    too_long = replace(going_on, messages=(*said, Message.of(Role.USER, "x" * 140_000)))
    with pytest.raises(ContextLengthError):
        await service.start(too_long, ME)
    assert len(agents.agents("local")) == 1
    fork = replace(going_on, stop=StopRules(max_tokens=1))
    await ask(service, fork)
    assert {agent.num_turns for agent in agents.agents("local")} == {1, 2}
    running.cancel()
    await read(running)


async def test_a_request_over_the_quota_leaves_no_fork_behind(
    service: InferenceService, agents: AgentLedger
) -> None:
    agents.create(Agent("coder", 0.0, quota=Quota(max_turns=1)))
    request = replace(REQUEST, agent=AgentHint(agent_id="coder"))
    said = replied(REQUEST, await ask(service, request))
    with pytest.raises(QuotaExceededError):
        await service.start(replace(REQUEST, messages=said), ME)
    assert [agent.id for agent in agents.agents("local")] == ["coder"]


class DatedTokenizer(FakeTokenizer):
    """Its template shows the date."""

    def render_chat(self, *args: Any, **options: Any) -> str:
        return f"{options.get('today')}{super().render_chat(*args, **options)}"


@pytest.mark.parametrize("hint", [AgentHint(), AgentHint(agent_id="coder")])
async def test_only_an_answered_conversation_has_its_own_date(
    agents: AgentLedger, hint: AgentHint
) -> None:
    replays = ReplayStore()
    request = replace(REQUEST, agent=hint)
    with ready_device(LoadedModel("fake", FakeBackend(), DatedTokenizer())) as device:
        service = InferenceService(*device, agents, replays, gate=gate_to(device[0]))
        num_prompt = await service.count_tokens(request, ME)
        long = (*request.messages, Message.of(Role.USER, "x" * 140_000))
        with pytest.raises(ContextLengthError):
            await service.start(replace(request, messages=long), ME)
        assert replays.num_bytes == 0
        final = finished(await ask(service, request))
        assert final.usage.prompt_tokens == num_prompt
        num_kept = replays.num_bytes
        await service.count_tokens(request, ME)
    assert replays.num_bytes == num_kept > 0


class StuckGrammar:
    """Never done until it is told."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def constrain(self, shape: ReplyShape, max_tokens: int) -> None:  # noqa: ARG002
        self.gate.wait(60)


async def test_requests_that_are_never_prepared_are_refused_and_the_problem_is_reported(
    agents: AgentLedger,
) -> None:
    grammar = StuckGrammar()
    model = LoadedModel("fake", FakeBackend(), FakeTokenizer(), grammar=grammar)
    with ready_device(model) as device:
        service = InferenceService(*device, agents, ReplayStore(), gate=gate_to(device[0], 1))
        request = replace(REQUEST, output_format=JsonFormat())
        starts = [service.start(request, Principal("local")) for _ in range(NUM_THREADS)]
        errors = await asyncio.gather(*starts, return_exceptions=True)
        assert {type(error) for error in errors} == {GenerationTimeoutError}
        assert "requests cannot be prepared" in service.problem
        with pytest.raises(OverloadedError, match="too many"):
            await service.start(REQUEST, Principal("local"))
        grammar.gate.set()
        await asyncio.to_thread(await_that, lambda: not service.problem)
        reply = await service.start(REQUEST, Principal("local"))
        reply.cancel()


async def test_after_a_restart_drafts_start_from_the_tenants_agents(
    service: InferenceService, device: tuple[DeviceThread, ReplyHub], agents: AgentLedger
) -> None:
    other = agents.principal("other")
    await ask(service, replace(REQUEST, agent=AgentHint(agent_id="mine")))
    await ask(service, replace(REQUEST, agent=AgentHint(agent_id="theirs")), other)
    model = device[0].ready_model()
    said = agents.log.tokens(ME.tenant, agents.get(ME.tenant, "mine").head)
    past = PastConversations(agents)  # as a server that starts now
    assert past.of(ME.tenant, model.root(ME), model) == (tuple(said),)
    assert past.of(ME.tenant, model.root(ME), model) == ()
    loaded_again = replace(model, backend=FakeBackend())
    assert past.of(ME.tenant, loaded_again.root(ME), loaded_again) == (tuple(said),)


# -- work while tools run -----------------------------------------------------------------------

READ = ToolSpec("read", "", {"type": "object", "properties": {"path": {"enum": ["a.txt"]}}})


@pytest.mark.parametrize("limit, is_computed", [(None, True), (100_000, True), (10, False)])
@pytest.mark.parametrize("ahead_tokens", [100, 0])
async def test_what_follows_a_call_is_computed_within_the_limits(
    device: tuple[DeviceThread, ReplyHub],
    service: InferenceService,
    limit: int | None,
    is_computed: bool,
    ahead_tokens: int,
) -> None:
    jobs: list[AheadJob] = []
    device[0].compute_ahead = jobs.append  # type: ignore[assignment, method-assign]
    device[0].reconfigure(EngineLimits(ahead_tokens=ahead_tokens, batch_window_ms=0))
    if limit is not None:
        limits = RateLimits(lambda: KeyRing(rate=Rate(tokens=limit)))
        service.limits = lambda: limits
    choice = ToolChoice(ToolMode.NAMED, "read")
    request = replace(REQUEST, tools=(READ,), tool_choice=choice, stop=StopRules(max_tokens=200))
    events = await ask(service, request)
    assert finished(events).reason is FinishReason.TOOL_USE
    rendering = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*filter(None, rendering))
    assert len(jobs) == (is_computed and ahead_tokens > 0)
