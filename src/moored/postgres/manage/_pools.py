"""The two pools of a manager, and what they are doing: `starting`, `ready`, `repopulating`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, NamedTuple

import psycopg

from moored.kernel import Clock, Recorder
from moored.reservoir import AsyncConnectionPool, ReservoirConfig

from ..server import Diagnosis, FaultVerdict, diagnose
from ._manager_core import Role

__all__ = ["ManagedPool", "PoolSizes", "PoolStatus", "pool_sizes"]

log = logging.getLogger("moored.postgres")

MAX_ADMIN = 4
#: For so long may a server that shuts down wait for what consumers have not acknowledged yet.
GRACE = 1.0


class PoolSizes(NamedTuple):
    """How many connections each pool has."""

    admin: int
    snapshot: int


def pool_sizes(total: int) -> PoolSizes:
    """A quarter for administration, at least 1 and at most 4; the rest for everybody else."""
    admin = min(max(total // 4, 1), MAX_ADMIN)
    return PoolSizes(admin, max(total - admin, admin))


class PoolStatus(Enum):
    """What a pool is doing."""

    STARTING = "starting"
    READY = "ready"
    #: It was ready, has lost connections, and opens others.
    REPOPULATING = "repopulating"


class ManagedPool:
    """A pool, and the reports of how it is.

    :param on_ready: all its connections are there.
    :param on_repopulating: it has lost some, or cannot open them for now, with the reason.
    :param on_failed: it cannot be filled, for a reason that does not go away by itself.
    """

    def __init__(
        self,
        role: Role,
        conninfo: Callable[[], Awaitable[str]],
        size: int,
        *,
        kwargs: dict[str, Any],
        clock: Clock,
        recorder: Recorder,
        name: str,
        on_ready: Callable[[Role], None],
        on_repopulating: Callable[[Role, str], None],
        on_failed: Callable[[Role, Diagnosis], None],
    ) -> None:
        self.role = role
        self.size = size
        self.status = PoolStatus.STARTING
        self._said = ""
        self._on_ready = on_ready
        self._on_repopulating = on_repopulating
        self._on_failed = on_failed
        self.pool: AsyncConnectionPool[psycopg.AsyncConnection[Any]] = AsyncConnectionPool(
            conninfo,
            # No prepared statements on the server: behind a pooler, the next transaction may be
            # on another one of its connections.
            kwargs={"prepare_threshold": None, **kwargs},
            config=ReservoirConfig(max_size=size, target_ready=size, low_watermark=size),
            open=False,
            name=f"{name}.{role.value}",
            queue_target=5.0,
            queue_interval=10.0,
            clock=clock,
            recorder=recorder,
        )

    async def run(self) -> None:
        """Keep it filled, and say how it is, until this is cancelled."""
        async with self.pool:
            while True:
                self._look()
                await self.pool.reservoir.changed()

    def _look(self) -> None:
        core, works = self.pool.reservoir.core, self.pool.reservoir.upkeep
        connected = len(core.items)
        failing = works.failing_for is not None and works.last_error is not None
        # One that is replaced ahead of its end is no loss.
        enough = self.size - (0 if failing else max(1, self.size // 10))
        if self.status is PoolStatus.READY:
            if connected < enough:
                self.status = PoolStatus.REPOPULATING
                why = diagnose(works.last_error).message if failing and works.last_error else ""
                self._on_repopulating(self.role, why or f"{connected} of {self.size} are there")
        elif connected >= self.size:
            self.status = PoolStatus.READY
            self._said = ""
            self._on_ready(self.role)
        elif failing and works.last_error is not None:
            diagnosis = diagnose(works.last_error)
            if self._holds_up(diagnosis):
                self._on_failed(self.role, diagnosis)
            elif str(diagnosis) != self._said:  # what everybody waits for, in words
                self._said = str(diagnosis)
                if diagnosis.verdict is FaultVerdict.FATAL:
                    self._on_failed(self.role, diagnosis)
                else:
                    self._on_repopulating(self.role, self._said)

    def _holds_up(self, diagnosis: Diagnosis) -> bool:
        """Whether the server shuts down, and waits for us: until all that it sent is safe."""
        leaving = self.role is Role.ADMIN and diagnosis.type == "database_server_shutting_down"
        return leaving and (self.pool.reservoir.upkeep.failing_for or 0.0) >= GRACE

    def __repr__(self) -> str:
        return f"<ManagedPool {self.role.value}: {self.status.value}, {self.pool!r}>"
