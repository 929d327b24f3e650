"""How `make conformance` compares two runs of another project's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.conformance import PROJECTS, counted, differences, mistake, read

pytestmark = pytest.mark.pure


def test_outcome_of_a_test_is_its_worst_one() -> None:
    lines = '["a", "passed"]\n["b", "skipped"]\n["a", "failed"]\n["a", "passed"]\n'
    assert read(lines) == {"a": "failed", "b": "skipped"}
    assert counted(read(lines)) == "0 passed, 1 failed, 1 skipped"


def test_every_test_that_differs_is_named() -> None:
    before = {"a": "passed", "b": "passed", "c": "failed", "d": "skipped"}
    after = {"a": "passed", "b": "failed", "c": "failed", "e": "passed"}
    assert list(differences(before, after)) == [
        ("b", "passed", "failed"),
        ("d", "skipped", "not run"),
        ("e", "not run", "passed"),
    ]


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    assert mistake({}) == (
        "give at least one checkout: make conformance DJANGO=… PROCRASTINATE=… LANGGRAPH=…"
    )
    (tmp_path / PROJECTS["django"].folder).mkdir()
    assert mistake({"django": tmp_path}) == ""
    assert "is not a checkout of langgraph" in mistake({"langgraph": tmp_path})
