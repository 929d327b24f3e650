"""A simulated database server that counts its connections and fails in every way."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.sim.reservoir_violations import Violations

from moored.leases import Lease
from moored.testing import Sim

if TYPE_CHECKING:
    from tests.sim.reservoir_callers import Visit

__all__ = ["Database", "Refused", "ServerFaults", "Wire", "most_over"]


class Refused(ConnectionError):
    """The server refuses; has a SQLSTATE, as Postgres errors do."""

    sqlstate = "08006"


class Throttled(Refused):
    """The server refuses because of too many connects."""

    sqlstate = "53400"


class Wire:
    """One physical connection."""

    __slots__ = ("closing", "dead", "lease", "noticed", "number", "user")

    def __init__(self, number: int, lease: Lease | None) -> None:
        self.number = number
        self.lease = lease
        #: Whether the server has ended the connection, and whether the client has noticed.
        self.dead = False
        self.noticed = False
        self.closing = False
        #: The caller or the hook that uses the connection.
        self.user: Visit | str | None = None

    def __repr__(self) -> str:
        return f"wire {self.number}"


@dataclass
class ServerFaults:
    """The duration of each operation of the server, and the probability of each fault."""

    takes: tuple[float, float] = (0.002, 0.03)
    refuses: float = 0.0
    throttles: float = 0.0
    hangs: float = 0.0
    #: The connect succeeds, and the first statement fails.
    unconfigurable: float = 0.0
    close_hangs: float = 0.0
    close_fails: float = 0.0
    ping_hangs: float = 0.0


class Database:
    """The server. A connection counts from the start of its connect to the end of its close."""

    def __init__(
        self, sim: Sim, violations: Violations, lease_of_task: Callable[[], Lease | None]
    ) -> None:
        self.faults = ServerFaults()
        self.physical: dict[Wire, None] = {}
        self.connects: list[float] = []
        #: Called just before a connect ends.
        self.on_handshake: Callable[[], None] | None = None
        #: The limit of connections.
        self.most: Callable[[], float] = lambda: math.inf
        #: Called at each ping, in the task that pings.
        self.on_ping: Callable[[Wire], None] = lambda wire: None
        #: Whether `is_broken` reports a dead connection before it is used.
        self.reports_loss = sim.rng.random() < 0.5
        self._sim = sim
        self._violations = violations
        self._lease_of_task = lease_of_task

    # -- hooks of the pool ---------------------------------------------------------------------

    async def connect(self) -> Wire:
        wire = Wire(len(self.connects) + 1, self._lease_of_task())
        self._violations.expect(wire.lease is not None, "a connect without a lease")
        self.connects.append(self._sim.now)
        self.physical[wire] = None
        count, most = len(self.physical), self.most()
        self._violations.expect(count <= most, f"{count} physical connections of {most}")
        try:
            await self._handshake()
        except BaseException:
            del self.physical[wire]
            raise
        return wire

    async def _handshake(self) -> None:
        seconds = self._sim.random(*self.faults.takes)
        if self.on_handshake is not None:
            self._sim.after(seconds, self.on_handshake)
        await asyncio.sleep(seconds)
        if self._chance(self.faults.refuses):
            raise Refused("connection refused")
        if self._chance(self.faults.throttles):
            raise Throttled("rate exceeded")
        if self._chance(self.faults.hangs):
            await asyncio.sleep(1000.0)

    async def configure(self, wire: Wire) -> None:
        await self._sleep()
        if self._chance(self.faults.unconfigurable):
            raise Refused("terminating connection")

    async def close(self, wire: Wire) -> None:
        self._violations.expect(not wire.closing, f"{wire} is closed twice")
        self._violations.expect(wire.user is None, f"{wire} is closed under {wire.user}")
        wire.closing = True
        try:
            await self._sleep()
            if self._chance(self.faults.close_hangs):
                await asyncio.sleep(1000.0)
            if self._chance(self.faults.close_fails):
                raise Refused("connection reset")
        finally:
            del self.physical[wire]

    def is_broken(self, wire: Wire) -> bool:
        return wire.noticed or (self.reports_loss and wire.dead)

    async def ping(self, wire: Wire) -> None:
        self._violations.expect(wire.user is None, f"{wire} is pinged under {wire.user}")
        self.on_ping(wire)
        if self._chance(self.faults.ping_hangs):
            await asyncio.sleep(1000.0)
        await self._ask(wire)

    async def reset(self, wire: Wire) -> None:
        self._violations.expect(wire.user is None, f"{wire} is reset under {wire.user}")
        wire.user = "reset"
        try:
            await self._ask(wire)
        finally:
            wire.user = None

    async def query(self, wire: Wire, seconds: float) -> None:
        """Run a query of a caller; a cancelled query leaves the connection broken."""
        try:
            await asyncio.sleep(seconds)
            await self._ask(wire)
        except asyncio.CancelledError:
            wire.noticed = True
            raise

    async def _ask(self, wire: Wire) -> None:
        await self._sleep()
        if wire.dead:
            wire.noticed = True
            raise Refused("server closed the connection unexpectedly")

    # -- faults --------------------------------------------------------------------------------

    def kill(self, share: float) -> None:
        """End each connection with this probability."""
        for wire in self.physical:
            wire.dead = wire.dead or self._chance(share)

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self._sim.rng.random() < probability

    async def _sleep(self) -> None:
        await asyncio.sleep(self._sim.random(*self.faults.takes))

    def hooks(self) -> dict[str, Any]:
        """Return the options of a pool on this server."""
        return {
            "connect": self.connect,
            "is_broken": self.is_broken,
            "ping": self.ping,
            "close_connection": self.close,
        }


def most_over(times: Sequence[float], *, rate: float, burst: int) -> float:
    """Return by how much the worst window exceeds rate x window + burst; 0 or less if none does.

    For every pair i <= j the window from i to j holds j - i + 1 connects. Not all pairs are tried:
    for each j only the i with the least i - rate x time counts.
    """
    worst, least = -math.inf, math.inf
    for number, at in enumerate(times):
        least = min(least, number - rate * at)
        worst = max(worst, number - rate * at - least + 1 - burst)
    return worst
