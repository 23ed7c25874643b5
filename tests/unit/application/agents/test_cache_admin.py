"""How often what all agents share is computed, and who waits for it."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from semantic.application.agents import cache_admin
from semantic.application.agents.cache_admin import RecentSharing, Sharing
from semantic.domain.errors import CachePersistenceError
from tests.waiting import await_that

pytestmark = pytest.mark.unit


class Cache:
    """Counts how often it is read; `gate` holds reads up, in the middle of which they pause."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.is_reading = threading.Event()
        self.num_reads = 0
        self.error: CachePersistenceError | None = None

    def read(self, pause: Callable[[], object]) -> Sharing:
        self.is_reading.set()
        assert self.gate.wait(60)
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass  # what it does between two pauses
        pause()
        if self.error is not None:
            raise self.error
        self.num_reads += 1
        return Sharing(num_files=self.num_reads)


@pytest.fixture
def cache() -> Iterator[Cache]:
    made = Cache()
    yield made
    made.gate.set()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let every computation count as a slow one, whose result is due at once."""
    monkeypatch.setattr(cache_admin, "_QUICK_S", -1.0)
    monkeypatch.setattr(cache_admin, "_SHARING_COST", -1)
    return monkeypatch


def test_what_is_quick_is_computed_for_every_request(cache: Cache) -> None:
    sharing = RecentSharing(cache.read)
    assert [sharing.get().num_files for _ in range(3)] == [1, 2, 3]


def test_a_recent_result_is_not_computed_again(cache: Cache, slow: pytest.MonkeyPatch) -> None:
    slow.setattr(cache_admin, "_SHARING_COST", 10**9)
    sharing = RecentSharing(cache.read)
    sharing.refresh(0.5)
    assert [sharing.get().num_files for _ in range(3)] == [1, 1, 1]


@pytest.mark.usefixtures("slow")
def test_a_result_that_is_due_is_replaced_in_the_background(cache: Cache) -> None:
    sharing = RecentSharing(cache.read)
    assert sharing.get().num_files == 1
    cache.gate.clear()
    cache.is_reading.clear()
    assert [sharing.get().num_files for _ in range(3)] == [1, 1, 1]  # nobody waits
    assert cache.is_reading.wait(60)
    cache.gate.set()
    await_that(lambda: sharing.get().num_files > 1)


def test_a_request_before_the_first_result_waits_for_the_one_that_is_computed(
    cache: Cache, slow: pytest.MonkeyPatch
) -> None:
    slow.setattr(cache_admin, "_SHARING_COST", 10**9)
    sharing = RecentSharing(cache.read)
    cache.gate.clear()
    endless_pauses = threading.Thread(target=sharing.refresh, args=[1e-6], daemon=True)
    endless_pauses.start()
    assert cache.is_reading.wait(60)
    found: list[Sharing] = []
    waiting = threading.Thread(target=lambda: found.append(sharing.get()), daemon=True)
    waiting.start()
    cache.gate.set()
    waiting.join(60)
    assert [one.num_files for one in found] == [1]
    assert cache.num_reads == 1


def test_a_failure_is_reported_when_the_last_result_is_too_old(
    cache: Cache, slow: pytest.MonkeyPatch
) -> None:
    sharing = RecentSharing(cache.read)
    assert sharing.get().num_files == 1
    cache.error = CachePersistenceError("the ledger cannot be read.")
    cache.is_reading.clear()
    assert sharing.get().num_files == 1
    assert cache.is_reading.wait(60)
    assert sharing.get().num_files == 1
    slow.setattr(cache_admin, "_MAX_AGE_S", -1.0)
    cache.error, before = None, cache.num_reads
    await_that(lambda: sharing.get().num_files > before)
    cache.error = CachePersistenceError("the ledger cannot be read.")

    def is_reported() -> bool:
        try:
            sharing.get()
        except CachePersistenceError:
            return True
        return False

    await_that(is_reported)
