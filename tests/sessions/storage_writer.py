"""A program that writes to a storage until it is killed, and prints each acknowledged write.

`python storage_writer.py CONFIG`, where CONFIG is JSON: `kind` and `directory` of the storage,
and either `begin` (the last generation of each key), for a program that the test kills, or `moment`
and `visit`, for one that kills itself there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.sessions.storages import make

from moored.sessions.storage._files import FileStorage
from moored.sessions.storage._storage import Storage

__all__ = ["LONG", "NAMESPACE", "value_of"]

NAMESPACE = ("alice", "session")
#: A key that is as long as a file name may be.
LONG = "x" * 255


def value_of(key: str, generation: int) -> bytes | None:
    """Return the value of a key in a generation, unique to both, or None if it is deleted."""
    if generation % 7 == 0:
        return None
    seed = hashlib.sha256(f"{key} {generation}".encode()).digest()
    return seed + seed * (seed[0] * seed[1] // 1000)


async def write_forever(storage: Storage, begin: Mapping[str, int]) -> None:
    """Write all keys concurrently."""

    async def write(key: str, generation: int) -> None:
        while True:
            generation += 1
            value = value_of(key, generation)
            if value is None:
                await storage.delete(*NAMESPACE, key)
            else:
                await storage.put(*NAMESPACE, key, value)
            # This fails, and ends the program, if the test has ended.
            os.write(1, f"{key} {generation}\n".encode())

    async with storage:
        await asyncio.gather(*(write(key, at) for key, at in begin.items()))


async def die_at(storage: FileStorage, moment: str, visit: int) -> None:
    """Write an old and then a new record; kill the process at a moment of the second write."""
    visits = 0

    def at(name: str) -> None:
        nonlocal visits
        visits += name == moment
        if visits == visit:
            os.kill(os.getpid(), signal.SIGKILL)

    async with storage:
        await storage.put(*NAMESPACE, "short", b"old")
        storage._moment = at  # type: ignore[method-assign]
        if moment == "taken away":
            await storage.clear("alice")
        await storage.put(*NAMESPACE, "short", b"new")
        await storage.put(*NAMESPACE, LONG, b"new")


def main() -> None:
    """Run as configured."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    storage = make(config["kind"], Path(config["directory"]))
    if "begin" in config:
        asyncio.run(write_forever(storage, config["begin"]))
    else:
        assert isinstance(storage, FileStorage)
        asyncio.run(die_at(storage, config["moment"], config["visit"]))


if __name__ == "__main__":
    main()
