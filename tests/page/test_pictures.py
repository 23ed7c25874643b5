"""Pictures in the page's chat: dropped, pasted, removed, sent, and shown in later visits."""

from pathlib import Path

import httpx
import pytest

from tests.http_server import make_settings, run_server
from tests.page.browser import NEEDED, Browser
from tests.pictures import base64_of, picture

pytestmark = [*NEEDED, pytest.mark.usefixtures("no_errors")]

SEND = """(() => {
  const bytes = Uint8Array.from(atob(%r), (letter) => letter.charCodeAt(0));
  const moved = new DataTransfer();
  moved.items.add(new File([bytes], "shot.png", { type: "image/png" }));
  const options = { bubbles: true, cancelable: true, dataTransfer: moved, clipboardData: moved };
  document.querySelector(".composer textarea").dispatchEvent(new %s(%r, options));
})()"""
WAITING = "document.querySelectorAll('.composer .picture img').length"
SHOWN = "[...document.querySelectorAll('.exchange .picture img')].map((one) => one.naturalWidth)"


def test_pictures_are_dropped_pasted_sent_and_shown_again(tmp_path: Path, browser: Browser) -> None:
    settings = make_settings(tmp_path, model="fake-vision", default_max_tokens=8)
    with run_server(settings) as server, server.client() as http:
        page = browser.open(server.url)
        page.await_true("!!document.querySelector('.composer textarea')")
        page.look(SEND % (base64_of(picture((60, 40))), "DragEvent", "drop"))
        page.await_true(f"{WAITING} === 1")
        page.look(SEND % (base64_of(picture((80, 50))), "ClipboardEvent", "paste"))
        page.await_true(f"{WAITING} === 2")
        page.click(".composer .picture:first-child button")
        page.await_true(f"{WAITING} === 1")
        page.type("look here", ".composer textarea")
        page.press("Enter")
        page.await_true("!!document.querySelector('.exchange:not(.live) .cost')")
        page.await_true(f"{SHOWN}.join() === '80'")
        assert page.look(WAITING) == 0
        page.click(".exchange button", "Regenerate")
        page.await_true("document.querySelectorAll('.person').length === 2")
        page.await_true("!!document.querySelector('.exchange:not(.live) .cost')")
        assert kinds(http) == ["image", "text"]

        page.look("(window.isOld = true, location.reload())")
        page.await_true("!window.isOld && !!document.querySelector('.exchange .picture img')")
        page.await_true(f"{SHOWN}.join() === '80'")
        page.await_true("document.querySelector('.exchange img').src.startsWith('blob:')")


def kinds(http: httpx.Client) -> list[str]:
    turns = http.get("/v1/agents/look-here/turns").json()["data"]
    assert len(turns) == 1
    return [part["type"] for part in turns[0]["messages"][0]["content"]]


def test_a_model_of_text_offers_no_pictures(tmp_path: Path, browser: Browser) -> None:
    with run_server(make_settings(tmp_path)) as server:
        page = browser.open(server.url)
        page.await_true("document.querySelector('.composer .under button')?.disabled")
        assert page.look("document.querySelector('.composer .under button').title") == (
            "fake accepts only text"
        )
