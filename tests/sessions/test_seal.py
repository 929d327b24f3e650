"""Envelopes: whatever was done to one, it is noticed; and no key is ever shown."""

from __future__ import annotations

import asyncio
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
PASSPHRASE = "correct horse battery"

often = settings(max_examples=scaled(2_000, least=40), deadline=None)
names = st.tuples(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
seals = st.sampled_from([Seal(), Seal(KEY), Seal([OTHER_KEY, KEY])])


@often
@given(seals, names, st.binary(max_size=100))
def test_what_was_put_in_comes_out(seal: Seal, names: tuple[str, str, str], value: bytes) -> None:
    assert seal.open_envelope(names, seal.close_envelope(names, value)) == value


@often
@given(seals, st.binary(max_size=60), st.data())
def test_damage_is_noticed(seal: Seal, value: bytes, data: st.DataObject) -> None:
    envelope = bytearray(seal.close_envelope(NAMES, value))
    if data.draw(st.booleans()):
        envelope = envelope[: data.draw(st.integers(0, len(envelope) - 1))]
    else:
        envelope[data.draw(st.integers(0, len(envelope) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptRecord):
        seal.open_envelope(NAMES, bytes(envelope))


@often
@given(seals, st.integers(0, 255), st.binary(max_size=80))
def test_what_was_made_on_purpose_is_noticed(seal: Seal, kind: int, payload: bytes) -> None:
    """Anybody can compute a checksum; only what needs no key opens."""
    envelope = _seal._envelope(kind, NAMES, payload)
    if kind == _seal.PLAIN and seal.accept_plain:
        assert seal.open_envelope(NAMES, envelope) == payload
    elif kind != _seal.WITH_PASSPHRASE or not seal.encrypts:
        with pytest.raises(CorruptRecord):
            seal.open_envelope(NAMES, envelope)


@often
@given(seals, st.binary(max_size=100))
def test_anything_else_is_no_envelope(seal: Seal, noise: bytes) -> None:
    with pytest.raises(CorruptRecord):
        seal.open_envelope(NAMES, noise)


@often
@given(seals, names, names)
def test_a_record_opens_only_in_its_place(
    seal: Seal, here: tuple[str, str, str], there: tuple[str, str, str]
) -> None:
    envelope = seal.close_envelope(here, b"secret")
    if here == there:
        return
    with pytest.raises(CorruptRecord):
        seal.open_envelope(there, envelope)
    if not seal.encrypts:
        return
    # Now with the checksum mended, as somebody would who swaps records on purpose.
    moved = _seal._envelope(envelope[len(_seal.MAGIC)], there, envelope[_seal.HEAD :])
    with pytest.raises(CorruptRecord, match="another key, or for another place"):
        seal.open_envelope(there, moved)


def test_encrypted_means_that_it_cannot_be_read() -> None:
    seal = Seal(KEY)
    one = seal.close_envelope(NAMES, b"secret" * 10)
    assert b"secret" not in one
    assert one != seal.close_envelope(NAMES, b"secret" * 10), "a nonce is used once"
    for wrong in (Seal(OTHER_KEY), Seal()):
        with pytest.raises(CorruptRecord):
            wrong.open_envelope(NAMES, one)
    assert Seal([OTHER_KEY, KEY]).open_envelope(NAMES, one) == b"secret" * 10


def test_with_a_key_what_is_not_encrypted_is_refused() -> None:
    plain = Seal().close_envelope(NAMES, b"planted")
    with pytest.raises(CorruptRecord, match="not encrypted"):
        Seal(KEY).open_envelope(NAMES, plain)
    assert Seal(KEY, accept_plain=True).open_envelope(NAMES, plain) == b"planted"


def test_an_error_tells_neither_who_nor_what() -> None:
    with pytest.raises(CorruptRecord) as caught:
        Seal(KEY).open_envelope(("profile!", "session", "address!"), b"content!")
    assert "!" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (b"sesame" * 2, "key 1 has 12 bytes: it must have 32"),
        ([KEY, b"sesame"], "key 2 has 6 bytes"),
        ("sesame", "too short"),
        ([], "no key"),
        ([KEY, 5], "type int"),
    ],
)
def test_what_is_no_key(key: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says) as caught:
        Seal(key)
    assert "sesame" not in str(caught.value)


async def test_no_key_is_ever_shown() -> None:
    secret = "open sesame, please"
    inner = MemoryStorage()
    async with open_storage(inner, key=[secret, KEY]) as storage:
        await storage.put("alice", "creds", "me", b"x")
        seal = storage._seal if isinstance(storage, Sealed) else None
        texts = [repr(storage), repr(seal), repr(vars(seal)), str(seal)]
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(seal)
    wrong: list[bytes | str] = [b"sesame" * 5 + b"!!", "close sesame"]
    try:
        await open_storage(inner, key=wrong).open()
    except CorruptRecord as error:
        texts += traceback.format_exception(error)
    else:
        pytest.fail("the key does not fit")
    assert not [text for text in texts if "sesame" in text or repr(KEY)[2:-1] in text]


def test_without_the_library_there_is_advice(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_wrong_key_is_noticed_before_anything_is_written() -> None:
    inner = MemoryStorage()
    async with open_storage(inner, key=KEY) as storage:
        await storage.put("alice", "creds", "me", b"secret")
    for wrong in (OTHER_KEY, PASSPHRASE):
        with pytest.raises(CorruptRecord, match="another key"):
            await open_storage(inner, key=wrong).open()
    with pytest.raises(StorageError, match="is encrypted: pass the key"):
        await Sealed(inner, Seal()).open()
    async with open_storage(inner, key=KEY) as storage:
        assert await storage.get("alice", "creds", "me") == b"secret"
        assert await storage.list_profiles() == ["alice"]


async def test_a_marker_that_is_damaged_keeps_nobody_out() -> None:
    inner = MemoryStorage()
    for key in (KEY, PASSPHRASE):
        async with open_storage(inner, key=key) as storage:
            await storage.put("alice", "creds", "me", b"secret")
        marker = bytearray(await inner.get(*MARKER) or b"")
        marker[-1] ^= 1
        await inner.put(*MARKER, bytes(marker))
        async with open_storage(inner, key=key) as storage:
            assert await storage.get("alice", "creds", "me") == b"secret"
        await inner.clear("")
        await inner.clear("alice")


async def test_a_passphrase(tmp_path: Path) -> None:
    path = tmp_path / "accounts.db"
    async with open_storage(path, key=PASSPHRASE) as storage:
        await storage.put("alice", "creds", "me", b"secret")
    async with open_storage(path, key=PASSPHRASE) as storage:
        assert await storage.get("alice", "creds", "me") == b"secret"
        assert isinstance(storage, Sealed)
        assert len(storage._seal._secrets[0]._made) == 1, "one salt, and so one key to make"
    with pytest.raises(CorruptRecord, match="another key"):
        await open_storage(path, key=PASSPHRASE + "!").open()
    assert b"secret" not in path.read_bytes()


async def test_two_that_begin_at_once_can_read_each_other() -> None:
    """Each may have a salt of its own until one of them is started again."""
    inner = MemoryStorage()
    first, second = Sealed(inner, Seal(PASSPHRASE)), Sealed(inner, Seal(PASSPHRASE))
    await asyncio.gather(first.open(), second.open())
    await first.put("alice", "creds", "me", b"first")
    await second.put("bob", "creds", "me", b"second")
    for storage in (first, second):
        assert await storage.get("alice", "creds", "me") == b"first"
        assert await storage.get("bob", "creds", "me") == b"second"


async def test_a_change_of_keys() -> None:
    inner = MemoryStorage()
    async with open_storage(inner, key=KEY) as storage:
        await storage.put("alice", "creds", "me", b"old")
        await storage.put("alice", "session", "bob", b"kept")
        await storage.put("alice", "session", "carol", b"damaged")
    await inner.put("alice", "session", "carol", b"noise")
    async with open_storage(inner, key=[PASSPHRASE, KEY]) as storage:
        assert await storage.get("alice", "creds", "me") == b"old"
        await storage.put("alice", "creds", "me", b"new")
        assert isinstance(storage, Sealed)
        assert await storage.reseal() == 2
    async with open_storage(inner, key=PASSPHRASE) as storage:
        assert await storage.get("alice", "creds", "me") == b"new"
        assert await storage.get("alice", "session", "bob") == b"kept"
    assert await inner.get("alice", "session", "carol") == b"noise", "not made worse"
    with pytest.raises(CorruptRecord, match="another key"):
        await open_storage(inner, key=KEY).open()


async def test_a_storage_that_was_begun_without_a_key(tmp_path: Path) -> None:
    path = tmp_path / "accounts.db"
    async with open_storage(path) as storage:
        await storage.put("alice", "creds", "me", b"secret")
    with pytest.raises(StorageError, match="accept_plain=True and call reseal"):
        await open_storage(path, key=KEY).open()
    async with open_storage(path, key=KEY, accept_plain=True) as storage:
        assert isinstance(storage, Sealed)
        assert await storage.reseal() == 1
    async with open_storage(path, key=KEY) as storage:
        assert await storage.get("alice", "creds", "me") == b"secret"


async def test_records_that_change_places_are_not_taken_for_each_other() -> None:
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
