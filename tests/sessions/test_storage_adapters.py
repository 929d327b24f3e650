"""SQLite and file storages: sharing, foreign files, and damage."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sessions.storages import make
from tests.sessions.support import LIMIT

from moored.sessions._errors import CorruptRecord, StorageError
from moored.sessions.storage._files import FileStorage
from moored.sessions.storage._open import open_storage
from moored.sessions.storage._records import Corruption, Records
from moored.sessions.storage._sqlite import SqliteStorage
from moored.sessions.storage._storage import Storage
from moored.testing import scaled


@pytest.mark.parametrize("kind", ["sqlite", "files"])
async def test_calls_without_a_thread_fail_and_later_calls_succeed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    storage = make(kind, tmp_path)
    await storage.open()
    async with asyncio.timeout(LIMIT):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            puts = [storage.put("alice", "creds", f"{n}", b"x") for n in range(3)]
            for outcome in await asyncio.gather(*puts, return_exceptions=True):
                assert isinstance(outcome, RuntimeError)
        await storage.put("alice", "creds", "me", b"x")
        assert await storage.keys("alice", "creds") == ["me"]
    await storage.close()


# -- SQLite --------------------------------------------------------------------------------------


async def test_concurrent_writes_share_a_commit(tmp_path: Path) -> None:
    async with SqliteStorage(tmp_path / "accounts.db", patience=60.0) as storage:
        other = sqlite3.connect(tmp_path / "accounts.db", isolation_level=None)
        other.execute("begin immediate")
        puts = [
            asyncio.ensure_future(storage.put(f"p{n}", "creds", "me", b"x")) for n in range(500)
        ]
        await asyncio.sleep(0)
        other.close()
        await asyncio.gather(*puts)
        assert storage.writes == 500
        assert storage.commits <= 2, "concurrent writes were committed separately"
        assert len(await storage.list_profiles()) == 500


async def test_invalid_write_does_not_fail_the_others(tmp_path: Path) -> None:
    async with SqliteStorage(tmp_path / "accounts.db") as storage:
        wrong: bytes = {}  # type: ignore[assignment]
        outcomes = await asyncio.gather(
            *(storage.put("p", "creds", f"{n}", b"x" if n != 7 else wrong) for n in range(20)),
            return_exceptions=True,
        )
        assert [n for n, outcome in enumerate(outcomes) if outcome is not None] == [7]
        assert isinstance(outcomes[7], StorageError)
        assert len(await storage.keys("p", "creds")) == 19


@pytest.mark.parametrize("value", ["a text", 5, 0.5])
async def test_record_changed_by_another_tool_is_corrupt(tmp_path: Path, value: object) -> None:
    path = tmp_path / "accounts.db"
    found: list[Corruption] = []
    async with open_storage(str(path)) as storage:
        records = Records(storage, "alice", on_corrupt=found.append)
        await records.put("creds", "me", b"old")
        with sqlite3.connect(path) as other:
            other.execute("update records set value = ? where key = ?", (value, b"me"))
        other.close()
        assert await records.get("creds", "me") is None
        assert [(each.namespace, each.key) for each in found] == [("creds", "me")]
        await records.put("creds", "me", b"new")
        assert await records.get("creds", "me") == b"new"


async def test_locked_database_fails_writes_after_its_patience(tmp_path: Path) -> None:
    path = tmp_path / "accounts.db"
    async with SqliteStorage(path, patience=0.05) as storage:
        await storage.put("alice", "creds", "me", b"old")
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("begin immediate")
        try:
            with pytest.raises(StorageError, match=r"locked for 0\.05 s.*let it end"):
                await storage.put("alice", "creds", "me", b"new")
            assert await storage.get("alice", "creds", "me") == b"old", (
                "a locked database could not be read"
            )
        finally:
            other.close()
        await storage.put("alice", "creds", "me", b"new")
        assert await storage.get("alice", "creds", "me") == b"new"


async def test_foreign_or_newer_database_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("dear diary, " * 200)
    with pytest.raises(StorageError, match="not a SQLite database"):
        await SqliteStorage(text).open()
    assert text.read_text() == "dear diary, " * 200
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as database:
        database.execute("create table songs (name text)")
    database.close()
    with pytest.raises(StorageError, match="another program"):
        await SqliteStorage(foreign).open()
    newer = tmp_path / "newer.db"
    async with SqliteStorage(newer):
        pass
    with sqlite3.connect(newer) as database:
        database.execute("pragma user_version = 9")
    database.close()
    with pytest.raises(StorageError, match="newer version"):
        await SqliteStorage(newer).open()
    with pytest.raises(StorageError, match="cannot be used as storage"):
        await SqliteStorage(text / "below" / "a.db").open()
    with pytest.raises(StorageError, match="permissions"):
        await SqliteStorage(tmp_path).open()


async def test_several_storages_share_one_database(tmp_path: Path) -> None:
    """They also create it concurrently."""
    storages = [SqliteStorage(tmp_path / "accounts.db", patience=30.0) for _ in range(6)]
    await asyncio.gather(*(storage.open() for storage in storages))
    await asyncio.gather(
        *(storage.put(f"p{n}", "creds", "me", b"x") for n, storage in enumerate(storages))
    )
    for storage in storages:
        assert len(await storage.list_profiles()) == 6
        await storage.close()


async def test_open_waits_for_a_process_that_writes_to_a_new_database(
    tmp_path: Path,
) -> None:
    path = tmp_path / "accounts.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin immediate")
        storage = SqliteStorage(path, patience=30.0)
        opening = asyncio.create_task(storage.open())
        done, _ = await asyncio.wait({opening}, timeout=0.2)
        assert not done
        other.execute("commit")
        await opening
        await storage.close()


@settings(max_examples=scaled(150, least=8), deadline=None)
@given(st.data())
def test_damaged_database_raises_storage_errors_only(data: st.DataObject) -> None:
    """Reads return the right bytes or raise StorageError; they never return wrong bytes."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "accounts.db"
        asyncio.run(_fill(open_storage(path)))
        path.write_bytes(_damaged(path.read_bytes(), data))
        asyncio.run(_read_damaged(open_storage(path)))


# -- files ---------------------------------------------------------------------------------------


async def test_directory_can_be_open_once(tmp_path: Path) -> None:
    async with FileStorage(tmp_path / "a") as first:
        with pytest.raises(StorageError, match=f"in use by the process {os.getpid()}"):
            await FileStorage(tmp_path / "a").open()
        await first.put("alice", "creds", "me", b"x")
    async with FileStorage(tmp_path / "a") as second:
        assert await second.get("alice", "creds", "me") == b"x"


def test_directory_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    hold = (
        "import fcntl, os, sys\n"
        "lock = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "os.write(lock, b'%d' % os.getpid())\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    (tmp_path / "a").mkdir()
    arguments = [sys.executable, "-c", hold, str(tmp_path / "a" / ".lock")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(StorageError, match=f"process {other.pid}: stop it"):
            asyncio.run(FileStorage(tmp_path / "a").open())
        other.kill()
    asyncio.run(_fill(FileStorage(tmp_path / "a")))


async def test_foreign_or_newer_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(StorageError, match="other files"):
        await FileStorage(tmp_path).open()
    assert os.listdir(tmp_path) == ["notes.txt"]
    with pytest.raises(StorageError, match="is a file"):
        await FileStorage(tmp_path / "notes.txt").open()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".format").write_text("moored files 7\n")
    with pytest.raises(StorageError, match="another format"):
        await FileStorage(tmp_path / "new").open()


async def test_foreign_files_are_ignored(tmp_path: Path) -> None:
    async with FileStorage(tmp_path / "a") as storage:
        await storage.put("alice", "creds", "me", b"x")
        for directory in ("", "alice", "alice/creds"):
            for name in (".DS_Store", "Upper", "x~y", "core dump"):
                (tmp_path / "a" / directory / name).write_text("?")
        assert await storage.list_profiles() == ["alice"]
        assert await storage.namespaces("alice") == ["creds"]
        assert await storage.keys("alice", "creds") == ["me"]


async def test_failed_write_names_no_recipient_and_leaves_no_file(tmp_path: Path) -> None:
    async with FileStorage(tmp_path / "a") as storage:
        await storage.put("alice", "creds", "bob@example.org", b"x")
        (tmp_path / "a" / "alice" / "session").write_text("in the way")
        with pytest.raises(StorageError, match="check the free space") as caught:
            await storage.put("alice", "session", "bob@example.org", b"x")
        assert "example" not in str(caught.value), "the error names the recipient"
        assert not list((tmp_path / "a" / ".tmp").iterdir())


@settings(max_examples=scaled(150, least=8), deadline=None)
@given(st.data())
def test_damaged_file_is_a_corrupt_record(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_fill(open_storage(f"files:{directory}")))
        file = Path(directory) / "alice" / "creds" / "me"
        file.write_bytes(_damaged(file.read_bytes(), data))

        async def read() -> None:
            async with open_storage(f"files:{directory}") as storage:
                with pytest.raises(CorruptRecord):
                    await storage.get("alice", "creds", "me")
                assert await storage.get("bob", "creds", "me") == b"bob's" * 100
                assert await storage.keys("alice", "creds") == ["me"]

        asyncio.run(read())


async def _fill(storage: Storage) -> None:
    async with storage:
        await storage.put("alice", "creds", "me", b"alice's" * 100)
        await storage.put("bob", "creds", "me", b"bob's" * 100)


async def _read_damaged(storage: Storage) -> None:
    try:
        async with storage:
            for profile, right in (("alice", b"alice's" * 100), ("bob", b"bob's" * 100)):
                value = await storage.get(profile, "creds", "me")
                assert value in (None, right)
            await storage.put("carol", "creds", "me", b"carol's")
            await storage.list_profiles()
    except StorageError:
        pass


def _damaged(before: bytes, data: st.DataObject) -> bytes:
    if data.draw(st.booleans(), label="truncate"):
        return before[: data.draw(st.integers(0, len(before) - 1), label="length")]
    damaged = bytearray(before)
    for position in data.draw(st.sets(st.integers(0, len(before) - 1), min_size=1, max_size=8)):
        damaged[position] ^= data.draw(st.integers(1, 255), label="flip")
    return bytes(damaged)
