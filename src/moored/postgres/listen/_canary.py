"""The canary: a notification from the pooled path to the listener, which must arrive.

It detects what a heartbeat cannot: a pooler in transaction mode accepts LISTEN, answers every
query, and loses each notification, or gives it to another client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from uuid import uuid4

from moored.kernel import Clock, Tasks, describe

from .._errors import ConfigurationError, PostgresError
from ._direct import SILENCE, DirectConnection
from ._events import PoolerRefused, quoted
from ._notify import PooledPath, notify_by
from ._report import ListenerFigures

__all__ = ["POOLED_LIMIT", "Canary", "NoListener"]

log = logging.getLogger("moored.postgres")

#: Seconds for the pooled path to accept a canary, and for a cancelled one to end.
POOLED_LIMIT = 3.0

Notify = Callable[[str, str], Awaitable[None]]


class CanaryLost(PostgresError):
    """A notification was sent, and did not arrive."""


class NoListener(PoolerRefused):
    """The default URL leads to a pooler: the listener turns itself off."""


class Canary:
    """Sends notifications to the listener's own channel, and waits for their arrival.

    :param optional: whether a pooler turns the listener off.
    """

    def __init__(
        self, pooled: PooledPath | None, figures: ListenerFigures, clock: Clock, *, optional: bool
    ) -> None:
        self.channel = f"moored_canary_{uuid4().hex}"
        self._pooled: Notify | None = None
        if pooled is not None:
            self._pooled = partial(pooled.notify, timeout=POOLED_LIMIT)
        self._figures = figures
        self._clock = clock
        self._optional = optional
        #: Whether the last one was lost.
        self._suspect = False
        self._sent = 0
        self._arrived: asyncio.Future[None] | None = None
        self._sending = Tasks()

    @property
    def channels(self) -> tuple[str, ...]:
        """The channels that the listener needs for canaries."""
        return () if self._pooled is None else (self.channel,)

    def received(self, payload: str) -> None:
        """A canary has arrived; one that was sent earlier than the last is ignored."""
        if payload == str(self._sent) and self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def send(self, direct: DirectConnection, notify: Notify | None = None) -> str | None:
        """Send a canary; return None when it has arrived, or why it could not be sent.

        :param notify: the path, if not the pooled one.

        :raises CanaryLost: it was sent, and did not arrive.
        """
        notify = notify or self._pooled
        assert notify is not None
        if len(self._sending) > 1:
            return "earlier canaries are still being sent"  # each holds a connection of the pool
        self._sent += 1
        began = self._clock.monotonic()
        arrived = self._arrived = asyncio.get_running_loop().create_future()
        sending = self._sending.start(_outcome(notify(self.channel, str(self._sent))))
        # One that takes too long is not cancelled: the driver would then wait for the server.
        await asyncio.wait({sending}, timeout=POOLED_LIMIT)
        if failure := sending.result() if sending.done() else "it does not answer":
            return failure
        try:
            await direct.until(arrived, "a canary", notifications=True)
        except TimeoutError:
            self._suspect = True
            self._figures.canaries_lost += 1
            raise CanaryLost(
                f"a test notification through notify_through did not arrive within {SILENCE:g} s"
            ) from None
        self._figures.canary_latency = self._clock.monotonic() - began
        return None

    async def probe(self, direct: DirectConnection, conninfo: str, *, was_up: bool) -> None:
        """Refuse a pooler that loses notifications, and paths to different databases.

        A server process with another pid than the one that began the connection is behind a pooler.
        Only a canary from another connection shows its mode: a pooler in transaction mode may
        deliver one from this connection.

        :param was_up: whether the listener has worked before.
        """
        pid = int(await direct.query("SELECT pg_catalog.pg_backend_pid()") or 0)
        pooler = pid != direct.pid
        if pooler and self._optional:
            raise NoListener(
                "there is no listener, because database_url leads to a pooler: set notify_url "
                '(NOTIFY_URL) to the URL of the server itself, or to "" to turn the listener off'
            )
        if pooler or (self._pooled is not None and (self._suspect or not was_up)):
            await self._probe(direct, conninfo, pooler)
        self._figures.pooler = pooler

    async def _probe(self, direct: DirectConnection, conninfo: str, pooler: bool) -> None:
        await direct.query(f"LISTEN {quoted(self.channel)}")
        paths: list[Notify] = [] if self._pooled is None else [self._pooled]
        if pooler:
            paths.append(partial(notify_by, conninfo))
        failure: str | None = None
        for path in paths:
            try:
                failure = await self.send(direct, path)
            except CanaryLost as lost:
                # An answer comes after every earlier notification, and shows that the link works.
                await direct.query("SELECT 1")
                if self._arrived is None or not self._arrived.done():
                    raise _refusal(pooler) from lost
            if failure is None:
                self._suspect = False
                break
        if pooler:
            self._report_pooler(failure)

    def _report_pooler(self, failure: str | None) -> None:
        if failure is not None:
            raise PostgresError(f"the listener's URL leads to a pooler of unknown mode: {failure}")
        if not self._figures.pooler:
            log.warning(
                "the listener is connected through a pooler in session mode: it works, but occupies"
                " a server connection of the pooler, and is lost with it; set its URL to the server"
                " itself (by convention port 5432 instead of 6432)"
            )

    async def end(self) -> None:
        """Cancel the canaries that are being sent."""
        if left := list(self._sending):
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=POOLED_LIMIT)


def _refusal(pooler: bool) -> ConfigurationError:
    if pooler:
        return PoolerRefused(
            "the URL of the listener leads to a pooler in transaction mode, which loses every "
            "notification, or gives it to another client: set notify_url (NOTIFY_URL) to the URL "
            "of the server itself (by convention port 5432 instead of 6432)"
        )
    return ConfigurationError(
        "notifications that are sent through the pool do not reach the listener: the two URLs "
        "lead to different servers or databases; correct one of them"
    )


async def _outcome(sending: Awaitable[None]) -> str | None:
    """Return why a canary could not be sent; None if it was."""
    try:
        await sending
    except Exception as error:
        return describe(error)
    return None
