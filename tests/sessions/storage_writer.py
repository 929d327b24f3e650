"""A program that writes to a storage until it is killed, and says what was acknowledged.

`python storage_writer.py CONFIG`, where CONFIG is JSON: `kind` and `place` of the storage, and
either `begin` (the generation at which each key stands), for one that is killed by others at any
moment, or `moment` and `visit`, for one that kills itself there.
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

__all__ = ["LONG", "PLACE", "value_of"]

PLACE = ("alice", "session")
#: A key that has no room in a file's name.
LONG = "x" * 1000


def value_of(key: str, generation: int) -> bytes | None:
    """What a record is in a generation: of any length, and not to be taken for another; or gone."""
    if generation % 7 == 0:
        return None
    seed = hashlib.sha256(f"{key} {generation}".encode()).digest()
    return seed + seed * (seed[0] * seed[1] // 1000)


async def write_for_ever(storage: Storage, begin: Mapping[str, int]) -> None:
    """All keys at the same time, so that they meet in the storage."""

    async def write(key: str, generation: int) -> None:
        while True:
            generation += 1
            value = value_of(key, generation)
            if value is None:
                await storage.delete(*PLACE, key)
            else:
                await storage.put(*PLACE, key, value)
            # Whoever reads this is gone: then this is over, too.
            os.write(1, f"{key} {generation}\n".encode())

    async with storage:
        await asyncio.gather(*(write(key, at) for key, at in begin.items()))


async def die_at(storage: FileStorage, moment: str, visit: int) -> None:
    """Write an old and then a new record, and be killed at a moment of the second."""
    visits = 0

    def at(name: str) -> None:
        nonlocal visits
        visits += name == moment
        if visits == visit:
            os.kill(os.getpid(), signal.SIGKILL)

    async with storage:
        await storage.put(*PLACE, "short", b"old")
        storage._moment = at  # type: ignore[method-assign]
        if moment == "taken away":
            await storage.clear("alice")
        await storage.put(*PLACE, "short", b"new")
        await storage.put(*PLACE, LONG, b"new")


def main() -> None:
    """Do as the configuration says."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    storage = make(config["kind"], Path(config["place"]))
    if "begin" in config:
        asyncio.run(write_for_ever(storage, config["begin"]))
    else:
        assert isinstance(storage, FileStorage)
        asyncio.run(die_at(storage, config["moment"], config["visit"]))


if __name__ == "__main__":
    main()
