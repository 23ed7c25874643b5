"""Replies in the ledger: they live on as long as they are of use."""

import pytest

from semantic.adapters.outbound.sqlite_ledger import SqliteLedger
from semantic.application.agent_ledger import write_at_once
from semantic.application.kept_replies import REPLAY_TTL_S, KeptReplies
from semantic.application.replay import ReplayKey

pytestmark = pytest.mark.unit

KEY, OTHER = ReplayKey(b"prompt", b"reply"), ReplayKey(b"prompt", b"other")


class Shelf:
    """A ledger, and who reads it at some time."""

    def __init__(self) -> None:
        self.ledger = SqliteLedger.in_memory()
        self.now = 1e9
        self.restart()

    def restart(self) -> None:
        self.replies = KeptReplies(self.ledger, write_at_once(self.ledger), lambda: self.now)

    def collect(self) -> None:
        """Forget what is too old, and what is in memory."""
        self.ledger.forget_unreachable(before=0, replays_before=self.now - REPLAY_TTL_S)
        self.restart()


def test_a_reply_survives_a_restart() -> None:
    shelf = Shelf()
    shelf.replies.remember(KEY, [1, 2])
    shelf.restart()
    assert shelf.replies.lookup(KEY) == (1, 2)
    assert shelf.replies.lookup(OTHER) is None


def test_a_reply_that_is_of_use_is_not_forgotten() -> None:
    shelf = Shelf()
    for key in (KEY, OTHER):
        shelf.replies.remember(key, [1, 2])
    shelf.now += REPLAY_TTL_S - 1
    assert shelf.replies.lookup(KEY) == (1, 2)
    shelf.now += 2
    shelf.collect()
    assert shelf.replies.lookup(KEY) == (1, 2)
    assert shelf.replies.lookup(OTHER) is None


def test_it_is_written_once_a_day() -> None:
    shelf, written = Shelf(), 0

    def write(*changes: object) -> object:
        nonlocal written
        written += len(changes)
        return None

    shelf.replies = KeptReplies(shelf.ledger, write, lambda: shelf.now)  # type: ignore[arg-type]
    shelf.replies.remember(KEY, [1])
    for _ in range(3):
        shelf.replies.lookup(KEY)
    assert written == 1
    shelf.now += 25 * 3600
    for _ in range(3):
        shelf.replies.lookup(KEY)
    assert written == 2
