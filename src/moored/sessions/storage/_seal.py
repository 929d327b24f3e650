"""The envelope of a record: a checksum always, and encryption with a key.

::

    "HFR1"  kind  checksum of all the rest and of the record's names   16 bytes
    kind 0        the value
    kind 1        nonce, 12 bytes · AES-256-GCM of the value
    kind 2        salt, 16 bytes · nonce · AES-256-GCM, the key made from a passphrase by scrypt

The checksum detects accidental damage; anybody can compute it. Encryption detects manipulation:
each record has an AES key of its own, derived from yours and from profile, namespace and key, so a
record that was moved to another place cannot be decrypted there. An older version of the same
record in the same place can: restoring an old disk image is not detected.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

from moored.kernel import SECRETS, counted

from .._errors import CorruptRecord, StorageError
from ._storage import Keys

__all__ = ["Names", "Seal"]

#: Profile, namespace and key of a record.
Names: TypeAlias = tuple[str, str, str]

MAGIC = b"HFR1"
PLAIN, WITH_KEY, WITH_PASSPHRASE = 0, 1, 2
CHECKSUM = 16
HEAD = len(MAGIC) + 1 + CHECKSUM
NONCE = 12
SALT = 16
NO_SALT = b""
KEY_BYTES = 32
MIN_PASSPHRASE = 8


class Seal:
    """Puts values into envelopes, and takes them out again.

    Deriving a key from a passphrase takes 0.2 s, once for each salt.

    :param key: 32 bytes, or a passphrase (a string), or several of them: the first one encrypts,
        all of them decrypt, so that a key can be replaced. Without a key, records only have a
        checksum.
    :param accept_plain: with a key, accept records that are not encrypted as well, for a storage
        that was first used without a key. Otherwise they are refused: anybody could forge them.
    """

    def __init__(self, key: Keys | None = None, *, accept_plain: bool = False) -> None:
        self._secrets = [_Secret(each) for each in _listed(key)]
        #: Whether there is a key, and whether records that are not encrypted are accepted.
        self.encrypts = bool(self._secrets)
        self.accept_plain = accept_plain or not self._secrets
        self._aes = _aes_gcm() if self._secrets else None
        #: The salt of the passphrase; the storage's own, once it is known.
        self._salt = secrets.token_bytes(SALT)

    def close_envelope(self, names: Names, value: bytes) -> bytes:
        """Return the envelope to store under these names."""
        if not self._secrets:
            return _envelope(PLAIN, names, value)
        first = self._secrets[0]
        kind, salt = first.kind, self._salt if first.kind == WITH_PASSPHRASE else NO_SALT
        nonce = secrets.token_bytes(NONCE)
        hidden = self._cipher(first.master(salt), names).encrypt(nonce, value, _bound(kind, names))
        return _envelope(kind, names, salt + nonce + hidden)

    def open_envelope(self, names: Names, envelope: bytes) -> bytes:
        """Return the value; raises `CorruptRecord` if it is damaged, moved, or of another key."""
        kind, payload = _checked(names, envelope)
        if kind == PLAIN:
            if not self.accept_plain:
                raise _corrupt(names, "is not encrypted, although there is a key")
            return payload
        if not self._secrets:
            raise _corrupt(names, "is encrypted, and no key was given")
        return self._reveal(kind, names, payload)

    def adopt(self, names: Names, envelope: bytes) -> bool:
        """Use the salt of this envelope from now on; return False if it must be written again.

        That is, if it is damaged, or encrypted with another key than the first. Raises
        `CorruptRecord` if none of the keys fits.
        """
        try:
            kind, payload = _checked(names, envelope)
        except CorruptRecord:
            return False  # the checksum is wrong, which says nothing about the key
        self.open_envelope(names, envelope)
        first = self._secrets[0]
        if kind != first.kind or self._try(first, names, payload) is None:
            return False
        if kind == WITH_PASSPHRASE:
            self._salt = payload[:SALT]
        return True

    def _reveal(self, kind: int, names: Names, payload: bytes) -> bytes:
        for secret in self._secrets:
            if secret.kind == kind and (value := self._try(secret, names, payload)) is not None:
                return value
        raise _corrupt(names, "was encrypted with another key, or for another place")

    def _try(self, secret: _Secret, names: Names, payload: bytes) -> bytes | None:
        from cryptography.exceptions import InvalidTag

        salt = payload[:SALT] if secret.kind == WITH_PASSPHRASE else NO_SALT
        sealed = payload[len(salt) :]
        try:
            opened: bytes = self._cipher(secret.master(salt), names).decrypt(
                sealed[:NONCE], sealed[NONCE:], _bound(secret.kind, names)
            )
        except (InvalidTag, ValueError):
            # ValueError: too short for a nonce, which must be a forgery: the checksum is right.
            return None
        return opened

    def _cipher(self, master: bytes, names: Names) -> Any:
        assert self._aes is not None
        return self._aes(
            blake2b(
                _spelled(names), key=master, digest_size=KEY_BYTES, person=b"moored record"
            ).digest()
        )

    def __repr__(self) -> str:
        return f"<Seal: {counted(len(self._secrets), 'key')}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Seal holds keys, and cannot be pickled")


class _Secret:
    """A key or a passphrase."""

    __slots__ = ("_made", "_value", "kind")

    def __init__(self, value: bytes | str) -> None:
        self.kind = WITH_PASSPHRASE if isinstance(value, str) else WITH_KEY
        if isinstance(value, str):
            SECRETS.add(value)
            value = value.encode("utf-8", "surrogatepass")
        self._value = value
        # The derived keys, by salt: a storage usually has one.
        self._made: dict[bytes, bytes] = {}

    def master(self, salt: bytes) -> bytes:
        """Return the key itself, or the one derived from the passphrase and the salt."""
        if self.kind == WITH_KEY:
            return self._value
        made = self._made.get(salt)
        if made is None:
            # 32 MiB and about 0.2 s, to make guessing the passphrase expensive.
            made = hashlib.scrypt(
                self._value, salt=salt, n=2**15, r=8, p=3, maxmem=2**26, dklen=KEY_BYTES
            )
            self._made[salt] = made
        return made


def _listed(key: Keys | None) -> Sequence[bytes | str]:
    if key is None:
        return ()
    keys = [key] if isinstance(key, bytes | str) else list(key)
    if not keys:
        raise ValueError("no key: pass None for a storage that is not encrypted")
    for number, each in enumerate(keys, 1):
        # No error shows the key.
        if isinstance(each, bytes):
            if len(each) != KEY_BYTES:
                raise ValueError(f"key {number} has {len(each)} bytes: it must have {KEY_BYTES}")
        elif not isinstance(each, str):
            raise TypeError(f"key {number} is of type {type(each).__name__}: pass bytes or str")
        elif len(each) < MIN_PASSPHRASE:
            raise ValueError(
                f"passphrase {number} is too short: it needs {MIN_PASSPHRASE} characters or more"
            )
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
    if kind not in (PLAIN, WITH_KEY, WITH_PASSPHRASE):
        raise _corrupt(names, f"was written by a newer version of Moored (kind {kind})")
    return kind, payload


def _checksum(head: bytes, names: Names, payload: bytes) -> bytes:
    check = blake2b(head, digest_size=CHECKSUM, person=b"moored check")
    check.update(_spelled(names))
    check.update(payload)
    return check.digest()


def _bound(kind: int, names: Names) -> bytes:
    return MAGIC + bytes((kind,)) + _spelled(names)


def _spelled(names: Names) -> bytes:
    """Encode the names as bytes, so that different triples never have the same encoding."""
    parts = [name.encode("utf-8", "surrogatepass") for name in names]
    return b"".join([len(part).to_bytes(4, "big") + part for part in parts])


def _corrupt(names: Names, what: str) -> CorruptRecord:
    # Without profile and key: they may name a recipient.
    return CorruptRecord(f"a record in namespace {names[1]!r} {what}")
