"""Strategies: how channels are made and outages handled, with real topology servers.

The tests of the global strategies run for threads and for asyncio alike: `side` calls either.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
import pytest
from tests.rpc.topology_server import TopologyServer, body_of

from moored.kernel import Clock, LoopThread, Recorder
from moored.rpc._config import ConnectionConfig
from moored.rpc._counters import Counters
from moored.rpc._errors import ConfigError, TopologyError
from moored.rpc._strategies import (
    AsyncGlobalStrategy,
    AsyncRegularStrategy,
    ConnectionStrategy,
    GlobalStrategy,
    RegularStrategy,
)
from moored.rpc.milvus._config import MilvusConfig
from moored.rpc.topology._follower import Follower
from moored.rpc.topology._sources import (
    CallableTopology,
    HttpTopology,
    StaticTopology,
    TopologySource,
)
from moored.rpc.topology._topology import Advice, Capability, Member, Topology, TopologyMixin
from moored.testing import Sim, assert_caught, mutant, scaled, simulate

SECRET = "s3cr3t"
GLOBAL = MilvusConfig.from_uri("http://g.global-cluster.example.com", token=SECRET)


@dataclass
class Channel:
    """A channel of a user's factory."""

    config: ConnectionConfig
    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass
class AsyncChannel(Channel):
    async def close(self) -> None:  # type: ignore[override]
        self.closed = True


@dataclass
class Managed:
    """The attributes of a managed connection that a strategy reads."""

    address: str
    config: ConnectionConfig = GLOBAL
    handler: Any = field(default_factory=lambda: Channel(GLOBAL))


def at(version: int, *endpoints: str) -> Topology:
    """A topology whose first member is the primary, and whose others are replicas."""
    first, *others = endpoints
    replicas = (Member(each, each, Capability.READABLE) for each in others)
    return Topology(version, (Member(first, first, Capability.PRIMARY), *replicas))


class User:
    """What a manager is told by the strategy of one of its endpoints."""

    def __init__(self) -> None:
        self.counters, self.handler = Counters(), SimpleNamespace(gate=self)
        self.credentials = None
        self.moves: list[str] = []
        self.moved_once = threading.Event()

    def moved(self, endpoint: object, why: str) -> None:
        self.moves.append(why)
        self.moved_once.set()


def serving(strategy: GlobalStrategy | AsyncGlobalStrategy) -> User:
    """Let a strategy serve a manager."""
    user = User()
    strategy.serve(user, user)
    return user


class ScriptedSource:
    """A source that returns or raises what it is set to, and counts its fetches."""

    def __init__(self, *answer: Topology | Exception) -> None:
        self.answer: Topology | Exception = answer[0]
        self.next = list(answer[1:])
        self.fetches = 0
        self.changed = threading.Condition()

    async def __call__(self) -> Topology:
        with self.changed:
            self.fetches += 1
            self.changed.notify_all()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def wait(self, fetches: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.fetches >= fetches, 30)


class Flavour:
    """One interface to the strategies for threads and for asyncio."""

    def __init__(self, kind: type[GlobalStrategy] | type[AsyncGlobalStrategy]) -> None:
        self.kind = kind
        self.loop = LoopThread("test-side")
        self.made: list[GlobalStrategy | AsyncGlobalStrategy] = []

    def strategy(self, **options: Any) -> GlobalStrategy | AsyncGlobalStrategy:
        channel = Channel if self.kind is GlobalStrategy else AsyncChannel
        made = self.kind(**{"handler_factory": channel, **options})
        self.made.append(made)
        return made

    def __call__(self, method: Callable[..., Any], *given: Any) -> Any:
        if not inspect.iscoroutinefunction(method):
            return method(*given)
        return self.loop.run(method(*given), timeout=60)

    def close(self, strategy: ConnectionStrategy, managed: Managed) -> None:
        if self.kind is GlobalStrategy:
            strategy.close(managed)
        else:
            self.loop.run(strategy.close_async(managed), timeout=60)

    def end(self) -> None:
        for each in self.made:
            self.close(each, Managed("nowhere"))
        self.loop.stop()


@pytest.fixture(params=[GlobalStrategy, AsyncGlobalStrategy])
def side(request: pytest.FixtureRequest) -> Iterator[Flavour]:
    """The strategies for threads, then those for asyncio."""
    made = Flavour(request.param)
    try:
        yield made
    finally:
        made.end()


# -- one server ------------------------------------------------------------------------------------


def test_strategy_interface_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ConnectionStrategy()  # type: ignore[abstract]
    assert ConnectionStrategy.__abstractmethods__ == {"create_handler", "on_unavailable", "close"}


@pytest.mark.parametrize(
    "kind", [RegularStrategy, GlobalStrategy, AsyncRegularStrategy, AsyncGlobalStrategy]
)
def test_every_strategy_implements_the_interface(kind: type[ConnectionStrategy]) -> None:
    strategy = kind()
    assert isinstance(strategy, ConnectionStrategy)
    is_async = kind.__name__.startswith("Async")
    assert inspect.iscoroutinefunction(strategy.on_unavailable) is is_async
    assert inspect.iscoroutinefunction(strategy.create_handler) is is_async
    assert inspect.iscoroutinefunction(strategy.close_async)
    assert isinstance(strategy, TopologyMixin) is ("Global" in kind.__name__)


def test_regular_strategy_makes_a_channel_to_its_server() -> None:
    config = ConnectionConfig.from_uri("http://host:5")
    strategy = RegularStrategy(handler_factory=Channel)
    channel = strategy.create_handler(config)
    assert channel.config is config
    managed = Managed("host:5", config, channel)
    assert strategy.on_unavailable(managed) is True
    strategy.close(managed)
    assert not channel.closed, "the manager closes channels"


async def test_regular_strategy_for_asyncio_makes_a_channel_to_its_server() -> None:
    async def make(config: ConnectionConfig) -> AsyncChannel:
        return AsyncChannel(config)

    config = ConnectionConfig.from_uri("http://host:5")
    for factory in (AsyncChannel, make):
        strategy = AsyncRegularStrategy(handler_factory=factory)
        channel = await strategy.create_handler(config)
        assert channel.config is config
        managed = Managed("host:5", config, channel)
        assert await strategy.on_unavailable(managed) is True
        await strategy.close_async(managed)
        assert not channel.closed, "the manager closes channels"


def test_strategies_make_grpc_channels_by_default() -> None:
    config = ConnectionConfig.from_uri("http://127.0.0.1:1")
    channels = [RegularStrategy().create_handler(config) for _ in range(2)]
    channels.append(GlobalStrategy(fetch_topology=StaticTopology(["b:1"])).create_handler(config))
    for channel in channels:
        assert isinstance(channel, grpc.Channel)
        channel.close()


async def test_asyncio_strategies_make_grpc_channels_by_default() -> None:
    config = ConnectionConfig.from_uri("http://127.0.0.1:1")
    following = AsyncGlobalStrategy(fetch_topology=StaticTopology(["b:1"]))
    for strategy in (AsyncRegularStrategy(), following):
        channel = await strategy.create_handler(config)
        assert isinstance(channel, grpc.aio.Channel)
        await channel.close()


# -- a primary that moves ------------------------------------------------------------


def test_first_channel_leads_to_the_primary(side: Flavour) -> None:
    source = ScriptedSource(at(1, "https://a", "http://b"))
    strategy = side.strategy(fetch_topology=source)
    assert repr(strategy) == f"<{side.kind.__name__} to primary: no topology yet, at no member>"
    channel = side(strategy.create_handler, GLOBAL)
    assert channel.config.address == "a:443" == strategy.address
    assert channel.config.secure
    assert channel.config.token == SECRET
    assert repr(strategy) == f"<{side.kind.__name__} to primary: version 1, at a:443>"


def test_later_channels_fetch_no_topology(side: Flavour) -> None:
    source = ScriptedSource(at(1, "a:1"))
    strategy = side.strategy(fetch_topology=source)
    for _ in range(3):
        side(strategy.create_handler, GLOBAL)
    assert source.fetches == 1


def test_without_a_topology_there_is_no_channel(side: Flavour) -> None:
    source = ScriptedSource(TopologyError("nobody knows"))
    strategy = side.strategy(fetch_topology=source)
    with pytest.raises(TopologyError, match="nobody knows"):
        side(strategy.create_handler, GLOBAL)
    source.answer = at(1, "a:1")
    assert side(strategy.create_handler, GLOBAL).config.address == "a:1", (
        "the next attempt must fetch again"
    )


def test_error_before_a_refresh_fetches_the_new_primary(side: Flavour) -> None:
    source = ScriptedSource(at(1, "a:1", "b:1"))
    strategy = side.strategy(fetch_topology=source)
    side(strategy.create_handler, GLOBAL)
    source.answer = at(2, "b:1", "a:1")
    assert side(strategy.on_unavailable, Managed("a:1")) is True
    assert source.fetches == 2
    assert strategy.advise("a:1") is Advice.MOVE
    assert side(strategy.create_handler, GLOBAL).config.address == "b:1" == strategy.address


def test_refresh_before_an_error_moves_to_the_new_primary(side: Flavour) -> None:
    source = ScriptedSource(at(1, "a:1"))
    strategy = side.strategy(fetch_topology=source, refresh_every=0.05)
    user = serving(strategy)
    side(strategy.create_handler, GLOBAL)
    source.answer = at(2, "b:1")
    assert user.moved_once.wait(30)
    assert user.moves == ["version 2 of the topology has another primary"]
    assert strategy.advise(strategy.address or "") is Advice.MOVE
    # The connection is still at the old primary, although the new one is known.
    assert side(strategy.on_unavailable, Managed("a:1")) is True
    assert side(strategy.create_handler, GLOBAL).config.address == "b:1"


def test_restarted_primary_is_connected_to_again(side: Flavour) -> None:
    recorder = Recorder()
    strategy = side.strategy(fetch_topology=ScriptedSource(at(1, "a:1")), recorder=recorder)
    side(strategy.create_handler, GLOBAL)
    assert side(strategy.on_unavailable, Managed("a:1")) is True
    assert side(strategy.create_handler, GLOBAL).config.address == "a:1"
    assert "a:1 is unavailable" in recorder.explain(f"rpc.{GLOBAL.address}.topology")


@pytest.mark.parametrize(
    "bad",
    [
        Topology(5, ()),
        Topology(5, (Member("b", "b:1", Capability.READABLE),)),
        Topology(5, (Member("b", "http://"),)),
        TopologyError("the server refused"),
        RuntimeError("a bug of the user's"),
        OSError("no route"),
    ],
)
def test_unusable_topology_is_recorded_and_the_old_one_kept(
    side: Flavour, bad: Topology | Exception
) -> None:
    source, recorder = ScriptedSource(at(1, "a:1")), Recorder()
    strategy = side.strategy(fetch_topology=source, recorder=recorder)
    side(strategy.create_handler, GLOBAL)
    source.answer = bad
    assert side(strategy.on_unavailable, Managed("a:1")) is True
    assert strategy.topology == at(1, "a:1")
    failures = [event for event in recorder.events() if event.kind == "failure"]
    assert failures
    assert failures[0].text == "the old topology is kept"
    assert side(strategy.create_handler, GLOBAL).config.address == "a:1"


def test_only_newer_versions_are_accepted(side: Flavour) -> None:
    source, now = ScriptedSource(at(5, "a:1")), 0.0
    strategy = side.strategy(fetch_topology=source, clock=Clock(monotonic=lambda: now))
    user = serving(strategy)
    side(strategy.create_handler, GLOBAL)
    for answer in (at(5, "b:1"), at(4, "c:1"), at(5, "a:1")):
        source.answer = answer
        now += 2.0
        side(strategy.on_unavailable, Managed("a:1"))
        assert side(strategy.create_handler, GLOBAL).config.address == "a:1"
    assert user.moves == []
    assert source.fetches == 4


def test_unexpected_exception_of_a_source_is_contained(side: Flavour) -> None:
    class Broken(TopologySource):
        def __init__(self) -> None:
            self.good = True

        async def fetch(self) -> Topology:
            if self.good:
                return at(1, "a:1")
            raise ZeroDivisionError("half of nothing")

    source = Broken()
    strategy = side.strategy(fetch_topology=source)
    side(strategy.create_handler, GLOBAL)
    source.good = False
    assert side(strategy.on_unavailable, Managed("a:1")) is True


def test_hung_topology_server_delays_a_recovery_by_its_patience_only(side: Flavour) -> None:
    async def hang() -> Topology:
        if not hanging.is_set():
            return at(1, "a:1")
        await asyncio.sleep(3600)
        raise AssertionError

    hanging, recorder = threading.Event(), Recorder()
    strategy = side.strategy(fetch_topology=hang, recorder=recorder, patience=1.0)
    side(strategy.create_handler, GLOBAL)
    hanging.set()
    begun = time.monotonic()
    assert side(strategy.on_unavailable, Managed("a:1")) is True
    first = time.monotonic() - begun
    assert 0.9 < first < 10.0
    assert any("no fresh topology within 1 s" in event.text for event in recorder.events())
    begun = time.monotonic()
    for _ in range(20):
        assert side(strategy.on_unavailable, Managed("a:1")) is True
    assert time.monotonic() - begun < 15.0, "later errors waited again"


def test_failed_fetch_is_repeated_in_the_background(side: Flavour) -> None:
    source = ScriptedSource(at(1, "a:1"))
    strategy = side.strategy(fetch_topology=source)
    user = serving(strategy)
    side(strategy.create_handler, GLOBAL)
    source.answer = TopologyError("not now")
    side(strategy.on_unavailable, Managed("a:1"))
    source.wait(fetches=3)
    source.answer = at(2, "b:1")
    side(strategy.on_unavailable, Managed("a:1"))
    assert user.moved_once.wait(30)
    assert side(strategy.create_handler, GLOBAL).config.address == "b:1"


def test_concurrent_errors_cause_one_fetch(side: Flavour) -> None:
    fetches, inside, over = 0, threading.Event(), threading.Event()

    async def slow() -> Topology:
        nonlocal fetches
        fetches += 1
        if fetches > 1:
            inside.set()
            await asyncio.to_thread(over.wait, 30)
        return at(fetches, f"m{fetches}:1")

    strategy = side.strategy(fetch_topology=slow, patience=30)
    side(strategy.create_handler, GLOBAL)
    outcomes: list[bool] = []

    def report() -> None:
        outcomes.append(side(strategy.on_unavailable, Managed("m1:1")))

    threads = [threading.Thread(target=report) for _ in range(20)]
    for thread in threads:
        thread.start()
    assert inside.wait(30)
    deadline = time.monotonic() + 10
    loops = [LoopThread.shared(), side.loop]
    while sum(len(loop._work) for loop in loops) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    over.set()
    for thread in threads:
        thread.join(30)
    assert outcomes == [True] * 20
    assert fetches == 2


def test_refresher_continues_after_a_recovery_and_ends_with_the_strategy(side: Flavour) -> None:
    source = ScriptedSource(at(1, "a:1"))
    strategy = side.strategy(fetch_topology=source, refresh_every=0.05)
    channel = side(strategy.create_handler, GLOBAL)
    source.answer = at(2, "b:1")
    side(strategy.on_unavailable, Managed("a:1"))
    side(strategy.create_handler, GLOBAL)
    source.wait(source.fetches + 3)
    assert strategy._refresher is not None
    following = strategy._refresher.task
    managed = Managed("b:1", handler=channel)
    side.close(strategy, managed)
    deadline = time.monotonic() + 10
    while not following.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert following.done()
    fetches = source.fetches
    time.sleep(0.2)
    assert source.fetches == fetches
    side.close(strategy, managed)


def test_channel_created_after_a_close_is_followed_again(side: Flavour) -> None:
    # Close, then create, as a manager that replaces a connection may do.
    source = ScriptedSource(at(1, "a:1"))
    strategy = side.strategy(fetch_topology=source, refresh_every=0.05)
    side.close(strategy, Managed("a:1", handler=side(strategy.create_handler, GLOBAL)))
    deadline = time.monotonic() + 10
    assert strategy._refresher is not None
    following = strategy._refresher.task
    while not following.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    side(strategy.create_handler, GLOBAL)
    source.wait(source.fetches + 3)


def test_topology_that_arrives_after_the_close_is_not_followed(side: Flavour) -> None:
    inside, over = threading.Event(), threading.Event()

    def slow() -> Topology:
        inside.set()
        over.wait(30)
        return at(1, "a:1")

    strategy = side.strategy(fetch_topology=slow)
    creating = threading.Thread(target=side, args=(strategy.create_handler, GLOBAL))
    creating.start()
    assert inside.wait(30)
    side.close(strategy, Managed("a:1"))
    over.set()
    creating.join(30)
    assert strategy.address == "a:1"
    assert strategy._refresher is None


def test_static_topology_is_not_refreshed(side: Flavour) -> None:
    strategy = side.strategy(fetch_topology=StaticTopology(["a:1", "b:1"]))
    assert side(strategy.create_handler, GLOBAL).config.address == "a:1"
    assert strategy._refresher is None
    assert side(strategy.on_unavailable, Managed("a:1")) is True


def test_garbage_collected_strategy_stops_its_refresher(side: Flavour) -> None:
    source = ScriptedSource(at(1, "a:1"))
    strategy: Any = side.strategy(fetch_topology=source, refresh_every=0.05)
    side.made.clear()
    side(strategy.create_handler, GLOBAL)
    following, gone = strategy._refresher.task, weakref.ref(strategy)
    del strategy
    deadline = time.monotonic() + 10
    while (gone() is not None or not following.done()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert gone() is None
    assert following.done()


def test_invalid_options_are_refused(side: Flavour) -> None:
    with pytest.raises(ValueError, match=r"patience=0 .*; refresh_every=0"):
        side.kind(patience=0, refresh_every=0)
    with pytest.raises(ConfigError, match="role='all'"):
        side.kind(role="all")  # type: ignore[arg-type]


# -- replicas --------------------------------------------------------------------------------------


def test_role_any_selects_the_nearest_replica(side: Flavour) -> None:
    near = {"b:1": 0.2, "c:1": 0.1}
    strategy = side.strategy(
        role="any",
        fetch_topology=ScriptedSource(at(1, "a:1", "b:1", "c:1")),
        latencies=lambda: near,
    )
    assert side(strategy.create_handler, GLOBAL).config.address == "c:1"


def test_failed_replica_is_avoided_for_the_next(side: Flavour) -> None:
    strategy = side.strategy(role="any", fetch_topology=ScriptedSource(at(1, "a:1", "b:1", "c:1")))
    assert side(strategy.create_handler, GLOBAL).config.address == "a:1"
    # The first cannot be reached, then the one in use fails, until all were tried.
    assert side(strategy.create_handler, GLOBAL).config.address == "b:1"
    side(strategy.on_unavailable, Managed("b:1"))
    assert side(strategy.create_handler, GLOBAL).config.address == "c:1"
    assert side(strategy.create_handler, GLOBAL).config.address == "a:1"
    assert side(strategy.create_handler, GLOBAL).config.address == "b:1"


def test_failed_replica_in_use_is_not_selected_next(side: Flavour) -> None:
    strategy = side.strategy(role="any", fetch_topology=ScriptedSource(at(1, "a:1", "b:1", "c:1")))
    side(strategy.create_handler, GLOBAL)
    side(strategy.on_unavailable, Managed("b:1"))
    assert side(strategy.create_handler, GLOBAL).config.address == "c:1"


def test_replica_that_failed_long_ago_is_selected_again(side: Flavour) -> None:
    now = 0.0
    strategy = side.strategy(
        role="any",
        fetch_topology=ScriptedSource(at(1, "a:1", "b:1")),
        clock=Clock(monotonic=lambda: now),
    )
    for _ in range(3):
        now += 61.0
        assert side(strategy.create_handler, GLOBAL).config.address == "a:1"
    # A failure after an hour of service still counts.
    now = 3600.0
    side(strategy.on_unavailable, Managed("a:1"))
    assert side(strategy.create_handler, GLOBAL).config.address == "b:1"


# -- a real topology server ------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[TopologyServer]:
    with TopologyServer(body_of(1, ("in01", "http://in01:1", 3))) as started:
        yield started


def global_config(server: TopologyServer) -> ConnectionConfig:
    return global_config_of(f"{server.url}/global-cluster")


def global_config_of(uri: str) -> ConnectionConfig:
    return MilvusConfig.from_uri(uri, token=f"user:{SECRET}")


def test_global_strategy_queries_the_topology_that_the_uri_names(
    side: Flavour, server: TopologyServer
) -> None:
    config = global_config(server)
    strategy = side.strategy()
    assert side(strategy.create_handler, config).config.address == "in01:1"
    [(path, headers)] = server.requests
    assert path == "/global-cluster/topology"
    assert headers["Authorization"] == f"Bearer user:{SECRET}"
    server.body = body_of(2, ("in01", "http://in01:1", 1), ("in02", "https://in02", 3))
    assert side(strategy.on_unavailable, Managed("in01:1", config)) is True
    assert side(strategy.create_handler, config).config.address == "in02:443"


def test_token_is_hidden_in_reprs_logs_and_records(
    side: Flavour, server: TopologyServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    config, recorder = global_config(server), Recorder()
    strategy = side.strategy(recorder=recorder)
    channel = side(strategy.create_handler, config)
    server.body = {"code": 1, "message": f"I do not know user:{SECRET}"}
    assert side(strategy.on_unavailable, Managed("in01:1", config)) is True
    server.reply = server.status(403)
    assert side(strategy.on_unavailable, Managed("in01:1", config)) is True
    shown = [repr(strategy), repr(channel), repr(strategy.topology), repr(strategy._source)]
    shown += [str(event.as_dict()) for event in recorder.events()]
    shown += [recorder.explain(each) for each in recorder.components()]
    assert "I do not know ***" in "\n".join(shown)
    assert SECRET not in "\n".join([*shown, caplog.text])


def test_exception_of_a_topology_function_hides_the_token(side: Flavour) -> None:
    config = global_config_of("http://there/global-cluster")
    strategy = side.strategy(fetch_topology=ScriptedSource(OSError(f"nothing for {SECRET}")))
    with pytest.raises(TopologyError, match=r"nothing for \*\*\*") as caught:
        side(strategy.create_handler, config)
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in f"{error!r} {error.__context__!r}"
        error = error.__cause__
    strategy = side.strategy(fetch_topology=ScriptedSource(OSError("nothing at all")))
    with pytest.raises(TopologyError, match="nothing at all") as caught:
        side(strategy.create_handler, config)
    assert isinstance(caught.value.__cause__, OSError)


async def test_slow_topology_server_does_not_block_the_loop(server: TopologyServer) -> None:
    def slow(talk: Any) -> None:
        time.sleep(1.0)
        server.tell(talk)

    server.reply = slow
    strategy = AsyncGlobalStrategy(handler_factory=AsyncChannel)
    creating = asyncio.create_task(strategy.create_handler(global_config(server)))
    turns = 0
    while not creating.done():
        await asyncio.sleep(0.005)
        turns += 1
    channel = await creating
    assert channel.config.address == "in01:1"
    assert turns > 10, "it took a second, in which the loop did not run"
    await strategy.close_async(Managed("in01:1", handler=channel))


async def test_close_does_not_wait_for_a_hung_refresh(server: TopologyServer) -> None:
    strategy = AsyncGlobalStrategy(handler_factory=AsyncChannel, refresh_every=0.05)
    channel = await strategy.create_handler(global_config(server))
    server.reply = server.hang
    count = len(server.requests)
    await asyncio.to_thread(server.wait, lambda: len(server.requests) > count)
    begun = time.monotonic()
    await strategy.close_async(Managed("in01:1", handler=channel))
    assert time.monotonic() - begun < 3.0
    await asyncio.to_thread(server.wait, lambda: server.ended == len(server.requests))


def test_loop_end_frees_the_strategy_and_its_refresher(server: TopologyServer) -> None:
    async def use() -> weakref.ref[Any]:
        strategy = AsyncGlobalStrategy(handler_factory=AsyncChannel)
        await strategy.create_handler(global_config(server))
        return weakref.ref(strategy)

    forgotten = [asyncio.run(use()) for _ in range(10)]
    gc.collect()
    assert [each() for each in forgotten] == [None] * 10


def test_every_kind_of_source_is_accepted(side: Flavour, server: TopologyServer) -> None:
    for source in (
        HttpTopology(server.url),
        StaticTopology(["in01:1"]),
        CallableTopology(lambda: ["in01:1"]),
        lambda: at(1, "in01:1"),
    ):
        strategy = side.strategy(fetch_topology=source)
        assert side(strategy.create_handler, GLOBAL).config.address == "in01:1"


# -- random faults, in virtual time ------------------------------------------------------------


async def random_faults(sim: Sim) -> None:
    """Move the primary while the topology is late, wrong or missing, and callers report errors."""
    current = at(1, "m1:1")
    healed = False
    seen: list[int] = []

    async def tell() -> Topology:
        answer = current
        await asyncio.sleep(sim.random(0, 3))
        if healed:
            return current
        chance = sim.random(0, 1)
        if chance < 0.2:
            raise TopologyError("a bad day")
        if chance < 0.3:
            return Topology(answer.version + 50, (Member("x", "x:1", Capability.READABLE),))
        if chance < 0.4:
            return at(answer.version - 1, f"m{answer.version - 1}:1")
        return answer

    async def report() -> None:
        for _ in range(5):
            await asyncio.sleep(sim.random(0, 20))
            assert await strategy.on_unavailable(Managed(strategy.address or "m1:1"))
            begun = sim.now
            channel = await strategy.create_handler(GLOBAL)
            assert sim.now == begun, "a known topology was fetched again"
            version = int(channel.config.address.removeprefix("m").removesuffix(":1"))
            seen.append(version)

    strategy = AsyncGlobalStrategy(
        fetch_topology=tell, handler_factory=AsyncChannel, refresh_every=7.0
    )
    user = serving(strategy)
    while strategy.topology is None:
        try:
            await strategy.create_handler(GLOBAL)
        except TopologyError:
            await asyncio.sleep(1)
    callers = [asyncio.create_task(report()) for _ in range(4)]
    for version in range(2, 8):
        await asyncio.sleep(sim.random(0, 20))
        current = at(version, f"m{version}:1")
    for caller in callers:
        await caller
    healed = True
    await asyncio.sleep(20)
    assert strategy.topology == current
    assert (await strategy.create_handler(GLOBAL)).config.address == "m7:1"
    assert seen == sorted(seen), "a caller returned to an old primary"
    versions = [int(why.split()[1]) for why in user.moves]
    assert versions == sorted(set(versions)), "a change was reported twice"
    closing_at = sim.now
    await strategy.close_async(Managed("m7:1", handler=AsyncChannel(GLOBAL)))
    assert sim.now == closing_at


def test_strategy_follows_the_primary_and_never_returns_to_an_old_one() -> None:
    simulate(random_faults, seeds=scaled(200, least=20))


def accepts_every_topology(self: TopologyMixin, topology: Topology) -> bool:
    self.topology = topology
    return True


def accepts_unusable_topologies(self: TopologyMixin, topology: Topology) -> bool:
    if self.topology is not None and topology.version <= self.topology.version:
        return False
    self.topology = topology
    return True


def starts_no_refresher(self: Any, source: TopologySource) -> None:
    return None


@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [
        (TopologyMixin, "accept", accepts_every_topology),
        (TopologyMixin, "accept", accepts_unusable_topologies),
        (Follower, "_follow", starts_no_refresher),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_mutants_are_caught(owner: Any, name: str, replacement: Any) -> None:
    planted = mutant(owner, name, replacement, name=replacement.__name__)
    assert_caught(random_faults, planted, within=200, clean=0)
