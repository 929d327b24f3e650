"""The types of a database: how their values are loaded, and checked before that.

The loaders are psycopg's, many in C, but for intervals. Types that are not built in are described
by rows of the server's catalog (`OwnType`): a domain is loaded as its base type, an enum as a
string, a composite type as a named tuple, ranges and arrays as psycopg's. Values of types for which
there is no loader are strings in text format, and bytes in binary format. A type that the program
has registered with psycopg globally is loaded as registered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import psycopg
from psycopg import pq
from psycopg.adapt import AdaptersMap, Transformer
from psycopg.types import TypeInfo
from psycopg.types.array import register_array
from psycopg.types.composite import CompositeInfo, register_composite
from psycopg.types.multirange import MultirangeInfo, register_multirange
from psycopg.types.range import RangeInfo, register_range

from ._checks import (
    Check,
    check_array,
    check_multirange,
    check_of,
    check_range,
    check_record,
    text_check_of,
)
from ._loaders import lenient_adapters, strict_adapters

__all__ = ["BUILT_IN", "OwnType", "Types"]

#: The first oid that a server gives to types that are not built in.
FIRST_OWN = 16384
_TEXT = 25


class OwnType(NamedTuple):
    """A type that is not built in, as the server's catalog describes it."""

    oid: int
    name: str
    #: "a" for an array, else pg_type.typtype: b(ase), c(omposite), d(omain), e(num), r(ange), or
    #: m(ultirange).
    kind: str
    #: The base type of a domain, the element type of an array, the subtype of a (multi)range.
    part: int = 0
    #: What separates the elements of an array.
    delimiter: str = ","
    #: The names and types of the fields of a composite type.
    names: tuple[str, ...] = ()
    fields: tuple[int, ...] = ()


class Types:
    """The known types of one database.

    Types are described again for each connection, which may lead to another server.
    """

    def __init__(self) -> None:
        self._own: dict[int, OwnType] = {}
        self._current: set[int] = set()
        strict = strict_adapters()
        self._adapters = strict, lenient_adapters(strict)
        self._loaders: dict[tuple[int, pq.Format, bool], Callable[[bytes], Any]] = {}

    def expire(self) -> None:
        """Let every type count as unknown: the server may be another one."""
        self._current.clear()

    def unknown(self, oids: Iterable[int]) -> set[int]:
        """Return the types that must be described by `add` before their values are read."""
        return {oid for oid in oids if oid >= FIRST_OWN and oid not in self._current}

    def add(self, requested: Collection[int], found: Iterable[OwnType]) -> None:
        """Add types, with those that they are made of; a type that was not found was dropped."""
        own = {each.oid: each for each in found}
        self._current.update(requested, own)
        changed = [each for each in own.values() if self._own.get(each.oid) != each]
        self._own |= own
        self._loaders.clear()
        # Domains last: they are loaded as their base types.
        for each in sorted(changed, key=lambda each: each.kind == "d"):
            if psycopg.adapters.get_loader(each.oid, pq.Format.TEXT) is None:
                for adapters in self._adapters:
                    self._register(each, adapters)

    def _register(self, own: OwnType, adapters: AdaptersMap) -> None:
        match own.kind:
            case "a":
                register_array(
                    TypeInfo(own.name, own.part, own.oid, delimiter=own.delimiter), adapters
                )
            case "c":
                register_composite(_composite(own), adapters)
            case "r":
                register_range(RangeInfo(own.name, own.oid, 0, subtype_oid=own.part), adapters)
            case "m":
                info = MultirangeInfo(own.name, own.oid, 0, range_oid=0, subtype_oid=own.part)
                register_multirange(info, adapters)
            case "d" | "e":
                # Labels may be added to an enum at any time: a class of them would be out of date.
                base = self.base(own.oid) if own.kind == "d" else _TEXT
                for form in pq.Format:
                    if (known := adapters.get_loader(base, form)) is not None:
                        adapters.register_loader(own.oid, known)

    def base(self, oid: int) -> int:
        """Return the base type of a domain, and any other type itself."""
        while (own := self._own.get(oid)) is not None and own.kind == "d":
            oid = own.part
        return oid

    def loader(self, oid: int, form: pq.Format, *, lenient: bool) -> Callable[[bytes], Any]:
        """Return the function that loads the values of a type.

        :param lenient: leave a value that Python cannot represent as it is, instead of raising;
            slower.
        """
        key = oid, form, lenient
        if key not in self._loaders:
            self._loaders[key] = Transformer(self._adapters[lenient]).get_loader(oid, form).load
        return self._loaders[key]

    def adapters(self, *, lenient: bool) -> AdaptersMap:
        """Return the adapters with the loaders of `loader`, to load results of queries."""
        return self._adapters[lenient]

    def check(self, oid: int) -> Check | None:
        """Return the check of a type's binary values, which raises ValueError; None if not needed.

        psycopg's loaders trust their input.
        """
        own = self._own.get(oid)
        match own:
            case None:
                return check_of(oid)
            case OwnType(kind="d"):
                return self.check(own.part)
            case OwnType(kind="a"):
                return partial(check_array, own.part, self.check(own.part))
            case OwnType(kind="c"):
                return partial(check_record, [(each, self.check(each)) for each in own.fields])
            case OwnType(kind="r"):
                return partial(check_range, self.check(own.part))
            case OwnType(kind="m"):
                return partial(check_multirange, partial(check_range, self.check(own.part)))
        return None

    def text_check(self, oid: int) -> Check | None:
        """Return the check of a type's values in text format; None if not needed."""
        own = self._own.get(oid)
        return text_check_of(oid, own.delimiter if own is not None and own.kind == "a" else None)


@cache
def _composite(own: OwnType) -> CompositeInfo:
    """Return psycopg's description; always the same, because psycopg keeps classes for each."""
    return CompositeInfo(own.name, own.oid, 0, field_names=own.names, field_types=own.fields)


#: The built-in types alone.
BUILT_IN = Types()
