"""Pieces of pinned slabs: what is handed out, and what comes back. No device is needed."""

import ctypes

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from semantic.adapters.outbound.backends.pinned import FreePieces, PinnedMemory
from tests.waiting import await_that

pytestmark = pytest.mark.unit

_PAGE = 4096


class PiecesMachine(RuleBasedStateMachine):
    """Takes and gives back pieces of slabs, most of which are adjacent."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = FreePieces()
        self.slabs: list[tuple[int, int]] = []
        self.taken: list[tuple[int, int]] = []

    @rule(size=st.integers(1, 8), gap=st.sampled_from([0, 0, 0, 1]), is_below=st.booleans())
    def add_slab(self, size: int, gap: int, is_below: bool) -> None:
        lowest = min((start for start, _ in self.slabs), default=1000)
        highest = max((start + size for start, size in self.slabs), default=1000)
        slab = (lowest - gap - size, size) if is_below else (highest + gap, size)
        self.slabs.append(slab)
        self.pieces.add_slab(*slab)

    @rule(size=st.integers(1, 10))
    def allocate(self, size: int) -> None:
        address = self.pieces.allocate(size)
        if address is not None:
            assert self.pieces.holds(address, size)
            self.taken.append((address, size))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.taken) - 1))
        self.pieces.free(*self.taken.pop(place))

    @invariant()
    def pieces_lie_in_one_slab_and_apart(self) -> None:
        for start, size in self.taken:
            inside = [s for s, n in self.slabs if s <= start and start + size <= s + n]
            assert len(inside) == 1
        units = [unit for start, size in self.taken for unit in range(start, start + size)]
        assert len(units) == len(set(units))
        assert self.pieces.num_free == sum(size for _, size in self.slabs) - len(units)

    def teardown(self) -> None:
        """All that was taken comes back, and each slab can be had as a whole again."""
        for piece in self.taken:
            self.pieces.free(*piece)
        sizes = sorted((size for _, size in self.slabs), reverse=True)
        found = {self.pieces.allocate(size) for size in sizes}
        assert found == {start for start, _ in self.slabs}


TestPieces = PiecesMachine.TestCase


def test_a_piece_never_reaches_into_an_adjacent_slab() -> None:
    pieces = FreePieces()
    pieces.add_slab(100, 10)
    pieces.add_slab(110, 10)
    assert pieces.allocate(11) is None
    assert (pieces.allocate(10), pieces.allocate(10)) == (100, 110)
    pieces.free(110, 10)
    pieces.free(100, 10)
    assert pieces.allocate(11) is None
    assert not pieces.holds(105, 10)


def test_memory_comes_from_registered_slabs_and_is_used_again() -> None:
    slabs: list[tuple[int, int]] = []

    def pin(address: int, size: int) -> bool:
        slabs.append((address, size))
        return True

    memory = PinnedMemory(pin, slab=4 * _PAGE, limit=16 * _PAGE)
    await_that(lambda: memory.num_free == 16 * _PAGE)
    for num_pages in (3, 1, 4, 2):
        held = [memory.allocate(num_pages * _PAGE) for _ in range(16 // num_pages)]
        pieces = [piece for piece in held if piece is not None]
        assert len(pieces) == 4 * (4 // num_pages)
        for piece in pieces:
            address = ctypes.addressof(ctypes.c_ubyte.from_buffer(piece))
            assert any(s <= address and address + piece.nbytes <= s + n for s, n in slabs)
        held.clear()
        pieces.clear()
        del piece
        assert memory.num_free == 16 * _PAGE


def test_nothing_is_handed_out_that_the_device_does_not_take() -> None:
    memory = PinnedMemory(lambda *_: False, slab=_PAGE, limit=4 * _PAGE)
    assert memory.allocate(1) is None
    assert memory.num_free == 0
