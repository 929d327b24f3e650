"""Check that the state of an rpc endpoint stays in one object: `make lint` runs it.

It counts, in `moored.rpc`, where code changes an attribute of another object, and where it reads a
private one. The first must not happen: an object has methods for that. The second is allowed a few
times, where the other object is a dependency's, or a second class of the same kind.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["found_in", "main"]

PACKAGE = Path(__file__).parents[1] / "src" / "moored" / "rpc"
#: How many private reads are allowed in all.
READS = 30
OWN = ("self", "cls")


def found_in(tree: ast.AST) -> Iterator[tuple[str, ast.Attribute]]:
    """Yield each change of another object's attribute, and each read of a private one."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or _is_own(node.value):
            continue
        if not isinstance(node.ctx, ast.Load):
            if not _is_plain(node):
                yield "change", node
        elif node.attr.startswith("_") and not node.attr.endswith("__"):
            yield "read", node


def _is_plain(node: ast.Attribute) -> bool:
    """Whether it is a number of the record of counters, or what has no method to change it."""
    count = isinstance(node.value, ast.Attribute) and node.value.attr == "counters"
    return count or node.attr in ("__cause__", "atexit", "_channel")


def _is_own(value: ast.expr) -> bool:
    base = isinstance(value, ast.Call) and ast.unparse(value.func) == "super"
    return base or (isinstance(value, ast.Name) and value.id in OWN)


def main() -> None:
    """Print what was found, and fail if it is too much."""
    found: dict[str, list[str]] = {"change": [], "read": []}
    for path in sorted(PACKAGE.rglob("*.py")):
        for kind, node in found_in(ast.parse(path.read_text())):
            found[kind].append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    if found["change"] or len(found["read"]) > READS:
        for kind, places in found.items():
            print(f"{kind}:", *places, sep="\n  ")
        sys.exit(
            f"moored.rpc changes {len(found['change'])} attributes of other objects (none is "
            f"allowed), and reads {len(found['read'])} private ones (at most {READS}): give the "
            "other object a method"
        )
    print(f"moored.rpc: no foreign changes, {len(found['read'])} private reads")


if __name__ == "__main__":
    main()
