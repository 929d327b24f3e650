"""The messages of a transaction: in memory while it is small, in a file when it is large."""

from __future__ import annotations

import os
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import cast

from .._errors import StateError
from ._rows import Relation

__all__ = ["HEADER", "SPILL_AFTER", "TRUNCATE", "Body", "Shelf"]

#: The length of the XLogData header. Messages are kept with it: removing it would be another copy.
HEADER = 25

#: A transaction with more bytes than this is written to a file.
SPILL_AFTER = 16 * 2**20
#: So many messages are counted at once: more would hold the event loop.
_COUNTED = 5000
#: The size of reads and writes of the file.
_CHUNK = 2**20
_head = struct.Struct("!i")
#: The kind of a message; the kind with the bytes that identify its table.
_KIND, _KEY = slice(HEADER, HEADER + 1), slice(HEADER, HEADER + 5)
_key_of = itemgetter(_KEY)
TRUNCATE = b"T"


@dataclass(slots=True)
class Shelf:
    """Where large transactions are stored, and from which size on."""

    #: The directory of the files; the system's temporary directory if None.
    directory: Path | None = None
    spill_after: int = SPILL_AFTER


_DEFAULT = Shelf()


class Body:
    """The messages of a transaction in their order, with the descriptions of their tables.

    It may be read several times, also by several readers concurrently. Its file is deleted with the
    last reference.
    """

    __slots__ = (
        "_counted",
        "_kept",
        "_mentioned",
        "count",
        "described",
        "shelf",
        "size",
        "spilled",
    )

    def __init__(self, shelf: Shelf = _DEFAULT) -> None:
        self.shelf = shelf
        self._kept: list[bytes | Relation] = []
        # How often each kind and table was mentioned, but for the last messages that are kept.
        self._mentioned: Counter[bytes] = Counter()
        self._counted = 0
        #: The file with the first messages; None while all are in memory.
        self.spilled: _Spilled | None = None
        #: The tables that were described within the transaction.
        self.described: tuple[Relation, ...] = ()
        #: The number of changes, and the bytes of their messages.
        self.count = 0
        self.size = 0

    def append(self, data: bytes) -> None:
        """Add the message of a change."""
        self.extend([data])

    def extend(self, messages: list[bytes]) -> None:
        """Add the messages of changes."""
        self.count += len(messages)
        self.size += sum(map(len, messages))
        self._kept += messages
        if len(self._kept) - self._counted >= _COUNTED:
            self._count()
        if self.size > self.shelf.spill_after:
            self._spill(2 * len(messages))

    def mentioned(self) -> Mapping[bytes, int]:
        """Count the messages by their kind and the four bytes after it, for a row the table's oid.

        Most were counted when they were added; several threads may call it.
        """
        return self._mentioned + Counter(map(_key_of, self._messages(self._counted)))

    def _count(self) -> None:
        self._mentioned.update(map(_key_of, self._messages(self._counted)))
        self._counted = len(self._kept)

    def truncates(self) -> list[bytes]:
        """Return the truncate messages."""
        kept = [entry for entry in self._messages(0) if entry[_KIND] == TRUNCATE]
        return kept if self.spilled is None else self.spilled.truncates + kept

    def _messages(self, first: int) -> list[bytes]:
        """Return the messages that are kept in memory, from a place on."""
        kept = self._kept[first:]
        # Descriptions of tables are kept among the messages, rarely.
        return cast(
            "list[bytes]", [e for e in kept if type(e) is bytes] if self.described else kept
        )

    def describe(self, relation: Relation) -> None:
        """Add the description of a table, which applies to the messages after it."""
        self.described = (*self.described, relation)
        self._kept.append(relation)

    def entries(self) -> Iterator[bytes | Relation]:
        """Iterate over the messages and the descriptions of tables, from the beginning."""
        kept = iter(self._kept)
        return kept if self.spilled is None else chain(self.spilled.read(), kept)

    def _spill(self, number: int) -> None:
        """Write so many messages, the first ones: all at once would hold the event loop."""
        if self.spilled is None:
            self.spilled = _Spilled(self.shelf.directory)
        self._count()
        self.spilled.gather(self._kept[:number])
        self._kept = self._kept[number:]  # a reader may have begun
        self._counted = len(self._kept)


class _Spilled:
    """Messages in an unnamed file, which vanishes with the process, however that ends."""

    def __init__(self, directory: Path | None) -> None:
        self._file: int | None = None
        self._relations: list[Relation] = []
        self._gathered = bytearray()
        self.truncates: list[bytes] = []
        # Readers in several threads may have to write the rest first.
        self._writing = threading.Lock()
        self._directory = directory or Path(tempfile.gettempdir())
        with self._errors():
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file, path = tempfile.mkstemp(prefix="transaction-", dir=self._directory)
            os.unlink(path)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise an `OSError` as a `StateError` that names the directory."""
        try:
            yield
        except OSError as error:
            raise StateError(
                f"a large transaction cannot be stored in {self._directory} "
                f"({error.strerror or error}): free disk space there, or set another state_dir"
            ) from error

    def gather(self, entries: list[bytes | Relation]) -> None:
        """Add entries; they are written when a chunk is full."""
        for entry in entries:
            if isinstance(entry, Relation):
                self._relations.append(entry)
                self._gathered += _head.pack(-len(self._relations))
            else:
                if entry[_KIND] == TRUNCATE:
                    self.truncates.append(entry)
                self._gathered += _head.pack(len(entry))
                if len(entry) > _CHUNK:
                    self._write()
                    self._write_all(entry)
                    continue
                self._gathered += entry
            if len(self._gathered) > _CHUNK:
                self._write()

    def read(self) -> Iterator[bytes | Relation]:
        """Yield all entries, from the beginning."""
        self._write()
        assert self._file is not None
        rest, offset = b"", 0
        while chunk := os.pread(self._file, _CHUNK, offset):
            offset += len(chunk)
            data, at = rest + chunk, 0
            while len(data) - at >= _head.size:
                (size,) = _head.unpack_from(data, at)
                begin = at + _head.size
                if size < 0:
                    yield self._relations[-size - 1]
                    at = begin
                elif begin + size <= len(data):
                    yield data[begin : begin + size]
                    at = begin + size
                elif size > _CHUNK:
                    # Read a large message by itself, without a copy.
                    offset += begin - len(data)
                    yield os.pread(self._file, size, offset)
                    offset += size
                    data, at = b"", 0
                else:
                    break
            rest = data[at:]

    def _write(self) -> None:
        with self._writing:
            self._write_all(self._gathered)
            self._gathered = bytearray()

    def _write_all(self, data: bytes | bytearray) -> None:
        assert self._file is not None
        with self._errors(), memoryview(data) as view:
            done = 0
            while done < len(view):
                done += os.write(self._file, view[done:])

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)
