"""The contract of every storage, and the addresses of storages."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sessions.storages import KEY, KINDS, KINDS_ON_DISK, make

from moored.sessions._errors import StorageError
from moored.sessions.storage._file_names import from_file_name, to_file_name
from moored.sessions.storage._files import FileStorage
from moored.sessions.storage._memory import MemoryStorage
from moored.sessions.storage._open import open_storage
from moored.sessions.storage._sealed import Sealed
from moored.sessions.storage._sqlite import SqliteStorage
from moored.sessions.storage._storage import Namespace, Storage
from moored.testing import scaled

HARD_NAMES = [
    "alice",
    "Alice",
    "ALICE",
    "../../etc/passwd",
    "..",
    ".",
    "/",
    "a/b",
    "a%2fb",
    "%",
    "~",
    "a~b",
    " ",
    "\0",
    "a\0b",
    "a\nb",
    "con",
    "é",
    "e\u0301",
    "😀" * 21,
    "x" * 255,
    "X" * 85,
    "\ud800",
    "%00",
    ".tmp",
    ".lock",
    "x.name",
]

names = st.one_of(
    st.sampled_from(HARD_NAMES),
    st.text(st.characters(codec=None), min_size=1, max_size=20),
)
values = st.binary(max_size=200)


@pytest.fixture(params=KINDS)
async def storage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Storage]:
    async with make(request.param, tmp_path) as opened:
        yield opened


async def test_record_is_stored_until_it_is_deleted(storage: Storage) -> None:
    assert await storage.get("alice", Namespace.CREDS, "me") is None
    await storage.put("alice", Namespace.CREDS, "me", b"one")
    assert await storage.get("alice", "creds", "me") == b"one"
    await storage.put("alice", "creds", "me", b"")
    assert await storage.get("alice", "creds", "me") == b""
    assert await storage.get("alice", "session", "me") is None
    assert await storage.get("bob", "creds", "me") is None
    await storage.delete("alice", "creds", "me")
    await storage.delete("alice", "creds", "me")
    await storage.delete("nobody", "creds", "me")
    assert await storage.get("alice", "creds", "me") is None
    assert await storage.list_profiles() == ["alice"], "deleting its records removed the profile"


async def test_profiles_are_created_by_new_or_put_and_removed_by_clear(storage: Storage) -> None:
    assert await storage.list_profiles() == []
    assert await storage.new("bob")
    assert not await storage.new("bob")
    await storage.put("alice", "creds", "me", b"secret")
    await storage.put("alice", "session", "carol", b"ratchet")
    assert not await storage.new("alice"), "new() created an existing profile"
    assert await storage.list_profiles() == ["alice", "bob"]
    assert await storage.namespaces("alice") == ["creds", "session"]
    assert await storage.namespaces("bob") == []
    assert await storage.keys("alice", "session") == ["carol"]
    assert await storage.keys("bob", "session") == []
    await storage.clear("alice")
    await storage.clear("nobody")
    assert await storage.list_profiles() == ["bob"]
    assert await storage.get("alice", "creds", "me") is None
    assert await storage.keys("alice", "session") == []
    assert await storage.new("alice")


async def test_namespace_without_records_is_not_listed(storage: Storage) -> None:
    await storage.put("alice", "session", "bob", b"x")
    await storage.delete("alice", "session", "bob")
    assert await storage.namespaces("alice") == []


async def test_names_that_file_systems_cannot_hold_are_kept_apart(storage: Storage) -> None:
    """Use each of them as a profile, a namespace and a key."""
    for number, name in enumerate(HARD_NAMES):
        await storage.put(name, "n", "k", b"profile %d" % number)
        await storage.put("p", name, "k", b"namespace %d" % number)
        await storage.put("p", "n", name, b"key %d" % number)
    for number, name in enumerate(HARD_NAMES):
        assert await storage.get(name, "n", "k") == b"profile %d" % number
        assert await storage.get("p", name, "k") == b"namespace %d" % number
        assert await storage.get("p", "n", name) == b"key %d" % number
    assert await storage.list_profiles() == sorted({*HARD_NAMES, "p"})
    assert await storage.namespaces("p") == sorted({*HARD_NAMES, "n"})
    assert await storage.keys("p", "n") == sorted(HARD_NAMES)
    for name in HARD_NAMES:
        await storage.delete("p", "n", name)
        await storage.clear(name)
    assert await storage.keys("p", "n") == []
    assert await storage.list_profiles() == ["p"]


async def test_concurrent_writers_do_not_interfere(storage: Storage) -> None:
    async def one(number: int) -> None:
        key = f"k{number}"
        for turn in range(3):
            await storage.put("alice", "session", key, b"%d.%d" % (number, turn))
            assert await storage.get("alice", "session", key) == b"%d.%d" % (number, turn)

    await asyncio.gather(*(one(number) for number in range(40)))
    assert len(await storage.keys("alice", "session")) == 40


async def test_calls_run_in_order_even_if_they_are_cancelled(storage: Storage) -> None:
    for number in range(20):
        task = asyncio.create_task(storage.put("alice", "creds", "me", b"%d" % number))
        await asyncio.sleep(0)
        task.cancel()
    assert await storage.get("alice", "creds", "me") == b"19"


@pytest.mark.parametrize("kind", KINDS_ON_DISK)
async def test_reopened_storage_has_all_records(kind: str, tmp_path: Path) -> None:
    storage = make(kind, tmp_path)
    async with storage:
        await storage.new("bob")
        await storage.put("alice", "creds", "x" * 250, b"\0secret\xff" * 1000)
    with pytest.raises(StorageError, match="not open"):
        await storage.get("alice", "creds", "me")
    for again in (storage, make(kind, tmp_path)):
        async with again:
            assert await again.list_profiles() == ["alice", "bob"]
            assert await again.keys("alice", "creds") == ["x" * 250]
            assert await again.get("alice", "creds", "x" * 250) == b"\0secret\xff" * 1000
            await again.open()
        await again.close()


@pytest.mark.parametrize("kind", KINDS_ON_DISK)
async def test_files_are_readable_by_their_owner_only(kind: str, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with make(kind, tmp_path) as storage:
            await storage.put("alice", "creds", "me", b"secret")
            assert _modes(tmp_path) <= {("file", 0o600), ("directory", 0o700)}
    finally:
        os.umask(before)


def _modes(directory: Path) -> set[tuple[str, int]]:
    return {
        ("directory" if path.is_dir() else "file", stat.S_IMODE(path.stat().st_mode))
        for path in directory.rglob("*")
    }


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "delete", "new", "clear", "reopen"]),
        names,
        names,
        names,
        values,
    ),
    max_size=12,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=scaled(80, least=5), deadline=None)
@given(steps)
def test_storage_behaves_like_a_dictionary(
    kind: str, steps: list[tuple[str, str, str, str, bytes]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_as_a_dictionary(make(kind, Path(directory)), steps))


async def _as_a_dictionary(storage: Storage, steps: list[tuple[str, str, str, str, bytes]]) -> None:
    records: dict[tuple[str, str, str], bytes] = {}
    profiles: set[str] = set()
    await storage.open()
    for step, profile, namespace, key, value in steps:
        if step == "put":
            await storage.put(profile, namespace, key, value)
            records[profile, namespace, key] = value
            profiles.add(profile)
        elif step == "delete":
            await storage.delete(profile, namespace, key)
            records.pop((profile, namespace, key), None)
        elif step == "new":
            assert await storage.new(profile) == (profile not in profiles)
            profiles.add(profile)
        elif step == "clear":
            await storage.clear(profile)
            profiles.discard(profile)
            records = {full: kept for full, kept in records.items() if full[0] != profile}
        else:
            await storage.close()
            await storage.open()
    assert await storage.list_profiles() == sorted(profiles)
    found = {
        (profile, namespace, key): await storage.get(profile, namespace, key)
        for profile in profiles
        for namespace in await storage.namespaces(profile)
        for key in await storage.keys(profile, namespace)
    }
    assert found == records
    await storage.close()


@given(names, names)
def test_file_names_are_unique_and_reversible(one: str, other: str) -> None:
    name = to_file_name(one)
    assert name.isascii()
    assert name == name.lower()
    assert "/" not in name
    assert not name.startswith(".")
    assert 0 < len(name) <= 255
    assert from_file_name(name) == one
    assert (name == to_file_name(other)) == (one == other)


@pytest.mark.parametrize("name", ["x" * 256, "X" * 86])
async def test_name_that_is_too_long_for_a_file_is_refused(name: str, tmp_path: Path) -> None:
    """Also by a transaction, and before it is written to the journal."""
    async with FileStorage(tmp_path / "files") as storage:
        with pytest.raises(StorageError, match="use a SQLite database"):
            await storage.put("alice", "session", name, b"")
        with pytest.raises(StorageError, match="use a SQLite database"):
            await storage.put_all("alice", {("session", name): b"", ("session", "bob"): b"x"})
        await storage.put("alice", "session", "bob", b"y")
        assert await storage.keys("alice", "session") == ["bob"]


@pytest.mark.parametrize("name", ["", "A", "%4", "%zz", "%61", ".tmp", "%ff", "a b", "x.name"])
def test_foreign_file_name_has_no_key(name: str) -> None:
    assert from_file_name(name) is None


# -- from a name to a storage --------------------------------------------------------------------


async def test_address_selects_the_kind_of_storage(tmp_path: Path) -> None:
    def inner(where: str | Path) -> Storage:
        storage = open_storage(where)
        assert isinstance(storage, Sealed)
        return storage.inner

    assert isinstance(inner("memory:"), MemoryStorage)
    database = inner(str(tmp_path / "accounts.db"))
    assert isinstance(database, SqliteStorage)
    assert database.path == tmp_path / "accounts.db"
    assert isinstance(inner(tmp_path / "accounts.db"), SqliteStorage)
    for where in (f"files:{tmp_path / 'new'}", str(tmp_path), tmp_path):
        assert isinstance(inner(where), FileStorage), where
    own = MemoryStorage()
    assert open_storage(own) is own
    sealed = open_storage(own, key=KEY)
    assert isinstance(sealed, Sealed)
    assert sealed.inner is own
    with pytest.raises(StorageError, match="encrypted already"):
        open_storage(sealed, key=KEY)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("", "the name is empty"),
        (":memory:", "'memory:'"),
        ("memory:x", "without a name"),
        ("files:", "directory is missing"),
        ("redis://cache", "no storage for redis://"),
        ("no/such/", "directory does not exist"),
    ],
)
def test_invalid_address_is_refused(where: str, says: str) -> None:
    with pytest.raises(StorageError, match=says):
        open_storage(where)


async def test_empty_profile_is_refused() -> None:
    async with open_storage("memory:") as storage:
        with pytest.raises(ValueError, match="must not be empty"):
            await storage.put("", "creds", "me", b"x")
