import pytest

from semantic.application.engine.generation import Sealing
from tests.unit.application.engine_rig import ROOT

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "boundaries, ends",
    [
        ((), [8, 16, 24, 32, 40, 48]),
        ((20,), [8, 16, 20, 28, 36, 44]),
        ((3, 20), [3, 11, 19, 20, 28, 36, 44]),
        ((8, 9), [8, 9, 17, 25, 33, 41, 49]),
    ],
)
def test_blocks_end_when_they_are_full_and_at_boundaries(
    boundaries: tuple[int, ...], ends: list[int]
) -> None:
    sealing = Sealing(ROOT, 8, boundaries)
    start = 0
    for end in ends:
        assert sealing.block_at(start) == (start, end)
        start = end
