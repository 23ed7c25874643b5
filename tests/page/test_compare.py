"""Two branches side by side, in a real Chromium: chosen in the graph, marked words, keys, phone."""

import json
from typing import Any

import httpx
import pytest

from tests.http_server import RunningServer
from tests.integration.test_direct_api import get, make, say
from tests.page.browser import NEEDED, Browser, Page

pytestmark = [*NEEDED, pytest.mark.usefixtures("no_errors")]

SYSTEM = "You help with a web shop. Be brief, cite files, never invent functions. " * 12
SEA = "Please write one short line about the sea in winter"
HILLS = "Please write one short line about the hills in winter"
MARKED = "[...CSS.highlights.get('{side}')].map(String)"


@pytest.fixture
def branches(http: httpx.Client) -> list[str]:
    """Agent `a` with turns one, two and SEA, and its fork `b` with HILLS in place of SEA."""
    make(http, id="a", system=SYSTEM)
    ids = [say(http, "a", text)["turn_id"] for text in ("one", "two")]
    http.post("/v1/agents/a/fork", json={"ids": ["b"]}).raise_for_status()
    say(http, "a", SEA)
    say(http, "b", HILLS)
    return ids


def marked(page: Page, side: str) -> Any:
    return page.look(MARKED.format(side=side))


def test_two_heads_are_chosen_in_the_graph_and_compared(
    page: Page, http: httpx.Client, branches: list[str]
) -> None:
    found = get(http, "/v1/agents/a/compare", **{"with": "b"})
    assert (found["common_turns"], found["fork"]) == (2, branches[1])
    page.click(".rail a", "Agents")
    page.click(".rows .row", "a")
    page.click(".deeds button", "Compare")
    page.await_text("choose another line", ".choosing")
    page.click(".rows .row:nth-child(2)")
    page.await_true("location.hash === '#/compare/a/b'")

    page.await_text(f"2 turns in common, {found['common_tokens']:,} tokens computed once", ".trunk")
    page.await_true(f"{MARKED.format(side='first')}.some((text) => text.startsWith('sea'))")
    assert any(text.startswith("hills") for text in marked(page, "second"))
    assert not any("Please" in text for text in marked(page, "first") + marked(page, "second"))
    page.await_text("Only here: sea", ".cell.first .hidden")
    page.click(".trunk summary")
    page.await_text("one", ".past .user")
    page.await_true("document.querySelectorAll('.past').length === 2")

    page.press("x")
    page.await_text("b", ".branch-head.first h2")
    page.press("j")
    assert page.look("document.activeElement.className") == "pair"
    page.press("Escape")
    page.await_true("location.hash === '#/agents/b'")


@pytest.mark.usefixtures("branches")
def test_a_fork_is_compared_from_the_turn_where_it_leaves(
    page: Page, running: RunningServer
) -> None:
    page.go(f"{running.url}/#/agents/a")
    page.click(".turn:nth-of-type(2) button", "Compare with b")
    page.await_true("location.hash === '#/compare/a/b'")
    page.await_text("2 turns in common", ".trunk")


@pytest.mark.usefixtures("branches")
def test_a_reply_is_compared_from_the_chat(page: Page, running: RunningServer) -> None:
    page.go(f"{running.url}/#/chat/a")
    page.await_text(SEA, ".exchange.latest")
    page.click(".exchange.latest .menu summary")
    page.click(".exchange.latest .sheet button", "Compare with b")
    page.await_true("location.hash === '#/compare/a/b'")


@pytest.mark.usefixtures("branches")
def test_a_pair_is_chosen_with_keys_alone(page: Page, running: RunningServer) -> None:
    page.go(f"{running.url}/#/agents/b")
    page.await_text("b", ".detail h2")
    page.press("d")
    page.await_text("choose another line", ".choosing")
    page.await_true(
        "!document.querySelector('.detail')"
    )  # no line is chosen, so j goes to the first
    page.press("j")
    page.await_true("location.hash === '#/agents/a'")
    page.press("Enter")
    page.await_true("location.hash === '#/compare/b/a'")


@pytest.mark.usefixtures("branches")
def test_one_branch_is_kept_and_the_other_deleted(
    page: Page, running: RunningServer, http: httpx.Client
) -> None:
    page.go(f"{running.url}/#/compare")
    page.await_text("2 turns in common", ".trunk")  # the view finds a pair by itself
    kept = page.look("document.querySelector('.branch-head.second h2').innerText")
    page.click(".branch-head.second button", "Keep this one")
    page.click("dialog .check input")
    page.click("dialog button", "Keep")
    page.await_true(f"location.hash === {json.dumps(f'#/chat/{kept}')}")
    page.await_text("Deleted", ".toast")
    assert get(http, f"/v1/agents/{kept}")["settings"]["pin"]


def test_agents_without_a_branch_get_an_explanation(page: Page, http: httpx.Client) -> None:
    make(http, id="alone")
    say(http, "alone", "one")
    page.click(".rail a", "Compare")
    page.await_text("See two branches of a conversation side by side", ".compare")
    page.click(".compare button", "Fork alone")
    page.await_text("Fork alone", "dialog h2")


@pytest.mark.usefixtures("branches")
@pytest.mark.parametrize("size", [(1280, 820), (390, 780)], ids=["desk", "phone"])
def test_branches_stand_beside_each_other_or_stacked(
    browser: Browser, running: RunningServer, size: tuple[int, int]
) -> None:
    page = browser.open(f"{running.url}/#/compare/a/b", *size)
    page.await_text("2 turns in common", ".trunk")
    left = [
        page.look(f"document.querySelector('.cell.{side}').getBoundingClientRect().left")
        for side in ("first", "second")
    ]
    assert (left[0] < left[1]) == (size[0] > 600)
    assert page.look("document.documentElement.scrollWidth <= innerWidth")
