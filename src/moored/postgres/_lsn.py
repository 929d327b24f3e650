"""LSNs: positions in the write-ahead log, written as PostgreSQL writes them."""

from __future__ import annotations

import re
from typing import Self

__all__ = ["LAST", "Lsn"]

_FORM = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")
#: The greatest LSN.
LAST = 2**64 - 1


class Lsn(int):
    """A position in the write-ahead log: an int that reads like `16/B374D848`."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an LSN as PostgreSQL writes it."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not a valid LSN (expected e.g. 16/B374D848)")
        return cls(int(found[1], 16) << 32 | int(found[2], 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn({str(self)!r})"
