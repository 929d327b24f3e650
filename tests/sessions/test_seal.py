"""Envelopes of records: any change to one is detected, and no key is ever shown."""

from __future__ import annotations

import builtins
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sessions.storages import KEY

from moored.sessions._errors import CorruptRecord, StorageError
from moored.sessions.storage import _seal
from moored.sessions.storage._memory import MemoryStorage
from moored.sessions.storage._open import open_storage
from moored.sessions.storage._seal import Seal
from moored.sessions.storage._sealed import MARKER, Sealed
from moored.testing import scaled

NAMES = ("alice", "session", "bob")
OTHER_KEY = bytes(reversed(range(32)))

FUZZ = settings(max_examples=scaled(2_000, least=40), deadline=None)
names = st.tuples(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
seals = st.sampled_from([Seal(), Seal(KEY), Seal([OTHER_KEY, KEY])])


@FUZZ
@given(seals, names, st.binary(max_size=100))
def test_envelope_opens_to_its_value(seal: Seal, names: tuple[str, str, str], value: bytes) -> None:
    assert seal.open_envelope(names, seal.close_envelope(names, value)) == value


@FUZZ
@given(seals, st.binary(max_size=60), st.data())
def test_damaged_envelope_is_corrupt(seal: Seal, value: bytes, data: st.DataObject) -> None:
    envelope = bytearray(seal.close_envelope(NAMES, value))
    if data.draw(st.booleans()):
        envelope = envelope[: data.draw(st.integers(0, len(envelope) - 1))]
    else:
        envelope[data.draw(st.integers(0, len(envelope) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptRecord):
        seal.open_envelope(NAMES, bytes(envelope))


@FUZZ
@given(seals, st.integers(0, 255), st.binary(max_size=80))
def test_forged_envelope_is_corrupt(seal: Seal, kind: int, payload: bytes) -> None:
    """The checksum needs no key: only a plain envelope opens, if plain ones are accepted."""
    envelope = _seal._envelope(kind, NAMES, payload)
    if kind == _seal.PLAIN and not seal.encrypts:
        assert seal.open_envelope(NAMES, envelope) == payload
    else:
        with pytest.raises(CorruptRecord):
            seal.open_envelope(NAMES, envelope)


@FUZZ
@given(seals, st.binary(max_size=100))
def test_arbitrary_bytes_are_corrupt(seal: Seal, noise: bytes) -> None:
    with pytest.raises(CorruptRecord):
        seal.open_envelope(NAMES, noise)


@FUZZ
@given(seals, names, names)
def test_envelope_opens_only_under_its_own_names(
    seal: Seal, here: tuple[str, str, str], there: tuple[str, str, str]
) -> None:
    envelope = seal.close_envelope(here, b"secret")
    if here == there:
        return
    with pytest.raises(CorruptRecord):
        seal.open_envelope(there, envelope)
    if not seal.encrypts:
        return
    # With the checksum recomputed, as an attacker does who swaps records.
    moved = _seal._envelope(envelope[len(_seal.MAGIC)], there, envelope[_seal.HEAD :])
    with pytest.raises(CorruptRecord, match="another key, or for another place"):
        seal.open_envelope(there, moved)


def test_encrypted_envelope_is_unreadable_without_its_key() -> None:
    seal = Seal(KEY)
    one = seal.close_envelope(NAMES, b"secret" * 10)
    assert b"secret" not in one
    assert one != seal.close_envelope(NAMES, b"secret" * 10), "the nonce was reused"
    for wrong in (Seal(OTHER_KEY), Seal()):
        with pytest.raises(CorruptRecord):
            wrong.open_envelope(NAMES, one)
    assert Seal([OTHER_KEY, KEY]).open_envelope(NAMES, one) == b"secret" * 10


def test_plain_envelope_is_refused_if_there_is_a_key() -> None:
    plain = Seal().close_envelope(NAMES, b"planted")
    with pytest.raises(CorruptRecord, match="not encrypted"):
        Seal(KEY).open_envelope(NAMES, plain)


def test_corruption_error_names_neither_profile_nor_content() -> None:
    with pytest.raises(CorruptRecord) as caught:
        Seal(KEY).open_envelope(("profile!", "session", "address!"), b"content!")
    assert "!" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (b"sesame" * 2, "key 1 has 12 bytes: it must have 32"),
        ([KEY, b"sesame"], "key 2 has 6 bytes"),
        ("sesame", "key 1 is of type str: pass 32 bytes"),
        ([], "no key"),
        ([KEY, 5], "type int"),
    ],
)
def test_invalid_key_is_refused_without_showing_it(key: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says) as caught:
        Seal(key)
    assert "sesame" not in str(caught.value)


async def test_keys_are_hidden_in_repr_pickle_and_tracebacks() -> None:
    secret = b"open sesame, please".ljust(32)
    inner = MemoryStorage()
    async with open_storage(inner, key=[secret, KEY]) as storage:
        await storage.put("alice", "creds", "me", b"x")
        seal = storage._seal if isinstance(storage, Sealed) else None
        texts = [repr(storage), repr(seal), repr(vars(seal)), str(seal)]
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(seal)
    wrong = b"sesame" * 5 + b"!!"
    try:
        await open_storage(inner, key=wrong).open()
    except CorruptRecord as error:
        texts += traceback.format_exception(error)
    else:
        pytest.fail("the key does not fit")
    assert not [text for text in texts if "sesame" in text or repr(KEY)[2:-1] in text]


def test_missing_cryptography_package_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("cryptography"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="cryptography")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    Seal()
    with pytest.raises(StorageError, match=r"pip install 'moored\[encryption\]'"):
        Seal(KEY)


# -- a storage with a key ------------------------------------------------------------------------


async def test_wrong_key_is_detected_before_anything_is_written() -> None:
    inner = MemoryStorage()
    async with open_storage(inner, key=KEY) as storage:
        await storage.put("alice", "creds", "me", b"secret")
    with pytest.raises(CorruptRecord, match="another key"):
        await open_storage(inner, key=OTHER_KEY).open()
    with pytest.raises(StorageError, match="is encrypted: pass the key"):
        await Sealed(inner, Seal()).open()
    async with open_storage(inner, key=KEY) as storage:
        assert await storage.get("alice", "creds", "me") == b"secret"
        assert await storage.list_profiles() == ["alice"]


async def test_damaged_marker_does_not_prevent_opening() -> None:
    inner = MemoryStorage()
    async with open_storage(inner, key=KEY) as storage:
        await storage.put("alice", "creds", "me", b"secret")
    marker = bytearray(await inner.get(*MARKER) or b"")
    marker[-1] ^= 1
    await inner.put(*MARKER, bytes(marker))
    async with open_storage(inner, key=KEY) as storage:
        assert await storage.get("alice", "creds", "me") == b"secret"


async def test_encrypted_file_shows_no_record(tmp_path: Path) -> None:
    path = tmp_path / "accounts.db"
    async with open_storage(path, key=KEY) as storage:
        await storage.put("alice", "creds", "me", b"secret")
    async with open_storage(path, key=KEY) as storage:
        assert await storage.get("alice", "creds", "me") == b"secret"
    assert b"secret" not in path.read_bytes()


async def test_key_can_be_replaced() -> None:
    """The first key writes, and all keys read."""
    inner = MemoryStorage()
    async with open_storage(inner, key=KEY) as storage:
        await storage.put("alice", "creds", "me", b"old")
        await storage.put("alice", "session", "bob", b"kept")
    async with open_storage(inner, key=[OTHER_KEY, KEY]) as storage:
        assert await storage.get("alice", "session", "bob") == b"kept"
        await storage.put("alice", "creds", "me", b"new")
    async with open_storage(inner, key=OTHER_KEY) as storage:
        assert await storage.get("alice", "creds", "me") == b"new"
        with pytest.raises(CorruptRecord, match="another key"):
            await storage.get("alice", "session", "bob")
    with pytest.raises(CorruptRecord, match="another key"):
        await open_storage(inner, key=KEY).open()


async def test_key_for_a_plain_storage_is_refused_and_its_records_stay(tmp_path: Path) -> None:
    path = tmp_path / "accounts.db"
    async with open_storage(path) as storage:
        await storage.put("alice", "creds", "me", b"secret")
    with pytest.raises(StorageError, match="copy its records to a new storage"):
        await open_storage(path, key=KEY).open()
    async with open_storage(path) as storage:
        assert await storage.get("alice", "creds", "me") == b"secret"


async def test_swapped_records_are_corrupt() -> None:
    inner = MemoryStorage()
    async with open_storage(inner, key=KEY) as storage:
        await storage.put("alice", "session", "bob", b"for bob")
        await storage.put("alice", "session", "mallory", b"for mallory")
        stolen = await inner.get("alice", "session", "mallory")
        await inner.put("alice", "session", "bob", stolen or b"")
        with pytest.raises(CorruptRecord):
            await storage.get("alice", "session", "bob")
        assert await storage.set_aside("alice", "session", "bob")
        assert await storage.get("alice", "session.corrupt", "bob") == stolen
        assert not await storage.set_aside("alice", "session", "nobody")
