"""One browser for the tests of the page."""

from collections.abc import Iterator

import pytest

from tests.page.browser import Browser, find_chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_chromium()
    assert executable is not None
    made = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()
