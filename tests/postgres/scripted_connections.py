"""The connections of a scripted server: replication, plain ones, and pools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import psycopg
from psycopg import errors

from moored.postgres._errors import StreamEnded
from moored.postgres.manage._manager_core import ManagerCore, Role
from moored.postgres.manage._parts import PostedEvent
from moored.postgres.manage._pools import PoolStatus
from moored.postgres.server._faults import FaultVerdict, diagnose
from moored.reservoir import PoolClosed

from .scripted_server import Server, Session

__all__ = ["Connection", "Link", "Pool"]


class Link:
    """What the replication client has of its connection; the same methods as the real one."""

    #: Messages come whole here.
    arrivals = 0

    def __init__(self, session: Session) -> None:
        self._session = session
        self._server = session.server

    @property
    def closed(self) -> bool:
        return self._session.closed

    @property
    def has_input(self) -> bool:
        session = self._session
        return session.reachable and bool(session.outbox)

    async def command(self, text: str, *, timeout: float | None = None) -> list[Any]:
        try:
            async with asyncio.timeout(timeout):
                return await self._server.execute(self._session, text)
        except TimeoutError:
            self.cut()
            raise StreamEnded(f"the server has not answered for {timeout:g} s") from None
        except asyncio.CancelledError:
            self.cut()
            raise

    async def stream(self, start_command: str, *, timeout: float | None = None) -> None:
        await self.command(start_command, timeout=timeout)

    async def receive(self) -> list[bytes]:
        session, server = self._session, self._server
        while True:
            if session.error is not None or session.closed:
                raise StreamEnded(str(session.error or "the connection is closed"))
            slot = server.slot
            if session.reachable and slot is not None and slot.active is session:
                if slot.lost:
                    raise errors.ObjectNotInPrerequisiteState(
                        "can no longer get changes from replication slot"
                    )
                if batch := server.next_messages(session):
                    return batch
            await session.sleep()

    async def send(self, message: bytes) -> None:
        self._session.check()
        while self._session.clogged:
            await self._session.sleep()
            self._session.check()
        self._server.standby_status(self._session, message)

    async def cancel(self, timeout: float) -> None:
        """Leave the statement to the end of the session, at which this server ends it."""

    async def close(self) -> None:
        self._server.hang_up(self._session)

    def cut(self) -> None:
        self._server.hang_up(self._session)


class Connection:
    """A plain connection, as far as the manager uses one."""

    info = SimpleNamespace(server_version=180000)

    def __init__(self, session: Session, rows: list[Any] | None = None) -> None:
        self.session = session
        self._rows = rows or []
        self.description = self._rows

    async def execute(self, query: Any, values: Any = None) -> Connection:
        text = query.decode() if isinstance(query, bytes) else query.as_string(None)
        rows = await self.session.server.execute(self.session, text, values)
        return Connection(self.session, rows)

    async def fetchall(self) -> list[Any]:
        return self._rows

    async def rollback(self) -> None:
        pass

    async def close(self) -> None:
        self.session.server.hang_up(self.session)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class Pool:
    """Stands in for a `ManagedPool`: one connection, which is opened again when it is lost."""

    silent_for = 0.0

    def __init__(
        self,
        server: Server,
        who: str,
        role: Role,
        core: ManagerCore,
        post: Callable[[PostedEvent], None],
    ) -> None:
        self.role = role
        self._server = server
        self._who = who
        self._core = core
        self._post = post
        self._session: Session | None = None
        self.ready = False
        self.closed = False

    @property
    def pool(self) -> Pool:
        return self

    @property
    def status(self) -> PoolStatus:
        if self.ready:
            return PoolStatus.READY
        return PoolStatus.STARTING if self._session is None else PoolStatus.REPOPULATING

    async def run(self) -> None:
        try:
            while True:
                await self._fill()
                assert self._session is not None
                while self._session.error is None:
                    await self._session.sleep()
                self.ready = False
                why = str(self._session.error)
                self._post(partial(self._core.pool_repopulating, self.role, why))
        finally:
            self.closed = True
            if self._session is not None:
                await self._close(self._session)

    async def _close(self, session: Session) -> None:
        """Close a connection, sometimes slowly: callers with a time limit must not wait for it."""
        rng = self._server.rng
        try:
            if not session.reachable or rng.random() < 0.1:
                await asyncio.sleep(rng.choice((0.0, 2.0, 30.0)))
        finally:
            self._server.hang_up(session)

    async def _fill(self) -> None:
        while True:
            try:
                self._session = await self._server.connect(self.role.value, self._who)
                break
            except psycopg.Error as error:
                diagnosis = diagnose(error)
                if diagnosis.verdict is FaultVerdict.FATAL:
                    self._post(partial(self._core.pool_failed, self.role, diagnosis))
                await asyncio.sleep(self._server.rng.uniform(0.5, 3.0))
        self.ready = True
        self._post(partial(self._core.pool_ready, self.role))

    @asynccontextmanager
    async def connection(self, timeout: float = 30.0) -> AsyncIterator[Connection]:
        if self.closed:
            raise PoolClosed("the pool is closed")
        if self._session is None or self._session.error is not None:
            await asyncio.sleep(timeout)
            raise TimeoutError("no connection within the time")
        yield Connection(self._session)
