"""The short form of `make soak` and `make stress`."""

from pathlib import Path

import pytest

from tests.chaos.soak import ALLOWED, DISK_BUDGET_MB, growth, soak
from tests.chaos.stress import stress

pytestmark = pytest.mark.smoke


@pytest.mark.slow
def test_agents_talk_over_all_protocols_and_nothing_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert soak(tmp_path, seconds=3, seed=7) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", [*ALLOWED, "disk_mb"])
def test_growth_is_found(name: str) -> None:
    flat = dict.fromkeys(ALLOWED, 100.0) | {"disk_mb": DISK_BUDGET_MB / 2}
    assert growth([flat] * 40) == []
    assert len(growth([flat] * 20 + [flat | {name: 400.0}] * 20)) == 1


@pytest.mark.slow
def test_rapid_requests_beyond_memory_are_answered_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stress(tmp_path, num_agents=4, num_requests=4, loads=(100,)) == 0, (
        capsys.readouterr().out
    )
