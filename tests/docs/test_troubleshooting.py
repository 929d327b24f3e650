"""The words of errors that the documentation quotes are those of the source."""

from __future__ import annotations

import ast
import re

import pytest

from .pages import ROOT, page

QUOTED = re.findall(r"^\| `([^|]+)` \|", page("operations/troubleshooting"), re.MULTILINE)


def literals(source: str) -> str:
    """Return the strings of a module, one on each line; a filled-in value ends a line."""
    constants = (each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Constant))
    return "\n".join(each.value for each in constants if isinstance(each.value, str))


TEXTS = [literals(path.read_text()) for path in (ROOT / "src" / "moored").rglob("*.py")]


def test_the_page_quotes_errors() -> None:
    assert len(QUOTED) > 40


@pytest.mark.parametrize("quoted", QUOTED)
def test_quoted_words_are_in_one_module(quoted: str) -> None:
    pieces = [piece.strip() for piece in quoted.split("…") if piece.strip()]
    assert pieces
    assert any(all(piece in text for piece in pieces) for text in TEXTS), quoted
