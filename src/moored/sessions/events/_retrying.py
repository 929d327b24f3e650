"""A handler that fails at the same event again and again, and what becomes of that event."""

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
    """Call a handler again for an event that it fails at, and then give that event to another.

    ::

        await sessions.connect("alice", protocol, on_event=retrying(handle, dead_letter=save))

    A handler that raises leaves its event unacknowledged: it is set aside, and the server sends it
    again over the next link. For trouble that passes that is late, and an event that the handler
    can never take comes again with each link. With this, the handler is called again in place,
    while later events wait for their turn; after the last attempt the event goes to `dead_letter`
    with the error, and it is acknowledged when that has returned. Without a `dead_letter`, or when
    that raises, it is set aside, as ever.

    :param attempts: how often the handler is called for one event.
    :param dead_letter: takes an event for which all attempts failed, such as into a table.
    :param backoff: the pauses between attempts; from 0.1 to 5 seconds, if it is not given.
    """
    refuse("retrying", [f"attempts={attempts!r} must be at least 1"] if attempts < 1 else [])
    pauses = backoff or Backoff(0.1, 5.0, jitter="half")

    async def handle(event: Incoming) -> None:
        pause = pauses.fresh()
        for _ in range(attempts - 1):
            try:
                await awaited(handler(event))
            except Exception as error:
                again = "a handler of %r has failed at %s and is called again: %s"
                log.warning(again, event.profile, event.type, describe(error))
                await asyncio.sleep(pause.fail())
            else:
                return
        try:
            await awaited(handler(event))
        except Exception as error:
            if dead_letter is None:
                raise
            aside = "a handler of %r has failed %s at one event: %s goes to the dead letters: %s"
            times = counted(attempts, "time")
            log.error(aside, event.profile, times, event.type, describe(error))
            await awaited(dead_letter(event, error))

    return handle
