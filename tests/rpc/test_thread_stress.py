"""The manager for threads under load, while its servers are killed and restarted."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from tests.logs import silent

from moored.kernel import LoopThread
from moored.rpc import (
    ConnectFailed,
    ConnectionConfig,
    ConnectionManager,
    ManagedConnection,
    ManagerClosed,
)
from moored.rpc._dial import make_channel
from moored.rpc._manager import ChangeQueue
from moored.testing import StressFailed, base_seed, mutant, scaled, stress_threads

from .handlers import ECHO, descriptors, eventually, own_threads
from .servers import EchoServer

THREADS = 8
#: How long a call or a checkout may wait, and after what time it counts as lost.
TIMEOUT, LOST_AFTER = 1.0, 4.0


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence the log: many connections break."""
    with silent("moored"):
        yield


class Client:
    """A client object, for `client=`."""


class Tracked(grpc.Channel):  # type: ignore[misc]
    """A real channel that counts its closes."""

    def __init__(self, inner: grpc.Channel) -> None:
        self._inner = inner
        self.closes = 0

    def unary_unary(self, *given: Any, **options: Any) -> Any:
        assert not self.closes, "a call over a channel that is closed"
        return self._inner.unary_unary(*given, **options)

    def unary_stream(self, *given: Any, **options: Any) -> Any:
        return self._inner.unary_stream(*given, **options)

    def stream_unary(self, *given: Any, **options: Any) -> Any:
        return self._inner.stream_unary(*given, **options)

    def stream_stream(self, *given: Any, **options: Any) -> Any:
        return self._inner.stream_stream(*given, **options)

    def subscribe(self, *given: Any, **options: Any) -> None:
        self._inner.subscribe(*given, **options)

    def unsubscribe(self, *given: Any, **options: Any) -> None:
        self._inner.unsubscribe(*given, **options)

    def close(self) -> None:
        self.closes += 1
        self._inner.close()

    def __enter__(self) -> Tracked:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


class Load:
    """A manager and the work of its threads; the last of the servers is never killed."""

    def __init__(self, servers: list[EchoServer]) -> None:
        self.configs = [ConnectionConfig.from_uri(server.uri) for server in servers]
        self.safe = self.configs[-1]
        self.channels: list[Tracked] = []
        self.outcomes: Counter[str] = Counter()
        self.over = threading.Event()
        self.manager = ConnectionManager(
            handler_factory=self._make, linger=0.4, idle=0.3, connect_timeout=TIMEOUT
        )

    def _make(self, config: ConnectionConfig) -> Tracked:
        channel = Tracked(make_channel(config, len(self.channels)))
        self.channels.append(channel)
        return channel

    # -- what a thread does --------------------------------------------------------------------

    def work(self, thread: int, iteration: int) -> None:
        chance = random.Random(f"{base_seed()} {thread}")
        while not self.over.is_set():
            config = chance.choice(self.configs)
            match chance.randrange(100):
                case 0:
                    self.limited(self.manager.close_all)
                case 1 | 2:
                    self.look()
                case number if number < 15:
                    self.alone(config)
                case number if number < 25:
                    self.share(config, Client(), forget=True)
                case _:
                    self.share(config, Client())

    def share(self, config: ConnectionConfig, client: Client, forget: bool = False) -> None:
        channel = self.take(config, client=client)
        if channel is None:
            return
        self.call(config, channel)
        if forget:  # its death is enough
            return
        self.manager.release(channel, client)
        self.manager.release(channel, client)

    def alone(self, config: ConnectionConfig) -> None:
        channel = self.take(config, dedicated=True)
        if channel is None:
            return
        self.call(config, channel)
        self.limited(channel.close)
        with pytest.raises(ManagerClosed):
            channel.unary_unary(ECHO)(b"", timeout=TIMEOUT)

    def take(self, config: ConnectionConfig, **how: Any) -> Any:
        try:
            return self.limited(lambda: self.manager.get_or_create(config, timeout=TIMEOUT, **how))
        except ConnectFailed:
            assert config is not self.safe, "its server was never killed"
            self.outcomes["not connected"] += 1
            return None

    def call(self, config: ConnectionConfig, channel: Any) -> None:
        try:
            answer = self.limited(lambda: channel.unary_unary(ECHO)(b"a", timeout=TIMEOUT))
            assert answer == b"a"
            self.outcomes["answered"] += 1
        except ManagerClosed:  # another thread has closed everything
            self.outcomes["closed"] += 1
        except grpc.RpcError as error:
            self.outcomes[error.code().name] += 1
            self.failed(config, channel, error)

    def failed(self, config: ConnectionConfig, channel: Any, error: grpc.RpcError) -> None:
        assert config is not self.safe, f"its server was never killed: {error}"
        assert error.code().name in ("UNAVAILABLE", "DEADLINE_EXCEEDED"), error
        self.limited(lambda: self.manager.handle_error(channel, error, timeout=TIMEOUT))

    def limited(self, act: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            return act()
        finally:
            took = time.monotonic() - began
            assert took < LOST_AFTER, f"it has taken {took:.1f} s"

    # -- what must hold ------------------------------------------------------------------------

    def look(self) -> None:
        """Check that the statistics are consistent."""
        stats = self.manager.get_stats()
        lines = stats["connections"]
        assert stats["total_connections"] == len(lines)
        assert stats["dedicated_connections"] == sum(line["dedicated"] for line in lines)
        assert stats["shared_connections"] + stats["dedicated_connections"] == len(lines)
        shared = [line["address"] for line in lines if not line["dedicated"]]
        assert len(shared) == len(set(shared)), f"two for one endpoint: {shared}"
        assert all(line["client_count"] >= 0 for line in lines)

    def always(self) -> None:
        """Check that a ready connection has one open, current generation."""
        LoopThread.shared().run(self._check_all(), LOST_AFTER)
        time.sleep(0.002)

    async def _check_all(self) -> None:
        for endpoint in self.manager._table:
            live = endpoint.handler.gate.live
            assert live is endpoint.live, f"calls go to {live!r}: {endpoint!r}"
            assert endpoint.waiting >= 0, f"{endpoint!r}: {endpoint.waiting} waiters"
            if endpoint.machine.at("up"):
                assert live is not None, f"{endpoint!r} has no channel"
                assert live.number == endpoint.generation, f"{live!r} is not that of {endpoint!r}"
                assert live.until is None, f"{live!r} is the current one"
            else:
                assert live is None, f"{live!r} is used while {endpoint!r}"

    def end(self) -> None:
        """Check that no caller or client is left, and that each channel was closed once."""
        lines = self.manager.get_stats()["connections"]  # after all posted changes
        for endpoint in self.manager._table:
            assert endpoint.waiting == 0, f"{endpoint!r} is waited for"
        for line in lines:
            assert line["client_count"] == 0, line
        self.manager.close()
        assert self.manager.get_stats()["total_connections"] == 0
        works = self.manager._background
        eventually(lambda: not works._tasks and not works._timers and not works._closings)
        eventually(lambda: all(channel.closes for channel in self.channels))
        assert {channel.closes for channel in self.channels} == {1}, "closed more than once"


def stress(load: Load, victims: list[EchoServer], kills: int) -> None:
    """Kill servers one after the other, and start them again, while the threads work."""

    def chaos() -> None:
        try:
            for number in range(kills):
                victim = victims[number % len(victims)]
                if load.over.wait(0.3):
                    return
                victim.kill()
                load.over.wait(0.1 + 0.4 * (number % 3))
                victim.start()
            load.over.wait(0.3)
        finally:
            load.over.set()

    killer = threading.Thread(target=chaos)
    killer.start()
    try:
        stress_threads(
            load.work,
            threads=THREADS,
            iterations=1,
            always=load.always,
            invariant=load.end,
            timeout=100.0,
        )
    finally:
        load.over.set()
        killer.join(60)
        load.manager.close()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[EchoServer]]:
    made = [EchoServer() for _ in range(3)]
    with made[0], made[1], made[2]:
        yield made


def test_invariants_hold_with_many_threads_and_killed_servers(servers: list[EchoServer]) -> None:
    load = Load(servers)
    kills = scaled(30, least=2)
    # The first connection starts threads that stay.
    load.share(load.safe, Client())
    threads, files = own_threads(), descriptors()
    stress(load, servers[:2], kills)
    assert load.outcomes["answered"] > 10 * kills, load.outcomes
    if kills > 10:  # calls may survive a few
        failed = load.outcomes["UNAVAILABLE"] + load.outcomes["not connected"]
        assert failed, "no kill was noticed"
    assert len(load.channels) > kills, "nothing was replaced"
    eventually(lambda: own_threads() <= threads)
    eventually(lambda: descriptors() <= files + 3)


# -- defects that must be noticed ------------------------------------------------------------------


async def _loses_changes(self: ChangeQueue) -> None:
    """Forget the changes that threads have posted."""
    self.forked()


@mutant(ChangeQueue, "_make_changes", _loses_changes, name="posted changes are lost")
def test_mutant_that_loses_changes_is_caught(servers: list[EchoServer]) -> None:
    with pytest.raises(StressFailed):
        stress(Load(servers), servers[:2], 1)


def _never_released(self: ManagedConnection, client: object | None, now: float) -> list[Any]:
    """Keep counting a client that has released its channel."""
    return []


@pytest.mark.soak
@mutant(ManagedConnection, "given_back", _never_released, name="a released client is still counted")
def test_mutant_that_never_forgets_clients_is_caught(servers: list[EchoServer]) -> None:
    with pytest.raises(StressFailed):
        stress(Load(servers), servers[:2], 1)
