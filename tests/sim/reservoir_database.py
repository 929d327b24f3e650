"""A database server as a pool sees it, which counts what is open and fails in every way."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.sim.reservoir_watch import Watch

from moored.leases import Lease
from moored.testing import Sim

if TYPE_CHECKING:
    from tests.sim.reservoir_callers import Visit

__all__ = ["Database", "Mood", "Refused", "Wire", "most_over"]


class Refused(ConnectionError):
    """What the server says when it does not want to; with a state, as Postgres has them."""

    sqlstate = "08006"


class Throttled(Refused):
    """What it says when it is asked too often."""

    sqlstate = "53400"


class Wire:
    """One physical connection."""

    __slots__ = ("closing", "dead", "lease", "noticed", "number", "user")

    def __init__(self, number: int, lease: Lease | None) -> None:
        self.number = number
        self.lease = lease
        #: Whether the server has ended it, and whether the client knows.
        self.dead = False
        self.noticed = False
        self.closing = False
        #: Who works with it.
        self.user: Visit | str | None = None

    def __repr__(self) -> str:
        return f"wire {self.number}"


@dataclass
class Mood:
    """How the server is now: how long things take, and how likely they go wrong."""

    takes: tuple[float, float] = (0.002, 0.03)
    refuses: float = 0.0
    throttles: float = 0.0
    hangs: float = 0.0
    #: Connects that succeed, and the first statement on them does not.
    unconfigurable: float = 0.0
    close_hangs: float = 0.0
    close_fails: float = 0.0
    ping_hangs: float = 0.0


class Database:
    """The server. What it counts is physical: from the begin of a connect to the end of a close."""

    def __init__(self, sim: Sim, watch: Watch, lease_of_task: Callable[[], Lease | None]) -> None:
        self.mood = Mood()
        self.physical: dict[Wire, None] = {}
        self.connects: list[float] = []
        #: Called just before a connect comes to its end.
        self.on_handshake: Callable[[], None] | None = None
        #: How many there may be; set by who made the pool.
        self.most: Callable[[], float] = lambda: math.inf
        #: Told of pings, in the task that asks.
        self.on_ping: Callable[[Wire], None] = lambda wire: None
        #: Whether clients see at once that a connection has ended, or only when they use it.
        self.tells = sim.rng.random() < 0.5
        self._sim = sim
        self._watch = watch
        self._lease_of_task = lease_of_task

    # -- what the pool calls -------------------------------------------------------------------

    async def connect(self) -> Wire:
        wire = Wire(len(self.connects) + 1, self._lease_of_task())
        self._watch.expect(wire.lease is not None, "a connect without a lease")
        self.connects.append(self._sim.now)
        self.physical[wire] = None
        count, most = len(self.physical), self.most()
        self._watch.expect(count <= most, f"{count} physical connections of {most}")
        try:
            await self._shake_hands()
        except BaseException:
            del self.physical[wire]
            raise
        return wire

    async def _shake_hands(self) -> None:
        seconds = self._sim.random(*self.mood.takes)
        if self.on_handshake is not None:
            self._sim.after(seconds, self.on_handshake)
        await asyncio.sleep(seconds)
        if self._chance(self.mood.refuses):
            raise Refused("connection refused")
        if self._chance(self.mood.throttles):
            raise Throttled("rate exceeded")
        if self._chance(self.mood.hangs):
            await asyncio.sleep(1000.0)

    async def configure(self, wire: Wire) -> None:
        await self._sleep()
        if self._chance(self.mood.unconfigurable):
            raise Refused("terminating connection")

    async def close(self, wire: Wire) -> None:
        self._watch.expect(not wire.closing, f"{wire} is closed twice")
        self._watch.expect(wire.user is None, f"{wire} is closed under {wire.user}")
        wire.closing = True
        try:
            await self._sleep()
            if self._chance(self.mood.close_hangs):
                await asyncio.sleep(1000.0)
            if self._chance(self.mood.close_fails):
                raise Refused("connection reset")
        finally:
            del self.physical[wire]

    def is_broken(self, wire: Wire) -> bool:
        return wire.noticed or (self.tells and wire.dead)

    async def ping(self, wire: Wire) -> None:
        self._watch.expect(wire.user is None, f"{wire} is pinged under {wire.user}")
        self.on_ping(wire)
        if self._chance(self.mood.ping_hangs):
            await asyncio.sleep(1000.0)
        await self._ask(wire)

    async def reset(self, wire: Wire) -> None:
        self._watch.expect(wire.user is None, f"{wire} is reset under {wire.user}")
        wire.user = "reset"
        try:
            await self._ask(wire)
        finally:
            wire.user = None

    async def query(self, wire: Wire, seconds: float) -> None:
        """What callers do with it; a query that is cancelled leaves a broken connection."""
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

    # -- what happens to it --------------------------------------------------------------------

    def kill(self, share: float) -> None:
        """End some of the connections, or all."""
        for wire in self.physical:
            wire.dead = wire.dead or self._chance(share)

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self._sim.rng.random() < probability

    async def _sleep(self) -> None:
        await asyncio.sleep(self._sim.random(*self.mood.takes))

    def hooks(self) -> dict[str, Any]:
        """What a pool must be given."""
        return {
            "connect": self.connect,
            "is_broken": self.is_broken,
            "ping": self.ping,
            "close_connection": self.close,
        }


def most_over(times: Sequence[float], *, rate: float, burst: int) -> float:
    """By how much the worst of all windows exceeds rate x window + burst; not positive if none.

    For every pair i <= j the window from i to j holds j - i + 1; the pairs are not tried one by
    one, because for each j only the i with the least i - rate x time counts.
    """
    worst, least = -math.inf, math.inf
    for number, at in enumerate(times):
        least = min(least, number - rate * at)
        worst = max(worst, number - rate * at - least + 1 - burst)
    return worst
