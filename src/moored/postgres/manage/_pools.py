"""The pools of a manager, and their states: `starting`, `ready`, `repopulating`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import psycopg

from moored.kernel import duration
from moored.reservoir import AsyncConnectionPool, ReservoirConfig

from ..server import Diagnosis, FaultVerdict, diagnose
from ..stream import KEEPALIVES
from ._manager_core import Role
from ._parts import PostedEvent
from ._stack import Stack

__all__ = ["ManagedPool", "PoolStatus", "pool_sizes"]

log = logging.getLogger("moored.postgres")

MAX_ADMIN = 4
#: How long a server that is shutting down may wait for unacknowledged transactions, in seconds.
GRACE = 1.0


def pool_sizes(total: int) -> tuple[int, int]:
    """Split `pool_size`: a quarter for administration, 1 to 4, and the rest for callers."""
    admin = min(max(total // 4, 1), MAX_ADMIN)
    return admin, max(total - admin, admin)


class PoolStatus(Enum):
    """The state of a pool."""

    STARTING = "starting"
    READY = "ready"
    #: It was ready, has lost connections, and opens new ones.
    REPOPULATING = "repopulating"


class ManagedPool:
    """A pool that reports its state to the manager's core.

    :param post: posts an event to the manager.
    """

    def __init__(
        self, stack: Stack, role: Role, url: str, size: int, post: Callable[[PostedEvent], None]
    ) -> None:
        self.role = role
        self.size = size
        self.status = PoolStatus.STARTING
        self._reported = ""
        self._silent = False
        self._core = stack.core
        self._post = post
        self.pool: AsyncConnectionPool[psycopg.AsyncConnection[Any]] = AsyncConnectionPool(
            partial(stack.resolver.conninfo, url),
            # No prepared statements: behind a pooler, the next transaction may use another server
            # connection.
            kwargs={
                "prepare_threshold": None,
                "application_name": stack.settings.application_name,
                **KEEPALIVES,
            },
            config=ReservoirConfig(max_size=size, target_ready=size, low_watermark=size),
            open=False,
            name=f"postgres.{stack.settings.stream_id}.{role.value}",
            queue_target=5.0,
            queue_interval=10.0,
            clock=stack.clock,
            recorder=stack.recorder,
        )

    async def run(self) -> None:
        """Keep the pool filled, and report its state, until cancelled."""
        async with self.pool:
            while True:
                self._check()
                await self.pool.reservoir.changed()

    def _check(self) -> None:
        silent = self.pool.silent_for
        if bool(silent) != self._silent:
            self._silent = bool(silent)
            if self.status is PoolStatus.READY:
                why = f"the server has not answered for {duration(silent)}" if silent else ""
                self._post(partial(self._core.pool_silent, self.role, why))
        upkeep, connected = self.pool.reservoir.upkeep, len(self.pool.reservoir.core.items)
        error = upkeep.attempts.error
        # Without errors, a few connections may be missing while they are replaced by schedule.
        enough = self.size - (max(1, self.size // 10) if error is None else 0)
        if self.status is PoolStatus.READY:
            if connected < enough:
                self.status = PoolStatus.REPOPULATING
                why = "" if error is None else diagnose(error).message
                self._repopulating(why or f"{connected} of {self.size} connections are open")
        elif connected >= self.size:
            self.status = PoolStatus.READY
            self._reported = ""
            self._post(partial(self._core.pool_ready, self.role))
        elif error is not None:
            diagnosis = diagnose(error)
            if self._blocks_shutdown(diagnosis):
                self._failed(diagnosis)
            elif str(diagnosis) != self._reported:
                self._reported = str(diagnosis)
                if diagnosis.verdict is FaultVerdict.FATAL:
                    self._failed(diagnosis)
                else:
                    self._repopulating(self._reported)

    def _repopulating(self, why: str) -> None:
        self._post(partial(self._core.pool_repopulating, self.role, why))

    def _failed(self, diagnosis: Diagnosis) -> None:
        self._post(partial(self._core.pool_failed, self.role, diagnosis))

    def _blocks_shutdown(self, diagnosis: Diagnosis) -> bool:
        """Whether the server is shutting down, and waits until the stream has confirmed all WAL."""
        stopping = self.role is Role.ADMIN and diagnosis.type == "database_server_shutting_down"
        return stopping and (self.pool.reservoir.upkeep.attempts.failing_for or 0.0) >= GRACE

    def __repr__(self) -> str:
        return f"<ManagedPool {self.role.value}: {self.status.value}, {self.pool!r}>"
