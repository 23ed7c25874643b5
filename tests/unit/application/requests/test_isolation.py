"""Another tenant's text cannot be detected: it takes the same work as new text.

Times are not asserted: what takes time is counted, on the device and in the tokenizer.
`benchmarks/bench_tenant_timing.py` measures them.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer
from semantic.application.engine.model import LoadedModel
from semantic.application.prompt.replay import ReplayStore
from semantic.application.requests.service import InferenceService
from semantic.domain.agents import Principal
from semantic.domain.chat import AgentHint, ChatRequest, Message, Role
from semantic.domain.events import Finished
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.ports.backend import LAST_SAMPLED, KVPayload, SequenceId, Step, Ticket
from tests.unit.application.device_rig import gate_to, ready_device
from tests.unit.application.ledger_rig import agents_of

pytestmark = pytest.mark.unit

Work = Counter[str]


class CountingBackend(FakeBackend):
    """Notes what it is asked to do, and how much of it."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def launch(self, step: Step) -> Ticket:
        for chunk in step.chunks:
            self.work["computed"] += 1 if chunk.tokens is LAST_SAMPLED else len(chunk.tokens)
        return super().launch(step)

    def load(self, seq: SequenceId, parts: Sequence[KVPayload], end: int) -> None:
        self.work["loaded"] += len(parts)
        super().load(seq, parts, end)

    def fork(self, src: SequenceId, dst: SequenceId, num_tokens: int) -> bool:
        self.work["forked"] += num_tokens
        return super().fork(src, dst, num_tokens)


class CountingTokenizer(FakeTokenizer):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def encode_plain(self, text: str, *, is_start: bool = False) -> list[int]:
        self.work["encoded"] += len(text)
        return super().encode_plain(text, is_start=is_start)


def said(word: str) -> ChatRequest:
    """A long conversation; all words of five letters make equally long ones."""
    system = Message.of(Role.SYSTEM, f"{word} " * 100)
    question = Message.of(Role.USER, f"{word} " * 100)
    stop = StopRules(max_tokens=1)
    return ChatRequest("fake", (system, question), sampling=SamplingParams(seed=1), stop=stop)


async def asked(
    service: InferenceService, work: Work, who: Principal, request: ChatRequest
) -> tuple[Work, int]:
    """Ask to the end; returns the work that took, and how many tokens were reused."""
    work.clear()
    events = [event async for event in await service.start(request, who)]
    finished = events[-1]
    assert isinstance(finished, Finished)
    return work.copy(), finished.usage.cache_read_tokens


@contextlib.contextmanager
def counted() -> Iterator[tuple[InferenceService, Work]]:
    """A service, and the work that it does."""
    work: Work = Counter()
    model = LoadedModel("fake", CountingBackend(work), CountingTokenizer(work))
    with ready_device(model) as device:
        gate = gate_to(device[0])
        yield InferenceService(*device, agents_of(), ReplayStore(), gate=gate), work


async def test_a_prompt_of_another_tenant_takes_the_same_work_as_a_cold_one() -> None:
    victim, prober = Principal("victim", b"one salt"), Principal("prober", b"another")
    with counted() as (service, work):
        await asked(service, work, prober, said("first"))  # whatever is done once for a tenant
        cold, num_cold = await asked(service, work, prober, said("never"))
        await asked(service, work, victim, said("plans"))
        probe, num_probed = await asked(service, work, prober, said("plans"))
        own, num_own = await asked(service, work, prober, said("plans"))

    # A few tokens of the template are the prober's own, from its first prompt.
    assert num_probed == num_cold < 20
    assert probe == cold
    # The same prompt of one's own is another matter, or this would show nothing.
    assert num_own > 400
    assert own["computed"] < cold["computed"] / 2
    assert own["encoded"] < cold["encoded"] / 2


async def test_an_ephemeral_prompt_takes_the_same_work_again() -> None:
    """No cache has kept it; it may still read what others have left."""
    me, ephemeral = Principal(), AgentHint("coder", is_ephemeral=True)
    with counted() as (service, work):
        await asked(service, work, me, said("first"))
        cold, num_cold = await asked(service, work, me, said("never"))
        await asked(service, work, me, replace(said("plans"), agent=ephemeral))
        again, num_again = await asked(service, work, me, said("plans"))
        _, num_read = await asked(service, work, me, replace(said("plans"), agent=ephemeral))

    assert (again, num_again) == (cold, num_cold)
    assert num_read > 400
