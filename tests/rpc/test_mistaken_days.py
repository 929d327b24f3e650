"""Days of mistakes and refusals, in many schedules: nobody waits for what cannot come."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import (
    AsyncConnectionManager,
    ConfigError,
    ConnectFailed,
    ConnectionConfig,
    Topology,
)
from moored.rpc._core import Actions, ConnectionCore, ShellAct, ShellAction
from moored.rpc._errors import TopologyRefused
from moored.rpc.topology._source_pacing import PACE
from moored.rpc.topology._sources import TopologySource
from moored.testing import Mutant, Sim, assert_caught, mutant, scaled, simulate

from .scripted import ADDRESSES, World

pytestmark = pytest.mark.usefixtures("forkable")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Each mistake is told in the log, thousands of times."""
    caplog.set_level(logging.ERROR, "moored.rpc")


class Weather(TopologySource):
    """What becomes of attempts to connect: fine, no luck, or a mistake."""

    def __init__(self, sim: Sim) -> None:
        self.world = World(sim.rng)
        self.kind, self.since = "fine", 0.0

    def make(self, config: ConnectionConfig) -> Any:
        if self.kind == "mistake":
            raise ConfigError("a mistake")
        if self.kind == "no luck":
            raise OSError("no luck")
        return self.world.channel(config)

    async def fetch(self, timeout: float | None = None) -> Topology:
        await asyncio.sleep(0.01)
        if self.kind == "refused":
            raise TopologyRefused("not you")
        return self.world.topology()


async def mistaken_days(sim: Sim) -> None:
    """Nobody waits beyond its time, nor for long while it is known that this does not help."""
    weather, chance = Weather(sim), sim.rng
    loop, over = asyncio.get_running_loop(), False
    outcomes: list[str] = []
    numbers = itertools.count()

    async def use(manager: AsyncConnectionManager, number: int) -> str:
        alone = chance.random() < 0.2
        name = f"alone{next(numbers)}" if alone else str(number % 2)
        config = ConnectionConfig.from_uri(f"http://{name}@{ADDRESSES[0]}")
        try:
            handler = await manager.get_or_create(config, alone, timeout=4.0)
            await handler.unary_unary("/any")(b"", timeout=4.0)
            await manager.release(handler)
        except grpc.RpcError as error:
            return str(error.code().name)
        except (ConfigError, ConnectFailed) as error:
            return type(error).__name__
        return "ok"

    async def caller(manager: AsyncConnectionManager, number: int) -> None:
        while not over:
            await asyncio.sleep(chance.uniform(0.0, 0.5))
            began, hopeless = loop.time(), weather.kind in ("mistake", "refused")
            steady = weather.since
            work = loop.create_task(use(manager, number))
            if chance.random() < 0.1:
                await asyncio.sleep(chance.uniform(0.0, 1.0))
                work.cancel()
            await asyncio.wait({work})
            took = loop.time() - began
            assert took <= 8.5
            if hopeless and steady == weather.since:
                # A source that has just refused is asked again after a second; it takes 0.01 s.
                assert took <= PACE + 0.02, (weather.kind, took)
            if not work.cancelled():
                outcomes.append(work.result())

    async with (
        AsyncConnectionManager(
            handler_factory=weather.make,
            credentials=weather.world.credentials,
            fetch_topology=weather if chance.random() < 0.5 else None,
            connect_timeout=3.0,
            linger=300.0,
        ) as manager,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(4):
            tasks.create_task(caller(manager, number))
        for _ in range(6):
            weather.kind = chance.choice(["fine", "no luck", "mistake", "refused"])
            weather.since = loop.time()
            await asyncio.sleep(chance.uniform(0.5, 8.0))
            if chance.random() < 0.7:
                weather.world.fall(ADDRESSES[0])
                weather.world.up[ADDRESSES[0]] = True
        weather.kind, weather.since = "fine", loop.time()
        await asyncio.sleep(12.0)
        settled = len(outcomes)
        await asyncio.sleep(5.0)
        assert set(outcomes[settled:]) == {"ok"}, outcomes[settled:]
        over = True
    assert not weather.world.open, "channels were left open"
    assert not weather.world.wrong


def test_many_mistaken_days() -> None:
    simulate(mistaken_days, seeds=scaled(300, least=12))


def _nobody_is_told(
    self: ConnectionCore, attempt: int, error: BaseException, now: float
) -> Actions:
    return self.failed(attempt, error, now)


def _for_good(self: ConnectionCore, now: float) -> Actions:
    return [ShellAction(ShellAct.WAKE)]


@pytest.mark.parametrize(
    "planted",
    [
        mutant(
            ConnectionCore, "failed_for_good", _nobody_is_told, name="nobody is told of a mistake"
        ),
        mutant(ConnectionCore, "refused", _nobody_is_told, name="nobody is told of a refusal"),
        mutant(ConnectionCore, "_refuse_waiter", _for_good, name="once refused, refused for good"),
    ],
    ids=lambda planted: planted.name,
)
def test_a_planted_defect_is_noticed(planted: Mutant) -> None:
    assert_caught(mistaken_days, planted, within=200, clean=3)
