"""Concurrent writers that change a table in every way, at random."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import psycopg

__all__ = ["KEYS", "create", "write", "write_until"]

#: How the key of the number n is written, for each kind of table.
KEYS = {
    "int": "{n}",
    "small": "{n}",
    # The order of strings is that of the collation, which only the server knows.
    "text": "'Key {m} of ' || md5('{n}')",
    "pair": "'{t}'::date, md5('{n}')::uuid",
    "partitioned": "{n}",
}
COLUMNS = {
    "int": "id int primary key",
    "small": "id int primary key",
    "text": "id text primary key",
    "pair": "day date, id uuid, primary key (day, id)",
    "partitioned": "id int primary key",
}
#: A row whose key changes may move to another partition.
PARTITIONS = """
create table items_0 partition of items for values with (modulus 2, remainder 0);
create table items_1 partition of items for values with (modulus 2, remainder 1)
"""
#: Longer than the server sends with an update that does not change it.
LARGE = "array_to_string(array(select md5(random()::text) from generate_series(1, 150)), '')"
#: Of the kind "small", the server sends every value, so that no row must be read again.
BODY = {"small": "md5(random()::text)"}


def key(kind: str, number: int) -> str:
    return KEYS[kind].format(n=number, m=number % 7, t=f"2026-01-{1 + number % 28:02}")


async def create(conn: psycopg.AsyncConnection[Any], kind: str, rows: int) -> None:
    """Create the table `items` with so many rows."""
    partitioned = kind == "partitioned"
    await conn.execute(
        f"create table items ({COLUMNS[kind]}, amount int, state text, body text)"
        f"{' partition by hash (id)' if partitioned else ''}; "
        f"alter table items alter column body set storage external; "
        f"{PARTITIONS if partitioned else ''}".encode()
    )
    body = BODY.get(kind, LARGE)
    for number in range(rows):
        await conn.execute(
            f"insert into items values ({key(kind, number)}, {number}, 'new', {body})".encode()
        )
    await conn.execute("analyze items")


def statement(kind: str, rng: random.Random, most: int, *, truncates: bool) -> tuple[str, str]:
    """Return the name and the text of a random statement."""
    one, other = key(kind, rng.randrange(most)), key(kind, rng.randrange(most))
    row = "(day, id)" if kind == "pair" else "id"
    value = f"({one})" if kind == "pair" else one
    amount, body = rng.randrange(100), BODY.get(kind, LARGE)
    choices = {
        "insert": f"insert into items values ({one}, {amount}, 'new', {body}) "
        "on conflict do nothing",
        "upsert": f"insert into items values ({one}, {amount}, 'new', {body}) "
        f"on conflict ({row.strip('()')}) do update set amount = {amount}",
        "update": f"update items set amount = {amount}, state = 'changed' where {row} = {value}",
        "large": f"update items set body = {body} where {row} = {value}",
        "delete": f"delete from items where {row} = {value}",
        "move": f"update items set {row} = {'row' if kind == 'pair' else ''}({other}) "
        f"where {row} = {value}",
        "many": f"update items set amount = amount + 1 where amount % 5 = {amount % 5}",
    }
    weights = {"insert": 8, "upsert": 3, "update": 6, "large": 2, "delete": 4, "move": 6, "many": 1}
    if truncates:
        choices["truncate"], weights["truncate"] = "truncate items", 1
    (name,) = rng.choices(list(weights), list(weights.values()))
    return name, choices[name]


async def write(
    url: str, kind: str, over: asyncio.Event, rng: random.Random, *, truncate: float, most: int
) -> Counter[str]:
    """Commit and roll back random transactions; return how often each statement was committed."""
    task, done = asyncio.current_task(), Counter[str]()
    assert task is not None
    async with await psycopg.AsyncConnection.connect(url) as conn:
        while not over.is_set():
            mine: Counter[str] = Counter()
            began = time.monotonic()
            # A move to a key that exists, a deadlock, a rewrite of the table.
            with suppress(psycopg.errors.IntegrityError, psycopg.errors.OperationalError):
                for _ in range(rng.choice([1, 1, 2, 4])):
                    truncates = rng.random() < truncate
                    name, text = statement(kind, rng, most, truncates=truncates)
                    await conn.execute(text.encode())
                    mine[name] += 1
                    await asyncio.sleep(rng.uniform(0, 0.004))
                if rng.random() < 0.85:
                    await conn.commit()
                    done += mine
            if task.cancelling():
                raise asyncio.CancelledError  # psycopg may raise the error of the query instead
            await conn.rollback()
            # On a busy machine, the follower needs time to keep up. Without locks, and limited: the
            # transaction took longer if it waited for those of the other writers.
            await asyncio.sleep(min(0.1, 2 * (time.monotonic() - began)))
    return done


async def write_until(
    url: str, kind: str, over: asyncio.Event, seed: int, *, truncate: float = 0.0, most: int = 400
) -> Counter[str]:
    """Let three writers write until the event is set."""
    tasks = [
        write(url, kind, over, random.Random(seed + n), truncate=truncate, most=most)
        for n in range(3)
    ]
    return sum(await asyncio.gather(*tasks), Counter())
