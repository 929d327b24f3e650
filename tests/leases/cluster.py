"""Simulated hosts that compete for leases, with crashes, pauses, clock steps and network faults."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.leases.faulty_network import FaultyNetwork, NetworkFaults
from tests.leases.model import Model

from moored.leases import Leases, MemoryStore, Policy, StoreUnavailable
from moored.testing import Host, Sim

__all__ = ["LIMIT", "REFUSE", "TROUBLE_UNTIL", "TTL", "Cluster"]

TTL = 6.0
LIMIT = 3
HOSTS = 5
TROUBLE_UNTIL = 25.0
#: After the last fault: calls in flight end, leases of dead hosts and of lost responses expire.
SETTLED = 2 * TTL + 5.0
REFUSE = Policy(on_unavailable="refuse", renew_every=2.0, margin=0.5, timeout=1.5)


class Cluster:
    """The hosts, their store, the network between them, and the model that checks them."""

    def __init__(self, sim: Sim, policy: Policy = REFUSE) -> None:
        self.sim = sim
        self.policy = policy
        self.faults = NetworkFaults()
        self.over = False
        self.store = MemoryStore(clock=sim.host("store").clock)
        self.model = Model(sim, self.store)
        self.hosts = [sim.host(f"host-{n}", self._main(n)) for n in range(HOSTS)]

    def line(self) -> FaultyNetwork:
        return FaultyNetwork(self.store, self.sim, self.faults)

    def client(self) -> Leases:
        return Leases(self.line(), service_name="orders", policy=self.policy)

    def _main(self, number: int) -> Any:
        async def main() -> None:
            host = self.sim.host(f"host-{number}")
            while True:
                try:
                    async with self.client() as leases:
                        wants = [self._want(leases, host, "db", LIMIT) for _ in range(2)]
                        await asyncio.gather(*wants, self._want(leases, host, "boss", 1))
                except StoreUnavailable:
                    await asyncio.sleep(0.5)

        return main

    async def _want(self, leases: Leases, host: Host, key: str, limit: int) -> None:
        rng = self.sim.rng
        while True:
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            try:
                lease = await leases.acquire(key, limit=limit, ttl=TTL)
            except StoreUnavailable:
                continue
            if lease is None:
                continue
            claim = self.model.begins(lease, host, limit)
            try:
                async with asyncio.timeout(rng.choice((0.2, 3.0, 12.0))):
                    await lease.lost()
            except TimeoutError:
                self.model.ends(claim)
                await lease.release()

    # -- trouble -------------------------------------------------------------------------------

    def plan_trouble(self) -> None:
        rng, at = self.sim.rng, self.sim.at
        for _ in range(rng.randint(2, 6)):
            host, when = rng.choice(self.hosts), rng.uniform(1.0, TROUBLE_UNTIL)
            at(when, rng.choice((self.crash, self.pause, self.step_clock)), host)
        for _ in range(rng.randint(0, 3)):
            at(rng.uniform(1.0, TROUBLE_UNTIL), self.storm)

    async def crash(self, host: Host) -> None:
        host.kill()
        await asyncio.sleep(self.sim.random(0.0, 8.0))
        if not self.over:
            host.restart()

    async def pause(self, host: Host) -> None:
        host.pause()
        await asyncio.sleep(self.sim.rng.choice((0.3, 4.0, 9.0)) * self.sim.random(0.5, 1.0))
        self.resume(host)

    def resume(self, host: Host) -> None:
        if host.paused:
            self.model.resumes(host)
            host.resume()

    def step_clock(self, host: Host) -> None:
        seconds = self.sim.rng.choice((-3600.0, -5.0, 5.0, 3600.0))
        self.sim.rng.choice((host, self.sim)).wall_step(seconds)

    async def storm(self) -> None:
        rng, faults = self.sim.rng, self.faults
        kind = rng.choice(("slow", "deaf", "lossy", "refused", "dying"))
        if kind == "slow":
            faults.there = faults.back = (0.1, rng.choice((0.8, 2.0, 8.0)))
        elif kind == "deaf":
            faults.lost_answers = rng.choice((0.5, 1.0))
        elif kind == "lossy":
            faults.lost_requests = rng.choice((0.5, 1.0))
        elif kind == "refused":
            faults.refused = True
        else:
            # As a dying server: its last responses are very late, then there are none.
            faults.back = (0.7, 1.4)
            await asyncio.sleep(rng.uniform(2.0, 4.0))
            faults.refused = not self.over
        await asyncio.sleep(rng.uniform(0.5, 10.0))
        self.clear_up()

    def clear_up(self) -> None:
        fresh = NetworkFaults()
        for name, value in vars(fresh).items():
            setattr(self.faults, name, value)

    # -- the end -------------------------------------------------------------------------------

    def calm(self) -> None:
        """End all faults: every host runs, and the store answers."""
        self.over = True
        self.clear_up()
        for host in self.hosts:
            self.resume(host)

    async def settle(self) -> None:
        """Kill all hosts, and check that all leases are free after one ttl, without any repair."""
        self.clear_up()
        self.over = True
        for host in self.hosts:
            host.kill()
        await asyncio.sleep(SETTLED)
        async with self.client() as leases:
            got = [await leases.acquire("db", limit=LIMIT, ttl=TTL) for _ in range(LIMIT + 1)]
            assert [lease is not None for lease in got] == [True] * LIMIT + [False], "stuck leases"
            assert await leases.acquire("boss", limit=1, ttl=TTL) is not None, "a stuck lease"
