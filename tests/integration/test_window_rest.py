"""Window layers keep their windows and not every token: Gemma 3 12B, a sixteenth of its width."""

from pathlib import Path

import pytest

from benchmarks.bench_window_rest import NUM_PROMPT, NUM_REPLY, gemma_3_12b, measure

pytestmark = pytest.mark.integration


def test_the_geometry_asks_for_832_mb_and_not_for_3_gb() -> None:
    spec = gemma_3_12b()
    assert spec.bytes_per_context(8192) == 832 * 2**20
    assert spec.bytes_per_token() * 8192 == 3 * 2**30


def test_what_rests_is_what_the_geometry_asks_for(tmp_path: Path) -> None:
    rest = measure(gemma_3_12b(head_dim=16), tmp_path)
    assert rest.asked_for * 16 == 832 * 2**20
    assert rest.unsettled > 3.5 * rest.asked_for
    assert rest.asked_for <= rest.memory <= 1.1 * rest.asked_for
    assert rest.asked_for <= rest.disk <= 1.1 * rest.asked_for
    assert rest.num_restorable == NUM_PROMPT + NUM_REPLY
