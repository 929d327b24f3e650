"""A consumer process that is killed: nothing is missed; repeats only if the cursor is separate."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from tests.programs import Program
from tests.soaking import some_of

from moored.postgres.outbox import Outbox
from moored.testing import base_seed, scaled

from .conftest import Sql

_PROGRAM = Path(__file__).with_name("consumer_program.py")


@pytest.mark.parametrize("way", some_of(["after", "with"], "with"))
async def test_a_killed_consumer_misses_nothing(
    url: str, sql: Sql, outbox: Outbox, way: str
) -> None:
    chance = random.Random(base_seed())
    kills = scaled(20, least=1)
    expected = [f"{number}" for number in range(100 * kills)]
    await sql.execute("create table effects (way text, payload text)")
    await sql.execute("create index on effects (payload)")

    async def effects() -> int:
        query = "select count(distinct payload) from effects"
        row = await (await sql.execute(query.encode())).fetchone()
        assert row is not None
        return int(row[0])

    async def at_least(wanted: int) -> None:
        async with asyncio.timeout(120.0):
            while await effects() < wanted:  # noqa: ASYNC110 - another process makes them
                await asyncio.sleep(0.02)

    for number in range(kills + 1):
        with Program(str(_PROGRAM), url, way) as program:
            try:
                before = await effects()
                for payload in expected[100 * number : 100 * number + 100]:
                    await outbox.publish(sql, "orders", payload)
                if number == kills:
                    await at_least(len(expected))
                else:
                    await at_least(before + 20)
                    await asyncio.sleep(chance.uniform(0, 0.05))
                assert program.returncode is None, "the program has failed"
            finally:
                program.kill()
    rows = await (await sql.execute("select payload from effects order by ctid")).fetchall()
    found = [payload for (payload,) in rows]
    assert list(dict.fromkeys(found)) == expected, "in order"
    if way == "with":
        assert found == expected, "each effect is made once"
