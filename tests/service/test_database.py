"""The watch over a real PostgreSQL, through a proxy that breaks the line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from urllib.parse import urlsplit

import pytest

from holdfast.kernel import Event
from holdfast.service import Config, DatabaseUnreachable, Service, _database
from holdfast.service._line import Line
from holdfast.service._listen import listen
from holdfast.testing import FaultProxy

LIMIT = 30.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code with shorter times."""
    monkeypatch.setattr(_database, "CHECK_EVERY", 0.05)
    monkeypatch.setattr(_database, "CHECK_TIMEOUT", 0.5)
    monkeypatch.setattr(_database, "CONNECT_TIMEOUT", 0.5)


@asynccontextmanager
async def service(url: str, *, wait: float = LIMIT) -> AsyncIterator[Service]:
    config = Config(port=0, database_url=url, database_wait=wait)
    with ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in listen(config.host, 0)]
        async with Service(config, sockets) as started:
            yield started


def behind(proxy: FaultProxy, url: str) -> str:
    """The same database, through the proxy."""
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")[0]
    return parts._replace(netloc=f"{login}@{proxy.host}:{proxy.port}").geturl()


def front(url: str) -> FaultProxy:
    parts = urlsplit(url)
    return FaultProxy(parts.hostname or "", parts.port)


async def third_failure(it: Service) -> None:
    """Wait until the watch has failed three times more."""
    failed = asyncio.Semaphore(0)

    def note(event: Event) -> None:
        if event.component == "holdfast/postgres/watch" and event.kind == "failure":
            failed.release()

    unsubscribe = it.recorder.subscribe(note)
    async with asyncio.timeout(LIMIT):
        for _ in range(3):
            await failed.acquire()
    unsubscribe()


async def status(it: Service, wanted: str) -> None:
    await it.monitor.wait_until(lambda now: now == wanted, LIMIT)


@pytest.mark.parametrize("fault", ["reset", "black_hole", "stall"])
async def test_a_line_that_breaks_or_falls_silent_is_noticed_and_found_again(
    postgres_url: str, fault: str
) -> None:
    async with front(postgres_url) as proxy, service(behind(proxy, postgres_url)) as it:
        await status(it, "active")
        getattr(proxy, fault)()
        await status(it, "starting")
        assert "does not answer" in str(it.monitor.conditions()["postgres_ready"].detail)
        proxy.heal()
        await status(it, "active")
        assert "PostgreSQL" in str(it.monitor.conditions()["postgres_ready"].detail)
        (machine,) = it.view.machines
        assert machine.phase == "active"
        causes = [move.cause for move in machine.history]
        assert any("does not answer" in cause for cause in causes)


async def test_a_database_that_is_never_reached_fails_the_start(postgres_url: str) -> None:
    async with front(postgres_url) as proxy:
        proxy.refuse()
        url = behind(proxy, postgres_url)
        async with service(url, wait=0.3) as it:
            with pytest.raises(
                DatabaseUnreachable, match=r"cannot reach PostgreSQL at 127\.0\.0\.1"
            ):
                await asyncio.wait_for(asyncio.shield(it.first_active), LIMIT)
            # It is for the one who runs the service to stop it; until then it goes on trying.
            proxy.heal()
            await status(it, "active")


async def test_one_that_is_lost_later_does_not(postgres_url: str) -> None:
    async with front(postgres_url) as proxy, service(behind(proxy, postgres_url), wait=0.3) as it:
        await asyncio.wait_for(asyncio.shield(it.first_active), LIMIT)
        proxy.refuse()
        proxy.reset()
        await status(it, "starting")
        await third_failure(it)
        assert it.first_active.exception() is None
        proxy.heal()
        await status(it, "active")


async def test_the_watch_is_one_connection_and_goes_with_the_service(postgres_url: str) -> None:
    async with front(postgres_url) as proxy:
        async with service(behind(proxy, postgres_url)) as it:
            await status(it, "active")
            assert proxy.statistics().open == 1
        async with asyncio.timeout(LIMIT):
            await proxy.wait_until(lambda now: now.open == 0)


async def test_a_silent_server_does_not_hold_up_the_stop(postgres_url: str) -> None:
    async with front(postgres_url) as proxy:
        async with service(behind(proxy, postgres_url)) as it:
            await status(it, "active")
            proxy.black_hole()
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began < LIMIT
        assert [event for event in it.recorder.events() if event.kind == "abandoned"] == []


async def test_an_attempt_that_was_given_up_leaves_no_connection() -> None:
    closed = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        closed.set()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(DatabaseUnreachable, match="no answer in time") as caught:
            await Line.dial(f"postgresql://app@127.0.0.1:{port}/x", timeout=0.2)
        # The error is still held here, as a supervisor holds the last failure of a child.
        await asyncio.wait_for(closed.wait(), LIMIT)
    assert caught.value.reason == "no answer in time"


async def test_a_line_says_what_it_is(postgres_url: str) -> None:
    line = await Line.dial(postgres_url, timeout=LIMIT)
    await line.ask(timeout=LIMIT)
    assert repr(line) == f"<Line to {line.place}: PostgreSQL {line.version}, open>"
    await line.close()
    assert repr(line).endswith("closed>")
    with pytest.raises(DatabaseUnreachable, match="the connection is closed"):
        await line.ask(timeout=LIMIT)


async def test_what_a_wrong_password_means_is_told(postgres_url: str) -> None:
    parts = urlsplit(postgres_url)
    url = parts._replace(netloc=f"postgres:wr0ng@{parts.hostname}:{parts.port}").geturl()
    async with service(url, wait=0.2) as it:
        with pytest.raises(DatabaseUnreachable, match="password authentication failed") as caught:
            await asyncio.wait_for(asyncio.shield(it.first_active), LIMIT)
    assert "wr0ng" not in str(caught.value)
