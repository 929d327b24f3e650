"""Time and chance, passed in: the loop's own, virtual in simulation, the system's in threads."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

__all__ = ["Clock"]

_chance = random.SystemRandom()


class Clock:
    """Monotonic time, wall time and randomness, in one thing that a shell passes to its core.

    `Clock.current()` is what almost everyone wants: inside a running event loop it follows that
    loop (so it is virtual in a simulation), and elsewhere it is the system's.
    """

    __slots__ = ("monotonic", "random", "wall")

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        random: random.Random = _chance,
    ) -> None:
        #: Seconds that never go back; only differences mean something.
        self.monotonic = monotonic
        #: Seconds since 1970, for people; it may jump.
        self.wall = wall
        #: The source of all randomness.
        self.random = random

    @classmethod
    def current(cls) -> Clock:
        """The clock of the running event loop, or the system's where no loop runs."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return _SYSTEM
        own = getattr(loop, "clock", None)
        if isinstance(own, Clock):
            return own
        # An ordinary loop's time is the system's, and one clock for all of them costs nothing.
        return _SYSTEM if type(loop).time is asyncio.BaseEventLoop.time else cls(loop.time)

    @classmethod
    def system(cls) -> Clock:
        """The system's clock, for threads."""
        return _SYSTEM

    def __repr__(self) -> str:
        return f"<Clock at {self.monotonic():.3f} s>"


_SYSTEM = Clock()
