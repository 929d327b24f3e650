"""The timeline of `moored top`: its bars, numbers and times, as text."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from moored.cli._timeline import SPAN, Timeline

pytestmark = pytest.mark.pure

NOW = 1_800_000_000.0
LANES = [["server", "db", "load"], ["grpc-server"]]


def state(up: float, *outages: dict[str, Any], **states: str) -> dict[str, Any]:
    nodes = {node: {"state": "works", "fact": ""} for group in LANES for node in group}
    nodes |= {node: {"state": each, "fact": ""} for node, each in states.items()}
    return {"started_at": NOW - up, "uptime": up, "nodes": nodes, "outages": list(outages)}


def outage(number: int, begin: float, ended: float | None, **parts: str) -> dict[str, Any]:
    """An outage that began and ended so many seconds ago."""
    end = None if ended is None else NOW - ended
    return {
        "id": number,
        "sign_of_life": NOW - begin,
        "ended": end,
        "parts": {node: [[NOW - begin, end, each]] for node, each in parts.items()},
    }


def lines(
    width: int, up: float, *outages: dict[str, Any], lanes: Any = LANES, **states: str
) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(Timeline(state(up, *outages, **states), lanes))
    return capture.get().splitlines()


#: A minute has four columns: 60, and 14 for the names.
WIDTH = 74


def test_a_part_without_an_outage_is_a_thin_line_from_the_start_of_the_process_on() -> None:
    head, server, *_, grpc, times = lines(WIDTH, 450.0)
    assert head.strip() == ""
    assert server == "  server      " + "·" * 30 + "─" * 30
    assert grpc == "  grpc-server " + "·" * 30 + "─" * 30
    assert times.endswith("now")


def test_the_root_is_solid_those_that_wait_are_hollow_and_bystanders_have_no_bar() -> None:
    past = outage(7, 600.0, 540.0, server="down", db="waits", load="waits")
    head, server, db, load, grpc, _ = lines(WIDTH, 2 * SPAN, past)
    assert head == " " * 36 + "7"
    assert server == "  server      " + "─" * 20 + "█" * 5 + "─" * 35
    assert db[14:] == load[14:] == "─" * 20 + "░" * 5 + "─" * 35
    assert "█" not in grpc
    assert "░" not in grpc


def test_a_short_outage_has_a_column_and_an_open_one_ends_now() -> None:
    short = outage(1, 300.0, 299.9, load="degraded")
    long = outage(2, 30.0, None, server="down", db="waits")
    _, server, db, load, *_ = lines(WIDTH, SPAN, long, short, server="down", db="waits")
    assert server == "█ server      " + "─" * 58 + "█" * 2
    assert db.startswith("░ db ")
    assert load == "  load        " + "─" * 40 + "▒" + "─" * 19


def test_the_worst_state_of_a_column_is_shown_and_numbers_that_touch_give_way() -> None:
    first = outage(1, 302.0, 301.0, server="degraded")
    second = outage(2, 300.0, 299.0, server="down")
    head, server, *_ = lines(WIDTH, SPAN, second, first)
    assert head.split() == ["2"]
    assert server.count("█") == 1


def test_of_many_parts_those_with_an_outage_are_shown_and_the_others_are_counted() -> None:
    names = [f"part-{number}" for number in range(40)]
    found = lines(
        WIDTH, SPAN, outage(1, 10.0, 5.0, **{"part-3": "down"}), lanes=[names],
        **dict.fromkeys(names, "works"),
    )  # fmt: skip
    assert [line.split()[0] for line in found[1:-1]] == ["part-3", "39"]
    assert found[-2] == "  39 other parts without an outage"


def test_what_is_not_watched_has_no_row_and_an_outage_before_the_span_no_bar() -> None:
    old = outage(1, 2 * SPAN, 2 * SPAN - 5, server="down")
    found = lines(WIDTH, 3 * SPAN, old, load="unknown")
    assert not any("load" in line or "█" in line for line in found)


def test_a_window_that_is_too_narrow_has_no_timeline() -> None:
    assert lines(30, SPAN) == []
