"""The state of a machine is compared with `at()`, which raises for a name that its chart lacks.

A comparison with a string goes on working after a rename, and is never true.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parent.parent
FILES = [each for folder in ("src", "tests", "examples") for each in (ROOT / folder).rglob("*.py")]


def is_of_a_machine(node: ast.expr) -> bool:
    """Whether this is a phase, a step, or the text of a state: `x.phase`, `str(x.state)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        return any(isinstance(arg, ast.Attribute) and arg.attr == "state" for arg in node.args)
    return isinstance(node, ast.Attribute) and node.attr in ("phase", "step")


def is_text(node: ast.expr) -> bool:
    """Whether this is a string, or a tuple, list or set with one."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(map(is_text, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def compared(source: str) -> Iterator[int]:
    """Yield the line of each comparison of a state with a string."""
    if not re.search(r"\.(phase|step)\b|\.state\)", source):
        return  # parsing takes a hundred times as long
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(is_of_a_machine, sides)) and any(map(is_text, sides)):
                yield node.lineno


def test_no_state_of_a_machine_is_compared_with_a_string() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in compared(path.read_text())
    ]
    assert not found, found


@pytest.mark.parametrize(
    "source",
    [
        'machine.phase == "up"',
        'move.source.step != "waiting"',
        'core.machine.phase in ("connecting", "up")',
        'str(core.machine.state) == "off/refused"',
    ],
)
def test_a_comparison_with_a_string_is_found(source: str) -> None:
    assert list(compared(source)) == [1]
    assert not list(compared('core.machine.at("up") and self._phase == "open"'))
