"""The page in a real Chromium: fork and rewind, the live map, keys, models; all views fit."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http_server import RunningServer, give_keys, make_settings, run_server
from tests.integration.test_direct_api import get, make, say
from tests.page.browser import NEEDED, Browser, Page

pytestmark = [*NEEDED, pytest.mark.usefixtures("no_errors")]

LONG = "You help with a web shop. Be brief, cite files, never invent functions. " * 12
RECORDING = Path(__file__).parents[1] / "recordings" / "pi.json"
CANVAS = "document.querySelector('.map canvas')"
VIEWS = ("chat", "agents", "compare", "memory", "now", "models", "connect")


def rows(page: Page) -> Any:
    return page.look(
        "[...document.querySelectorAll('.rows .row .name')].map((row) => row.innerText)"
    )


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


def test_agents_are_forked_and_taken_back(page: Page, http: httpx.Client) -> None:
    make(http, id="a", system=LONG)
    ids = [say(http, "a", text)["turn_id"] for text in ("one", "two", "three")]
    page.click(".rail a", "Agents")
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
    page.click(".rail a", "Agents")
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
        page.await_text("secret-agent", ".person")
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
    page.await_true("document.activeElement.closest('.composer')")
    for number, view in enumerate(VIEWS, start=1):
        page.look("document.activeElement.blur()")  # the chat's composer takes digits as text
        page.press(str(number))
        page.await_text(view.capitalize(), ".rail .on")
        page.await_true(f"!!document.querySelector('section.{view}')")
        assert page.look("document.documentElement.scrollWidth <= innerWidth"), view
    ground = page.look("getComputedStyle(document.body).backgroundColor")
    assert (int(ground[4:].split(",")[0]) < 60) == (scheme == "dark")


def test_the_clients_page_shows_this_address_and_model(page: Page, running: RunningServer) -> None:
    page.click(".rail a", "Connect")
    page.await_text(f"ANTHROPIC_BASE_URL={running.url}", ".client pre")
    page.await_text("ANTHROPIC_MODEL=fake", ".client pre")
    page.await_text("model_context_window = 131072", ".client pre")


def test_a_model_is_swapped_with_its_steps_shown(page: Page, http: httpx.Client) -> None:
    page.click(".rail a", "Models")
    page.await_text("in use", ".card.served")
    page.click(".card button", "Serve")
    page.await_text("fake-2", ".card.served")
    assert http.get("/health").json()["model"] == "fake-2"
    page.await_text("fake-2", ".status .name")
    page.click(".rail a", "Now")
    page.await_text("model ready: fake-2", ".events")


def test_the_last_hour_is_drawn(page: Page, running: RunningServer, http: httpx.Client) -> None:
    make(http, id="a")
    say(http, "a", "one")
    running.server.history.record()
    page.click(".rail a", "Now")
    page.await_text("Time to first token", ".chart")
    page.await_true("document.querySelectorAll('.chart canvas').length === 5")
    page.await_text("No requests are waiting", ".panel")
