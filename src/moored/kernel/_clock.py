"""Time and randomness as an object: the event loop's, virtual in a simulation, or the system's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random, SystemRandom

__all__ = ["Clock"]

_system_random = SystemRandom()


@dataclass(slots=True, eq=False, repr=False)
class Clock:
    """Monotonic time, wall time and randomness, to be passed to code that has no clock of its own.

    Most code uses `Clock.current()`: inside a running event loop it is that loop's clock (so it is
    virtual in a simulation), and elsewhere the system's.
    """

    #: Returns seconds that never decrease; only differences are meaningful.
    monotonic: Callable[[], float] = time.monotonic
    #: Returns seconds since 1970; they may jump.
    wall: Callable[[], float] = time.time
    #: The source of all randomness.
    random: Random = _system_random

    @classmethod
    def current(cls) -> Clock:
        """Return the clock of the running event loop, or the system's if none runs."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return _SYSTEM
        own = getattr(loop, "clock", None)
        if isinstance(own, Clock):
            return own
        # The time of asyncio's own loops is the system's: they share one clock object.
        return _SYSTEM if type(loop).time is asyncio.BaseEventLoop.time else cls(loop.time)

    @classmethod
    def system(cls) -> Clock:
        """Return the system's clock."""
        return _SYSTEM

    def __repr__(self) -> str:
        return f"<Clock at {self.monotonic():.3f} s>"


_SYSTEM = Clock()
