"""The envelope of a record: a checksum always, and encryption with a key.

::

    "HFR1"  kind  checksum of all the rest and of the record's names   16 bytes
    kind 0        the value
    kind 1        nonce, 12 bytes · AES-256-GCM of the value

The checksum detects accidental damage; anybody can compute it. Encryption detects manipulation:
each record has an AES key of its own, derived from yours and from profile, namespace and key, so a
record that was moved to another place cannot be decrypted there. An older version of the same
record in the same place can: restoring an old disk image is not detected.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

from moored.kernel import counted

from .._errors import CorruptRecord, StorageError
from ._storage import Keys

__all__ = ["Names", "Seal"]

#: Profile, namespace and key of a record.
Names: TypeAlias = tuple[str, str, str]

MAGIC = b"HFR1"
PLAIN, ENCRYPTED = 0, 1
CHECKSUM = 16
HEAD = len(MAGIC) + 1 + CHECKSUM
NONCE = 12
KEY_BYTES = 32


class Seal:
    """Puts values into envelopes, and takes them out again.

    :param key: 32 bytes, or several such keys: the first one encrypts, all of them decrypt, so that
        a key can be replaced. Without a key, records only have a checksum; with one, records that
        are not encrypted are refused: anybody could forge them.
    """

    def __init__(self, key: Keys | None = None) -> None:
        # One keyed hash for each key, from which the AES keys of records are derived: unlike the
        # key, it cannot be printed or pickled.
        self._hashes = [
            blake2b(key=each, digest_size=KEY_BYTES, person=b"moored record")
            for each in _listed(key)
        ]
        #: Whether there is a key.
        self.encrypts = bool(self._hashes)
        self._aes = _aes_gcm() if self._hashes else None

    def close_envelope(self, names: Names, value: bytes) -> bytes:
        """Return the envelope to store under these names."""
        if not self._hashes:
            return _envelope(PLAIN, names, value)
        nonce = secrets.token_bytes(NONCE)
        hidden = self._cipher(self._hashes[0], names).encrypt(nonce, value, _bound(names))
        return _envelope(ENCRYPTED, names, nonce + hidden)

    def open_envelope(self, names: Names, envelope: bytes) -> bytes:
        """Return the value; raises `CorruptRecord` if it is damaged, moved, or of another key."""
        kind, payload = _checked(names, envelope)
        if kind == PLAIN:
            if self.encrypts:
                raise _corrupt(names, "is not encrypted, although there is a key")
            return payload
        if not self._hashes:
            raise _corrupt(names, "is encrypted, and no key was given")
        for each in self._hashes:
            if (value := self._decrypted(each, names, payload)) is not None:
                return value
        raise _corrupt(names, "was encrypted with another key, or for another place")

    def is_current(self, names: Names, envelope: bytes) -> bool:
        """Whether the first key has encrypted an envelope; False also for a damaged one.

        Raises `CorruptRecord` if none of the keys fits.
        """
        try:
            kind, payload = _checked(names, envelope)
        except CorruptRecord:
            return False  # the checksum is wrong, which says nothing about the key
        self.open_envelope(names, envelope)
        return kind == ENCRYPTED and (self._decrypted(self._hashes[0], names, payload) is not None)

    def _decrypted(self, keyed: blake2b, names: Names, payload: bytes) -> bytes | None:
        from cryptography.exceptions import InvalidTag

        try:
            value: bytes = self._cipher(keyed, names).decrypt(
                payload[:NONCE], payload[NONCE:], _bound(names)
            )
        except (InvalidTag, ValueError):
            # ValueError: too short for a nonce, which must be a forgery: the checksum is right.
            return None
        return value

    def _cipher(self, keyed: blake2b, names: Names) -> Any:
        assert self._aes is not None
        derived = keyed.copy()
        derived.update(_spelled(names))
        return self._aes(derived.digest())

    def __repr__(self) -> str:
        return f"<Seal: {counted(len(self._hashes), 'key')}>"


def _listed(key: Keys | None) -> Sequence[bytes]:
    if key is None:
        return ()
    keys = [key] if isinstance(key, bytes | str) else list(key)
    if not keys:
        raise ValueError("no key: pass None for a storage that is not encrypted")
    for number, each in enumerate(keys, 1):
        # No error shows the key.
        if not isinstance(each, bytes):
            raise TypeError(
                f"key {number} is of type {type(each).__name__}: pass {KEY_BYTES} bytes, made by "
                "secrets.token_bytes(32), or by hashlib.scrypt from a passphrase"
            )
        if len(each) != KEY_BYTES:
            raise ValueError(f"key {number} has {len(each)} bytes: it must have {KEY_BYTES}")
    return keys


def _aes_gcm() -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError as error:
        raise StorageError(
            "encryption needs cryptography, which is not installed: "
            "pip install 'moored[encryption]'"
        ) from error
    return AESGCM


def _envelope(kind: int, names: Names, payload: bytes) -> bytes:
    head = bytes((kind,))
    return b"".join((MAGIC, head, _checksum(head, names, payload), payload))


def _checked(names: Names, envelope: bytes) -> tuple[int, bytes]:
    """Return the kind and the payload of an envelope, after checking its checksum."""
    start = len(MAGIC)
    if envelope[:start] != MAGIC or len(envelope) < HEAD:
        raise _corrupt(names, "is damaged: it has no envelope")
    payload = envelope[HEAD:]
    if _checksum(envelope[start : start + 1], names, payload) != envelope[start + 1 : HEAD]:
        raise _corrupt(names, "is damaged: its checksum is wrong")
    kind = envelope[start]
    if kind not in (PLAIN, ENCRYPTED):
        raise _corrupt(names, f"was written by a newer version of Moored (kind {kind})")
    return kind, payload


def _checksum(head: bytes, names: Names, payload: bytes) -> bytes:
    check = blake2b(head, digest_size=CHECKSUM, person=b"moored check")
    check.update(_spelled(names))
    check.update(payload)
    return check.digest()


def _bound(names: Names) -> bytes:
    return MAGIC + bytes((ENCRYPTED,)) + _spelled(names)


def _spelled(names: Names) -> bytes:
    """Encode the names as bytes, so that different triples never have the same encoding."""
    parts = [name.encode("utf-8", "surrogatepass") for name in names]
    return b"".join([len(part).to_bytes(4, "big") + part for part in parts])


def _corrupt(names: Names, what: str) -> CorruptRecord:
    # Without profile and key: they may name a recipient.
    return CorruptRecord(f"a record in namespace {names[1]!r} {what}")
