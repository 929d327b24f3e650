"""Code that reads the rows of one table, written for that table.

Reading rows is most of what a consumer costs, and most of that is not the loading of values but
what Python does in between: loops, lists, a dict from two sequences. Written out for the columns of
one table, without any of that, it takes half the time.

What is written knows the usual row only: every value null or of the form that was seen before, all
of them such that Python can hold them. Anything else is left to the one that reads every row, and
says what is wrong with it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["MOST_COLUMNS", "ColumnRecipe", "row_reader", "whole_reader"]

#: For more columns than this the code would be too long to be worth it.
MOST_COLUMNS = 300

_size = struct.Struct("!I").unpack_from
_head = struct.Struct("!BI").pack
_NULL = ord("n")


class _Unusual(Exception):
    """A row that the written code does not know."""


class ColumnRecipe(NamedTuple):
    """How the values of one column are read."""

    name: str
    #: The kind of a value that is not null.
    kind: int
    #: How many bytes it has, if that is always the same.
    size: int | None
    load: Callable[[bytes], Any]
    #: Raises if the bytes must not be given to `load`.
    check: Callable[[bytes], None] | None


def whole_reader(recipes: Sequence[ColumnRecipe], otherwise: Callable[[bytes, int], Any]) -> Any:
    """Reads a new row ("N" and the values) that goes to the end of its message.

    It takes the message and where the row begins, and returns the row. What it does not know, and
    what is wrong, it passes to `otherwise`.
    """
    start = b"N" + len(recipes).to_bytes(2)
    return _written(recipes, otherwise, start, f"if at != len(data): {_UNUSUAL}")


def row_reader(recipes: Sequence[ColumnRecipe], otherwise: Callable[[bytes, int], Any]) -> Any:
    """Reads a row that may have something after it; returns the row, and where it ends."""
    start = len(recipes).to_bytes(2)
    return _written(recipes, otherwise, start, f"if at > len(data): {_UNUSUAL}", ", at")


def _written(
    recipes: Sequence[ColumnRecipe],
    otherwise: Callable[[bytes, int], Any],
    start: bytes,
    check_end: str,
    more: str = "",
) -> Any:
    names: dict[str, Any] = {"size_of": _size, "otherwise": otherwise, "Unusual": _Unusual}
    lines = [f"at = begin + {len(start)}", f"if data[begin:at] != {start!r}: {_UNUSUAL}"]
    values = []
    for place, recipe in enumerate(recipes):
        lines += _cut(place, recipe)
        names[f"load_{place}"] = recipe.load
        values.append(f"{recipe.name!r}: None if v{place} is None else load_{place}(v{place})")
    # Only then, when every value is known to lie within the message, they are looked at.
    lines.append(check_end)
    for place, recipe in enumerate(recipes):
        if recipe.check is not None:
            names[f"check_{place}"] = recipe.check
            lines.append(f"if v{place} is not None: check_{place}(v{place})")
    lines.append(f"return {{{', '.join(values)}}}{more}")
    body = "\n".join(f"        {line}" for line in lines)
    source = f"""def read(data, begin):
    try:
{body}
    except Exception:
        pass
    return otherwise(data, begin)
"""
    exec(source, names)
    return names["read"]


_UNUSUAL = "raise Unusual"


def _cut(place: int, recipe: ColumnRecipe) -> list[str]:
    """What finds the bytes of one value."""
    if recipe.size is not None:
        head = _head(recipe.kind, recipe.size)
        return [
            "v = at + 5",
            f"if data[at:v] == {head!r}: at = v + {recipe.size}; v{place} = data[v:at]",
            f"elif data[at] == {_NULL}: v{place} = None; at += 1",
            f"else: {_UNUSUAL}",
        ]
    return [
        "kind = data[at]",
        f"if kind == {recipe.kind}:",
        f"    v = at + 5; at = v + size_of(data, at + 1)[0]; v{place} = data[v:at]",
        f"elif kind == {_NULL}: v{place} = None; at += 1",
        f"else: {_UNUSUAL}",
    ]
