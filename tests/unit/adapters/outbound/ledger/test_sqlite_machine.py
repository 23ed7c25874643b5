"""Any sequence of changes, made to a ledger and to dictionaries."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.domain.agents import Agent, Pointer, Reuse, Turn
from semantic.domain.blocks import BlockName, BlockPart
from semantic.domain.events import Usage
from semantic.domain.spec import LayerKind
from semantic.ports.storage import (
    DropAgent,
    DropPart,
    LedgerChange,
    MarkDurable,
    MarkIndexWhole,
    PutAgent,
    PutPart,
    PutReplay,
    PutTenant,
    PutTurn,
    Repoint,
    Tenant,
    TouchParts,
    TurnPlace,
)
from tests.unit.adapters.outbound.ledger.ledger_values import LedgerModel
from tests.unit.adapters.outbound.ledger.test_codec import any_message

pytestmark = pytest.mark.unit

TENANTS, TURNS, AGENTS = ("local", "acme"), ("t1", "t2", "t3", "t4"), ("coder", "reviewer")
BLOCKS = tuple(BlockName(bytes([index]) * 32) for index in range(4))
KEYS = (b"", b"k")
tenants, turn_ids, blocks = (st.sampled_from(ids) for ids in (TENANTS, TURNS, BLOCKS))
times = st.floats(0, 8).map(round).map(float)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)
counts = st.integers(0, 2**40)
turns = st.builds(
    Turn,
    id=turn_ids,
    parent=st.none() | turn_ids,
    agent_id=st.sampled_from(AGENTS),
    messages=st.lists(any_message, max_size=2).map(tuple),
    tokens=tokens,
    num_tokens=counts,
    pointer=st.none() | st.builds(Pointer, blocks, blocks, counts),
    usage=st.builds(Usage, counts, counts),
    created_at=times,
    reuse=st.builds(Reuse, counts, counts),
    is_durable=st.booleans(),
)
agents = st.builds(
    Agent,
    id=st.sampled_from(AGENTS),
    created_at=times,
    tenant=tenants,
    head=st.none() | turn_ids,
    num_turns=st.integers(0, 9),
    last_used=times,
    is_pinned=st.booleans(),
)
parts = st.builds(
    BlockPart,
    blocks,
    blocks,
    blocks,
    st.sampled_from(LayerKind),
    counts,
    st.binary(max_size=8),
    counts,
    times,
)
part_keys = st.tuples(blocks, st.sampled_from(LayerKind))
changes: st.SearchStrategy[LedgerChange] = st.one_of(
    st.builds(PutTenant, st.builds(Tenant, tenants, st.binary(max_size=4))),
    st.builds(PutAgent, agents),
    st.builds(DropAgent, tenants, st.sampled_from(AGENTS)),
    st.builds(PutTurn, tenants, turns),
    st.builds(PutTurn, tenants, turns),
    st.builds(MarkDurable, turn_ids),
    st.builds(Repoint, blocks, blocks),
    st.builds(PutPart, parts),
    st.builds(DropPart, part_keys),
    st.builds(TouchParts, st.lists(part_keys, max_size=3).map(tuple), times),
    st.just(MarkIndexWhole()),
    st.builds(PutReplay, tenants, st.sampled_from(KEYS), tokens, times),
)


class LedgerMachine(RuleBasedStateMachine):
    """A ledger and its model, through changes, restarts, backups and the loss of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.ledger = SqliteLedger(Path(self.scratch.name))
        self.model = LedgerModel()
        self.backup: LedgerModel | None = None

    @initialize()
    def load(self) -> None:
        self.model.check(self.ledger.load())

    @rule(batch=st.lists(changes, max_size=8), is_synced=st.booleans())
    def apply(self, batch: list[LedgerChange], *, is_synced: bool) -> None:
        self.ledger.apply(batch, is_synced=is_synced)
        self.model.apply(batch)

    @rule(batch=st.lists(changes, max_size=4))
    def apply_what_cannot_be_stored(self, batch: list[LedgerChange]) -> None:
        impossible = PutReplay("local", b"k", (-1,), 0.0)
        with pytest.raises(ValueError, match="token ids"):
            self.ledger.apply([*batch, impossible], is_synced=False)

    @rule(before=times, replays_before=times)
    def forget(self, before: float, replays_before: float) -> None:
        num_gone = self.ledger.forget_unreachable(before=before, replays_before=replays_before)
        assert num_gone == self.model.forget(before, replays_before)

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.model.check(self.ledger.load())

    @rule()
    def back_up(self) -> None:
        self.ledger.back_up()
        self.backup = self.model.copy()

    @precondition(lambda self: self.backup)
    @rule()
    def lose_the_file(self) -> None:
        assert self.backup
        self.ledger.close()
        (Path(self.scratch.name) / "ledger.db").unlink()
        self.model = self.backup.copy()
        self.model.lose_index()
        state = self.ledger.load()
        assert "was missing; restored" in state.problem
        # Agents whose turns never came, or were forgotten, start anew.
        self.model.mend_agents()
        self.model.check(state)

    @invariant()
    def readings_agree(self) -> None:
        for tenant in TENANTS:
            for turn_id in TURNS:
                expected = self.model.turns.get((tenant, turn_id))
                log = tuple(self.model.log(tenant, turn_id))
                assert self.ledger.turn(tenant, turn_id) == expected
                assert self.ledger.turns(tenant, turn_id, limit=99) == log
                assert self.ledger.turns(tenant, turn_id, limit=2) == log[:2]
                assert self.ledger.ancestry(tenant, turn_id) == tuple(turn.id for turn in log)
                place = TurnPlace(expected.num_tokens, expected.pointer) if expected else None
                assert self.ledger.place(tenant, turn_id) == place
            for key in KEYS:
                put = self.model.replays.get((tenant, key))
                assert self.ledger.replay(tenant, key) == (put.tokens if put else None)
        pointers = self.ledger.pointers()
        assert set(pointers) == self.model.pointers()
        assert len(pointers) == len(set(pointers))

    def teardown(self) -> None:
        self.ledger.close()
        self.scratch.cleanup()


LedgerMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
TestLedger = LedgerMachine.TestCase
