"""A sequence on its way back, part by part."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import pytest

from semantic.adapters.outbound.backends.fake import FakeBackend, fake_spec
from semantic.application.cache.index import BlockIndex
from semantic.application.cache.restore_plan import HeldPart, RestorePlan, WantedPart
from semantic.application.engine import restore as restore_module
from semantic.application.engine.restore import Restore
from semantic.domain.blocks import PartKey, pack_tokens
from semantic.domain.errors import CacheCorruptionError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import Chunk, KVPayload, SequenceId, Step
from tests.unit.application.engine_rig import ROOT

pytestmark = pytest.mark.unit

TOKENS = list(range(1, 13))
SOURCE, TARGET = SequenceId(0), SequenceId(1)


class Source:
    """Parts that come when a test says so, as many at a time as there is room for."""

    def __init__(self, payloads: Mapping[PartKey, KVPayload]) -> None:
        self.payloads = dict(payloads)
        self.room = 100
        self.arrived: set[PartKey] = set()
        self.quick: set[PartKey] = set()  # of those that arrived: read at once, not in memory
        self.asked: list[PartKey] = []
        self.held: dict[PartKey, HeldPart] = {}
        self.leased: Counter[PartKey] = Counter()

    def acquire(self, wanted: WantedPart) -> HeldPart | None:
        if len(self.held) >= self.room:
            return None
        self.asked.append(wanted.key)
        held = self.held[wanted.key] = HeldPart(wanted, self.payloads[wanted.key].nbytes)
        held.was_in_memory = wanted.key in self.arrived and wanted.key not in self.quick
        self.arrive(*self.arrived)
        return held

    def release(self, held: HeldPart) -> None:
        del self.held[held.wanted.key]

    def lease(self, parts: Sequence[WantedPart]) -> None:
        self.leased.update(part.key for part in parts)

    def end_lease(self, parts: Sequence[WantedPart]) -> None:
        self.leased.subtract(part.key for part in parts)

    def arrive(self, *keys: PartKey) -> None:
        self.arrived.update(keys)
        for key in keys:
            if key in self.held and not self.held[key].future.done():
                self.held[key].future.set_result(self.payloads[key])

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held and nothing leased."""
        return not self.held and not any(self.leased.values())


class Setting:
    """A backend that computed twelve tokens, and a plan to restore them from three blocks."""

    def __init__(self, *, has_state: bool = False) -> None:
        self.backend = FakeBackend(fake_spec(block_tokens=4, has_state=has_state))
        self.backend.open_sequence(SOURCE, TOKENS)
        index, parent = BlockIndex(), ROOT
        parts: list[WantedPart] = []
        for start in (0, 4, 8):
            tokens = tuple(TOKENS[start : start + 4])
            chunk = Chunk(SOURCE, start, tokens)
            self.backend.collect(self.backend.launch(Step((chunk,))))
            node = index.add(ROOT, parent, start, pack_tokens(tokens))
            parent = node.name
            parts.append(WantedPart(node, LayerKind.FULL))
        if has_state:
            parts.append(WantedPart(parts[-1].node, LayerKind.STATE))
        payloads: dict[PartKey, KVPayload] = {}
        for part in parts:
            ticket = self.backend.snapshot(SOURCE, part.node.start, part.node.end, part.kind)
            payloads[part.key] = self.backend.payload(ticket)
        self.backend.open_sequence(TARGET, TOKENS)
        self.plan = RestorePlan(tuple(parts), 12, parent, 12)
        self.keys = [part.key for part in parts]
        self.source = Source(payloads)

    def arrive(self, *places: int) -> None:
        self.source.arrive(*(self.keys[place] for place in places))

    def fail(self, place: int, error: Exception) -> None:
        self.source.held[self.keys[place]].future.set_exception(error)

    def restore(self, prefetched: Collection[PartKey] = ()) -> Restore:
        return Restore(TARGET, self.plan, self.source, prefetched)

    def goes_on(self) -> bool:
        """Whether source and target give the same next token."""
        rows = []
        for seq in (SOURCE, TARGET):
            self.backend.close_sequence(SequenceId(2))
            assert self.backend.fork(seq, SequenceId(2), 12)
            ticket = self.backend.snapshot(SequenceId(2), 0, 12, LayerKind.FULL)
            rows.append(self.backend.payload(ticket))
        return rows[0] == rows[1]


@pytest.fixture
def setting() -> Setting:
    return Setting()


def is_ready(restore: Restore) -> bool:
    return restore.is_ready


def is_starved(restore: Restore) -> bool:
    return restore.is_starved


def loaded_end(restore: Restore) -> int:
    """Positions that are loaded, from which sealing can go on."""
    loaded = restore.loaded_plan
    if loaded is None:
        return 0
    assert loaded.chain == loaded.parts[-1].node.name
    assert loaded.num_whole == loaded.end
    return loaded.end


def test_parts_are_loaded_as_they_come_and_in_order(setting: Setting) -> None:
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


def test_a_call_loads_at_most_about_so_many_bytes(setting: Setting) -> None:
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


def test_where_tokens_came_from(setting: Setting) -> None:
    setting.arrive(0)
    restore = setting.restore()
    setting.arrive(1, 2)
    assert restore.advance(setting.backend, 10**9)
    reuse = restore.reuse(num_prompt=15)
    assert (reuse.pool, reuse.disk, reuse.computed) == (4, 8, 3)


def test_prefetched_parts_count_as_read_from_disk(setting: Setting) -> None:
    setting.arrive(0, 1, 2)
    restore = setting.restore({setting.keys[1]})
    assert restore.advance(setting.backend, 10**9)
    reuse = restore.reuse(12)
    assert (reuse.pool, reuse.disk) == (8, 4)


def test_parts_that_are_read_at_once_count_as_read_from_disk(setting: Setting) -> None:
    setting.arrive(0, 1, 2)
    setting.source.quick = {setting.keys[2]}
    restore = setting.restore()
    assert restore.advance(setting.backend, 10**9)
    reuse = restore.reuse(12)
    assert (reuse.pool, reuse.disk) == (8, 4)


# -- room ---------------------------------------------------------------------------------------


def test_with_room_for_one_part_a_restore_loads_one_by_one(setting: Setting) -> None:
    setting.source.room = 1
    restore = setting.restore()
    for place in range(3):
        assert len(setting.source.held) == 1
        assert not restore.is_starved  # its part is being read
        setting.arrive(place)
        assert restore.advance(setting.backend, 10**9) == (place == 2)
    assert setting.goes_on()
    assert setting.source.is_idle


def test_a_restore_without_room_is_starved_and_asks_again(setting: Setting) -> None:
    setting.source.room = 0
    restore = setting.restore()
    assert not restore.advance(setting.backend, 10**9)
    assert is_starved(restore)
    assert loaded_end(restore) == 0
    setting.source.room = 1
    setting.arrive(0)
    assert not restore.advance(setting.backend, 10**9)
    setting.source.room = 0
    setting.arrive(1)
    assert not restore.advance(setting.backend, 10**9)
    assert is_starved(restore)
    assert loaded_end(restore) == 8
    restore.close()
    assert setting.source.is_idle


def test_state_that_has_no_room_starves_it() -> None:
    setting = Setting(has_state=True)
    setting.source.room = 1
    setting.arrive(0, 1, 2)
    restore = setting.restore()
    setting.source.room = 0
    assert not restore.advance(setting.backend, 10**9)
    setting.source.room = 1
    assert not restore.advance(setting.backend, 10**9)
    setting.arrive(3)
    assert restore.advance(setting.backend, 10**9)


def test_only_a_little_is_held_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore_module, "_AHEAD_BYTES", 1)
    setting = Setting()
    restore = setting.restore()
    assert setting.source.asked == setting.keys[:2]
    setting.arrive(0)
    assert not restore.advance(setting.backend, 10**9)
    assert list(setting.source.held) == setting.keys[1:]


def test_a_restore_closed_in_the_middle_releases_everything(setting: Setting) -> None:
    setting.arrive(0)
    restore = setting.restore()
    assert not restore.advance(setting.backend, 10**9)
    restore.close()
    restore.close()
    assert setting.source.is_idle


# -- failures -----------------------------------------------------------------------------------


def test_the_part_that_could_not_be_read_is_the_suspect(setting: Setting) -> None:
    restore = setting.restore()
    setting.arrive(0, 2)
    setting.fail(1, OSError("gone"))
    with pytest.raises(CacheCorruptionError):
        restore.advance(setting.backend, 10**9)
    assert restore.suspect_parts == [setting.plan.parts[1]]


def test_parts_that_the_backend_refuses_are_all_suspects(setting: Setting) -> None:
    setting.source.payloads[setting.keys[1]] = setting.source.payloads[setting.keys[0]]
    setting.arrive(0, 1, 2)
    restore = setting.restore()
    assert not restore.advance(setting.backend, 1)
    with pytest.raises(CacheCorruptionError):
        restore.advance(setting.backend, 10**9)
    assert restore.suspect_parts == list(setting.plan.parts[1:])


def test_a_cancelled_read_is_a_failure(setting: Setting) -> None:
    restore = setting.restore()
    setting.source.held[setting.keys[0]].future.cancel()
    with pytest.raises(CacheCorruptionError):
        restore.advance(setting.backend, 10**9)
