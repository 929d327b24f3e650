"""Write the table of figures in README.md from benchmarks/results.json, which `make bench` renews.

`python tools/figures.py` writes it; a test checks that the two files agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: written by tools/figures.py -->\n", "<!-- end of the figures -->\n"

#: What is measured, the benchmark, and the cells of Moored and of its peers.
ROWS = (
    (
        "check out a pooled connection, asyncio",
        "pool",
        "{async_uncontended_vs_psycopg_pool} times as fast",
        "psycopg_pool",
    ),
    ("the same, threads", "pool", "{threads_vs_psycopg_pool} times as fast", "psycopg_pool"),
    (
        "a checkout with `SELECT 1` in SQLAlchemy",
        "pool",
        "{sqlalchemy_select1_vs_queuepool} times as fast",
        "QueuePool",
    ),
    (
        "50 connections expire at once, 20 new ones per second: errors of callers",
        "herd",
        "{errors}",
        "psycopg_pool {psycopg_pool_errors}, asyncpg {asyncpg_errors}, "
        "SQLAlchemy {sqlalchemy_errors}",
    ),
    (
        "changes of 100 rows per transaction, decoded and acknowledged",
        "replication",
        "{consumer_vs_pg_recvlogical_100} times as fast",
        "pg_recvlogical, which only writes the bytes",
    ),
    (
        "copy a table as rows",
        "snapshot",
        "{snapshot_rows_vs_asyncpg_cursor} times as fast",
        "a cursor of asyncpg",
    ),
    (
        "copy a table as bytes",
        "snapshot",
        "{snapshot_vs_psql_copy} times as fast",
        "`\\copy` of psql",
    ),
    (
        "events missed while the listening connections are killed",
        "outbox",
        "{missed}",
        "LISTEN and reconnect {bare_missed}, a cursor on an id {id_cursor_missed}",
    ),
    (
        "CPU time to deliver an event to a browser",
        "fanout",
        "{cpu_us_per_delivery_vs_sse_starlette} times as much",
        "sse-starlette",
    ),
    (
        "first successful call after a server restart",
        "rpc_recovery",
        "{first_call_ms_p50} ms",
        "PyMilvus {pymilvus_first_call_ms_p50} ms",
    ),
    (
        "connects after an outage, with 20 callers",
        "rpc_recovery",
        "{connects_per_outage_threads}",
        "PyMilvus {pymilvus_connects_per_outage_threads}",
    ),
    (
        "confirmed sends over MQTT",
        "session_send",
        "{sends_vs_aiomqtt} times as fast",
        "aiomqtt",
    ),
    (
        "a pending send learns that its link was lost after",
        "session_loss",
        "{resolve_ms_p50} ms",
        "aiomqtt {aiomqtt_resolve_ms_p50} ms: its timeout of 3 s",
    ),
)


def cell(figure: Mapping[str, Any]) -> str:
    """Return a figure with two significant digits, or as a whole number."""
    value = figure["value"]
    whole = value >= 10 or value == int(value)
    part = f" {figure['unit']}" if figure["unit"].startswith("of ") else ""
    return (f"{value:,.0f}" if whole else f"{value:.2g}") + part


def table() -> str:
    """Return the table of the stored results."""
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    lines = ["| | Moored | compared with |", "|---|---|---|"]
    used = []
    for what, benchmark, ours, peers in ROWS:
        if benchmark in results:
            used.append(results[benchmark])
            figures = results[benchmark]["figures"]
            shown = {name: cell(figure) for name, figure in figures.items()}
            lines.append(f"| {what} | {ours.format(**shown)} | {peers.format(**shown)} |")
    lines += ["", *conditions(used)]
    return "\n".join(lines) + "\n"


def conditions(used: list[dict[str, Any]]) -> list[str]:
    """Return how the figures were measured, as far as it was recorded."""
    date = max(each["date"] for each in used)
    short = sum(each["quick"] for each in used)
    loads = [each["load"] for each in used if each["load"] is not None]
    unknown = len(used) - len(loads)
    load = f"{min(loads):.0f} to {max(loads):.0f}" if loads else "not recorded"
    runs = f"{short} of {len(used)} rows come from short runs (`--quick`), the rest from full ones"
    if short in (0, len(used)):
        runs = f"all rows come from {'short runs (`--quick`)' if short else 'full runs'}"
    return [
        f"Last measured on {date}; {runs}.",
        f"The load of the machine was {load}"
        + (f" (not recorded for {unknown} of the rows)" if unknown and loads else "")
        + "; if it was busy,",
        "the figures are unreliable. Each is a median, a speed that of the ratios of paired runs.",
    ]


def written(text: str) -> str:
    """Return the text of README with the table of the stored results."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
