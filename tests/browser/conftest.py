"""Fixtures of the tests in a browser: one Chromium per worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.browser.chromium import Browser, Page, browser
from tests.servers import require_server
from tests.service.support import drop_slots


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A running Chromium."""
    with browser(require_server("chromium"), tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def postgres_url(postgres_url: str) -> Iterator[str]:
    """A database of the shared server; the slots that services leave are dropped with it."""
    yield postgres_url
    drop_slots(postgres_url)


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A new tab without cookies or storage."""
    with chromium.page() as opened:
        yield opened
