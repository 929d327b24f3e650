"""The steps of a connect in their order, and the release of its lease, once, whatever fails."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.leases.virtual import in_virtual_time
from tests.reservoir.stand_in import Conn, Journal, Server, Tokens, reservoir, wait_until
from tests.reservoir.support import eventually_async

from moored.leases import StoreMisconfigured, connect
from moored.reservoir import Reservoir, ReservoirConfig, TokenError
from moored.testing import Sim

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def silence(caplog: pytest.LogCaptureFixture) -> None:
    """Hundreds of failures on purpose are not worth a line each."""
    caplog.set_level("CRITICAL", "moored")


# -- the order -------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_lease_then_a_turn_then_a_token_then_the_connect(sim: Sim) -> None:
    journal = Journal()
    server, tokens = Server(journal), Tokens(journal.lines)
    async with (
        journal.leases() as leases,
        reservoir(server, leases=leases, tokens=tokens) as water,
    ):
        await wait_until(lambda: water.statistics().size)
        assert journal.lines == ["lease", "rate", "token", "connect"]
        assert server.passwords == ["token-1"]
        water.discard(water.try_checkout())
        await wait_until(lambda: water.statistics().size)
        assert journal.lines[4:] == ["close", "release", "lease", "rate", "token", "connect"]


@in_virtual_time
async def test_a_denied_lease_uses_no_turn(sim: Sim) -> None:
    journal = Journal()
    server = Server(journal)
    config = ReservoirConfig(max_size=1, lease_limit=1)
    async with journal.leases() as leases:
        taken = await leases.acquire("connections:db", limit=1)
        assert taken is not None
        async with reservoir(server, config, leases=leases) as water:
            await asyncio.sleep(20.0)
            assert water.statistics().refill_failures["lease"] >= 4
            assert set(journal.lines) == {"lease"}
            await taken.release()
            await wait_until(lambda: water.statistics().size)


# -- whatever fails, the lease is given back, once -------------------------------------------------


def fail_at_token(server: Server, tokens: Tokens, journal: Journal) -> Callable[[], None]:
    tokens.error = TokenError("no token")

    def mend() -> None:
        tokens.error = None

    return mend


def fail_at_connect(server: Server, tokens: Tokens, journal: Journal) -> Callable[[], None]:
    server.error = OSError("connection refused")

    def mend() -> None:
        server.error = None

    return mend


def hang_at_connect(server: Server, tokens: Tokens, journal: Journal) -> Callable[[], None]:
    server.takes = 1e6

    def mend() -> None:
        server.takes = 0.01

    return mend


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [(fail_at_token, "token"), (fail_at_connect, "connect"), (hang_at_connect, "connect")],
)
def test_a_failed_connect_releases_its_lease(breaks: Any, reason: str) -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        journal = Journal()
        server, tokens = Server(journal), Tokens(journal.lines)
        mend = breaks(server, tokens, journal)
        config = ReservoirConfig(max_size=3, connect_timeout=2.0)
        async with journal.leases() as leases:
            async with reservoir(server, config, leases=leases, tokens=tokens) as water:
                await wait_until(lambda: water.statistics().refill_failures.get(reason, 0) >= 7)
                await wait_until(lambda: not water.statistics().in_flight)
                assert set(water.statistics().refill_failures) == {reason}
                assert Counter(journal.released) == Counter(journal.acquired)
                assert leases.statistics().held == 0
                mend()
                await wait_until(lambda: water.statistics().size == 3)
                assert leases.statistics().held == 3
            assert Counter(journal.released) == Counter(journal.acquired)
            assert max(Counter(journal.released).values()) == 1
        assert server.alive == 0

    scenario()


@in_virtual_time
async def test_a_failed_configure_closes_the_connection_and_releases_its_lease(sim: Sim) -> None:
    journal = Journal()
    server = Server(journal)
    broken = [True]

    async def configure(conn: Conn) -> None:
        if broken[0]:
            raise ValueError("no such setting")

    async with journal.leases() as leases:
        async with reservoir(server, leases=leases, configure=configure) as water:
            await wait_until(lambda: water.statistics().refill_failures.get("configure", 0) >= 3)
            await wait_until(lambda: not water.statistics().in_flight)
            assert server.alive == 0, "what was opened is closed"
            assert Counter(journal.released) == Counter(journal.acquired)
            broken[0] = False
            await wait_until(lambda: water.statistics().size)
        assert Counter(journal.released) == Counter(journal.acquired)


@in_virtual_time
async def test_a_rate_limit_timeout_releases_the_lease(sim: Sim) -> None:
    journal = Journal()
    server = Server(journal)
    # One at once, and the next one after 100 s.
    config = ReservoirConfig(max_size=2, rate=0.01, burst=2)
    async with journal.leases() as leases, reservoir(server, config, leases=leases) as water:
        await wait_until(lambda: water.statistics().refill_failures.get("rate_limit", 0) >= 2, 200)
        assert len(server.times) == 1
        await wait_until(lambda: not water.statistics().in_flight)
        assert len(journal.released) == len(journal.acquired) - 1
        await wait_until(lambda: water.statistics().size == 2, 300.0)


@pytest.mark.parametrize("error", [StoreMisconfigured("access denied"), RuntimeError("a defect")])
def test_a_failed_connect_whose_lease_cannot_be_released_is_repeated(error: Exception) -> None:
    class Store(Journal):
        broken = True

        async def release(self, requests: Any) -> Any:
            if self.broken:
                raise error
            return await super().release(requests)

    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        store = Store()
        server = Server(store)
        server.error = OSError("connection refused")
        async with store.leases() as leases:
            async with reservoir(server, ReservoirConfig(max_size=3), leases=leases) as water:
                await wait_until(lambda: water.statistics().refill_failures.get("connect", 0) >= 7)
                assert isinstance(water.upkeep.attempts.last_error, OSError)
                server.error, store.broken = None, False
                await wait_until(lambda: water.statistics().size == 3)
                assert water.statistics().in_flight == 0
                await wait_until(lambda: leases.statistics().in_doubt == 0)
            assert list(await store.held()) == []

    scenario()


@in_virtual_time
async def test_a_rate_limit_timeout_names_a_store_that_is_too_slow_for_the_burst(sim: Sim) -> None:
    journal = Journal()
    config = ReservoirConfig(max_size=3, rate=100.0, burst=5)
    async with journal.leases() as leases:
        journal.takes = 0.03  # longer than `hold`, which is 20 ms
        async with reservoir(Server(journal), config, leases=leases) as water:
            await wait_until(lambda: water.statistics().size == 3)
            journal.takes = 0.11
            water.discard(water.try_checkout())
            await wait_until(lambda: water.upkeep.attempts.last_error)
            error = str(water.upkeep.attempts.last_error)
            assert "the store took 0.110 s to answer" in error
            assert error.endswith(("burst of at least 12", "burst of at least 13"))


STAGES = {"lease": 0.5, "rate": 1.5, "token": 2.5, "connect": 3.5, "configure": 4.5}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stop_while_connecting_releases_the_lease(stage: str) -> None:
    """Each step takes a second, and the end comes in the middle of it."""

    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        journal = Journal()
        server, tokens = Server(journal), Tokens(journal.lines)
        journal.takes = server.takes = tokens.takes = 1.0

        async def configure(conn: Conn) -> None:
            await asyncio.sleep(1.0)

        # Tokens of the rate limit are good for a second at most: here for two.
        config = ReservoirConfig(max_size=4, rate=1.0, burst=20)
        more = {"tokens": tokens, "configure": configure}
        async with journal.leases() as leases:
            async with reservoir(server, config, leases=leases, **more):
                await asyncio.sleep(STAGES[stage])
            journal.takes = 0.0
            await asyncio.sleep(60.0)
            # A lease whose acquire was not answered may be released a second time.
            returned = Counter(one for one in journal.released if one in journal.acquired)
            assert returned == Counter(journal.acquired)
            assert len(journal.acquired) == (0 if stage == "lease" else 4)
            assert leases.statistics().held == 0
        assert list(await journal.held()) == []
        assert server.alive == 0

    scenario()


async def test_a_connection_opened_by_a_thread_after_the_stop_is_closed() -> None:
    """A thread cannot be stopped: what it opens is closed, and then the lease is given back."""
    may_end, entered = threading.Event(), threading.Event()
    journal = Journal()

    class Blocking:
        closed = False

        def close(self) -> None:
            journal.lines.append("close")
            self.closed = True

    conn = Blocking()

    def connect() -> Blocking:
        entered.set()
        assert may_end.wait(30.0)
        return conn

    async with journal.leases() as leases:
        config = ReservoirConfig(max_size=1, start_stagger=0.0)
        water: Reservoir[Any] = Reservoir(
            "", config=config, connect=connect, asynchronous=False, leases=leases, endpoint="db"
        )
        await water.start()
        await asyncio.to_thread(entered.wait, 30.0)
        stopping = asyncio.create_task(water.stop(timeout=30.0))
        await asyncio.sleep(0.05)
        assert not stopping.done()
        assert journal.released == [], "there may be a connection, so it counts"
        may_end.set()
        await stopping
        assert conn.closed
        assert journal.lines[-2:] == ["close", "release"]
        assert Counter(journal.released) == Counter(journal.acquired)


async def test_the_lease_of_a_connect_that_outlives_the_stop_is_held_until_it_ends() -> None:
    may_end, entered = threading.Event(), threading.Event()

    def connect_slowly() -> object:
        entered.set()
        assert may_end.wait(30.0)
        return object()

    url = "memory://slow-connect"
    config = ReservoirConfig(max_size=1, start_stagger=0.0)
    async with connect(url) as others:
        water: Reservoir[Any] = Reservoir(
            "", config=config, connect=connect_slowly, asynchronous=False, leases=url, endpoint="db"
        )
        await water.start()
        await asyncio.to_thread(entered.wait, 30.0)
        await water.stop(timeout=0.0)
        assert len(await others.held()) == 1
        may_end.set()
        await eventually_async(lambda: not water.core.size)
        assert await others.held() == []
        await eventually_async(lambda: water.upkeep.budget is None)
