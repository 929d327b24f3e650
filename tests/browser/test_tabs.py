"""The tabs of a browser share the streams of the shipped client, over HTTP/1.1."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any
from urllib.parse import quote, unquote

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route
from tests.broker.serving import ACME, OTHER, served
from tests.browser.chromium import Browser, Page

from moored.broker import ApiKeys, Broker, BrokerApp, MemorySource

#: More tabs than a browser opens connections to a host over HTTP/1.1.
TABS = 7
CHANNELS = ("orders", "refunds")
KEYS = {"acme-key": ACME, "acme-other-key": ACME, "other-key": OTHER}

#: Reads a stream for each channel, and notes what arrives, and how many streams the tab opens.
PAGE = """
<!doctype html><title>tab</title><link rel="icon" href="data:,">
<script type="module">
  import { subscribe } from "/v1/subscribe.js";
  const { fetch } = globalThis;
  globalThis.opened = 0;
  globalThis.fetch = (...request) => { opened += 1; return fetch(...request); };
  globalThis.got = { orders: [], refunds: [] };
  globalThis.ids = { orders: [], refunds: [] };
  globalThis.token = "acme-key";
  globalThis.streams = Object.keys(got).map((channel) => subscribe("/v1/subscribe", {
    token, channels: [channel], ...OPTIONS,
    onevent: ({ data, id }) => {
      got[channel].push(JSON.parse(data).number);
      ids[channel].push(id);
    },
    onreset: () => got[channel].push("reset"),
  }));
</script>
"""


class Stage:
    """A server, and the tabs of one browser."""

    def __init__(
        self, url: str, source: MemorySource, broker: Broker, open_tab: Callable[[], Page]
    ) -> None:
        self.url, self.source, self.broker = url, source, broker
        self._open_tab = open_tab
        self._numbers = count(1)
        self.last = 0

    async def tab(self, options: str = "{}", before: str = "") -> Page:
        """Open a tab, and wait until its page has run; another script runs `before` that."""
        tab: Page = await asyncio.to_thread(self._open_tab)
        command = partial(tab.command, "Page.addScriptToEvaluateOnNewDocument", source=before)
        await asyncio.to_thread(command)
        await asyncio.to_thread(tab.open, f"{self.url}/?{quote(options)}")
        await self.until(tab, "globalThis.streams")
        return tab

    async def until(self, tab: Page, condition: str) -> None:
        await asyncio.to_thread(tab.until, condition)

    async def value(self, tab: Page, expression: str) -> Any:
        return await asyncio.to_thread(tab.evaluate, expression)

    def publish(self, events: int = 1, tenant: str = ACME) -> None:
        """Publish events with the next numbers, each on both channels."""
        for _ in range(events):
            self.last = next(self._numbers)
            for channel in CHANNELS:
                payload = json.dumps({"org_id": tenant, "number": self.last})
                self.source.publish(channel, payload)

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """Publish an event every few milliseconds."""

        async def publish() -> None:
            while True:
                self.publish()
                await asyncio.sleep(0.005)

        task = asyncio.create_task(publish())
        try:
            yield
        finally:
            task.cancel()

    async def separate(self, acme: Page, other: Page) -> None:
        """Publish an event for each of two tenants: each tab gets that of its own only."""
        self.publish()
        self.publish(tenant=OTHER)
        self.publish(2)
        self.publish(tenant=OTHER)
        last = self.last
        await self.until(other, f"got.orders.includes({last}) && got.refunds.includes({last})")
        await self.until(
            acme, f"got.orders.includes({last - 1}) && got.refunds.includes({last - 1})"
        )
        for tab, expected in (acme, [last - 4, last - 2, last - 1]), (other, [last - 3, last]):
            for numbers in (await self.value(tab, "got")).values():
                assert [number for number in numbers if number >= last - 4] == expected

    async def begin(self, *tabs: Page, tenant: str = ACME) -> None:
        """Publish until each tab has received an event on both channels."""
        async with asyncio.timeout(60):
            for tab in tabs:
                while not await self.value(tab, "got.orders.length && got.refunds.length"):
                    self.publish(tenant=tenant)

    async def received(self, tab: Page, *, first: int | None = None) -> None:
        """Wait for the last event: the tab has each event since its first one exactly once."""
        last = self.last
        await self.until(tab, f"got.orders.includes({last}) && got.refunds.includes({last})")
        for numbers in (await self.value(tab, "got")).values():
            assert numbers == list(range(first or numbers[0], last + 1))

    async def subscribers(self, number: int) -> None:
        """Wait until so many streams are open."""
        async with asyncio.timeout(60):
            while self.broker.statistics().subscribers != number:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)


@asynccontextmanager
async def stage(chromium: Browser) -> AsyncIterator[Stage]:
    async def page(request: Request) -> HTMLResponse:
        return HTMLResponse(PAGE.replace("OPTIONS", unquote(request.url.query)))

    source = MemorySource()
    async with Broker(source, channels=CHANNELS) as broker:
        streams = BrokerApp(broker, ApiKeys(KEYS), cookie="session", retry=(0.1, 0.1))
        async with served(Starlette(routes=[Route("/", page), Mount("/", streams)])) as url:
            with chromium.tabs() as open_tab:
                yield Stage(url, source, broker, open_tab)


async def test_many_tabs_share_a_stream_and_each_gets_each_event_once(chromium: Browser) -> None:
    async with stage(chromium) as on:
        tabs = [await on.tab() for _ in range(TABS)]
        await on.begin(*tabs)
        on.publish(50)
        for tab in tabs:
            await on.received(tab)
        await on.subscribers(2)


@pytest.mark.parametrize("how", ["Page.close", "Page.crash"])
async def test_no_event_is_missed_or_doubled_when_the_leading_tab_ends(
    chromium: Browser, how: str
) -> None:
    async with stage(chromium) as on:
        leader, *tabs = [await on.tab() for _ in range(4)]
        await on.begin(leader, *tabs)
        async with on.publishing():
            await asyncio.to_thread(leader.end, how)
            before = on.last
            for tab in tabs:
                await on.until(tab, f"Math.min(got.orders.at(-1), got.refunds.at(-1)) > {before}")
        on.publish()
        for tab in tabs:
            await on.received(tab)
        await on.subscribers(2)
        assert sum([await on.value(tab, "opened") for tab in tabs]) >= 2


async def test_a_leading_tab_that_is_frozen_is_replaced_and_misses_nothing(
    chromium: Browser,
) -> None:
    async with stage(chromium) as on:
        leader, tab = await on.tab(), await on.tab()
        await on.begin(leader, tab)
        await asyncio.to_thread(leader.command, "Page.setWebLifecycleState", state="frozen")
        late = await on.tab()  # gets no answer from the leader
        async with on.publishing():
            await on.until(late, "opened >= 2 && got.orders.length && got.refunds.length")
        on.publish()
        await on.received(tab)
        await on.received(late)
        await asyncio.to_thread(leader.command, "Page.setWebLifecycleState", state="active")
        await on.received(leader)
        on.publish()
        for each in (leader, tab, late):
            await on.received(each)
        await on.subscribers(2)


async def test_users_of_one_browser_get_their_own_events_only(chromium: Browser) -> None:
    async with stage(chromium) as on:
        acme, other = await on.tab(), await on.tab("{token: 'other-key'}")
        await on.begin(acme)
        await on.begin(other, tenant=OTHER)
        await on.separate(acme, other)
        await on.subscribers(4)


async def test_a_tab_whose_token_function_returns_another_users_token_no_longer_shares(
    chromium: Browser,
) -> None:
    async with stage(chromium) as on:
        changing, acme = [await on.tab("{token: () => globalThis.token}") for _ in range(2)]
        await on.begin(changing, acme)
        await on.value(changing, "token = 'other-key'")
        await on.broker.drain(over=0)  # ends the streams: the leader asks its function again
        on.broker.draining = False
        await on.until(acme, "opened >= 2")
        await on.separate(acme, changing)


@pytest.mark.parametrize(
    ("options", "before"),
    [
        ("{}", "delete Navigator.prototype.locks"),  # as on an insecure page
        ("{}", "delete globalThis.BroadcastChannel"),
        ("{share: false}", ""),
        ("{token: undefined}", "document.cookie = 'session=acme-key'"),
    ],
)
async def test_a_tab_that_cannot_share_has_streams_of_its_own(
    chromium: Browser, options: str, before: str
) -> None:
    async with stage(chromium) as on:
        tabs = [await on.tab(options, before) for _ in range(2)]
        await on.begin(*tabs)
        await on.subscribers(4)


async def test_tabs_with_a_cookie_share_if_they_say_whose_stream_it_is(chromium: Browser) -> None:
    async with stage(chromium) as on:
        ann = "{token: undefined, share: 'ann'}"
        tabs = [await on.tab(ann, "document.cookie = 'session=acme-key'") for _ in range(2)]
        await on.begin(*tabs)
        await on.subscribers(2)


async def test_a_tab_with_an_older_event_id_first_gets_what_it_has_missed(
    chromium: Browser,
) -> None:
    async with stage(chromium) as on:
        leader = await on.tab()
        await on.begin(leader)
        on.publish(10)
        await on.received(leader)
        older = json.dumps(
            {channel: await on.value(leader, f"ids.{channel}.at(-6)") for channel in CHANNELS}
        )
        late = await on.tab(f"{{lastEventId: {older}[channel]}}")
        await on.received(late, first=on.last - 4)
        on.publish()  # where the streams meet
        for tab in (leader, late):
            await on.received(tab)
        await on.subscribers(2)
