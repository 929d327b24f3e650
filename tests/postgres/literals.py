"""Random values of PostgreSQL's types, each as a text that the server reads.

All but xml, which the embedded server is built without.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC
from ipaddress import ip_network

from hypothesis import strategies as st

__all__ = ["OWN_TYPES", "TYPES", "Literals"]

Literals = st.SearchStrategy[str]

# Characters that mean something where texts are written: in arrays, ranges, rows and searches.
_awkward = st.sampled_from(list("\"'\\{}()[],;:& |!*<>= \t\n%é€𝄞"))
_characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
words = st.text(st.one_of(_awkward, _characters), max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)


def whole(bits: int) -> Literals:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).map(str)


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


def hexadecimal(size: int) -> Literals:
    return st.binary(min_size=size, max_size=size).map(lambda data: data.hex(":"))


# -- numbers -------------------------------------------------------------------------------------

numeric = st.one_of(
    st.decimals(allow_nan=False, allow_infinity=True).map(str),
    st.tuples(st.integers(-(10**60), 10**60), st.integers(0, 40)).map(lambda t: f"{t[0]}e-{t[1]}"),
    st.sampled_from(["NaN", "0", "-0.000", "1e100", "1e-100", "9" * 200, "0." + "0" * 90 + "1"]),
)
money = st.integers(-(2**63), 2**63 - 1).map(
    lambda cents: f"{'-' if cents < 0 else ''}{abs(cents) // 100}.{abs(cents) % 100:02d}"
)
lsn = st.tuples(unsigned(32), unsigned(32)).map(lambda t: f"{t[0]:X}/{t[1]:X}")
tid = st.tuples(unsigned(32), unsigned(16)).map(lambda t: f"({t[0]},{t[1]})")
vector = st.lists(st.integers(0, 30_000), max_size=5).map(lambda some: " ".join(map(str, some)))


# -- times ---------------------------------------------------------------------------------------

dates = st.dates().map(str)
times = st.times().map(str)
minutes_from_greenwich = st.integers(-15 * 60, 15 * 60)
timetz = st.tuples(st.times(), minutes_from_greenwich).map(
    lambda t: f"{t[0]}{'-' if t[1] < 0 else '+'}{abs(t[1]) // 60:02d}:{abs(t[1]) % 60:02d}"
)
timestamps = st.datetimes().map(str)
timestamptz = st.datetimes(timezones=st.just(UTC)).map(str)
intervals = st.tuples(
    st.integers(-50_000, 50_000), st.integers(-(10**6), 10**6), st.integers(-(10**15), 10**15)
).map(lambda t: f"{t[0]} months {t[1]} days {t[2]} microseconds")


# -- texts ---------------------------------------------------------------------------------------

char = st.one_of(
    st.characters(min_codepoint=1, max_codepoint=126),
    st.integers(128, 255).map(lambda byte: f"\\{byte:03o}"),
    st.just(""),
)
names = words.filter(lambda word: len(word.encode()) < 64)
bytea = st.binary(max_size=40).map(lambda data: f"\\x{data.hex()}")
leaves = st.one_of(st.none(), st.booleans(), st.integers(), finite, words)
documents = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=5,
).map(lambda value: json.dumps(value, ensure_ascii=False))
jsonpath = st.sampled_from(["$", "$.a[*]", '$."a b" ? (@.c > 1)', "strict $.x.y", "$[0 to 3]"])


# -- searches ------------------------------------------------------------------------------------


def lexeme(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace("'", "''")
    return f"'{escaped}'"


lexemes = words.filter(lambda word: word != "").map(lexeme)
places = st.lists(
    st.tuples(st.integers(1, 16_383), st.sampled_from(["", "A", "B", "C", "D"])), max_size=4
).map(lambda some: ",".join(f"{place}{weight}" for place, weight in some))
tsvector = st.lists(
    st.tuples(lexemes, places).map(lambda t: f"{t[0]}:{t[1]}" if t[1] else t[0]), max_size=5
).map(" ".join)
sought = st.tuples(lexemes, st.sampled_from(["", ":*", ":A", ":*BD", ":ABCD"])).map("".join)
tsquery = st.one_of(
    st.just(""),
    st.recursive(
        sought,
        lambda inner: st.one_of(
            inner.map(lambda query: f"!({query})"),
            st.tuples(inner, st.sampled_from(["&", "|", "<->", "<3>", "<0>"]), inner).map(
                lambda t: f"({t[0]} {t[1]} {t[2]})"
            ),
        ),
        max_leaves=5,
    ),
)


# -- networks, bits, shapes ----------------------------------------------------------------------

addresses = st.ip_addresses()
inet = addresses.flatmap(
    lambda address: st.integers(0, address.max_prefixlen).map(lambda bits: f"{address}/{bits}")
)
networks = inet.map(lambda text: str(ip_network(text, strict=False)))
points = st.tuples(finite, finite).map(lambda t: f"({t[0]!r},{t[1]!r})")
some_points = st.lists(points, min_size=1, max_size=5).map(",".join)
line = st.tuples(finite.filter(lambda a: abs(a) > 1e-5), finite, finite).map(
    lambda t: f"{{{t[0]!r},{t[1]!r},{t[2]!r}}}"
)
circle = st.tuples(points, st.floats(0, 1e300)).map(lambda t: f"<{t[0]},{t[1]!r}>")
path = st.one_of(some_points.map("[{}]".format), some_points.map("({})".format))


# -- things made of others -----------------------------------------------------------------------


def span(of: st.SearchStrategy[str], key: Callable[[str], object]) -> Literals:
    """A range; its bounds are put in order by `key`."""

    def write(parts: tuple[str | None, str | None, str, str]) -> str:
        low, high, left, right = parts
        if low is not None and high is not None and key(low) > key(high):  # type: ignore[operator]
            low, high = high, low
        quoted = ["" if bound is None else f'"{bound}"' for bound in (low, high)]
        return f"{left}{quoted[0]},{quoted[1]}{right}"

    bound = st.one_of(st.none(), of)
    edges = st.tuples(bound, bound, st.sampled_from("[("), st.sampled_from("])")).map(write)
    return st.one_of(st.just("empty"), edges)


def array(of: Literals, delimiter: str = ",", *, size: int = 4) -> Literals:
    """An array, with nulls among its elements."""
    element = st.one_of(st.just("NULL"), of.map(_element))
    return st.lists(element, max_size=size).map(lambda some: f"{{{delimiter.join(some)}}}")


def _element(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def table(of: Literals) -> Literals:
    """An array of two dimensions."""
    element = of.map(_element)
    return st.integers(1, 3).flatmap(
        lambda width: st.lists(
            st.lists(element, min_size=width, max_size=width).map(",".join).map("{{{}}}".format),
            min_size=1,
            max_size=3,
        ).map(lambda rows: f"{{{','.join(rows)}}}")
    )


small = st.integers(-(10**6), 10**6).map(str)
small_range = span(small, int)
uuids = st.uuids().map(str)
bits = st.text("01", min_size=11, max_size=11)

#: By the name of a type what its values may be.
TYPES: dict[str, Literals] = {
    "bool": st.sampled_from(["t", "f"]),
    "int2": whole(16),
    "int4": whole(32),
    "int8": whole(64),
    "float4": st.floats(width=32).map(repr),
    "float8": st.floats().map(repr),
    "numeric": numeric,
    "numeric(10,3)": st.integers(-(10**9), 10**9).map(lambda n: f"{n / 1000:.3f}"),
    "money": money,
    "text": words,
    "varchar(20)": words,
    "bpchar(14)": words,
    '"char"': char,
    "name": names,
    "bytea": bytea,
    "date": dates,
    "time": times,
    "timetz": timetz,
    "timestamp": timestamps,
    "timestamptz": timestamptz,
    "interval": intervals,
    "uuid": uuids,
    "json": documents,
    "jsonb": documents,
    "jsonpath": jsonpath,
    "inet": inet,
    "cidr": networks,
    "macaddr": hexadecimal(6),
    "macaddr8": hexadecimal(8),
    "bit(11)": bits,
    "varbit": st.text("01", max_size=30),
    "point": points,
    "line": line,
    "lseg": st.tuples(points, points).map(lambda t: f"[{t[0]},{t[1]}]"),
    "box": st.tuples(points, points).map(lambda t: f"({t[0]},{t[1]})"),
    "path": path,
    "polygon": some_points.map("({})".format),
    "circle": circle,
    "oid": unsigned(32).map(str),
    "xid": unsigned(32).map(str),
    "xid8": unsigned(64).map(str),
    "tid": tid,
    "pg_lsn": lsn,
    "pg_snapshot": st.sampled_from(["10:20:10,14,15", "7:7:", "1:9223372036854775807:5"]),
    "int2vector": vector,
    "oidvector": vector,
    "tsvector": tsvector,
    "tsquery": tsquery,
    "int4range": small_range,
    "int8range": small_range,
    "numrange": small_range,
    "daterange": span(st.dates().map(str), str),
    "tsrange": span(st.datetimes().map(str), str),
    "tstzrange": span(timestamptz, str),
    "int4multirange": st.lists(small_range, max_size=3).map(lambda some: f"{{{','.join(some)}}}"),
    "datemultirange": st.just('{[2020-01-01,2020-02-01),["2021-01-01",)}'),
    "bool[]": array(st.sampled_from(["t", "f"])),
    "int4[]": array(whole(32)),
    "float8[]": array(st.floats().map(repr)),
    "numeric[]": array(numeric),
    "text[]": array(words),
    "bytea[]": array(bytea),
    "timestamptz[]": array(timestamptz),
    "uuid[]": array(uuids),
    "jsonb[]": array(documents),
    "point[]": array(points),
    "box[]": array(st.just("(1.5,2),(0,-1)"), ";"),
    "tsvector[]": array(tsvector),
    "int4range[]": array(small_range),
    "int4[][]": table(whole(32)),
    "text[][]": table(words),
}

#: Types that are not built in; the stream knows no more of them than their names.
OWN_TYPES: dict[str, Literals] = {
    "mood": st.sampled_from(["happy", "sad", 'so; "so"']),
    "small": st.integers(0, 99).map(str),
    "pair": st.tuples(small, words.map(_element)).map(lambda t: f"({t[0]},{t[1]})"),
    "mood[]": array(st.sampled_from(["happy", "sad"])),
}
