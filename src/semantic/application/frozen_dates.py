"""The day each agent believes it is: the one on which it first spoke.

Some templates print the date at the head of the prompt; were it today's, every agent's state
would be worthless at midnight.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from datetime import date


class FrozenDates:
    """Days by agent, in memory; the agents heard of least recently go first. Safe on any thread."""

    def __init__(self, today: Callable[[], date] = date.today, *, max_agents: int = 10_000) -> None:
        self._today = today
        self._max_agents = max_agents
        self._dates: OrderedDict[str, date] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, agent: str) -> date:
        """Return an agent's day; it is today's for a new one."""
        with self._lock:
            day = self._dates.setdefault(agent, self._today())
            self._dates.move_to_end(agent)
            if len(self._dates) > self._max_agents:
                self._dates.popitem(last=False)
            return day
