"""Storages whose process is killed: every record has its old or its new value, complete."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.programs import Program
from tests.sessions.storage_writer import LONG, NAMESPACE, value_of
from tests.sessions.storages import make

from moored.sessions.storage._files import FileStorage
from moored.sessions.storage._sqlite import SqliteStorage
from moored.testing import base_seed, scaled

KEYS = ("bob", "carol", "dave/../..", LONG)


def start(**config: Any) -> Program:
    return Program("tests.sessions.storage_writer", json.dumps(config))


@pytest.mark.parametrize("kind", ["sqlite", "encrypted sqlite", "files", "encrypted files"])
def test_process_killed_at_random_loses_no_acknowledged_write(kind: str, tmp_path: Path) -> None:
    rng = random.Random(f"{base_seed()} {kind}")
    generations = dict.fromkeys(KEYS, 0)
    acknowledged = 0
    for _ in range(scaled(20, least=3)):
        lines = write_and_kill(rng, kind, tmp_path, generations)
        for line in lines:
            key, generation = line.rsplit(" ", 1)
            assert int(generation) == generations[key] + 1
            generations[key] += 1
        acknowledged += len(lines)
        asyncio.run(compare(kind, tmp_path, generations))
    assert acknowledged >= 30


def write_and_kill(
    rng: random.Random, kind: str, directory: Path, generations: dict[str, int]
) -> list[str]:
    """Let the program write for a while, kill it, and return the acknowledged writes."""
    with start(kind=kind, directory=str(directory), begin=generations) as program:
        try:
            lines = [program.stdout.readline() for _ in range(rng.randrange(10, 60))]
        finally:
            program.kill()
        lines += program.stdout.readlines()
    assert program.returncode == -signal.SIGKILL
    # The last line may be incomplete.
    return [line.rstrip("\n") for line in lines if line.endswith("\n")]


async def compare(kind: str, directory: Path, generations: dict[str, int]) -> None:
    async with make(kind, directory) as storage:
        for key, generation in generations.items():
            found = await storage.get(*NAMESPACE, key)
            next_one = value_of(key, generation + 1)
            assert found in (value_of(key, generation), next_one), f"{key[:10]} at {generation}"
            if found == next_one:
                generations[key] += 1
        expected = {key for key in KEYS if value_of(key, generations[key]) is not None}
        assert set(await storage.keys(*NAMESPACE)) == expected


@pytest.mark.parametrize(
    ("moment", "visit", "short", "long", "leftovers"),
    [
        ("written", 1, b"old", None, 1),
        ("on the disk", 1, b"old", None, 1),
        ("named", 1, b"new", None, 0),
        # The second visit writes the record with the long name.
        ("written", 2, b"new", None, 1),
        ("on the disk", 2, b"new", None, 1),
        ("named", 2, b"new", b"new", 0),
        ("taken away", 1, None, None, 1),
    ],
)
async def test_process_killed_inside_a_write_leaves_whole_records(
    moment: str,
    visit: int,
    short: bytes | None,
    long: bytes | None,
    leftovers: int,
    tmp_path: Path,
) -> None:
    with start(kind="files", directory=str(tmp_path), moment=moment, visit=visit) as program:
        pass
    assert program.returncode == -signal.SIGKILL
    async with FileStorage(tmp_path / "accounts") as storage:
        assert await storage.get(*NAMESPACE, "short") == short
        assert await storage.get(*NAMESPACE, LONG) == long
        known = [key for key, value in ((LONG, long), ("short", short)) if value is not None]
        assert await storage.keys(*NAMESPACE) == sorted(known)
        assert await storage.list_profiles() == ([] if moment == "taken away" else ["alice"])
        assert storage.leftovers == leftovers
        assert os.listdir(tmp_path / "accounts" / ".tmp") == []
        await storage.put(*NAMESPACE, LONG, b"newer")
        assert await storage.get(*NAMESPACE, LONG) == b"newer"
        assert LONG in await storage.keys(*NAMESPACE)


async def test_file_storage_syncs_the_file_before_the_name_and_the_directory_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killing the process cannot show this: the page cache survives it."""
    done: list[tuple[str, str]] = []
    sync, replace = os.fsync, os.replace

    def synced(file: int) -> None:
        done.append(("sync", os.readlink(f"/proc/self/fd/{file}").replace(str(tmp_path), "")))
        sync(file)

    def replaced(source: Any, target: Any) -> None:
        done.append(("name", str(target).replace(str(tmp_path), "")))
        replace(source, target)

    async with FileStorage(tmp_path / "a") as storage:
        await storage.put("alice", "creds", "other", b"x")
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "replace", replaced)
        await storage.put("alice", "creds", "me", b"x")
        (first, draft), *rest = done
        assert first == "sync"
        assert draft.startswith("/a/.tmp/")
        assert rest == [("name", "/a/alice/creds/me"), ("sync", "/a/alice/creds")]
        done.clear()
        await storage.delete("alice", "creds", "me")
        assert done == [("sync", "/a/alice/creds")]
        done.clear()
        await storage.clear("alice")
        assert done == [("sync", "/a")]
        done.clear()
        await storage.new("bob")
        assert done == [("sync", "/a")]


async def test_sqlite_syncs_every_commit(tmp_path: Path) -> None:
    async with SqliteStorage(tmp_path / "accounts.db") as storage:
        for pragma, value in (("synchronous", 2), ("journal_mode", "wal")):
            assert await storage._rows(f"pragma {pragma}") == [value]
