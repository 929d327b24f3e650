"""Stop a whole server with SIGSTOP: it keeps its connections, and answers nothing."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from moored.embedded import SyncEmbeddedPostgres

__all__ = ["frozen"]


@contextmanager
def frozen(server: SyncEmbeddedPostgres | psutil.Process) -> Iterator[float]:
    """Stop all processes of a server, or of its first one; yields when that was."""
    postmaster = server if isinstance(server, psutil.Process) else psutil.Process(server.pid)
    # The postmaster first, because it would start new processes.
    postmaster.send_signal(signal.SIGSTOP)
    family = [postmaster, *postmaster.children(recursive=True)]
    for each in family[1:]:
        each.send_signal(signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        for each in family:
            with suppress(psutil.NoSuchProcess):  # its client has given it up
                each.send_signal(signal.SIGCONT)
