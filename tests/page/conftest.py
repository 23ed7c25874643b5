"""One browser for the tests of the page, and a server with the fake backend for each of them."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.http_server import RunningServer, make_settings, run_server
from tests.page.browser import Browser, Page, find_chromium

# What a browser logs of answers that the tests ask for.
NETWORK = ("net::ERR_", "status of 40", "status of 503")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_chromium()
    assert executable is not None
    made = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def no_errors(browser: Browser) -> Iterator[None]:
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
