"""What the commands print of the state of a service."""

from __future__ import annotations

import pytest

from moored.cli import _show

pytestmark = pytest.mark.pure


def test_an_outage_has_one_length_and_names_its_root_and_those_that_waited() -> None:
    outage = {
        "id": 7,
        "root": "server",
        "what": "PostgreSQL did not answer",
        "parts": {"server": "down", "db": "waits", "search": "waits"},
        "sign_of_life": 1000.0,
        "ended": 1025.1,
        "lasted": 25.1,
        "why": "Connections stay open but nothing arrives.",
        "cost": {"callers waited": 1, "messages not sent": 3},
        "cost_words": "1 caller waited, 3 messages not sent",
    }
    first, *rest = [str(line) for line in _show.outages([outage])]
    assert first.startswith("  7   ")
    assert "  PostgreSQL did not answer, for 25.1 s, until " in first
    assert rest == [
        "    because  Connections stay open but nothing arrives.",
        "    with it  db, search",
        "    cost     1 caller waited, 3 messages not sent",
    ]
    alone = {
        **outage,
        "parts": {"server": "down"},
        "cost": {},
        "why": "",
        "ended": None,
        "lasted": 15.24,
    }
    (only,) = [str(line) for line in _show.outages([alone])]
    assert only.endswith("  PostgreSQL did not answer, for 15.2 s, until now")
