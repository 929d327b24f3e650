"""Reports to systemd, as sd_notify does: ready, the health in words, watchdog, stopping."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import MutableMapping

__all__ = ["SystemdNotifier"]

#: Seconds that a report may wait for systemd, which reads its socket all the time.
TIMEOUT = 1.0


class SystemdNotifier:
    """Sends datagrams to the socket of `NOTIFY_SOCKET`; without one it does nothing.

    The variables are removed from the environment, so that no child process reports as well.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        address = environ.pop("NOTIFY_SOCKET", "")
        # "@" stands for the null byte that begins the name of an abstract socket.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        timeout = int(environ.pop("WATCHDOG_USEC", "0")) / 1e6
        own = str(os.getpid())
        is_watched = bool(address) and environ.pop("WATCHDOG_PID", own) == own
        #: Seconds between two reports to the watchdog; 0 without a watchdog.
        self.interval = timeout / 2 if is_watched else 0.0

    def send(self, *assignments: str) -> None:
        """Send assignments such as "READY=1"."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            one.settimeout(TIMEOUT)
            try:
                one.sendto("\n".join(assignments).encode(), self._address)
            except OSError:
                pass  # systemd does not read, or has gone: the service is not affected

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report to the watchdog from now on: a blocked event loop stops the reports."""
        if self.interval:
            self.send("WATCHDOG=1")
            loop.call_later(self.interval, self.watch, loop)
