"""Window layers keep their windows and not every token: Gemma 3 12B, a sixteenth of its width."""

from pathlib import Path

import pytest

from benchmarks.bench_memory import rest_of
from benchmarks.blocks import spec_of

pytestmark = pytest.mark.integration


def test_the_geometry_asks_for_832_mb_and_not_for_3_gb() -> None:
    spec = spec_of("Gemma 3 12B")
    assert spec.bytes_per_context(8192) == 832 * 2**20
    assert spec.bytes_per_context(1) * 8192 == 3 * 2**30


def test_what_rests_is_what_the_geometry_asks_for(tmp_path: Path) -> None:
    rest = rest_of(spec_of("Gemma 3 12B", scale=16), tmp_path, 8160, 32)
    assert rest.asked_for * 16 == 832 * 2**20
    assert rest.unsettled > 3.5 * rest.asked_for
    assert rest.asked_for <= rest.memory <= 1.1 * rest.asked_for
    assert rest.asked_for <= rest.disk <= 1.1 * rest.asked_for
    assert rest.num_restorable == 8192
