"""The consumer can never handle some orders: it goes on with the others, an operator mends it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from tests.service.support import moored
from tests.stories.support import (
    LIMIT,
    Callers,
    all_copied,
    all_seen,
    attached,
    migrate,
    replica,
    tenants,
    until,
)

from moored.testing import scaled

ORDERS = scaled(5_000, least=60)
POISONOUS = scaled(50, least=3)


async def test_a_poisonous_transaction(
    postgres_url: str, tmp_path: Path, figures: Callable[[str], None]
) -> None:
    async def consumers(*arguments: str) -> Any:
        command = ["consumers", *arguments, "--database-url", postgres_url, "--json"]
        done = await asyncio.to_thread(moored, *command)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    await migrate(postgres_url)
    whose, not_ready = tenants(2), 0
    async with (
        await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as conn,
        replica(postgres_url, tmp_path, PARK="1") as shop,
    ):
        await conn.execute("alter table copies add constraint no_tea check (id > 0)")
        await shop.ready()
        await until(lambda: shop.health() == (200, "active"), "the table is published")
        async with attached(shop.url, *whose) as browsers:
            began = time.monotonic()
            async with Callers(shop.url, whose) as callers:
                for number in range(1, POISONOUS + 1):
                    before = callers.answers[200]
                    await conn.execute("insert into orders values (%s, %s)", [-number, whose[0]])
                    while callers.answers[200] < before + ORDERS // POISONOUS:
                        answer = await shop.answers("/v1/health?ready")
                        not_ready += answer is None or answer.is_error
                        await asyncio.sleep(0.1)
            # All others are copied.
            copied = (
                "select count(*) from orders where id > 0 and id not in (select id from copies)"
            )
            while (await (await conn.execute(copied)).fetchone()) != (0,):
                # The tries of each take some seconds.
                assert time.monotonic() < began + LIMIT + 6 * POISONOUS
                await asyncio.sleep(0.1)
            passed = time.monotonic() - began
            seen = await all_seen(postgres_url, browsers, since=-POISONOUS)
        # The operator sees why, mends the cause, and lets them be handled again.
        parked = await consumers("list")
        assert len(parked) == POISONOUS, parked
        assert all("no_tea" in each["error"] for each in parked), parked
        health = await shop.answers("/v1/health")
        assert health is not None
        assert health.json()["degraded"] == ["consumer-copy"]
        await conn.execute("alter table copies drop constraint no_tea")
        await consumers("retry", *(str(each["id"]) for each in parked))
        orders, twice = await all_copied(postgres_url)
        assert await consumers("list") == []
        await until(lambda: shop.health() == (200, "active"), "active")
        await shop.ended()
    assert not_ready == 0
    assert callers.answers.keys() == {200}
    figures(
        f"{POISONOUS} of {orders} orders were parked and retried, the others copied after "
        f"{passed:.1f} s; ready all the time, 0 requests failed, {seen} events, 0 missed, "
        f"0 doubled; copied twice {twice}"
    )
