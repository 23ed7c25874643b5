"""The last hour of metrics."""

import pytest

from semantic.adapters.outbound.telemetry.metrics import MetricsHistory

pytestmark = pytest.mark.unit


def test_readings_are_kept_for_an_hour_and_returned_since_a_time() -> None:
    clock = {"now": 0.0}
    history = MetricsHistory(
        lambda: {"tokens": clock["now"] * 2, 'le{le="1"}': 1.0}, lambda: clock["now"]
    )
    assert history.since(0).at == []
    for second in range(5, 5005, 5):
        clock["now"] = float(second)
        history.record()

    recent = history.since(4990)
    assert (recent.at, recent.series) == (
        [4995.0, 5000.0],
        {"tokens": [9990.0, 10000.0], 'le{le="1"}': [1.0, 1.0]},
    )
    kept = history.since(0).at
    assert 3600 <= kept[-1] - kept[0] < 3700
    assert history.since(5000).at == []
