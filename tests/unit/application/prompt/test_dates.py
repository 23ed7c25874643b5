"""The date that a conversation shows its model."""

from datetime import date, timedelta

import pytest

from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.ledger import write_at_once
from semantic.application.prompt.renderer import FrozenDates
from semantic.application.prompt.replay import LedgerReplayStore, ReplayStore
from semantic.domain.chat import AgentHint, ChatRequest, Message, Role

pytestmark = pytest.mark.unit

MONDAY = date(2026, 3, 2)
TUESDAY = MONDAY + timedelta(1)
ROOT = b"root"


class Days:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.today = MONDAY
        self.dates = FrozenDates(ReplayStore(), lambda: self.today)

    def asked(self, *texts: str, agent: AgentHint | None = None, root: bytes = ROOT) -> date:
        """The date of a conversation of these messages, the user's first; it is answered."""
        request = asking(*texts, agent=agent)
        day = self.dates.of(root, request)
        self.dates.keep(root, request, day)
        return day


def asking(*texts: str, agent: AgentHint | None = None) -> ChatRequest:
    roles = (Role.USER, Role.ASSISTANT)
    said = tuple(Message.of(roles[i % 2], text) for i, text in enumerate(texts))
    return ChatRequest("m", said, agent=agent or AgentHint())


@pytest.mark.parametrize(
    "hint", [AgentHint(agent_id="a"), AgentHint(session="a"), AgentHint(client_key="a")]
)
def test_an_agents_day_does_not_pass(hint: AgentHint) -> None:
    days = Days()
    assert days.asked("hi", agent=hint) == MONDAY
    days.today = TUESDAY
    assert days.asked("hi", "ho", "hi", agent=hint) == MONDAY
    assert days.asked("something else", agent=hint) == MONDAY
    assert days.asked("hi", agent=AgentHint(agent_id="b")) == TUESDAY
    assert days.asked("hi", agent=hint, root=b"another tenant's") == TUESDAY


def test_a_conversation_keeps_the_day_it_began() -> None:
    days = Days()
    assert days.asked("hi") == MONDAY
    days.today = TUESDAY
    assert days.asked("hi", "ho", "and now?") == MONDAY
    assert days.asked("hello", "ho", "and now?") == TUESDAY


def test_a_conversation_that_begins_like_an_older_one_has_its_own_day() -> None:
    days = Days()
    days.asked("hi")
    days.today = TUESDAY
    assert days.asked("hi") == TUESDAY


@pytest.mark.parametrize("hint", [AgentHint(agent_id="a"), AgentHint()])
def test_an_unanswered_conversation_has_no_date_yet(hint: AgentHint) -> None:
    days = Days()
    assert days.dates.of(ROOT, asking("hi", agent=hint)) == MONDAY
    days.today = TUESDAY
    assert days.dates.of(ROOT, asking("hi", "ho", "hi", agent=hint)) == TUESDAY


def test_an_answer_that_comes_after_midnight_keeps_the_day_of_its_prompt() -> None:
    days, request = Days(), asking("hi")
    day = days.dates.of(ROOT, request)
    days.today = TUESDAY
    days.dates.keep(ROOT, request, day)
    assert days.asked("hi", "ho", "and now?") == MONDAY


def test_days_survive_a_restart() -> None:
    ledger = SqliteLedger.in_memory()
    request = asking("hi", agent=AgentHint(agent_id="a"))

    def dates(today: date) -> FrozenDates:
        return FrozenDates(LedgerReplayStore(ledger, write_at_once(ledger)), lambda: today)

    dates(MONDAY).keep(ROOT, request, MONDAY)
    assert dates(TUESDAY).of(ROOT, request) == MONDAY
