"""The way to Redis: few connections, each call within its time, every error translated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from redis import exceptions as theirs
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

    A call takes at most the configured time, waiting for a free connection included. The driver
    closes a connection whose answer was not waited for, so a late answer reaches nobody.
    """

    def __init__(self, config: RedisConfig) -> None:
        self.config = config
        #: What about the server's own configuration puts leases at risk; known once it answered.
        self.warnings: tuple[str, ...] = ()
        self._client = config.client()
        self._slots = asyncio.Semaphore(config.connections)
        self._looked = False

    async def reach(self) -> None:
        """Raise if the server cannot be used."""
        async with self._turn():
            pass

    async def close(self) -> None:
        """Let go of the connections."""
        with translated(self.config.place):
            await self._client.aclose()

    async def run(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        """Run a script several times, in one round trip; in a cluster, in one for each key."""
        if not calls:
            return []
        async with self._turn():
            answers = await self._send("EVALSHA", script.sha, calls)
            # A server forgets its scripts when it restarts; sent whole, it learns them again.
            missing = [n for n, a in enumerate(answers) if isinstance(a, theirs.NoScriptError)]
            if missing:
                again = await self._send("EVAL", script.text, [calls[n] for n in missing])
                for n, answer in zip(missing, again, strict=True):
                    answers[n] = answer
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return answers

    async def names(self, pattern: str) -> list[str]:
        """The names that match a pattern, each once, in order."""
        async with self._turn(), self._slots:
            return sorted({name async for name in self._client.scan_iter(pattern, count=1000)})

    async def _send(self, command: str, script: str, calls: Sequence[Call]) -> list[Any]:
        """What the server answers to each call; errors are among the answers."""
        lines = [(command, script, len(c.keys), *c.keys, *c.arguments) for c in calls]
        if len(lines) == 1:
            return [await self._answer(lines[0])]
        if isinstance(self._client, Redis):
            async with self._slots:
                pipeline = self._client.pipeline(transaction=False)
                for line in lines:
                    pipeline.execute_command(*line)
                return list(await pipeline.execute(raise_on_error=False))
        return await asyncio.gather(*(self._answer(line) for line in lines))

    async def _answer(self, line: tuple[Any, ...]) -> Any:
        try:
            async with self._slots:
                return await self._client.execute_command(*line)
        except (theirs.RedisError, theirs.RedisClusterException, OSError) as error:
            return error

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """A call: within its time, with errors translated."""
        limit = self.config.timeout
        with translated(self.config.place):
            try:
                async with asyncio.timeout(limit):
                    await self._look()
                    yield
            except TimeoutError as error:
                raise StoreUnavailable(
                    f"Redis at {self.config.place} gave no answer within {limit:g} s"
                ) from error
            except theirs.ResponseError as error:
                if is_stale_primary(error):
                    await self._forget_connections()
                raise

    async def _forget_connections(self) -> None:
        # The name may lead to the new primary now; an open connection never will.
        if isinstance(self._client, Redis):
            await self._client.connection_pool.disconnect(inuse_connections=False)

    async def _look(self) -> None:
        """Once, when the server answers: see whether it keeps what it is given."""
        if self._looked:
            return
        async with self._slots:
            try:
                known = await self._client.execute_command("INFO")
            except theirs.NoPermissionError:
                known = {}
                await self._client.execute_command("PING")
        self._looked = True
        self.warnings = _risks(_settings(known))
        for warning in self.warnings:
            log.warning("Redis at %s: %s", self.config.place, warning)


def _settings(known: Any) -> dict[str, Any]:
    """The server's settings; a cluster answers for several servers."""
    if isinstance(known, dict) and "maxmemory" not in known:
        known = next((each for each in known.values() if isinstance(each, dict)), known)
    return known if isinstance(known, dict) else {}


def _risks(known: dict[str, Any]) -> tuple[str, ...]:
    policy = known.get("maxmemory_policy", "noeviction")
    if policy == "noeviction" or not known.get("maxmemory"):
        return ()
    return (
        f"maxmemory-policy is {policy}, so leases may be evicted when memory is short, and then "
        "more of them live than the limit; set it to noeviction",
    )
