"""Running the service in a process of its own: signals, notices, and the exit code.

=====  ============================================================================
0      the service was stopped (Ctrl-C, SIGTERM, SIGHUP), and everything has ended in order
1      the service failed while it ran; the last line on stderr has the reason
2      the service could not start, or cannot continue until an operator changes something; one
       line on stderr has the reason
130    a second Ctrl-C forced the service to end
=====  ============================================================================

Notices and logs go to stdout; stderr has only the reason of a failure.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from moored.kernel import SECRETS, MooredError, first_of

from ._config import Config
from ._errors import ServiceError
from ._listen import listen
from ._logs import Logs
from ._service import Service, address_of
from ._signals import FORCED, Signals
from ._systemd import SystemdNotifier
from ._token_file import token_stored

__all__ = ["serve"]

DONE, GAVE_UP, CANNOT_START = 0, 1, 2
#: Seconds until a forced process exits without waiting; guard processes clean up after it.
FORCE_TIMEOUT = 3.0
CHOOSE = "the token is new at each start; set MOORED_ADMIN_TOKEN to choose one"


def serve(config: Config, make: Callable[..., Service] = Service) -> int:
    """Run the service until a signal stops it; returns the exit code for the process.

    :param make: returns the service, for other parts than PostgreSQL alone; it gets the arguments
        of `Service`.
    """
    signals = Signals()
    logs = Logs(layout=config.log_format, level=config.log_level)
    sockets: list[socket.socket] = []
    try:
        sockets = listen(config.host, config.port)
        with _own_token(config, sockets, logs) as config:
            return asyncio.run(_run(config, sockets, logs, signals, make))
    except ServiceError as error:
        return _print_error(error, CANNOT_START)
    except MooredError as error:
        return _print_error(error, GAVE_UP)
    finally:
        for one in sockets:
            one.close()
        logs.close()
        signals.close()


async def _run(
    config: Config,
    sockets: Sequence[socket.socket],
    logs: Logs,
    signals: Signals,
    make: Callable[..., Service],
) -> int:
    loop = asyncio.get_running_loop()
    service = make(config, sockets, say=logs.say)
    service.recorder.subscribe(logs.sink)
    stop_requested = asyncio.Event()

    def force() -> None:
        logs.say("forced to end")
        service.force()
        loop.call_later(FORCE_TIMEOUT, os._exit, FORCED)

    signals.attach(loop, on_stop=stop_requested.set, on_force=force)
    began = loop.time()
    systemd = SystemdNotifier()

    def report(*assignments: str) -> None:
        systemd.send(*assignments, f"STATUS={_status(service)}")

    service.monitor.subscribe(lambda change: report())
    async with service:
        # HTTP answers: the readiness of the parts may depend on servers that are down for days.
        report("READY=1")
        systemd.watch(loop)
        if await _active(service, stop_requested):
            logs.say(_ready(service, loop.time() - began))
            await first_of(
                stop_requested.wait(), service.root.wait(), asyncio.shield(service.failed)
            )
        if stop_requested.is_set():
            logs.say("stopping (Ctrl-C again forces it)")
        report("STOPPING=1")
    logs.say("stopped")
    return FORCED if signals.forced else DONE


async def _active(service: Service, stop_requested: asyncio.Event) -> bool:
    """Wait until the service is active; return False if it has to stop before."""
    await first_of(asyncio.shield(service.first_active), stop_requested.wait(), service.root.wait())
    return service.first_active.done()


@contextmanager
def _own_token(config: Config, sockets: Sequence[socket.socket], logs: Logs) -> Iterator[Config]:
    """Print the address, and yield the configuration with a token: a new one unless one is set."""
    address = address_of(config, sockets)
    if config.no_token:
        logs.say(f"{address} (--no-token: open to every user of this machine)")
        yield config
    elif config.admin_token is not None:
        who = "the admin token is required, but for /v1/health and the streams of brokers"
        logs.say(f"{address} ({who})")
        yield config
    else:
        token = secrets.token_hex(24)
        config = replace(config, admin_token=token)
        with token_stored(sockets[0].getsockname()[1], token) as path:
            logs.say_link(f"{address}/?token={token} ({CHOOSE})", f"{address} ({_where(path)})")
            yield config


def _where(path: Path | None) -> str:
    if path is None:
        return "the token of this start could not be stored: set MOORED_ADMIN_TOKEN"
    return f"the token of this start is in {path}"


def _status(service: Service) -> str:
    # Without reasons: every user of the machine may read it.
    parts = ", ".join(f"{part} {state}" for part, state in service.view.parts().items())
    return f"{service.view.status} ({parts})"


def _ready(service: Service, took: float) -> str:
    why = {part: ", ".join(service.view.reasons(part)) for part in service.view.parts()}
    details = [f"{part}: {text}" for part, text in why.items() if text]
    return f"ready after {took:.1f} s" + (f": {'; '.join(details)}" if details else "")


def _print_error(error: MooredError, code: int) -> int:
    # Only the first line: the rest (the log of a server) has been logged already.
    line = SECRETS.hide(str(error).partition("\n")[0])
    print(f"moored: {line}", file=sys.stderr, flush=True)  # noqa: T201
    return code
