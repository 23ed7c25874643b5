"""The page in a real Chromium: chat, fork and rewind, the live map, a dead server, keys."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from semantic.domain.agents import Agent, Turn
from semantic.domain.chat import Message, Role
from semantic.domain.events import Usage
from tests.http_server import RunningServer, give_keys, make_settings, run_server
from tests.integration.test_direct_api import get, make, say
from tests.page.browser import NEEDED, Browser, Page
from tests.smoke.server_process import serve
from tests.unit.application.device_rig import hold
from tests.waiting import await_that

pytestmark = NEEDED

LONG = "You help with a web shop. Be brief, cite files, never invent functions. " * 12
RECORDING = Path(__file__).parents[1] / "recordings" / "pi.json"
CANVAS = "document.querySelector('.map canvas')"
VIEWS = ("agents", "memory", "now", "chat", "models", "connect")
# What a browser logs of answers that the tests ask for.
NETWORK = ("net::ERR_", "status of 40", "status of 503")


@pytest.fixture(autouse=True)
def _no_errors(browser: Browser) -> Iterator[None]:
    """No script fails, and nothing is blocked by the page's own policy."""
    browser.console.clear()
    yield
    browser.close_pages()
    assert [line for line in browser.console if not any(known in line for known in NETWORK)] == []


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningServer]:
    with run_server(make_settings(tmp_path, log_level="error")) as server:
        yield server


@pytest.fixture
def http(running: RunningServer) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client


@pytest.fixture
def page(running: RunningServer, browser: Browser) -> Page:
    return browser.open(running.url)


def test_a_stopped_reply_is_kept_and_continued(
    browser: Browser, http: httpx.Client, running: RunningServer
) -> None:
    make(http, id="coder")
    page = browser.open(f"{running.url}/#/chat/coder")
    may_go_on = hold(running.server.device, num_steps=6)
    page.type("Tell me more.", ".composer textarea")
    page.press("Enter")
    page.await_true("document.querySelector('.live .assistant')?.innerText.length > 0")
    begun = page.look("document.querySelector('.live .assistant').innerText")
    page.press("Escape")
    may_go_on.set()
    page.await_text("stopped", ".exchange:not(.live) .cost .note")
    [stopped] = get(http, "/v1/agents/coder/turns")["data"]
    assert stopped["finish_reason"] == "cancelled"
    text = stopped["messages"][-1]["content"][0]["text"]
    assert text.startswith(begun.strip())
    page.click(".exchange .cost button", "Continue")
    page.await_true("!document.querySelector('.cost .note')?.innerText.includes('stopped')")
    page.await_text("reply", ".exchange:not(.live) .cost .note")
    [whole] = get(http, "/v1/agents/coder/turns")["data"]
    assert whole["messages"][-1]["content"][0]["text"].startswith(text)
    assert whole["finish_reason"] != "cancelled"


def test_a_message_is_edited_and_a_reply_is_written_again(
    browser: Browser, http: httpx.Client, running: RunningServer
) -> None:
    make(http, id="coder")
    first = say(http, "coder", "one")
    page = browser.open(f"{running.url}/#/chat/coder")
    page.click(".exchange .cost button", "Edit")
    page.await_text("Sends in place of the earlier message", ".composer")
    page.await_true("document.querySelector('.composer textarea').value === 'one'")
    page.type(" and two")
    page.press("Enter")
    page.await_text("one and two", ".exchange:not(.live) .said.user")
    [edited] = get(http, "/v1/agents/coder/turns")["data"]
    assert edited["parent"] is None
    assert edited["id"] != first["turn_id"]

    page.click(".exchange .cost button", "Regenerate")
    page.await_true(
        "location.hash === '#/chat/coder' && document.querySelectorAll('.person').length === 2"
    )
    await_that(lambda: get(http, "/v1/agents/coder/turns")["data"][:1] not in ([], [edited]))
    [again] = get(http, "/v1/agents/coder/turns")["data"]
    assert again["messages"][0] == edited["messages"][0]
    [kept] = [a for a in get(http, "/v1/agents")["data"] if a["id"] != "coder"]
    assert kept["head"] == edited["id"]


def rows(page: Page) -> Any:
    return page.look(
        "[...document.querySelectorAll('.rows .row .name')].map((row) => row.innerText)"
    )


def test_an_agent_is_made_and_talked_to(page: Page, http: httpx.Client) -> None:
    page.await_text("No agents yet")
    page.click("button", "New")
    page.type("coder", "dialog input[name=id]")
    page.type(LONG, "dialog textarea")
    page.click("dialog button", "Create")
    page.await_text("coder", ".conversation h1")

    page.type("Where is the price computed?", ".composer textarea")
    page.press("Enter")
    page.await_text("computed", ".exchange:not(.live) .cost .key")
    page.type("And the tax?", ".composer textarea")
    page.press("Enter")
    page.await_true("document.querySelectorAll('.exchange:not(.live)').length === 2")

    turns = get(http, "/v1/agents/coder/turns")["data"]
    assert len(turns) == 2
    shown = page.look(
        "[...document.querySelectorAll('.said.assistant')].map((said) => said.innerText)"
    )
    told = [turn["messages"][-1]["content"][0]["text"] for turn in reversed(turns)]
    # Sampled text may hold control characters, which a browser shows as space or not at all.
    assert [re.findall("[a-z]", text) for text in shown] == [re.findall("[a-z]", t) for t in told]
    page.await_text(f"{turns[0]['reuse']['hot']:,} hot", ".exchange:last-of-type .cost")
    page.click(".exchange:last-of-type button", "Why")
    page.await_text("begins with the complete stored conversation", ".why")


def test_why_shows_the_text_on_both_sides(
    running: RunningServer, http: httpx.Client, browser: Browser
) -> None:
    for day in ("Monday", "Tuesday"):
        said = [{"role": "user", "content": f"{LONG} Today is {day}. What now?"}]
        body = {"model": "fake", "messages": said, "max_tokens": 4}
        http.post("/v1/chat/completions", json=body, headers={"x-agent-id": "diary"})
    page = browser.open(f"{running.url}/#/chat/diary")
    page.click(".exchange:last-of-type button", "Why")
    page.await_text("Mon", ".why .old")
    page.await_text("Tues", ".why .new")


def test_the_timeline_says_why_tokens_were_computed_again(
    running: RunningServer, http: httpx.Client, browser: Browser
) -> None:
    recorded = json.loads(RECORDING.read_text())["requests"]
    headers = {"x-agent-id": "pi"}
    for request in (recorded[0], recorded[0], recorded[-1]):  # three more tools in the last one
        said = request["messages"][:2]
        body = {"messages": said, "tools": request["tools"], "max_tokens": 4}
        http.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()
    (latest, *_) = get(http, "/v1/agents/pi/timeline")["data"]
    assert latest["miss"]["text"].startswith("tool list changed: 3 tools added at position 2, ")
    page = browser.open(f"{running.url}/#/agents/pi")
    page.await_text(latest["miss"]["text"], ".timeline .miss")
    page.await_text(latest["miss"]["text"], ".log .turn.head .miss")
    heights = page.look(
        "[...document.querySelectorAll('.timeline li i')].map((bar) => bar.offsetHeight)"
    )
    assert len(heights) == 2 * 3
    assert heights[0] > heights[1] == 0  # the first turn computed everything
    assert heights[3] > heights[2]  # the second one reused it
    assert page.look("[...document.querySelectorAll('.timeline li.missed')].length") == 1


def test_drafted_tokens_are_shown(running: RunningServer, browser: Browser) -> None:
    said = (Message.of(Role.USER, "Again?"), Message.of(Role.ASSISTANT, "Again."))
    usage = Usage(9, 8, accepted_prediction_tokens=5, rejected_prediction_tokens=2)
    turn = Turn("turn_1", None, "", said, (), 17, None, usage, 1.0)
    running.server.memory.agents.create(Agent("parrot", 1.0).advance(turn.id, at=1.0), [turn])
    page = browser.open(f"{running.url}/#/chat/parrot")
    page.await_text("5 of 7 draft tokens were accepted", ".cost")
    page.await_text("5 drafted", ".cost .key")


def test_agents_are_forked_and_taken_back(page: Page, http: httpx.Client) -> None:
    make(http, id="a", system=LONG)
    ids = [say(http, "a", text)["turn_id"] for text in ("one", "two", "three")]
    page.click(".rows .row", "a")
    page.await_text("three", ".log .turn.head")

    page.click(".log .turn:nth-of-type(3) button", "Rewind")
    page.await_text("one", ".log .turn.head")
    assert get(http, "/v1/agents/a")["head"] == ids[0]
    page.click(".toast button", "Undo")
    page.await_text("three", ".log .turn.head")
    assert get(http, "/v1/agents/a")["head"] == ids[2]

    page.click(".log .turn:nth-of-type(2) button", "Fork")
    page.type("b", "dialog input[name=name]")
    page.click("dialog button", "Fork")
    page.await_text("b", ".detail h2")
    assert get(http, "/v1/agents/b")["head"] == ids[1]
    page.await_true("document.querySelectorAll('.rows .row').length === 2")
    assert rows(page) == ["a", "b"]  # the fork below what it came from

    page.press("p")
    page.await_text("is pinned", ".toast")
    page.press("Delete")
    page.click("dialog button", "Delete")
    page.await_true("document.querySelectorAll('.rows .row').length === 1")
    page.click(".toast:last-child button", "Undo")
    page.await_true("document.querySelectorAll('.rows .row').length === 2")
    assert get(http, "/v1/agents/b")["settings"]["pin"]


def test_what_others_do_is_seen_at_once(page: Page, http: httpx.Client) -> None:
    page.await_text("No agents yet")
    make(http, id="new-one")
    page.await_text("new-one", ".rows .row")
    http.delete("/v1/agents/new-one")
    page.await_text("No agents yet")


def test_the_map_lives(running: RunningServer, http: httpx.Client, browser: Browser) -> None:
    make(http, id="a", system=LONG)
    say(http, "a", "one")
    page = browser.open(f"{running.url}/#/memory")
    count = f"parseInt({CANVAS}.getAttribute('aria-label'))"
    before = page.await_true(count)

    make(http, id="b", system=LONG)
    say(http, "b", "something else " * 40)
    page.await_true(f"{count} > {before}")
    page.await_true("parseInt(document.querySelectorAll('.legend b')[3].innerText) > 0")

    page.await_text("RAM", ".budgets")  # it moves the map
    page.await_text("none reported", ".budgets")  # of the device's memory
    left, top = (page.look(f"{CANVAS}.getBoundingClientRect().{side}") for side in ("left", "top"))
    page.hover(left + 8, top + 8)
    page.await_text("a, b", ".tip .owners")
    page.await_text("256 tokens, 0 to 255", ".tip")
    pixel = f"[...{CANVAS}.getContext('2d').getImageData(8, 8, 1, 1).data].join()"
    page.hover(left + 600, top + 300)
    colour = page.look(pixel)
    http.delete("/v1/agents/b")  # what others share stays
    http.post("/v1/agents/a/evict")
    page.await_true(f"{pixel} !== {colour!r}")
    page.await_true("document.querySelectorAll('.legend b')[2].innerText !== '0'")


def test_a_server_that_dies_comes_back(tmp_path: Path, browser: Browser) -> None:
    with serve(tmp_path / "home", tmp_path / "log", "--backend", "fake") as first:
        with first.client() as http:
            make(http, id="survivor", system=LONG)
            say(http, "survivor", "one")
        page = browser.open(f"{first.url}/#/chat/survivor")
        page.await_text("one", ".said.user")
    page.await_text("The server does not answer", ".down")
    page.type("are you there?", ".composer textarea")
    page.press("Enter")
    page.await_text("Try again", ".live button")

    port = first.url.rsplit(":", 1)[1]
    with serve(tmp_path / "home", tmp_path / "log2", "--backend", "fake", "--port", port):
        page.await_true("!document.querySelector('.down')")
        page.click(".live button", "Try again")
        page.await_true("document.querySelectorAll('.exchange:not(.live)').length === 2")


def test_a_key_is_asked_for_and_kept_for_the_tab_alone(tmp_path: Path, browser: Browser) -> None:
    keys = give_keys(tmp_path, "a")
    with run_server(make_settings(tmp_path)) as running:
        headers = {"x-api-key": keys["a"]}
        with running.client(headers=headers) as http:
            make(http, id="secret-agent")
        page = browser.open(running.url)
        page.type("sk-wrong", "dialog input[name=key]")
        page.press("Enter")
        page.await_text("key", "dialog .fault")
        page.type(keys["a"], "dialog input[name=key]")
        page.press("Enter")
        page.await_text("secret-agent", ".rows .row")
        page.click(".rail a", "Memory")
        page.await_text("needs an admin key", ".memory .fault")
        assert page.look("Object.values(sessionStorage).join()") == keys["a"]
        assert keys["a"] not in page.look("Object.values(localStorage).join() + document.cookie")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 820), (390, 780)], ids=["desk", "phone"])
def test_every_view_fits(
    page: Page, http: httpx.Client, size: tuple[int, int], scheme: str
) -> None:
    make(http, id="a-rather-long-name-of-an-agent-that-somebody-chose", system=LONG)
    say(http, "a-rather-long-name-of-an-agent-that-somebody-chose", "one")
    page.resize(*size)
    page.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    for number, view in enumerate(VIEWS, start=1):
        page.press(str(number))
        page.await_text(view.capitalize(), ".rail .on")
        page.await_true(f"!!document.querySelector('section.{view}')")
        assert page.look("document.documentElement.scrollWidth <= innerWidth"), view
    ground = page.look("getComputedStyle(document.body).backgroundColor")
    assert (int(ground[4:].split(",")[0]) < 60) == (scheme == "dark")


def test_the_clients_page_shows_this_address_and_model(page: Page, running: RunningServer) -> None:
    page.press("6")
    page.await_text(f"ANTHROPIC_BASE_URL={running.url}", ".client pre")
    page.await_text("ANTHROPIC_MODEL=fake", ".client pre")
    page.await_text("model_context_window = 131072", ".client pre")


def test_a_model_is_swapped_with_its_steps_shown(page: Page, http: httpx.Client) -> None:
    page.press("5")
    page.await_text("ready", ".card.served")
    page.click(".card button", "Serve")
    page.await_text("fake-2", ".card.served")
    assert http.get("/health").json()["model"] == "fake-2"
    page.await_text("fake-2", ".status .name")
    page.press("3")
    page.await_text("model ready: fake-2", ".events")


def test_the_last_hour_is_drawn(page: Page, running: RunningServer, http: httpx.Client) -> None:
    make(http, id="a")
    say(http, "a", "one")
    running.server.history.record()
    page.press("3")
    page.await_text("Time to first token", ".chart")
    page.await_true("document.querySelectorAll('.chart canvas').length === 5")
    page.await_text("No requests are waiting", ".panel")
