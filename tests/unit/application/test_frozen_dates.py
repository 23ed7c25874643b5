"""The day an agent believes it is."""

from datetime import date, timedelta

import pytest

from semantic.application.frozen_dates import FrozenDates

pytestmark = pytest.mark.unit


def test_an_agents_day_does_not_pass() -> None:
    days = [date(2026, 3, 1)]
    dates = FrozenDates(lambda: days[0], max_agents=2)
    assert dates.of("a") == days[0]
    days[0] += timedelta(1)
    assert dates.of("a") == date(2026, 3, 1)
    assert dates.of("b") == date(2026, 3, 2)


def test_agents_that_were_not_heard_of_for_long_are_forgotten() -> None:
    days = [date(2026, 3, 1)]
    dates = FrozenDates(lambda: days[0], max_agents=2)
    for agent in ("a", "b", "a", "c"):
        dates.of(agent)
    days[0] += timedelta(1)
    assert dates.of("a") == date(2026, 3, 1)
    assert dates.of("b") == date(2026, 3, 2)
