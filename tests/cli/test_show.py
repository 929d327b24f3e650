"""What the commands print of the state of a service."""

from __future__ import annotations

import pytest

from moored.cli import _show

pytestmark = pytest.mark.pure


def test_an_incident_says_how_long_each_part_and_how_long_all_did_not_work() -> None:
    incident = {
        "parts": {"db": "starting", "search": "degraded"},
        "wall": 0.0,
        "lasted": 8.2,
        "lasted_of": {"db": 2.8, "search": 8.2},
        "because": ["db: no route"],
        "cost": {"callers waited": 1, "messages not sent": 3},
    }
    first, *rest = [str(line) for line in _show.outages([incident])]
    assert first.startswith("  db (2.8 s), search (8.2 s) did not work from ")
    assert first.endswith(" on, for 8.2 s, until all worked again")
    assert rest == [
        "    because  db: no route",
        "    cost     1 caller waited, 3 messages not sent",
    ]
    alone = {**incident, "parts": {"db": "degraded"}, "lasted_of": {"db": 8.2}, "cost": {}}
    (only, _) = [str(line) for line in _show.outages([alone])]
    assert only.startswith("  db was degraded from ")
    assert only.endswith(" on, for 8.2 s")
