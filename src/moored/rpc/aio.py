"""`channel()` for asyncio: a channel by its address, from the manager of the running loop."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Literal, overload

import grpc  # type: ignore[import-untyped]

from ._any_loop import AnyLoopChannel
from ._handler import AsyncHandler
from ._manager_async import AsyncConnectionManager
from ._open import config_of, refuse_timeout

__all__ = ["channel"]


@overload
def channel(
    target: str,
    *,
    tls: bool | grpc.ChannelCredentials = False,
    client: object | None = None,
    connect: Literal[False] = False,
    timeout: None = None,
    **options: Any,
) -> AnyLoopChannel: ...


@overload
def channel(
    target: str,
    *,
    tls: bool | grpc.ChannelCredentials = False,
    client: object | None = None,
    connect: Literal[True],
    timeout: float | None = None,
    **options: Any,
) -> Coroutine[Any, Any, AsyncHandler]: ...


def channel(
    target: str,
    *,
    tls: bool | grpc.ChannelCredentials = False,
    client: object | None = None,
    connect: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> AnyLoopChannel | Coroutine[Any, Any, AsyncHandler]:
    """Return a channel to a server at once; tasks of one loop share its connection.

    It needs no running loop, so a module may make it when it is imported. Parameters: see
    `moored.rpc.channel`; with `connect=True`, await the result.
    """
    config = config_of(target, tls, options)
    if connect:
        manager = AsyncConnectionManager.get_instance()
        return manager.get_or_create(config, client=client, timeout=timeout)
    refuse_timeout(timeout)
    return AnyLoopChannel(config, client)
