"""Managers in the simulator: servers die, hang and move while callers call, wait and cancel."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from tests.mutants import planted_defects

from moored.rpc import (
    AsyncConnectionManager,
    AsyncHandler,
    ConnectFailed,
    ConnectionConfig,
    Topology,
)
from moored.rpc._background import Background
from moored.rpc._channel_pool import lanes_of
from moored.rpc._dial import unavailable
from moored.rpc._endpoint import TOO_MANY, Act, Endpoint, Live, Order, Orders
from moored.rpc._refusals import Refusals
from moored.testing import Mutant, Sim, assert_caught, mutant, scaled, simulate

from .handlers import report_broken
from .scripted import ADDRESSES, World

pytestmark = pytest.mark.usefixtures("forkable")

FAULTS_UNTIL = 20.0
#: How much later than its timeout a call may end.
LATE = 0.5
#: Less than a connect may take.
LITTLE = 0.3


class Client:
    """A client object, for `client=`."""


class AppError(Exception):
    """An application's own error, unknown to gRPC."""


def needs_new_connection(error: BaseException) -> bool:
    return isinstance(error, AppError) or unavailable(error)


class Scenario:
    """A manager, its clients, and random faults."""

    def __init__(self, sim: Sim) -> None:
        self.chance = sim.rng
        self.loop = asyncio.get_running_loop()
        lanes = self.chance.choice([1, 2])
        self.world = World(self.chance, lanes)
        self.is_global = self.chance.random() < 0.5
        self.manager = AsyncConnectionManager(
            handler_factory=self.world.channel,
            channels=lanes,
            credentials=self.world.credentials,
            fetch_topology=self._topology if self.is_global else None,
            probe=self._probe,
            classify=needs_new_connection,
            linger=5.0,
            idle=2.0,
            connect_timeout=3.0,
            max_age=self.chance.choice([None, 4.0]),
        )
        self.renews = self.manager._options.max_age is not None
        self.last: dict[str, Any] = {}
        self.rotated_at = 0.0
        self.numbers = itertools.count()
        self.over = False
        self.outcomes: list[str] = []
        self.reports: set[asyncio.Task[None]] = set()

    async def _topology(self) -> Topology:
        # Async: a plain function would run in a thread, in real time.
        await asyncio.sleep(self.chance.uniform(0.001, 0.05))
        return self.world.topology()

    async def _probe(self, channel: Any) -> bool:
        await asyncio.sleep(self.chance.uniform(0.001, 0.05))
        if self.world.hangs[channel.address]:
            channel.dead = True  # a hung server counts as dead
            await asyncio.sleep(30.0)
        channel.dead = channel.dead or not self.world.up[channel.address]
        return not channel.dead

    async def client(self, number: int) -> None:
        config = ConnectionConfig.from_uri(f"http://{number % 2}@{ADDRESSES[0]}")
        client = Client()
        while not self.over:
            await asyncio.sleep(self.chance.uniform(0.0, 1.0))
            timeout = self.chance.uniform(0.05, 4.0)
            began = self.loop.time()
            use = self._use_alone if self.chance.random() < 0.1 else self._use
            work = self.loop.create_task(use(config, client, timeout))
            if self.chance.random() < 0.2:
                await asyncio.sleep(self.chance.uniform(0.0, 1.0))
                work.cancel()
            await asyncio.wait({work})
            took = self.loop.time() - began
            assert took <= max(1.0, timeout * 2) + LATE, f"{took} of {timeout}"
            if not work.cancelled():
                self.outcomes.append(work.result())

    async def _use(self, config: ConnectionConfig, client: Client, timeout: float) -> str:
        try:
            handler = await self.manager.get_or_create(config, client=client, timeout=timeout)
        except ConnectFailed:
            found = self.manager._table.awake.get(config.key)
            assert found is None or not found.usable, (
                "the connection is usable, and the caller was not woken"
            )
            return "unreached" if timeout > LITTLE else "too little time"
        generation = handler.generation
        outcome = await self._call(handler, timeout)
        if generation and self.loop.time() < FAULTS_UNTIL and self.chance.random() < 0.2:
            task = self.loop.create_task(self._report_error(handler, generation))
            self.reports.add(task)
            task.add_done_callback(self.reports.discard)
        if self.chance.random() < 0.3:
            await self.manager.release(handler, client=client)
        return outcome

    async def _report_error(self, handler: AsyncHandler, generation: int) -> None:
        """Report an application's own error, possibly late."""
        await asyncio.sleep(self.chance.choice([0.0, self.chance.uniform(0.0, 2.0)]))
        dated = self.chance.random() < 0.5
        live = handler.endpoint.live
        if live is not None and self._may_act(handler.endpoint, generation if dated else None):
            for lane in lanes_of(live.channel):
                lane.dead = True  # replacing it is justified
        known = generation if dated else None
        limit = self.chance.uniform(0.0, 0.2)
        await self.manager.handle_error(handler, AppError(), limit, generation=known)

    def _may_act(self, endpoint: Endpoint, generation: int | None) -> bool:
        """Whether the error concerns the current generation, or probably does if undated."""
        if generation is not None:
            return generation == endpoint.generation
        return endpoint.generation == 1 or self.loop.time() >= endpoint.link.proven_at

    async def _use_alone(self, config: ConnectionConfig, client: Client, timeout: float) -> str:
        """Use a dedicated connection, which must be gone after its release."""
        own = ConnectionConfig.from_uri(f"http://alone{next(self.numbers)}@{ADDRESSES[0]}")
        try:
            handler = await self.manager.get_or_create(own, True, client, timeout)
        except ConnectFailed:
            return "unreached" if timeout > LITTLE else "too little time"
        try:
            return await self._call(handler, timeout)
        finally:
            await self.manager.release(handler, client=client)
            assert handler.endpoint.closed, "a released dedicated connection still exists"

    async def _call(self, handler: AsyncHandler, timeout: float) -> str:
        try:
            await handler.unary_unary("/any")(b"", timeout=timeout)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "ok"

    async def inject_faults(self) -> None:
        world, chance = self.world, self.chance
        while self.loop.time() < FAULTS_UNTIL:
            await asyncio.sleep(chance.uniform(0.05, 2.0))
            address = chance.choice(ADDRESSES)
            match chance.randrange(9):
                case 0:
                    world.fall(address)
                case 1 | 2:
                    world.up[address] = True
                case 3:
                    world.hangs[address] = not world.hangs[address]
                case 4:
                    self.move()
                case 8:
                    world.busy[address] = not world.busy[address]
                case 5:
                    for endpoint in self.manager._table:
                        # An error of an old generation.
                        stale = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, (), ())
                        generation = chance.randrange(max(1, endpoint.generation))
                        report_broken(endpoint.handler, stale, generation)
                case 6 | 7 if self.loop.time() - self.rotated_at > 2.5:
                    world.token, self.rotated_at = world.token + 1, self.loop.time()
        for address in ADDRESSES:
            world.up[address], world.hangs[address] = True, False
            world.busy[address] = False

    def move(self) -> None:
        world = self.world
        world.version += 1
        world.primary = self.chance.choice(ADDRESSES)
        for endpoint in self.manager._table:
            if self.is_global and endpoint.strategy is not None:
                endpoint.strategy.hurry()

    def check(self) -> None:
        """Check the invariants that hold at any moment."""
        assert not self.world.wrong
        for endpoint in self.manager._table:
            refusals, gate = endpoint.refusals, endpoint.handler.gate
            assert refusals is not None
            assert not refusals.refused or gate.credentials.token != self.world.token
            live = endpoint.live
            assert gate.live is live
            assert live is None or live.number == endpoint.generation
            self._check_need(endpoint.key, live)
            assert live is None or live.until is None
            known = getattr(endpoint.strategy, "topology", None)
            if live is not None and known is not None:
                assert live.address == known.primary.endpoint.removeprefix("http://")

    def _check_need(self, key: str, live: Live | None) -> None:
        """No channel is replaced without a reason."""
        if live is None or self.is_global or self.renews:
            return
        last, self.last[key] = self.last.get(key, live), live
        lanes = lanes_of(last.channel)
        failing = sum(lane.unavailable for lane in lanes) >= TOO_MANY
        assert last is live or failing or any(lane.dead for lane in lanes), (
            "a healthy channel was replaced"
        )


async def random_faults(sim: Sim) -> tuple[int, ...]:
    """Every caller gets an outcome in time; no needless replacement; nothing is left open."""
    scenario = Scenario(sim)
    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(scenario.client(number)) for number in range(6)]
        inject_faults = tasks.create_task(scenario.inject_faults())
        while not inject_faults.done():
            scenario.check()
            await asyncio.sleep(0.03)
        await asyncio.sleep(8.0)  # the longest wait of an attempt, and one more
        settled = len(scenario.outcomes)
        await asyncio.sleep(5.0)
        assert "ok" in scenario.outcomes[settled:], "the connection did not recover"
        # Calls with short timeouts may still time out.
        allowed = {"ok", "DEADLINE_EXCEEDED", "too little time"}
        assert set(scenario.outcomes[settled:]) <= allowed, scenario.outcomes[settled:]
        scenario.over = True
    del clients
    connects = sum(each["generation"] for each in scenario.manager.get_stats()["connections"])
    await scenario.manager.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(40.0):  # what hangs is given up after its grace
            while scenario.world.open:  # noqa: ASYNC110 - no notification
                await asyncio.sleep(0.1)
    assert not scenario.world.open, "channels were left open"
    assert not scenario.world.wrong
    return (connects, len(scenario.outcomes), scenario.outcomes.count("ok"))


def test_invariants_hold_under_random_faults() -> None:
    report = simulate(random_faults, scaled(1000, least=4))
    assert report.distinct == report.schedules


# -- defects that must be noticed ------------------------------------------------------------------


def _accepts_old_errors(
    self: Endpoint, generation: int, cause: Any, now: float, **more: Any
) -> Orders:
    return _broken(self, self.generation, cause, now, **more)


def _never_connected(self: Endpoint, generation: int, cause: Any, now: float, **_: Any) -> Orders:
    """Treat an UNAVAILABLE of a live server as a lost connection."""
    return _broken(self, generation, cause, now)


def _renews_at_once(self: Endpoint, generation: int, cause: Any, now: float, **more: Any) -> Orders:
    """Replace a connection after one UNAVAILABLE answer."""
    return _broken(self, generation, cause, now, **{**more, "renew": True})


def _dials_beside(self: Background, endpoint: Endpoint, attempt: int) -> None:
    """Continue the dial of a closed connection beside the next one."""
    if endpoint.strategy is None:
        self.give_strategy(endpoint)
    self._tasks.start(self._dial(endpoint, attempt, None))


def _wakes_no_waiter(self: Background, endpoint: Endpoint, verdict: Any) -> None:
    self._waiters.pop(endpoint, None)


def _never_retries(self: Endpoint, now: float) -> Orders:
    return _dial(self, now) if self.machine.at("connecting") else []


def _dials_per_caller(self: Endpoint, now: float) -> Orders:
    planned = self.link.next_dial_at is not None
    return [*_waits(self, now), *([Order(Act.DIAL, self.link.dials)] if planned else [])]


def _keeps_the_old(self: Endpoint, now: float) -> Orders:
    """Keep a channel that is known to be broken."""
    return []


async def _forgets_to_close(self: Background, endpoint: Endpoint, live: Live) -> None:
    self._gone(endpoint, live)


def _refreshes_per_caller(self: Refusals, number: int, now: float) -> bool:
    self.refreshing = False
    return _refuse(self, number, now)


def _accepts_old_refusals(self: Refusals, number: int, now: float) -> bool:
    return _refuse(self, self.number, now)


def _never_released(self: Endpoint, client: Any, now: float) -> Orders:
    """Keep counting a client that has released the connection."""
    return []


_refuse = Refusals.refuse
_broken, _waits, _dial = Endpoint.broken, Endpoint.waits, Endpoint._dial


def _blames_the_current(self: Endpoint, now: float) -> int:
    return self.generation


def _ignores_the_date(
    self: Background, endpoint: Endpoint, generation: int | None, cause: Any, **more: Any
) -> None:
    _broken_by(self, endpoint, endpoint.generation, cause, **more)


_broken_by = Background.broken

MUTANTS = [
    mutant(
        Endpoint, "broken", _accepts_old_errors, name="an error of an old generation is accepted"
    ),
    mutant(
        Endpoint,
        "broken",
        _never_connected,
        name="UNAVAILABLE of a live server replaces its connection",
    ),
    mutant(Endpoint, "broken", _renews_at_once, name="one UNAVAILABLE answer renews a connection"),
    mutant(
        Endpoint,
        "blamed",
        _blames_the_current,
        name="an undated error always blames the current generation",
    ),
    mutant(
        Background,
        "broken",
        _ignores_the_date,
        name="the generation passed to handle_error is ignored",
    ),
    mutant(
        Background,
        "_start_dial",
        _dials_beside,
        name="a dial continues after its connection was closed",
    ),
    mutant(Background, "_wake", _wakes_no_waiter, name="waiting callers are not woken"),
    mutant(Endpoint, "_dial", _never_retries, name="a failed attempt is not retried"),
    mutant(Endpoint, "waits", _dials_per_caller, name="each caller starts its own attempt"),
    mutant(
        Endpoint, "_drop", _keeps_the_old, name="calls use a channel that is known to be broken"
    ),
    mutant(
        Background, "_close_channel", _forgets_to_close, name="a replaced channel is not closed"
    ),
    mutant(
        Refusals,
        "refuse",
        _refreshes_per_caller,
        name="each refused caller refreshes the credentials",
    ),
    mutant(
        Refusals, "refuse", _accepts_old_refusals, name="a refusal of old credentials is accepted"
    ),
    mutant(
        Endpoint,
        "given_back",
        _never_released,
        name="a released connection still counts its client",
    ),
]


@pytest.mark.parametrize(
    "planted",
    planted_defects(
        MUTANTS,
        "UNAVAILABLE of a live server replaces its connection",
        "the generation passed to handle_error is ignored",
        "an undated error always blames the current generation",
        "calls use a channel that is known to be broken",
        "a refusal of old credentials is accepted",
        "each caller starts its own attempt",
    ),
)
def test_mutants_are_caught(planted: Mutant) -> None:
    assert_caught(random_faults, planted, within=300, clean=0)
