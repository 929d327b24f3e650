"""What a manager's background calls: functions of the user's, which may be written either way."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc  # type: ignore[import-untyped]

from moored.kernel import in_thread, start_thread

from ._fork import inside

__all__ = ["close_unused", "run"]


def close_unused(channel: Any) -> None:
    """A channel that came when nobody wanted it any more."""

    def close() -> None:
        with inside():
            channel.close()

    if isinstance(channel, grpc.Channel):
        start_thread(close, name="moored-rpc-close")


async def run(
    call: Callable[..., Any], *given: Any, unwanted: Callable[[Any], object] | None = None
) -> Any:
    """Call what may be written either way; a plain function may block, so it gets a thread."""
    if inspect.iscoroutinefunction(call):
        return await call(*given)

    def dispose(outcome: Any) -> None:
        if inspect.iscoroutine(outcome):
            outcome.close()
        elif unwanted is not None:
            unwanted(outcome)

    future = in_thread(partial(call, *given), name="moored-rpc", unwanted=dispose)
    try:
        outcome = await future
    except asyncio.CancelledError:
        # It may have come in the very moment in which it was given up.
        if not future.cancelled() and future.exception() is None:
            dispose(future.result())
        raise
    return await outcome if inspect.isawaitable(outcome) else outcome
