"""The pages about `moored.postgres` agree with the code, and the tutorial runs."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import blocks, page

import moored.postgres
from moored.postgres import Postgres
from moored.postgres.manage._pools import pool_sizes
from moored.postgres.report._health import CONDITIONS, ConnectionState, Health, Persistent
from moored.postgres.report._phases import CHART
from moored.postgres.server._faults import FAULTS, Fault, FaultVerdict

from .conftest import MakePostgres, Sql
from .server import until

MANAGER = page("topics/postgres-manager")
OPERATIONS = page("operations/postgres")
TUTORIAL = page("tutorial/follow-a-table")
SOURCE = Path(moored.postgres.__file__).parent
LIMIT = 30.0


def rows(page: str) -> list[list[str]]:
    """The rows of all tables of a page, cell by cell."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_table_of_moves_is_the_one_of_the_code() -> None:
    assert CHART.text() in blocks(MANAGER, "text")


def test_the_diagram_is_the_one_of_the_code() -> None:
    assert blocks(MANAGER, "mermaid") == [CHART.mermaid()]


def test_every_step_is_explained() -> None:
    explained = {row[0].strip("`") for row in rows(MANAGER)}
    steps = {step for steps in CHART.phases.values() for step in steps}
    assert steps <= explained


def test_the_table_of_errors_is_the_one_of_the_code() -> None:
    def line(fault: Fault) -> str:
        cells = (f"`{fault.type}`", fault.verdict.value, fault.happened, fault.remedy)
        return f"| {' | '.join(cells)} |"

    head, rule = "| type | verdict | what happened | what to do |", "|---|---|---|---|"
    assert "\n".join([head, rule, *map(line, FAULTS), ""]) in MANAGER


@pytest.mark.parametrize("verdict", FaultVerdict, ids=lambda verdict: verdict.name)
def test_every_verdict_is_explained(verdict: FaultVerdict) -> None:
    assert any(row[0] == verdict.value for row in rows(MANAGER))


def test_every_condition_is_listed_in_its_order() -> None:
    listed = [row[0].strip("`") for row in rows(MANAGER)]
    assert [name for name in listed if name in CONDITIONS] == list(CONDITIONS)


@pytest.mark.parametrize("page", [MANAGER, OPERATIONS], ids=["manager", "operations"])
def test_every_health_is_listed_with_its_code(page: str) -> None:
    table = page.partition("| health | HTTP |")[2].partition("\n\n")[0]
    said = {row[0].strip("`"): row[1] for row in rows(table)}
    assert said == {health.value: str(health.http) for health in Health}


@pytest.mark.parametrize("status", [*ConnectionState, *Persistent], ids=str)
def test_every_status_is_listed(status: ConnectionState | Persistent) -> None:
    assert any(row[0] == f"`{status.value}`" for row in rows(MANAGER))


def test_every_event_is_listed() -> None:
    source = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    emitted = set(re.findall(r"(?:_emit\(|Act\.EMIT, )\"(\w+)\"", source))
    listed = {row[0].strip("`") for row in rows(OPERATIONS)}
    assert {"ready", "retained_wal_exceeded"} <= emitted
    assert emitted <= listed


def test_the_sizes_of_the_pools_are_those_of_the_code() -> None:
    table = OPERATIONS.partition("| `pool_size` | admin | snapshot |")[2].partition("\n\n")[0]
    given = [[int(cell.split()[0]) for cell in row] for row in rows(table)]
    assert [total for total, *_ in given] == [1, 2, 20, 100]
    for total, admin, snapshot, altogether in given:
        assert (admin, snapshot) == pool_sizes(total)
        assert altogether == admin + snapshot + 1


async def test_the_tutorial_prints_what_it_says(make: MakePostgres, sql: Sql) -> None:
    program = blocks(TUTORIAL)[0]
    promised = TUTORIAL.partition("the program prints\n\n```\n")[2].partition("```")[0]
    assert len([line for line in program.splitlines() if line]) <= 15
    names: dict[str, Any] = {}
    exec(program.replace("asyncio.run(main())", ""), names)
    made: asyncio.Future[Postgres] = asyncio.get_running_loop().create_future()
    printed: asyncio.Queue[str] = asyncio.Queue()

    def postgres(url: str) -> Postgres:
        made.set_result(make())
        return made.result()

    names["Postgres"] = postgres
    names["print"] = lambda *words: printed.put_nowait(" ".join(map(str, words)))
    await sql.execute("alter table orders rename name to item")
    running = asyncio.create_task(names["main"]())
    pg = await made

    async def is_open() -> bool:
        return pg.is_open

    await until(is_open)
    await pg.wait_until_published("orders", timeout=LIMIT)
    await sql.execute("insert into orders values (1, 'tea')")
    await sql.execute("update orders set item = 'green tea'")
    await sql.execute("delete from orders")
    lines = [await asyncio.wait_for(printed.get(), LIMIT) for _ in range(3)]
    assert lines == promised.splitlines()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
