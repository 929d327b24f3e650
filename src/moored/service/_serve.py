"""Running the service in a process of its own: signals, notices, and the exit code.

=====  ============================================================================
0      it was told to stop (Ctrl-C, SIGTERM), and everything has ended in order
1      it gave up while it ran; the last line on stderr says why
2      it could not start, or cannot go on before somebody changes something; one line on stderr
       says what
130    it was forced to end by a second Ctrl-C
=====  ============================================================================

What it says while it runs goes to stdout; stderr has the reason of a failure, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence

from moored.kernel import SECRETS, MooredError, first_of

from ._config import Config
from ._errors import ServiceError
from ._listen import listen
from ._logs import Logs
from ._service import Service, address_of
from ._signals import FORCED, Signals

__all__ = ["serve"]

DONE, GAVE_UP, CANNOT_START = 0, 1, 2
#: How long a forced end may take before the process leaves; guards clean up after it.
FORCE_TIMEOUT = 3.0


def serve(config: Config) -> int:
    """Run the service until it is told to stop; returns the exit code for the process."""
    signals = Signals()
    logs = Logs(layout=config.log_format, level=config.log_level)
    sockets: list[socket.socket] = []
    try:
        sockets = listen(config.host, config.port)
        return asyncio.run(_run(config, sockets, logs, signals))
    except ServiceError as error:
        return _complain(error, CANNOT_START)
    except MooredError as error:
        return _complain(error, GAVE_UP)
    finally:
        for one in sockets:
            one.close()
        logs.close()
        signals.close()


async def _run(
    config: Config, sockets: Sequence[socket.socket], logs: Logs, signals: Signals
) -> int:
    loop = asyncio.get_running_loop()
    service = Service(config, sockets, say=logs.say)
    service.recorder.subscribe(logs.sink)
    asked = asyncio.Event()

    def force() -> None:
        logs.say("forced to end")
        service.force()
        loop.call_later(FORCE_TIMEOUT, os._exit, FORCED)

    signals.attach(loop, on_stop=asked.set, on_force=force)
    began = loop.time()
    logs.say(_greeting(config, sockets))
    async with service:
        if await _active(service, asked):
            logs.say(_ready(service, loop.time() - began))
            await first_of(asked.wait(), service.root.wait(), asyncio.shield(service.failed))
        if asked.is_set():
            logs.say("stopping (Ctrl-C again forces it)")
    logs.say("stopped")
    return FORCED if signals.forced else DONE


async def _active(service: Service, asked: asyncio.Event) -> bool:
    """Wait until the service is active; return False when it has to stop before."""
    await first_of(asyncio.shield(service.first_active), asked.wait(), service.root.wait())
    return service.first_active.done()


def _greeting(config: Config, sockets: Sequence[socket.socket]) -> str:
    who = "open to every user of this machine; set MOORED_ADMIN_TOKEN to change that"
    if config.admin_token is not None:
        who = "everything but /v1/health asks for the admin token"
    return f"{address_of(config, sockets)} ({who})"


def _ready(service: Service, took: float) -> str:
    details = [each.detail for each in service.monitor.conditions().values() if each.detail]
    return f"ready after {took:.1f} s" + (f": {', '.join(details)}" if details else "")


def _complain(error: MooredError, code: int) -> int:
    # The first line says it; what follows (a server's log) is in the log already.
    line = SECRETS.hide(str(error).partition("\n")[0])
    print(f"moored: {line}", file=sys.stderr, flush=True)  # noqa: T201
    return code
