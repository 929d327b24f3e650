"""Fixtures of the tests in a browser: one Chromium per worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.browser.chromium import Browser, Page, browser
from tests.servers import require_server


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A running Chromium."""
    with browser(require_server("chromium"), tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A new tab without cookies or storage."""
    with chromium.page() as opened:
        yield opened
