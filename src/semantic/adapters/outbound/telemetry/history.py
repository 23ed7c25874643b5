"""The last hour of a few metrics, for those who come later and want to see it.

Prometheus keeps what it scrapes; who has none sees the last hour on the page at `/`. A reading is a
few dozen numbers every few seconds, and asks nothing of the engine.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_EVERY_S = 5.0
_KEPT_S = 3660.0  # an hour, and what rates at its beginning are computed from


@dataclass(frozen=True, slots=True)
class Readings:
    """Metrics over time.

    Attributes:
        at: When they were read, in seconds since the epoch.
        series: The value of each metric at each of these times, by its name in `/metrics`.
    """

    at: list[float]
    series: dict[str, list[float]]


class MetricsHistory:
    """Keeps readings of metrics. Used on the event loop's thread."""

    def __init__(
        self, read: Callable[[], Mapping[str, float]], now: Callable[[], float] = time.time
    ) -> None:
        """Start with none.

        Args:
            read: Reads the metrics; their names are the same each time.
            now: Seconds since the epoch.
        """
        self._read = read
        self._now = now
        self._names: tuple[str, ...] = ()
        self._kept: deque[tuple[float, array[float]]] = deque(maxlen=int(_KEPT_S / _EVERY_S))

    async def run(self) -> None:
        """Read every few seconds, until it is cancelled."""
        while True:
            self.record()
            await asyncio.sleep(_EVERY_S)

    def record(self) -> None:
        """Keep a reading, and forget the oldest."""
        values = self._read()
        self._names = tuple(values)
        self._kept.append((self._now(), array("d", values.values())))

    def since(self, moment: float) -> Readings:
        """The readings after a moment, the oldest first."""
        found = [(at, values) for at, values in self._kept if at > moment]
        series = {n: [v[i] for _, v in found] for i, n in enumerate(self._names)}
        return Readings([at for at, _ in found], series)
