"""The view Models in a real Chromium: found, downloaded, stopped, served and deleted."""

import httpx
import pytest

from tests.page.browser import NEEDED, Page
from tests.waiting import await_that

pytestmark = [*NEEDED, pytest.mark.usefixtures("no_errors")]

SOURCE = "org/small-4bit"


def test_a_model_is_downloaded_stopped_resumed_served_and_deleted(
    page: Page, http: httpx.Client
) -> None:
    page.click(".rail a", "Models")
    page.await_text("in use", ".card")  # it moves what is below
    page.await_text("best here", ".offers")
    page.await_text("does not fit", ".offers")
    page.click(".offers button", "Download")
    page.await_text("of 954", ".download .note")
    page.click(".download button", "Cancel")
    page.await_text("stopped; files that arrived are kept", ".download")
    [stopped] = http.get("/admin/models/downloads").json()["downloads"]
    assert 0 < stopped["done_bytes"] < stopped["total_bytes"]

    page.click(".download button", "Resume")
    page.await_text("complete", ".download")
    page.await_text("small-4bit", ".card")
    page.await_text("Fits in this machine's memory", ".card")
    page.click(".download button", "Serve")
    page.await_text("small-4bit", ".card.served")
    assert http.get("/health").json()["model"] == "small-4bit"

    page.click(".card button", "Serve")  # back to another one
    await_that(lambda: http.get("/health").json()["model"] == "fake")
    page.type("small-4bit", "#search")
    page.await_true("document.querySelectorAll('.card').length === 1")
    page.click(".card button", "Delete")
    page.click("dialog button", "Delete")
    page.await_text("No model on this machine matches")
    page.await_text("954 MB freed", ".toast")
