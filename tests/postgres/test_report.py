"""Report, explanation and metrics of a stream, with a real server."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from moored.postgres import Postgres, PostgresError
from moored.postgres.consume import _backpressure
from moored.postgres.prometheus import PREFIX, PostgresCollector
from moored.postgres.report._explain import EXPLAINED, explain
from moored.postgres.report._health import Health
from moored.postgres.report._phases import CHART, WORDS

from .conftest import MakePostgres, Sql
from .server import LIMIT, connected, following, quicken, until, walsender

OPERATIONS = (Path(__file__).parents[2] / "docs" / "operations" / "postgres.md").read_text()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch, check_every=0.2)


def samples(collector: PostgresCollector) -> dict[tuple[str, ...], float]:
    """The values by name and labels, without the stream's."""
    registry = CollectorRegistry()
    registry.register(collector)
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "stream")): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


# -- data ----------------------------------------------------------------------------------------


async def test_the_report_is_json_in_every_state(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        seen = {pg.statistics()["step"]}
        moves: list[str] = []
        pg.machine.observe(lambda move: moves.append(json.dumps(pg.statistics())))
        await pg.wait_until_active(LIMIT)
        seen |= {json.loads(text)["step"] for text in moves}
        assert len(seen) >= 8
        assert json.loads(json.dumps(pg.statistics()))["health"] == "active"
        await pg.sleep()
        assert json.loads(json.dumps(pg.statistics()))["pools"] == {}


async def test_the_docs_list_every_field_of_the_report(make: MakePostgres, sql: Sql) -> None:
    table = OPERATIONS.partition("### Everything")[2].partition("\n### ")[0]
    firsts = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    listed = {name for cell in firsts for name in re.findall(r"`(\w+)`", cell)}
    async with make() as pg:
        assert listed == set(pg.statistics())


async def test_lag_and_consumers_follow_what_is_acknowledged(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        await until(lambda: _caught_up(pg))
        await sql.execute("insert into orders values (1, 'x')")
        txn = await following(changes)
        await asyncio.sleep(0.2)
        now = pg.statistics()
        assert now["lag"]["seconds"] >= 0.2
        assert now["lag"]["bytes"] > 0
        assert now["transactions"] == 1
        assert now["bytes"] > 0
        assert now["consumers"]["search"]["outstanding"] == 1
        assert "the consumer 'search' has 1 transaction" in pg.explain()
        await txn.ack()
        await until(lambda: _caught_up(pg))
        assert pg.statistics()["consumers"]["search"]["outstanding"] == 0


async def test_explain_names_detached_consumers_and_unhandled_resets(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        away = pg.changes("away", tables=["orders"])
        here = pg.changes("here", tables=["orders"])
        await pg.wait_until_published(timeout=LIMIT)
        await away.aclose()
        await sql.execute("insert into orders values (1, 'x')")
        taken = await following(here)
        await until(lambda: _is_streaming(pg))
        assert "'here' is away" not in pg.explain()
        await taken.ack()
        text = pg.explain()
        assert "the consumer 'away' is not attached, and the server retains the WAL" in text
        assert "drop_consumer('away')" in text
        await pg._hub.drop("away", "too much was kept for it")
        assert "'away' has a Reset that it has not handled yet" in pg.explain()
        assert "too much was kept for it" in pg.explain()


async def test_a_consumer_with_a_full_queue_degrades_the_health(
    make: MakePostgres, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_backpressure, "STALLED_AFTER", 0.0)
    async with make() as pg:
        hung = pg.changes("hung", tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        assert pg.health is Health.ACTIVE
        pg._hub.pressure.queue_length = 0
        await sql.execute("insert into orders values (1, 'x')")

        async def degraded() -> bool:
            return pg.health is Health.DEGRADED and await _is_streaming(pg)

        await until(degraded)
        assert "the queue of 'hung' is full" in pg.explain()
        await following(hung)
        assert pg.health is Health.ACTIVE


async def _is_streaming(pg: Postgres) -> bool:
    return pg.machine.at("streaming")


async def _caught_up(pg: Postgres) -> bool:
    lag = pg.statistics()["lag"]
    return lag is not None and lag["seconds"] == 0.0


async def test_the_slot_is_queried_soon_after_the_start(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        await pg.wait_until_active(LIMIT)

        async def looked() -> bool:
            # The first look may come before the server has begun to send.
            return pg.statistics()["slot"]["active_pid"] is not None

        await until(looked)
        slot = pg.statistics()["slot"]
        assert slot["wal_status"] == "reserved"
        assert slot["active_pid"] == await walsender(sql, pg)


async def test_received_transactions_are_counted_over_all_connections(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        for number in (1, 2):
            await sql.execute("insert into orders values (%s, 'x')", (number,))
            await (await following(changes)).ack()
            assert pg.statistics()["transactions"] >= number
            await _cut(pg, sql)
        now = pg.statistics()
        assert now["transactions"] >= 2
        assert now["restarts"] >= 2
        assert now["event_counts"]["connection_error"] >= 2


async def test_attaching_again_needs_no_new_connection(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        await sql.execute("insert into orders values (1, 'x')")
        await following(changes)  # and no acknowledgement: it must come again
        await changes.aclose()
        changes = pg.changes(tables=["orders"])
        await following(changes)
        now = pg.statistics()
        assert (now["transactions"], now["connects"], now["restarts"]) == (1, 1, 0)
        # Only when more waits for it than is kept here is there another stream.
        pg._hub.pressure.queue_length = 0
        await sql.execute("insert into orders values (2, 'x')")
        await following(changes)
        await changes.aclose()
        backlog = pg._hub._known["default"].backlog
        assert backlog is not None
        backlog.complete = False
        changes = pg.changes(tables=["orders"])
        await following(changes)
        now = pg.statistics()
        assert (now["connects"], now["restarts"]) == (2, 0)
        assert now["transactions"] >= 2


async def _cut(pg: Postgres, sql: Sql) -> None:
    """Terminate the stream's backend, and wait until it streams again."""
    await until(lambda: walsender(sql, pg))
    before = pg.statistics()["connects"]
    await sql.execute("select pg_terminate_backend(%s)", (await walsender(sql, pg),))

    async def back() -> bool:
        now = pg.statistics()
        return bool(now["connects"] > before and now["health"] == "active")

    await until(back)


async def test_during_the_backoff_the_report_does_not_show_streaming(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
        steps: list[str] = []
        pg.monitor.subscribe(lambda change: steps.append(f"{pg.health.value} {pg.machine.step}"))
        await _cut(pg, sql)
        assert "starting start_replication_client" in steps
        assert "waiting streaming" not in steps


async def test_a_failed_wait_for_the_lock_is_an_event(make: MakePostgres, sql: Sql) -> None:
    """The event `failed_to_acquire_connection_lock` is reported, and the lock is tried again."""
    async with connected(make().settings.database_url) as other, make() as pg:
        await other.execute("select pg_advisory_lock(hashtext(%s))", (pg.settings.slot_name,))

        async def waits() -> bool:
            return pg.statistics()["server"] is not None and pg.machine.step.endswith("lock")

        await until(waits)
        own = pg.statistics()["server"]["backend_pid"]
        await other.execute("select pg_terminate_backend(%s)", (own,))

        async def told() -> bool:
            return bool(pg.statistics()["event_counts"].get("failed_to_acquire_connection_lock"))

        await until(told)
        failed = [e for e in pg.last_events if e.name == "failed_to_acquire_connection_lock"]
        assert "terminating connection" in failed[0].detail
        await other.execute("select pg_advisory_unlock_all()")
        await pg.wait_until_active(LIMIT)


async def test_no_failure_is_reported_while_going_to_sleep(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
        healths: list[Health] = []
        pg.monitor.subscribe(lambda change: healths.append(pg.health))
        await pg.sleep()
        assert set(healths) == {Health.ACTIVE, Health.SLEEPING}
        assert healths == sorted(healths, key=list(Health).index)
        assert pg.machine.at("connection_setup")


async def test_statistics_work_after_close_and_not_before_open(
    make: MakePostgres, sql: Sql
) -> None:
    pg = make()
    with pytest.raises(PostgresError, match="use `async with`"):
        pg.statistics()
    assert pg.fatal is None
    async with pg:
        await pg.wait_until_active(LIMIT)
    assert pg.statistics()["health"] == "failed"
    assert "because  the manager was closed" in pg.explain()
    never = make()
    await never.close()
    with pytest.raises(PostgresError, match="closed"):
        never.statistics()


# -- words ---------------------------------------------------------------------------------------


def test_every_step_has_words() -> None:
    assert set(EXPLAINED) == {step for steps in CHART.phases.values() for step in steps}


def base(**more: Any) -> dict[str, Any]:
    return {
        "health": "starting",
        "step": "streaming",
        "for": 14.0,
        "cause": "it was told to",
        "fatal": None,
        "lag": None,
        "silent": 0.0,
        "flushed": "0/1",
        "outage": None,
        "last_outage": None,
        "consumers": {},
        "pools": {},
        "silence": "",
        "slot": {"name": "moored_slot_default"},
        "slot_blockers": [],
        "lock": {"held": False, "holder": None},
        **more,
    }


@pytest.mark.parametrize("step", EXPLAINED)
@pytest.mark.parametrize("health", [health.value for health in Health])
def test_every_step_is_explained_in_every_health(step: str, health: str) -> None:
    head, *rest = explain(base(step=step, health=health)).splitlines()
    assert head == f"{health}: {WORDS[step]} for 14 s"
    assert rest[-1].startswith("  so       ")
    assert all(re.match(r"  (because|so     )  \S", line) for line in rest)


def test_a_silent_stream_is_not_said_to_have_caught_up() -> None:
    silent = {"step": "streaming", "health": "active", "silent": 4.0}
    lines = explain(base(**silent)).splitlines()
    assert lines[1] == "  because  nothing has arrived for 4.0 s; more may wait to be read"
    assert lines[-1].startswith("  so       the stream is opened again if the server stays silent")


OUTAGE = {"cause": "hung up", "last": "refused", "began": 1e9, "failures": 3, "took": 14.0}


def test_between_two_attempts_the_last_failure_is_the_reason() -> None:
    outage = {**OUTAGE, "next_try": 2.0}
    now = base(step="start_replication_client", outage=outage, last_outage=OUTAGE)
    assert explain(now).splitlines()[1:] == [
        "  because  refused (3 failures in 14 s); the first failure: hung up",
        "  so       the next try is in 2.0 s",
    ]


def test_the_last_outage_is_explained_with_its_begin_and_duration() -> None:
    lines = explain(base(health="active", last_outage=OUTAGE)).splitlines()
    assert lines[-2] == (
        "  before   an outage of 14 s from 2001-09-09 01:46:40 UTC on, 3 failures: hung up"
    )


def test_a_server_that_does_not_answer_is_the_reason_of_a_degraded_health() -> None:
    silence = "the server has not answered the admin pool for 4 s"
    text = explain(base(step="streaming", health="degraded", silence=silence))
    assert text.splitlines()[1] == f"  because  {silence}"
    assert "callers keep their timeouts" in text


def test_a_pool_that_lacks_connections_is_named_with_its_error() -> None:
    short = {"state": "starting", "connected": 3, "max_size": 16, "error": "no connection left"}
    full = {"state": "ready", "connected": 4, "max_size": 4, "error": None}
    now = base(step="start_connection_pool:connecting", pools={"admin": full, "snapshot": short})
    lines = explain(now).splitlines()
    assert lines[1] == ("  because  the snapshot pool has 3 of 16 connections: no connection left")
    assert "admin" not in "".join(lines)


# -- metrics -------------------------------------------------------------------------------------


async def test_the_metrics_are_the_numbers_of_the_report(make: MakePostgres, sql: Sql) -> None:
    collector = PostgresCollector()
    assert samples(collector) == {}
    async with make() as pg:
        collector.add(pg)
        early = samples(collector)
        assert (PREFIX + "lag_bytes",) not in early  # not known is not 0
        changes = pg.changes("search", tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        await sql.execute("insert into orders values (1, 'x')")
        txn = await following(changes)
        found = samples(collector)
        now = pg.statistics()
        assert found[PREFIX + "health", "active"] == 1
        assert sum(found[PREFIX + "health", health.value] for health in Health) == 1
        assert found[PREFIX + "condition_met", "integrity_checks_passed"] == 1
        assert found[PREFIX + "consumer_outstanding", "search"] == 1
        assert found[PREFIX + "transactions_total",] == 1
        assert found[PREFIX + "bytes_total",] == now["bytes"]
        assert found[PREFIX + "pool_connections", "admin"] == 1
        assert found[PREFIX + "lag_bytes",] > 0
        assert found[PREFIX + "connects_total",] == now["connects"]
        assert found[PREFIX + "events_total", "ready"] == 1
        await txn.ack()
    assert samples(collector) == {}  # it is closed
    collector.remove(pg)
    collector.remove(pg)
