"""The public names of `moored.testing`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import moored.testing as testing

pytestmark = pytest.mark.pure


def test_every_public_name_exists_and_has_a_docstring() -> None:
    for name in testing.__all__:
        assert getattr(testing, name) is not None
        if name != "Scenario":  # a type alias has no docstring
            assert getattr(testing, name).__doc__
    assert set(testing.__all__) <= set(dir(testing))


def test_names_for_type_checkers_are_those_imported_on_first_use() -> None:
    tree = ast.parse(Path(testing.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == testing._HOME
    assert set(typed) == set(testing.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'simulator'"):
        testing.simulator  # noqa: B018
