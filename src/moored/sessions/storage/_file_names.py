"""File names for any string, and back.

Names come from users and from the network: they may contain slashes, be "..", be longer than a file
system allows, or differ only in case. So a file name consists of `a-z 0-9 _ - %`; every other byte,
also a capital letter, is written as `%` and two digits. A name that gets too long is refused.
"""

from __future__ import annotations

import re

from .._errors import StorageError

__all__ = ["from_file_name", "to_file_name"]

#: Every file system allows 255 bytes.
MAX_NAME = 255

_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
_SPELLING = [chr(byte) if byte in _SAFE else f"%{byte:02x}" for byte in range(256)]
_WHOLE = re.compile(r"(?:[a-z0-9_-]|%[0-9a-f]{2})+")


def to_file_name(text: str) -> str:
    """Return the file name for a string; no two strings have the same.

    Raises `StorageError` if it is too long for a file system.
    """
    raw = text.encode("utf-8", "surrogatepass")
    # An empty name would be the directory itself; a lone % occurs nowhere else.
    name = "".join([_SPELLING[byte] for byte in raw]) or "%"
    if len(name) > MAX_NAME:
        # Without the name, which may be a recipient's.
        raise StorageError(
            f"a name needs {len(name)} characters as a file name, and may have {MAX_NAME}: "
            "use a SQLite database for such names"
        )
    return name


def from_file_name(name: str) -> str | None:
    """Return the string of a file name; None if the name was not made by `to_file_name`."""
    if name == "%":
        return ""
    if not _WHOLE.fullmatch(name):
        return None
    raw = re.sub(rb"%(..)", lambda found: bytes((int(found[1], 16),)), name.encode())
    try:
        text = raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    return text if to_file_name(text) == name else None
