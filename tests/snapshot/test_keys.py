"""With a condition, changed rows are found by keys of any type, in either format."""

from __future__ import annotations

import pytest
from tests.postgres.conftest import MakePostgres, Sql

from .orders import copied, item_of

KEYS = {
    "bytea": r"'\x00ff'",
    "date": "'infinity'",
    "timestamptz": "'2026-01-02 03:04:05.678+00'",
    "text": r"""'a"b\c,{}'''""",
    "uuid": "'c0ffee00-0000-0000-0000-000000000000'",
    "numeric(10,2)": "1.50",
    "bool": "true",
    "inet": "'10.0.0.1/8'",
    "char(5)": "'ab'",
    "mood": "'very happy'",
    "float4": "1.1",
}


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "text"])
@pytest.mark.parametrize("kind", KEYS)
async def test_a_changed_row_is_found_by_its_key(
    make: MakePostgres, sql: Sql, binary: bool, kind: str
) -> None:
    await sql.execute("create type mood as enum ('sad', 'very happy')")
    await sql.execute(
        f"create table odd (id {kind}, number int, amount int, feels mood); "
        "alter table odd add primary key (id, number); "
        f"insert into odd values ({KEYS[kind]}, 1, 1, 'sad')".encode()
    )
    where = "amount > 0 and id::text not like '%%other'"
    async with make(binary=binary) as pg, pg.follow("odd", consumer="c", where=where) as follow:
        await copied(follow)
        await sql.execute("update odd set amount = 2")
        (change,) = await item_of(follow)
        assert (change.kind, change.new["amount"], change.new["feels"]) == ("update", 2, "sad")
        await sql.execute("update odd set amount = -2")
        (change,) = await item_of(follow)
        assert change.kind == "delete"
        assert change.old.keys() == {"id", "number"}
