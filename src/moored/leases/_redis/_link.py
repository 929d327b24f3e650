"""Connections to Redis: runs scripts with a timeout, and translates errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from redis import exceptions
from redis.asyncio import Redis

from .._errors import StoreUnavailable
from ._config import RedisConfig
from ._errors import is_stale_primary, translated
from ._scripts import Script

__all__ = ["Call", "RedisLink"]

log = logging.getLogger("moored.leases")


class Call(NamedTuple):
    """One run of a script."""

    keys: tuple[str, ...]
    arguments: tuple[Any, ...] = ()


class RedisLink:
    """Runs scripts on a server.

    The timeout of a call includes the wait for a free connection. The driver closes a connection
    whose response was not read, so a late response is never taken for another one.
    """

    def __init__(self, config: RedisConfig) -> None:
        self.config = config
        self._client = config.client()
        self._slots = asyncio.Semaphore(config.connections)
        self._checked = False

    async def check(self) -> None:
        """Raise if the server cannot be used."""
        async with self._call():
            pass

    async def close(self) -> None:
        """Close the connections."""
        with translated(self.config.place):
            await self._client.aclose()

    async def run(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        """Run a script several times, in one round trip; in a cluster, in one for each key."""
        if not calls:
            return []
        async with self._call():
            replies = await self._send("EVALSHA", script.sha, calls)
            # A server loses its scripts when it restarts; EVAL loads them again.
            missing = [n for n, r in enumerate(replies) if isinstance(r, exceptions.NoScriptError)]
            if missing:
                again = await self._send("EVAL", script.text, [calls[n] for n in missing])
                for n, reply in zip(missing, again, strict=True):
                    replies[n] = reply
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
            return replies

    async def scan(self, pattern: str) -> list[str]:
        """Return the Redis keys that match a pattern, sorted and distinct."""
        async with self._call(), self._slot():
            return sorted({name async for name in self._client.scan_iter(pattern, count=1000)})

    async def _send(self, command: str, script: str, calls: Sequence[Call]) -> list[Any]:
        """Return the server's reply to each call; errors are returned, not raised."""
        commands = [(command, script, len(c.keys), *c.keys, *c.arguments) for c in calls]
        if len(commands) == 1:
            return [await self._reply(commands[0])]
        if isinstance(self._client, Redis):
            async with self._slot():
                pipeline = self._client.pipeline(transaction=False)
                for each in commands:
                    pipeline.execute_command(*each)
                return list(await pipeline.execute(raise_on_error=False))
        return await asyncio.gather(*(self._reply(each) for each in commands))

    async def _reply(self, command: tuple[Any, ...]) -> Any:
        try:
            async with self._slot():
                return await self._client.execute_command(*command)
        except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
            return error

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Limit the commands in flight; report a closed connection alike on every event loop."""
        async with self._slots:
            try:
                yield
            except RuntimeError as error:
                # What uvloop raises for a write to a connection that the server has closed.
                if "the handler is closed" not in str(error):
                    raise
                raise ConnectionResetError("the server closed the connection") from error

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        """Apply the timeout to a block, and translate its errors."""
        timeout = self.config.timeout
        with translated(self.config.place):
            try:
                async with asyncio.timeout(timeout):
                    await self._check_settings()
                    yield
            except TimeoutError as error:
                raise StoreUnavailable(
                    f"Redis at {self.config.place} did not answer within {timeout:g} s"
                ) from error
            except exceptions.ResponseError as error:
                if is_stale_primary(error):
                    await self._close_idle()
                raise

    async def _close_idle(self) -> None:
        # The host name may resolve to the new primary now, for new connections.
        if isinstance(self._client, Redis):
            await self._client.connection_pool.disconnect(inuse_connections=False)

    async def _check_settings(self) -> None:
        """Once the server answers, warn about settings that put leases at risk."""
        if self._checked:
            return
        async with self._slot():
            try:
                info = await self._client.execute_command("INFO")
            except exceptions.NoPermissionError:
                info = {}
                await self._client.execute_command("PING")
        self._checked = True
        known = _of_one_server(info)
        policy = known.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and known.get("maxmemory"):
            log.warning(
                "Redis at %s: maxmemory-policy is %s, so leases may be evicted when memory is "
                "short, and the limit would be exceeded; set it to noeviction",
                self.config.place,
                policy,
            )


def _of_one_server(info: Any) -> dict[str, Any]:
    """Return the INFO of one server; a cluster returns one for each of its servers."""
    if isinstance(info, dict) and "maxmemory" not in info:
        info = next((each for each in info.values() if isinstance(each, dict)), info)
    return info if isinstance(info, dict) else {}
