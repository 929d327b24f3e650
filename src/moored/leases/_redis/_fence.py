"""Writes to Redis under a fence: an owner that has been replaced is refused.

The newest fence that a resource has seen is kept beside it, and compared and raised in the same
script that writes. So there is no moment between the check and the write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis
import redis.asyncio

from .._errors import FenceRejected
from ._errors import translated
from ._scripts import FENCED

__all__ = ["fenced", "fenced_set", "fenced_set_sync", "fenced_sync"]

_PLACE = "the fenced write"
AsyncClient = redis.asyncio.Redis | redis.asyncio.RedisCluster
SyncClient = redis.Redis | redis.RedisCluster


async def fenced(client: AsyncClient, resource: str, fence: int, *command: Any) -> Any:
    """Run one command unless a newer fence than this one was seen for the resource.

    `resource` names what is protected, and is usually the key that the command writes. In a Redis
    Cluster both must be in one slot, as a key and itself are. Returns what the command returns;
    raises `FenceRejected` when an owner with a newer fence has been here.
    """
    line = _line(resource, fence, command)
    with translated(_PLACE):
        answer = await client.execute_command("EVAL", FENCED.text, *line)
    return _result(resource, fence, answer)


async def fenced_set(
    client: AsyncClient, key: str, value: Any, fence: int, *, ttl: float | None = None
) -> None:
    """Set a key, for `ttl` seconds if given, unless a newer fence was seen for it."""
    await fenced(client, key, fence, *_set(key, value, ttl))


def fenced_sync(client: SyncClient, resource: str, fence: int, *command: Any) -> Any:
    """The same as `fenced`, for a client without asyncio."""
    line = _line(resource, fence, command)
    with translated(_PLACE):
        send: Callable[..., Any] = client.execute_command
        answer = send("EVAL", FENCED.text, *line)
    return _result(resource, fence, answer)


def fenced_set_sync(
    client: SyncClient, key: str, value: Any, fence: int, *, ttl: float | None = None
) -> None:
    """The same as `fenced_set`, for a client without asyncio."""
    fenced_sync(client, key, fence, *_set(key, value, ttl))


def _set(key: str, value: Any, ttl: float | None) -> tuple[Any, ...]:
    return ("SET", key, value) if ttl is None else ("SET", key, value, "PX", round(ttl * 1000))


def _line(resource: str, fence: int, command: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(command) < 2:
        raise ValueError(f"fenced: {command!r} is no command with a key; give its parts one by one")
    return (2, _beside(resource), command[1], fence, *command)


def _beside(resource: str) -> str:
    """Where the fence of a resource is kept: in the same slot of a Redis Cluster."""
    _, opened, rest = resource.partition("{")
    tag, closed, _ = rest.partition("}")
    slot = tag if opened and closed and tag else resource
    return f"moored:fence:{{{slot}}}:{resource}"


def _result(resource: str, fence: int, answer: Any) -> Any:
    done, *result = answer
    if not done:
        raise FenceRejected(resource, fence=fence, seen=int(result[0]))
    return result[0] if result else None
