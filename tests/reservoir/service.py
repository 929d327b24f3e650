"""Processes with a pool and callers each, for tests that kill them: `python service.py ORDERS`.

One process imports everything and forks the others, so that they are there within milliseconds. It
writes their numbers, and they end with it, as it does with its standard input.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from typing import Any

from tests.reservoir.harness import Load, Rig

from moored.reservoir import ReservoirConfig

_PR_SET_PDEATHSIG = 1


async def serve(order: dict[str, Any]) -> None:
    """Use a pool until killed."""
    config = ReservoirConfig(**order["config"])
    async with (
        Rig(order["shell"], order["conninfo"], config=config) as rig,
        Load(rig, order["callers"], timeout=1.0),
    ):
        await asyncio.Event().wait()


def spawn(order: dict[str, Any]) -> int:
    """A child that dies with this process."""
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            asyncio.run(serve(order))
        finally:
            os._exit(1)
    return pid


if __name__ == "__main__":
    pids = [spawn(order) for order in json.loads(sys.argv[1])]
    sys.stdout.write(f"{json.dumps(pids)}\n")
    sys.stdout.flush()
    sys.stdin.read()
