"""Changes to agents: where durability is promised, an answer comes after its change is written."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import pytest

from semantic.adapters.outbound.blocks.agent_archive import AgentFile, ExportKeys
from semantic.adapters.outbound.blocks.format import FORMATS, KVCodec
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.cache_admin import CacheService, ModelCache
from semantic.application.agents.feed import EventFeed
from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.running_turns import TurnLanes, TurnWatch
from semantic.application.agents.service import AgentService
from semantic.application.agents.transfer import AgentTransfer
from semantic.application.agents.turn_log import PastTurns, turn_id
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.prompt.replay import ReplayStore
from semantic.application.settings import EngineLimits
from semantic.domain.agents import Agent, Principal
from semantic.domain.errors import AgentNotFoundError, CachePersistenceError, ModelSwapError
from semantic.ports.telemetry import NoTelemetry
from tests.unit.application.device_rig import no_load
from tests.unit.application.ledger_rig import LateWriter, agents_of, exchange_of
from tests.waiting import await_that

pytestmark = pytest.mark.unit

OWNER = Principal()
BOB = Agent("bob", 1.0)


def no_model() -> ModelCache:
    raise ModelSwapError("no model is loaded.")


def no_engine(*_: object) -> NoReturn:
    raise AssertionError("nothing is computed")


@dataclass(frozen=True)
class Rig:
    """What changes agents; "ann" has two turns."""

    agents: AgentLedger
    service: AgentService
    transfer: AgentTransfer
    past: PastTurns


def make_rig(agents: AgentLedger) -> Rig:
    for number in (1, 2):
        said = [str(message) for message in range(2 * number)]
        prompt = list(range(2 * number - 1))
        exchange = exchange_of(prompt, [2 * number - 1], said, turn_id=turn_id(str(number)))
        agents.commit("local", "ann", exchange)
    feed, lanes = EventFeed(), TurnLanes(max_waiting=1, timeout_s=1)
    device = DeviceThread(
        lambda _: no_load(), no_engine, EngineLimits(), lambda _: None, hang_timeout_s=1
    )
    cache = CacheService(no_model, agents, device, TurnWatch(feed, NoTelemetry()), feed, None)
    files = AgentFile(KVCodec(FORMATS[16]), ExportKeys(bytes(32), {}))
    service = AgentService(agents, lanes, cache, feed, device)
    transfer = AgentTransfer(agents, no_model, device, None, files, feed, ReplayStore())
    return Rig(agents, service, transfer, PastTurns(agents.log))


def create_again(rig: Rig) -> None:
    rig.agents.create(BOB)  # as another request does, whose answer is not out yet
    assert not rig.service.create(BOB)[1]


def delete_again(rig: Rig) -> None:
    rig.agents.delete("local", "ann")
    with pytest.raises(AgentNotFoundError):
        rig.service.delete(OWNER, "ann")


def import_file(rig: Rig) -> None:
    file = list(rig.transfer.export(OWNER, "ann"))
    rig.transfer.import_agent(OWNER, lambda: file, "copy", is_messages_only=True)


CHANGES: dict[str, Callable[[Rig], object]] = {
    "create": lambda rig: rig.service.create(BOB),
    "create again": create_again,
    "update": lambda rig: rig.service.update(OWNER, "ann", lambda a: replace(a, is_pinned=True)),
    "fork": lambda rig: rig.service.fork(OWNER, "ann", ["b", "c"], turn_id("1")),
    "rewind": lambda rig: rig.service.rewind(OWNER, "ann", turn_id("1")),
    "delete": lambda rig: rig.service.delete(OWNER, "ann"),
    "delete again": delete_again,
    "import": import_file,
    "forget a response": lambda rig: rig.past.forget_text("1", OWNER),
}


def written(ledger: SqliteLedger) -> tuple[Any, ...]:
    """What is in a ledger."""
    agents = {agent.id: agent for agent in ledger.load().agents}
    turn = ledger.turn("local", turn_id("1"))
    return agents, turn


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_answered_when_it_is_written(change: str) -> None:
    ledger = SqliteLedger.in_memory()
    writer = LateWriter(ledger)
    rig = make_rig(agents_of(ledger, writer, settle_s=60))
    writer.write()
    before = written(ledger)
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(CHANGES[change], rig)
        await_that(lambda: writer.is_awaited or answering.done())
        assert not answering.done()
        writer.write(writer.num_waiting - 1)
        assert written(ledger) != before
        assert not answering.done()
        writer.write()
        answering.result(60)


@pytest.mark.parametrize("change", CHANGES)
def test_where_nothing_is_promised_a_change_is_answered_at_once(change: str) -> None:
    ledger = SqliteLedger.in_memory()
    writer = LateWriter(ledger)
    rig = make_rig(agents_of(ledger, writer))
    CHANGES[change](rig)
    assert not writer.is_awaited
    assert not written(ledger)[0]


def failed(error: Exception) -> Future[None]:
    done: Future[None] = Future()
    done.set_exception(error)
    return done


@pytest.mark.parametrize(
    "write,words",
    [
        (lambda *_: failed(CachePersistenceError("the disk is full.")), "the disk is full"),
        (lambda *_: Future(), "writing takes more than 0 s"),
    ],
)
def test_a_change_that_is_not_written_is_refused_and_stays_in_memory(
    write: Callable[..., Future[None]], words: str
) -> None:
    agents = agents_of(write=write, settle_s=0)
    rig = make_rig(agents)
    with pytest.raises(CachePersistenceError, match=words):
        rig.service.delete(OWNER, "ann")
    assert agents.find_agent("local", "ann") is None


def test_forks_are_written_in_one_change() -> None:
    ledger = SqliteLedger.in_memory()
    writer = LateWriter(ledger)
    rig = make_rig(agents_of(ledger, writer))
    writer.write()
    rig.agents.fork("local", "ann", ["b", "c", "d"])
    assert writer.num_waiting == 1
