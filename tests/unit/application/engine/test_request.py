import pytest

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.application.engine.request import Generation
from semantic.application.engine.text import TextAssembler
from semantic.domain.blocks import split_tokens
from tests.unit.application.engine_rig import make_job

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("boundaries", [(), (20,), (3, 20), (8, 9)])
def test_blocks_are_cut_as_the_domain_cuts_them(boundaries: tuple[int, ...]) -> None:
    job = make_job("a", "x" * 44, boundaries=boundaries)
    item = Generation(job, 0, TextAssembler(lambda _: b""), 0.0, block_tokens=8)
    ranges: list[tuple[int, int]] = []
    start = 0
    while start < 44:
        end = min(item.block_at(start)[1], 44)
        ranges.append((start, end))
        start = end
    assert ranges == split_tokens(job.tokens, fake_spec(block_tokens=8), boundaries)
