"""File names for any text, and back.

Names come from users and from the network: they may hold slashes, be "..", be longer than a file
system takes, or differ from each other in their case alone. So a file's name has nothing in it but
`a-z 0-9 _ - %`; every other byte is written as `%` and two digits, a capital letter too, and what
gets too long is cut and ends with `~` and a hash. Such a name does not tell the whole text: the
text is in a file beside it.
"""

from __future__ import annotations

import re
from hashlib import blake2b

__all__ = ["from_file_name", "is_cut", "to_file_name"]

#: Every file system takes 255 bytes.
MAX_NAME = 160
KEPT = 80

_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
_SPELLING = [chr(byte) if byte in _SAFE else f"%{byte:02x}" for byte in range(256)]
_WHOLE = re.compile(r"(?:[a-z0-9_-]|%[0-9a-f]{2})+")


def to_file_name(text: str) -> str:
    """The file name that stands for a text; no two texts have the same."""
    raw = text.encode("utf-8", "surrogatepass")
    # A name of no letters at all would be the directory itself; a lone % stands for nothing else.
    name = "".join([_SPELLING[byte] for byte in raw]) or "%"
    if len(name) <= MAX_NAME:
        return name
    return f"{name[:KEPT]}~{blake2b(raw, digest_size=20).hexdigest()}"


def is_cut(name: str) -> bool:
    """Whether the text cannot be had from the name."""
    return "~" in name


def from_file_name(name: str) -> str | None:
    """The text that an uncut file name stands for; None for a file that is not one of ours."""
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
