"""A sequence on its way back, part by part."""

from concurrent.futures import Future

import pytest

from semantic.adapters.outbound.fake_backend import FakeBackend, fake_spec
from semantic.application.block_index import BlockIndex
from semantic.application.recall import RestorePlan, WantedPart
from semantic.application.restore import Restore
from semantic.domain.blocks import pack_tokens
from semantic.domain.errors import CacheCorruptionError
from semantic.domain.spec import LayerKind
from semantic.ports.outbound import Chunk, KVPayload, SequenceId, Step
from tests.unit.application.engine_rig import ROOT

pytestmark = pytest.mark.unit

TOKENS = list(range(1, 13))
SOURCE, TARGET = SequenceId(0), SequenceId(1)


class Setting:
    """A backend that computed twelve tokens, and a plan to restore them from three blocks."""

    def __init__(self, *, has_state: bool = False) -> None:
        self.backend = FakeBackend(fake_spec(block_tokens=4, has_state=has_state))
        self.backend.open(SOURCE, TOKENS)
        index, parent = BlockIndex(), ROOT
        parts: list[WantedPart] = []
        self.payloads: list[KVPayload] = []
        for start in (0, 4, 8):
            tokens = tuple(TOKENS[start : start + 4])
            chunk = Chunk(SOURCE, start, tokens)
            self.backend.collect(self.backend.launch(Step((chunk,))))
            node = index.add(ROOT, parent, start, pack_tokens(tokens))
            parent = node.name
            parts.append(WantedPart(node, LayerKind.FULL))
        if has_state:
            parts.append(WantedPart(parts[-1].node, LayerKind.STATE))
        for part in parts:
            ticket = self.backend.snapshot(SOURCE, part.node.start, part.node.end, part.kind)
            self.payloads.append(self.backend.payload(ticket))
        self.backend.open(TARGET, TOKENS)
        self.plan = RestorePlan(tuple(parts), 12, parent, 12)
        self.futures: list[Future[KVPayload]] = [Future() for _ in parts]

    def arrive(self, *places: int) -> None:
        for place in places:
            self.futures[place].set_result(self.payloads[place])

    def restore(self) -> Restore:
        return Restore(TARGET, self.plan, self.futures)

    def goes_on(self) -> bool:
        """Whether source and target give the same next token."""
        rows = []
        for seq in (SOURCE, TARGET):
            self.backend.close(SequenceId(2))
            assert self.backend.fork(seq, SequenceId(2), 12)
            ticket = self.backend.snapshot(SequenceId(2), 0, 12, LayerKind.FULL)
            rows.append(self.backend.payload(ticket))
        return rows[0] == rows[1]


def is_ready(restore: Restore) -> bool:
    return restore.is_ready


def test_parts_are_loaded_as_they_come_and_in_order() -> None:
    setting = Setting()
    restore = setting.restore()
    assert not is_ready(restore)
    setting.arrive(1)
    assert not is_ready(restore)
    setting.arrive(0)
    assert is_ready(restore)
    assert not restore.advance(setting.backend, 10**9)
    assert not is_ready(restore)
    setting.arrive(2)
    assert restore.advance(setting.backend, 10**9)
    assert setting.goes_on()


def test_a_call_loads_at_most_about_so_many_bytes() -> None:
    setting = Setting()
    setting.arrive(0, 1, 2)
    restore = setting.restore()
    assert [restore.advance(setting.backend, 1) for _ in range(3)] == [False, False, True]
    assert setting.goes_on()


def test_state_comes_last_and_is_waited_for() -> None:
    setting = Setting(has_state=True)
    setting.arrive(0, 1, 2)
    restore = setting.restore()
    assert not restore.advance(setting.backend, 10**9)
    assert not is_ready(restore)
    setting.arrive(3)
    assert is_ready(restore)
    assert restore.advance(setting.backend, 10**9)


def test_where_tokens_came_from() -> None:
    setting = Setting()
    setting.arrive(0)
    restore = setting.restore()
    setting.arrive(1, 2)
    reuse = restore.reuse(num_prompt=15)
    assert (reuse.pool, reuse.disk, reuse.computed) == (4, 8, 3)


def test_what_was_read_ahead_for_it_came_from_disk() -> None:
    setting = Setting()
    setting.arrive(0, 1, 2)
    prefetched = {setting.plan.parts[1].key}
    reuse = Restore(TARGET, setting.plan, setting.futures, prefetched).reuse(12)
    assert (reuse.pool, reuse.disk) == (8, 4)


def test_the_part_that_could_not_be_read_is_the_suspect() -> None:
    setting = Setting()
    setting.arrive(0, 2)
    setting.futures[1].set_exception(OSError("gone"))
    restore = setting.restore()
    with pytest.raises(CacheCorruptionError):
        restore.advance(setting.backend, 10**9)
    assert restore.suspects == [setting.plan.parts[1]]


def test_parts_that_the_backend_refuses_are_all_suspects() -> None:
    setting = Setting()
    setting.payloads[1] = setting.payloads[0]
    setting.arrive(0, 1, 2)
    restore = setting.restore()
    assert not restore.advance(setting.backend, 1)
    with pytest.raises(CacheCorruptionError):
        restore.advance(setting.backend, 10**9)
    assert restore.suspects == list(setting.plan.parts[1:])


def test_a_cancelled_read_is_a_failure() -> None:
    setting = Setting()
    setting.futures[0].cancel()
    with pytest.raises(CacheCorruptionError):
        setting.restore().advance(setting.backend, 10**9)
