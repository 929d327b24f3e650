"""Fenced writes to Redis: commands of an owner that was replaced are rejected.

The newest fence of a resource is stored in a key beside it. One script compares it, updates it and
runs the command, so nothing can happen between the check and the write.
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
    """Run one command and return its result; raises `FenceRejected` if the resource has seen a
    newer fence.

    `resource` names what is protected, usually the key that the command writes. In a Redis Cluster
    both must be in the same hash slot.
    """
    arguments = _eval_arguments(resource, fence, command)
    with translated(_PLACE):
        reply = await client.execute_command("EVAL", FENCED.text, *arguments)
    return _result(resource, fence, reply)


async def fenced_set(
    client: AsyncClient, key: str, value: Any, fence: int, *, ttl: float | None = None
) -> None:
    """Set a key, for `ttl` seconds if given; raises `FenceRejected` if it has a newer fence."""
    await fenced(client, key, fence, *_set(key, value, ttl))


def fenced_sync(client: SyncClient, resource: str, fence: int, *command: Any) -> Any:
    """The same as `fenced`, for a client without asyncio."""
    arguments = _eval_arguments(resource, fence, command)
    with translated(_PLACE):
        send: Callable[..., Any] = client.execute_command
        reply = send("EVAL", FENCED.text, *arguments)
    return _result(resource, fence, reply)


def fenced_set_sync(
    client: SyncClient, key: str, value: Any, fence: int, *, ttl: float | None = None
) -> None:
    """The same as `fenced_set`, for a client without asyncio."""
    fenced_sync(client, key, fence, *_set(key, value, ttl))


def _set(key: str, value: Any, ttl: float | None) -> tuple[Any, ...]:
    return ("SET", key, value) if ttl is None else ("SET", key, value, "PX", round(ttl * 1000))


def _eval_arguments(resource: str, fence: int, command: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(command) < 2:
        raise ValueError(
            f"fenced: {command!r} must be a command with a key, each word an argument of its own"
        )
    return (2, _fence_key(resource), command[1], fence, *command)


def _fence_key(resource: str) -> str:
    """Return the key of a resource's fence, in the resource's hash slot of a Redis Cluster."""
    _, opened, rest = resource.partition("{")
    tag, closed, _ = rest.partition("}")
    slot = tag if opened and closed and tag else resource
    return f"moored:fence:{{{slot}}}:{resource}"


def _result(resource: str, fence: int, reply: Any) -> Any:
    done, *result = reply
    if not done:
        raise FenceRejected(resource, fence=fence, seen=int(result[0]))
    return result[0] if result else None
