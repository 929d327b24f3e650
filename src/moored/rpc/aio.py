"""`channel()` for asyncio: a channel by its address, from the manager of the running loop."""

from __future__ import annotations

from typing import Any

import grpc  # type: ignore[import-untyped]

from ._handler_async import AsyncHandler
from ._manager_async import AsyncConnectionManager
from ._open import config_of

__all__ = ["channel"]


async def channel(
    target: str,
    *,
    tls: bool | grpc.ChannelCredentials = False,
    client: object | None = None,
    timeout: float | None = None,
    **options: Any,
) -> AsyncHandler:
    """Return a connected channel to a server; tasks of one loop share it.

    Parameters: see `moored.rpc.channel`.
    """
    config = config_of(target, tls, options)
    manager = AsyncConnectionManager.get_instance()
    return await manager.get_or_create(config, client=client, timeout=timeout)
