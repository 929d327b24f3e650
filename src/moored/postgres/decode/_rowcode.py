"""Generate code that reads the rows of one table.

Decoding rows is most of the cost of a consumer, and most of that is not the loading of values but
Python's overhead: loops, lists, a dict from two sequences. Code that is generated for the columns
of one table has none of that, and takes half the time.

The generated code handles only usual rows: each value is null, unchanged or has the format that was
seen before, and Python can represent it. Any other row is passed to the general reader, which
handles every row and reports errors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

__all__ = ["MOST_COLUMNS", "UNCHANGED", "ColumnRecipe", "row_reader", "whole_reader"]

#: For more columns than this, the generated code would be too long to pay off.
MOST_COLUMNS = 300

_size = struct.Struct("!I").unpack_from
_head = struct.Struct("!BI").pack
_NULL, _UNCHANGED = b"nu"


class Unchanged(Enum):
    """The value of a large column that an update did not change: PostgreSQL does not send it."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = Unchanged.UNCHANGED


class _Unusual(Exception):
    """Raised within generated code for a row that it cannot handle."""


class ColumnRecipe(NamedTuple):
    """How the values of a column are read."""

    name: str
    #: The kind byte of a value that is not null.
    kind: int
    #: The size of a value in bytes, if it is fixed.
    size: int | None
    #: None for a column that is skipped.
    load: Callable[[bytes], Any] | None
    #: Raises if the bytes are not valid for `load`.
    check: Callable[[bytes], None] | None


def whole_reader(recipes: Sequence[ColumnRecipe], otherwise: Callable[[bytes, int], Any]) -> Any:
    """Generate a reader of a new row ("N" and the values) that ends with its message.

    The reader takes the message and the offset of the row, and returns the row. Unusual and invalid
    rows are passed to `otherwise`. It stops after the last column that is not skipped.
    """
    start = b"N" + len(recipes).to_bytes(2)
    used = list(recipes)
    while used and used[-1].load is None:
        used.pop()
    differs = "!=" if len(used) == len(recipes) else ">"
    return _generate(used, otherwise, start, f"if at {differs} len(data): {_UNUSUAL}")


def row_reader(recipes: Sequence[ColumnRecipe], otherwise: Callable[[bytes, int], Any]) -> Any:
    """Generate a reader of a row that may not be the last; it returns the row and its end."""
    start = len(recipes).to_bytes(2)
    return _generate(recipes, otherwise, start, f"if at > len(data): {_UNUSUAL}", ", at")


def _generate(
    recipes: Sequence[ColumnRecipe],
    otherwise: Callable[[bytes, int], Any],
    start: bytes,
    check_end: str,
    more: str = "",
) -> Any:
    names: dict[str, Any] = {"size_of": _size, "otherwise": otherwise}
    names |= {"Unusual": _Unusual, "UNCHANGED": UNCHANGED}
    lines = [
        f"at = begin + {len(start)}; unsent = ()",
        f"if data[begin:at] != {start!r}: {_UNUSUAL}",
    ]
    values = []
    for place, recipe in enumerate(recipes):
        lines += _cut(place, recipe)
        if recipe.load is None:
            continue
        names[f"load_{place}"] = recipe.load
        values.append(f"{recipe.name!r}: None if v{place} is None else load_{place}(v{place})")
    # Check and load values only when all of them are known to lie within the message.
    lines.append(check_end)
    for place, recipe in enumerate(recipes):
        if recipe.check is not None:
            names[f"check_{place}"] = recipe.check
            lines.append(f"if v{place} is not None: check_{place}(v{place})")
    lines += [
        f"row = {{{', '.join(values)}}}",
        "if unsent: row.update(dict.fromkeys(unsent, UNCHANGED))",
        f"return row{more}",
    ]
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
    """Generate the lines that find the bytes of one value, or skip it."""
    if recipe.load is None:
        return [
            "kind = data[at]",
            f"if kind == {recipe.kind}: at += 5 + size_of(data, at + 1)[0]",
            f"elif kind == {_NULL} or kind == {_UNCHANGED}: at += 1",
            f"else: {_UNUSUAL}",
        ]
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
        f"elif kind == {_UNCHANGED}: v{place} = None; at += 1; unsent += ({recipe.name!r},)",
        f"else: {_UNUSUAL}",
    ]
