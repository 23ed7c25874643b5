import dataclasses
from typing import get_args

import pytest

from semantic.domain import agents, blocks, chat, events, reply_format, sampling, spec
from semantic.domain.events import Event

pytestmark = pytest.mark.unit


VALUES = [
    value
    for module in (agents, blocks, chat, events, reply_format, sampling, spec)
    for value in vars(module).values()
    if getattr(value, "__module__", "") == module.__name__
    and dataclasses.is_dataclass(value)
    and isinstance(value, type)
]


@pytest.mark.parametrize("value", VALUES)
def test_values_are_frozen_and_slotted(value: type) -> None:
    # A dataclass defines its own __setattr__ only if it is frozen.
    assert "__setattr__" in vars(value)
    assert "__slots__" in vars(value)
    assert "__dict__" not in vars(value)


def test_every_event_is_such_a_value() -> None:
    assert set(get_args(Event)) <= set(VALUES)
