"""Transactions over several records: all of them change, or none."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.storages import KINDS, make

from moored.sessions import Records, StorageError
from moored.sessions.storage._files import FileStorage
from moored.sessions.storage._memory import MemoryStorage
from moored.sessions.storage._sqlite import SqliteStorage
from moored.sessions.storage._storage import Changes, Storage

pytestmark = pytest.mark.pure

ONE, TWO, NEW = ("session", "bob"), ("sender_key", "group"), ("device_list", "bob")


@pytest.fixture(params=KINDS)
async def storage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Storage]:
    async with make(request.param, tmp_path) as opened:
        yield opened


async def values(storage: Storage, *records: tuple[str, str]) -> list[bytes | None]:
    return [await storage.get("alice", *record) for record in records]


async def test_put_all_writes_and_removes_several_records(storage: Storage) -> None:
    await storage.put("alice", *ONE, b"1")
    await storage.put("alice", *TWO, b"1")
    await storage.put_all("alice", {ONE: b"2", TWO: None, NEW: b""})
    assert await values(storage, ONE, TWO, NEW) == [b"2", None, b""]
    assert await storage.keys("alice", TWO[0]) == []


async def test_transactions_and_updates_of_a_record_run_one_after_the_other(
    storage: Storage,
) -> None:
    records = Records(storage, "alice")

    def move(old: Changes) -> Changes:
        return {ONE: b"%d" % (int(old[ONE] or 0) - 1), TWO: b"%d" % (int(old[TWO] or 0) + 1)}

    def more(old: bytes | None) -> bytes:
        return b"%d" % (int(old or 0) + 10)

    await asyncio.gather(
        *[records.update_many([ONE, TWO], move) for _ in range(5)],
        *[records.update(*ONE, more) for _ in range(5)],
        *[records.update_many([TWO, ONE], move) for _ in range(5)],
    )
    assert await values(storage, ONE, TWO) == [b"40", b"10"]
    assert records.busy == 0
    await records.close()


async def test_failed_transaction_changes_nothing(storage: Storage) -> None:
    async with Records(storage, "alice") as records:
        await records.put(*ONE, b"1")

        def raises(old: Changes) -> Changes:
            raise LookupError("no")

        with pytest.raises(LookupError):
            await records.update_many([ONE, TWO], raises)
        wrong: list[Any] = [lambda old: {TWO: 1}, lambda old: {TWO: b"", ONE: "text"}]
        for change in wrong:
            with pytest.raises(TypeError, match="a record must be bytes"):
                await records.update_many([ONE, TWO], change)
        with pytest.raises(StorageError, match="was not given"):
            await records.update_many([ONE], lambda old: {ONE: b"2", NEW: b""})
        assert await values(storage, ONE, TWO, NEW) == [b"1", None, None]
        # Later updates are not blocked.
        await records.put(*ONE, b"2")
        assert await records.update_many([ONE, TWO], lambda old: {}) == {ONE: b"2", TWO: None}


async def test_sqlite_rolls_back_a_transaction_that_fails_in_the_middle(tmp_path: Path) -> None:
    async with SqliteStorage(tmp_path / "accounts.db") as storage:
        await storage.put("alice", *ONE, b"1")
        wrong: Any = {ONE: b"2", TWO: object()}
        with pytest.raises(StorageError):
            await storage.put_all("alice", wrong)
        assert await values(storage, ONE, TWO) == [b"1", None]


async def test_transaction_without_the_lease_changes_nothing() -> None:
    storage = MemoryStorage()
    records = Records(storage, "alice", may_write=lambda: False)
    with pytest.raises(StorageError, match="the lease of this profile is lost"):
        await records.update_many([ONE, TWO], lambda old: {ONE: b"", TWO: b""})
    assert await values(storage, ONE, TWO) == [None, None]


async def test_cancelled_transaction_blocks_no_other() -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    class BlockingStorage(MemoryStorage):
        async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
            began.set()
            await go_on.wait()
            return await super().get(profile, namespace, key)

    records = Records(BlockingStorage(), "alice")
    first = asyncio.ensure_future(records.update_many([ONE, TWO], lambda old: {ONE: b"1"}))
    await began.wait()
    second = asyncio.ensure_future(records.update_many([TWO, ONE], lambda old: {TWO: b"2"}))
    await asyncio.sleep(0)
    second.cancel()
    go_on.set()
    assert await first == {ONE: b"1", TWO: None}
    await asyncio.wait_for(records.put(*TWO, b"3"), 30)
    assert records.busy == 0


async def test_storage_without_transactions_raises() -> None:
    class WithoutTransactions(MemoryStorage):
        put_all = Storage.put_all

    async with Records(WithoutTransactions(), "alice") as records:
        with pytest.raises(StorageError, match="no transactions over several records"):
            await records.update_many([ONE], lambda old: {ONE: b""})


class Killed(BaseException):
    """Stands for the death of the process."""


@pytest.mark.parametrize(
    ("moment", "visit", "is_new"),
    [
        ("written", 1, False),
        ("on the disk", 1, False),
        ("named", 1, True),
        ("in the journal", 1, True),
        ("named", 2, True),
        ("one of several", 1, True),
        ("one of several", 3, True),
    ],
)
async def test_file_transaction_survives_a_crash_as_a_whole(
    tmp_path: Path, moment: str, visit: int, is_new: bool
) -> None:
    class Crashing(FileStorage):
        left = 0

        def _moment(self, name: str) -> None:
            if name == moment and self.left:
                self.left -= 1
                if not self.left:
                    raise Killed

    storage = Crashing(tmp_path)
    await storage.open()
    await storage.put("alice", *ONE, b"1")
    await storage.put("alice", *TWO, b"1")
    storage.left = visit
    with pytest.raises(Killed):
        await storage.put_all("alice", {ONE: b"2", TWO: None, NEW: b"2"})
    await storage.close()
    async with FileStorage(tmp_path) as again:
        expected = [b"2", None, b"2"] if is_new else [b"1", b"1", None]
        assert await values(again, ONE, TWO, NEW) == expected
        assert not (tmp_path / ".journal").exists()


class FullFiles(FileStorage):
    """A directory that has no space left after the first record of a transaction."""

    full = True

    def _moment(self, name: str) -> None:
        if name == "one of several" and self.full:
            raise OSError(errno.ENOSPC, "No space left on device")


async def key_of_new(storage: Storage) -> None:
    assert await storage.keys("alice", NEW[0]) == [NEW[1]]


async def get(storage: Storage) -> None:
    assert await values(storage, ONE, NEW) == [b"2", b"2"]


async def put_all(storage: Storage) -> None:
    await storage.put_all("alice", {TWO: b"2"})
    assert await values(storage, ONE, TWO, NEW) == [b"2", b"2", b"2"]


async def clear(storage: Storage) -> None:
    await storage.clear("alice")
    await storage.new("bob")
    assert await storage.list_profiles() == ["bob"]


@pytest.mark.parametrize("call", [get, key_of_new, put_all, clear])
async def test_call_after_a_failed_transaction_completes_it_first(
    call: Callable[[Storage], Awaitable[None]], tmp_path: Path
) -> None:
    async with FullFiles(tmp_path / "accounts") as storage:
        await storage.put("alice", *ONE, b"1")
        with pytest.raises(StorageError, match="No space left"):
            await storage.put_all("alice", {ONE: b"2", NEW: b"2"})
        with pytest.raises(StorageError, match="No space left"):
            await storage.get("alice", *ONE)
        storage.full = False
        await call(storage)
