"""The contract of every ledger, whether one process owns it or several share it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeAlias

import pytest

from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.cluster.ports import LeaseStorePort
from semantic.domain.agents import Agent, Pointer
from semantic.domain.chat import images_in
from semantic.domain.errors import CachePersistenceError, ConflictError
from semantic.ports.storage import (
    AdvanceHead,
    DropAgent,
    LedgerPort,
    MarkDurable,
    PutAgent,
    PutImage,
    PutPart,
    PutReplay,
    PutTenant,
    PutTurn,
    Repoint,
    Tenant,
    TurnPlace,
)
from tests.unit.adapters.outbound.ledger.ledger_values import (
    ROOT,
    agent_of,
    image_of,
    name_of,
    part_of,
    turn_of,
    turn_with,
)
from tests.waiting import await_that

pytestmark = pytest.mark.contract


class SharedLedger(LedgerPort, LeaseStorePort, Protocol):
    """Both in one, as the ledger of several servers is."""


Open: TypeAlias = Callable[[], LedgerPort]


@pytest.fixture(params=["sqlite", "postgres"])
def open_ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens what is there, again and again, as servers do one after another."""
    url = request.getfixturevalue("database_url") if request.param == "postgres" else None
    with ExitStack() as opened:

        def open_it() -> LedgerPort:
            made: LedgerPort = postgres_ledger(url) if url else SqliteLedger(tmp_path)
            made.load()
            opened.callback(made.close)
            return made

        yield open_it


@pytest.fixture
def ledger(open_ledger: Open) -> LedgerPort:
    return open_ledger()


@pytest.fixture
def shared_ledger(database_url: str) -> Iterator[SharedLedger]:
    ledger = postgres_ledger(database_url)
    ledger.load()
    yield ledger
    ledger.close()


def postgres_ledger(url: str) -> SharedLedger:
    pytest.importorskip("psycopg")
    from semantic.cluster.adapters.postgres import PostgresLedger

    return PostgresLedger(url, SqliteLedger(None))


def advance(agent: Agent, turn_id: str, epoch: int | None = None) -> list[PutTurn | AdvanceHead]:
    moved = agent.advance(turn_id, at=2.0)
    return [PutTurn("local", turn_of(turn_id, agent.head)), AdvanceHead(moved, agent, epoch)]


# -- what is kept -----------------------------------------------------------------------------


def test_everything_is_there_for_the_next_server(open_ledger: Open) -> None:
    first = open_ledger()
    agent, turn = agent_of("coder", "t1"), turn_of("t1", text="h\u00e9 \x00", block=name_of(1, 2))
    replay = PutReplay("local", b"key", (7, 8), at=1.0)
    tenant = Tenant("local", b"salt")
    first.apply(
        [PutTenant(tenant), PutTurn("local", turn), PutAgent(agent), replay], is_synced=True
    )
    first.apply([PutPart(part_of(1))], is_synced=True)
    assert first.load().parts == (part_of(1),)
    first.close()

    second = open_ledger()

    assert second.load().tenants == (tenant,)
    assert second.agent("local", "coder") == agent
    assert second.agents("local") == (agent,)
    assert second.turn("local", "t1") == turn
    assert second.place("local", "t1") == TurnPlace(3, turn.pointer)
    ids = ["t1", *(f"missing-{i}" for i in range(1200))]
    assert second.places("local", ids) == {"t1": TurnPlace(3, turn.pointer)}
    assert second.places("acme", ids) == {}
    assert second.replay("local", b"key") == (7, 8)
    assert second.pointers() == (turn.pointer,)
    others = (second.turn("acme", "t1"), second.agent("acme", "coder"))
    assert (*others, second.replay("acme", b"key"), second.place("local", "t9")) == (None,) * 4


def test_what_a_tenant_stores_is_counted_in_bytes(ledger: LedgerPort) -> None:
    turns = [
        PutTurn("local", turn_of(name, text=text)) for name, text in (("a", "h\u00e9"), ("b", ""))
    ]
    changes: list[PutAgent | PutTurn] = [PutAgent(agent_of("coder", "a")), *turns]
    assert ledger.stored_bytes("local") == 0
    ledger.apply(changes, is_synced=False)
    assert ledger.stored_bytes("local") == ledger.size_of(*changes) > 0
    longer = PutTurn("local", turn_of("c", text="\u00e9" * 1000))
    assert ledger.size_of(longer) - ledger.size_of(turns[1]) == 2000
    assert ledger.stored_bytes("acme") == ledger.size_of() == 0


def test_a_log_is_read_from_its_head_backwards(ledger: LedgerPort) -> None:
    log = [turn_of(f"t{i}", f"t{i - 1}" if i else None, at=float(-i)) for i in range(9)]
    ledger.apply([PutTurn("local", turn) for turn in log[::-1]], is_synced=False)

    assert ledger.turns("local", "t8", limit=1000) == tuple(log[::-1])
    assert ledger.turns("local", "t5", limit=2) == (log[5], log[4])
    assert ledger.turns("local", "t5", limit=0) == ledger.turns("acme", "t5", limit=1) == ()
    assert ledger.ancestry("local", "t8", until="t6") == ("t8", "t7", "t6")


def test_turns_follow_their_blocks_and_unreachable_ones_go(ledger: LedgerPort) -> None:
    kept, lost = turn_of("t1", block=name_of(1)), turn_of("t2", "t1", block=name_of(1))
    ledger.apply([PutTurn("local", kept), PutTurn("local", lost)], is_synced=False)
    ledger.apply([PutAgent(agent_of("coder", "t1"))], is_synced=False)
    ledger.apply([Repoint(name_of(1), name_of(1, 2)), MarkDurable("t1")], is_synced=False)

    latest, earlier = (ledger.turn("local", turn_id) for turn_id in ("t2", "t1"))
    assert latest
    assert earlier
    assert latest.pointer == earlier.pointer == Pointer(ROOT, name_of(1, 2), 3)
    assert (latest.is_durable, earlier.is_durable) == (False, True)
    assert ledger.forget_unreachable(before=0.5, replays_before=0.0) == 0
    assert ledger.forget_unreachable(before=99.0, replays_before=0.0) == 1
    assert ledger.turn("local", "t2") is None
    ledger.apply([DropAgent("local", "coder")], is_synced=False)
    assert (ledger.agents("local"), ledger.pointers()) == ((), ())


def test_images_are_kept_once_for_each_tenant_while_a_turn_refers_to_them(
    open_ledger: Open,
) -> None:
    first, second = image_of(b"first" * 1000), image_of(b"second")
    ledger = open_ledger()
    files = [PutImage("local", image.digest, image.data, 1.0) for image in (first, second)]
    turns = [turn_with("t1", first, second), turn_with("t2", first, parent="t1")]
    ledger.apply([*files, *(PutTurn("local", turn) for turn in turns)], is_synced=False)
    ledger.apply([files[0], PutAgent(agent_of("coder", "t1"))], is_synced=False)
    ledger.close()

    ledger = open_ledger()

    assert ledger.image("local", first.digest) == first.data
    assert ledger.image("local", second.digest) == second.data
    assert ledger.image("acme", first.digest) is None
    stored = ledger.turn("local", "t1")
    assert stored == turns[0]
    assert [image.data for image in images_in(stored.messages)] == [b"", b""]
    agents_and_turns = ledger.size_of(
        PutAgent(agent_of("coder", "t1")), *(PutTurn("local", t) for t in (stored, turn_of("x")))
    )
    assert ledger.stored_bytes("local") > agents_and_turns + len(first.data) + len(second.data)
    assert ledger.size_of(PutTurn("local", turns[0])) >= ledger.size_of(
        PutTurn("local", stored)
    ) + len(first.data) + len(second.data)
    # The second turn goes; the first refers to both images.
    assert ledger.forget_unreachable(before=99.0, replays_before=0.0) == 1
    assert ledger.image("local", first.digest) == first.data
    # The text of the first is removed, and with it both images at once.
    ledger.apply([PutTurn("local", replace(stored, messages=()))], is_synced=False)
    assert ledger.image("local", first.digest) is ledger.image("local", second.digest) is None


def test_an_image_without_a_turn_waits_for_one(ledger: LedgerPort) -> None:
    image = image_of(b"imported")
    ledger.apply([PutImage("local", image.digest, image.data, 5.0)], is_synced=False)

    assert ledger.forget_unreachable(before=4.0, replays_before=0.0) == 0
    ledger.apply([PutImage("local", image.digest, image.data, 9.0)], is_synced=False)
    assert ledger.forget_unreachable(before=8.0, replays_before=0.0) == 0
    assert ledger.image("local", image.digest) == image.data
    assert ledger.forget_unreachable(before=10.0, replays_before=0.0) == 1
    assert ledger.image("local", image.digest) is None


def test_the_first_salt_of_a_tenant_stays(open_ledger: Open) -> None:
    first, second = open_ledger(), open_ledger()
    first.apply([PutTenant(Tenant("acme", b"first"))], is_synced=False)
    second.apply([PutTenant(Tenant("acme", b"second"))], is_synced=False)

    assert first.tenant("acme") == second.tenant("acme") == Tenant("acme", b"first")


# -- heads ------------------------------------------------------------------------------------


def test_a_head_moves_only_from_where_its_writer_saw_it(ledger: LedgerPort) -> None:
    new = agent_of("coder", None, 0)
    ledger.apply([AdvanceHead(new, None)], is_synced=True)
    ledger.apply(advance(new, "t1"), is_synced=True)
    stale = (
        advance(new, "t2"),
        [AdvanceHead(new, None)],
        [AdvanceHead(agent_of("gone", "t1"), agent_of("gone", None))],
    )
    for changes in stale:
        with pytest.raises(ConflictError):
            ledger.apply(changes, is_synced=True)

    moved = ledger.agent("local", "coder")
    assert moved
    assert (moved.head, moved.num_turns) == ("t1", 1)
    assert ledger.turn("local", "t2") is None  # all or none
    assert ledger.agents("local") == (moved,)


def test_of_two_concurrent_moves_of_an_agent_one_wins(open_ledger: Open) -> None:
    ledgers = [open_ledger(), open_ledger()]
    ledgers[0].apply([AdvanceHead(agent_of("coder", None, 0), None)], is_synced=False)
    wins: list[str] = []

    def run(number: int) -> None:
        for count in range(15):
            known = ledgers[number].agent("local", "coder")
            assert known
            try:
                ledgers[number].apply(advance(known, f"t{number}-{count}"), is_synced=False)
            except ConflictError:
                continue
            wins.append(f"t{number}-{count}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    agent = ledgers[0].agent("local", "coder")
    assert agent
    assert agent.head
    assert agent.num_turns == len(wins)
    assert set(ledgers[1].ancestry("local", agent.head)) == set(wins)


# -- leases -----------------------------------------------------------------------------------


def test_an_agent_is_leased_to_one_at_a_time(shared_ledger: SharedLedger) -> None:
    first = shared_ledger.acquire("local", "coder", ttl_s=60)
    assert first is not None
    assert shared_ledger.acquire("local", "coder", ttl_s=60) is None
    assert shared_ledger.acquire("acme", "coder", ttl_s=60) is not None

    assert shared_ledger.renew("local", "coder", first, ttl_s=60)
    shared_ledger.release("local", "coder", first)
    assert not shared_ledger.renew("local", "coder", first, ttl_s=60)

    second = shared_ledger.acquire("local", "coder", ttl_s=60)
    assert second is not None
    assert second > first
    shared_ledger.release("local", "coder", first)  # it is over, and ends no other's
    assert shared_ledger.acquire("local", "coder", ttl_s=60) is None


def test_a_lease_that_was_taken_over_moves_nothing(shared_ledger: SharedLedger) -> None:
    agent = agent_of("coder", None, 0)
    shared_ledger.apply([AdvanceHead(agent, None)], is_synced=False)
    stale = shared_ledger.acquire("local", "coder", ttl_s=0.01)
    assert stale is not None
    time.sleep(0.02)
    fresh = shared_ledger.acquire("local", "coder", ttl_s=60)
    assert fresh is not None

    with pytest.raises(ConflictError):
        shared_ledger.apply(advance(agent, "t1", stale), is_synced=False)
    assert not shared_ledger.renew("local", "coder", stale, ttl_s=60)
    shared_ledger.apply(advance(agent, "t2", fresh), is_synced=False)

    assert shared_ledger.agent("local", "coder") == agent.advance("t2", at=2.0)
    assert shared_ledger.acquire("local", "coder", ttl_s=60) is not None  # it ended with the turn


def test_an_expired_lease_holds_until_another_takes_it(shared_ledger: SharedLedger) -> None:
    agent = agent_of("coder", None, 0)
    epoch = shared_ledger.acquire("local", "coder", ttl_s=0.01)
    assert epoch is not None
    time.sleep(0.02)

    shared_ledger.apply([AdvanceHead(agent, None, epoch)], is_synced=False)

    assert shared_ledger.agent("local", "coder") == agent


# -- what only several servers can do to each other -----------------------------------------------


def test_servers_receive_changes_of_others_and_not_their_own(database_url: str) -> None:
    pytest.importorskip("psycopg")
    from semantic.cluster.adapters.postgres import PostgresLedger

    mine = PostgresLedger(database_url, SqliteLedger(None))
    theirs = PostgresLedger(database_url, SqliteLedger(None))
    heard: list[tuple[str, str, str]] = []
    for ledger in (mine, theirs):
        ledger.load()
    mine.listen(lambda *moved: heard.append(moved))
    await_that(lambda: heard == [("", "", "")])

    mine.apply([PutAgent(agent_of("own", "t0"))], is_synced=False)
    theirs.apply([PutAgent(agent_of("coder", "t1"))], is_synced=False)
    theirs.apply([DropAgent("local", "coder")], is_synced=False)

    await_that(lambda: len(heard) == 3)
    assert heard[1:] == [("local", "coder", "t1"), ("local", "coder", "")]
    mine.close()
    theirs.close()


def test_a_missing_or_newer_database_is_reported(database_url: str) -> None:
    pytest.importorskip("psycopg")
    from semantic.cluster.adapters.postgres import PostgresLedger

    ledger = PostgresLedger(database_url, SqliteLedger(None))
    ledger.load()
    with ledger.transaction() as connection:
        connection.execute("INSERT INTO versions VALUES (99)")
    with pytest.raises(CachePersistenceError, match="newer version of Semantic"):
        ledger.load()
    ledger.close()
    with pytest.raises(CachePersistenceError, match="database"):
        ledger.agent("local", "coder")
    nowhere = PostgresLedger("postgresql://nobody@127.0.0.1:1/x", SqliteLedger(None), timeout_s=0.2)
    with pytest.raises(CachePersistenceError, match="database"):
        nowhere.load()
    nowhere.close()


def test_an_agent_keeps_its_settings_when_its_head_moves(ledger: LedgerPort) -> None:
    agent = replace(agent_of("coder", None, 0), labels=(("a", "b"),), ttl_s=9.0)
    ledger.apply([AdvanceHead(agent, None)], is_synced=False)
    ledger.apply(advance(agent, "t1"), is_synced=False)

    assert ledger.agents("local") == (agent.advance("t1", at=2.0),)
