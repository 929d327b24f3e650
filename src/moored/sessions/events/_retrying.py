"""Retry a failing event handler, and pass the event to a dead letter function in the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

from moored.kernel import Backoff, awaited, counted, describe, refuse

from .._content import Incoming
from ._sink import Handler

__all__ = ["DeadLetter", "retrying"]

log = logging.getLogger("moored.sessions")

DeadLetter: TypeAlias = Callable[[Incoming, Exception], Awaitable[object] | object]


def retrying(
    handler: Handler,
    *,
    attempts: int = 5,
    dead_letter: DeadLetter | None = None,
    backoff: Backoff | None = None,
) -> Callable[[Incoming], Coroutine[Any, Any, None]]:
    """Wrap a handler: retry it when it raises, and then pass the event to `dead_letter`.

    ::

        await sessions.connect("alice", protocol, on_event=retrying(handle, dead_letter=save))

    Without it, an event whose handler raises is set aside: it is not acknowledged, and the server
    sends it again over the next link. That is late for a temporary failure, and an event that the
    handler can never handle comes again over each link. With it, the handler is called again
    immediately, while later events wait. After the last attempt, `dead_letter` gets the event and
    the error, and the event is acknowledged when it returns. Without a `dead_letter`, or if that
    raises, the event is set aside.

    :param attempts: the number of calls of the handler for one event.
    :param dead_letter: gets an event for which all attempts failed, to store it for example.
    :param backoff: the pauses between attempts; by default, from 0.1 to 5 seconds.
    """
    refuse("retrying", [f"attempts={attempts!r} must be at least 1"] if attempts < 1 else [])
    pauses = backoff or Backoff(0.1, 5.0, jitter="half")

    async def handle(event: Incoming) -> None:
        pause = pauses.fresh()
        for _ in range(attempts - 1):
            try:
                await awaited(handler(event))
            except Exception as error:
                again = "the handler of %r failed for %s and is called again: %s"
                log.warning(again, event.profile, event.type, describe(error))
                await asyncio.sleep(pause.fail())
            else:
                return
        try:
            await awaited(handler(event))
        except Exception as error:
            if dead_letter is None:
                raise
            aside = "the handler of %r failed %s for one event; %s goes to the dead letters: %s"
            times = counted(attempts, "time")
            log.error(aside, event.profile, times, event.type, describe(error))
            await awaited(dead_letter(event, error))

    return handle
