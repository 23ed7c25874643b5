"""Text in every view has a contrast of at least 4.5:1 with its ground, in light and dark."""

import httpx
import pytest

from tests.integration.test_direct_api import make, say
from tests.page.browser import FAINT, NEEDED, Page

pytestmark = [*NEEDED, pytest.mark.usefixtures("no_errors")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_text_is_faint(page: Page, http: httpx.Client, scheme: str) -> None:
    make(http, id="a", system="Be brief. " * 60)
    say(http, "a", "one")
    http.post("/v1/agents/a/fork", json={"ids": ["b", "c"]}).raise_for_status()
    say(http, "a", "A line about the sea in winter.")
    say(http, "b", "A line about the hills in winter.")
    http.post("/v1/agents/c/evict", json={"to": "cold"}).raise_for_status()
    page.call(
        "Emulation.setEmulatedMedia",
        features=[
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ],
    )
    for view, shown in {
        "agents/a": ".log .turn",
        "compare/a/b": ".pair .cell footer",
        "memory": ".budgets",
        "now": ".figures",
        "chat/a": ".exchange",
        "models": ".offers",
        "connect": ".client",
    }.items():
        page.look(f"location.hash = '#/{view}'")
        page.await_true(f"!!document.querySelector('section.{view.split('/')[0]} {shown}')")
        assert page.look(FAINT) == [], view
