"""Configuration errors and refusals in the simulator: no caller waits for a hopeless attempt."""

from __future__ import annotations

import asyncio
import itertools
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
from moored.rpc._endpoint import Endpoint, Orders
from moored.rpc._errors import TopologyRefused
from moored.rpc._verdicts import Verdict
from moored.rpc.topology._source_pacing import PACE
from moored.rpc.topology._sources import TopologySource
from moored.testing import Mutant, Sim, assert_caught, mutant, scaled, simulate

from .scripted import ADDRESSES, World

pytestmark = pytest.mark.usefixtures("forkable")


class AttemptOutcomes(TopologySource):
    """Decides how attempts to connect end, as `kind` says."""

    def __init__(self, sim: Sim) -> None:
        self.world = World(sim.rng)
        self.kind, self.since = "success", 0.0

    def make(self, config: ConnectionConfig) -> Any:
        if self.kind == "config error":
            raise ConfigError("a configuration error")
        if self.kind == "transient":
            raise OSError("connection refused")
        return self.world.channel(config)

    async def fetch(self) -> Topology:
        await asyncio.sleep(0.01)
        if self.kind == "refused":
            raise TopologyRefused("not you")
        return self.world.topology()


async def random_outcomes(sim: Sim) -> None:
    """No call exceeds its timeout, and none waits while attempts are known to be hopeless."""
    attempts, chance = AttemptOutcomes(sim), sim.rng
    loop, finished = asyncio.get_running_loop(), False
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
        while not finished:
            await asyncio.sleep(chance.uniform(0.0, 0.5))
            began, hopeless = loop.time(), attempts.kind in ("config error", "refused")
            steady = attempts.since
            work = loop.create_task(use(manager, number))
            if chance.random() < 0.1:
                await asyncio.sleep(chance.uniform(0.0, 1.0))
                work.cancel()
            await asyncio.wait({work})
            took = loop.time() - began
            assert took <= 8.5
            if hopeless and steady == attempts.since:
                # A source that has just refused is queried again after PACE; a fetch takes 0.01 s.
                assert took <= PACE + 0.02, (attempts.kind, took)
            if not work.cancelled():
                outcomes.append(work.result())

    async with (
        AsyncConnectionManager(
            handler_factory=attempts.make,
            credentials=attempts.world.credentials,
            fetch_topology=attempts if chance.random() < 0.5 else None,
            connect_timeout=3.0,
            linger=300.0,
        ) as manager,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(4):
            tasks.create_task(caller(manager, number))
        for _ in range(6):
            attempts.kind = chance.choice(["success", "transient", "config error", "refused"])
            attempts.since = loop.time()
            await asyncio.sleep(chance.uniform(0.5, 8.0))
            if chance.random() < 0.7:
                attempts.world.fall(ADDRESSES[0])
                attempts.world.up[ADDRESSES[0]] = True
        attempts.kind, attempts.since = "success", loop.time()
        await asyncio.sleep(12.0)
        settled = len(outcomes)
        await asyncio.sleep(5.0)
        assert set(outcomes[settled:]) == {"ok"}, outcomes[settled:]
        finished = True
    assert not attempts.world.open, "channels were left open"
    assert not attempts.world.wrong


def test_hopeless_attempts_fail_their_callers_immediately() -> None:
    simulate(random_outcomes, seeds=scaled(300, least=2))


def _retries_after(wrong: Verdict) -> Any:
    def failed(
        self: Endpoint,
        attempt: int,
        error: BaseException,
        now: float,
        verdict: Verdict = Verdict.RETRY,
    ) -> Orders:
        return _failed(self, attempt, error, now, Verdict.RETRY if verdict is wrong else verdict)

    return failed


_failed = Endpoint.failed


def _never_dials_again(self: Endpoint, now: float) -> Orders:
    """Dial only while nothing was refused."""
    return [] if self._held else _dial(self, now)


_dial = Endpoint._dial


@pytest.mark.parametrize(
    "planted",
    [
        mutant(
            Endpoint,
            "failed",
            _retries_after(Verdict.MISTAKE),
            name="a configuration error is retried",
        ),
        mutant(
            Endpoint,
            "failed",
            _retries_after(Verdict.REFUSED),
            name="a refusal is retried without waking the callers",
        ),
        mutant(Endpoint, "_dial", _never_dials_again, name="a refusal never expires"),
    ],
    ids=lambda planted: planted.name,
)
def test_mutants_are_caught(planted: Mutant) -> None:
    assert_caught(random_outcomes, planted, within=200, clean=0)
