"""Log lines and records of an outage, of a standby and of a close."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import psycopg
import pytest

from moored.postgres import Postgres
from moored.postgres.server import _admin
from moored.testing import FaultProxy

from .conftest import MakePostgres, Sql
from .server import LIMIT, connected, own_server, quicken, through, until


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    """What was logged about the stream and its supervisors."""
    return [
        record.getMessage() + (" with a traceback" if record.exc_info else "")
        for record in caplog.records
        if record.levelno >= level and record.name in ("moored.postgres", "moored.supervisor")
    ]


async def streams(pg: Postgres) -> bool:
    """Whether it has received something: it is active a moment before that."""
    return pg.machine.at("streaming")


@pytest.mark.every_loop
async def test_an_outage_is_logged_once_and_its_end_once(
    streamed_url: str,
    stream_id: str,
    sql: Sql,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    quicken(monkeypatch)
    caplog.set_level(logging.INFO, "moored")
    port = int(str(psycopg.conninfo.conninfo_to_dict(streamed_url)["port"]))
    async with FaultProxy("127.0.0.1", port) as proxy:
        url = through(streamed_url, proxy.port)
        async with Postgres(url, stream_id=stream_id, state_dir=tmp_path, pool_size=2) as pg:
            await until(lambda: streams(pg))
            caplog.clear()
            proxy.refuse()
            proxy.reset()

            async def failed_often() -> bool:
                outage = pg.statistics()["outage"]
                return outage is not None and outage["failures"] >= 4

            await until(failed_often)
            assert "the next try is in" in pg.explain() or "connecting" in pg.explain()
            proxy.refuse(False)
            await pg.wait_until_active(LIMIT)
            said = lines(caplog)
            assert said[0].startswith("the stream was lost: ")
            assert said[-1].startswith("the stream is back after ")
            # Hung up, then refused: two reasons.
            assert len(said) <= 3, said
            assert not any("traceback" in line or "TaskGroup" in line for line in said)
            assert "  before   an outage of " in pg.explain()
            causes = [cause for event in pg.recorder.events() for cause in event.because]
            assert not any("TaskGroup" in cause for cause in causes)


async def test_a_standby_logs_the_holder_of_the_lock_at_once(
    make: MakePostgres, sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    async with make(application_name="first") as first:
        await first.wait_until_active(LIMIT)
        caplog.clear()
        async with make(application_name="second") as second:

            async def told() -> bool:
                return bool(lines(caplog, logging.WARNING))

            await until(told)
            (said,) = lines(caplog, logging.WARNING)
            held = f"standing by: the lock of {second.settings.slot_name} is held by backend "
            assert said.startswith(held)
            assert '(application "first", from 127.0.0.1' in said
            assert f"another stream_id (this one has {second.settings.stream_id!r})" in said


async def test_opening_and_closing_twice_leaves_no_error_in_the_servers_log(
    tmp_path: Path,
) -> None:
    async with own_server() as server:
        async with connected(server.url) as conn:

            async def gone() -> bool:
                query = "select 1 from pg_replication_slots where active"
                return await (await conn.execute(query)).fetchone() is None

            for _ in range(2):  # the second time, slot and publication exist
                async with Postgres(server.url, state_dir=tmp_path, pool_size=2) as pg:
                    await until(partial(streams, pg))
                await until(gone)
        log = (server.data_dir / "postgres.log").read_text()
        for words in ("ERROR", "unexpected EOF", "terminating connection", "reset by"):
            assert words not in log, log


async def test_the_server_does_not_warn_of_a_connection_that_ends_just_before_it_is_terminated(
    sql: Sql, streamed_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_admin, "END_PATIENCE", 0.0)
    async with connected(streamed_url) as other:
        alive = other.info.backend_pid
        await _admin.terminate(sql, alive)
        with pytest.raises(psycopg.OperationalError):
            await other.execute("select 1")
    warnings: list[str | None] = []
    sql.add_notice_handler(lambda said: warnings.append(said.message_primary))

    async def gone() -> bool:
        query = "select 1 from pg_stat_activity where pid = %s"
        return await (await sql.execute(query, (alive,))).fetchone() is None

    await until(gone)
    await _admin.terminate(sql, alive)
    assert warnings == []


async def test_changes_of_the_status_are_recorded_as_text(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
        said = [event.text for event in pg.recorder.events()]
        assert "active (connections: up, changes: up)" in said
        assert "checking the history and publishing the tables" in said
        assert not any("start_shapes_supervisor" in text or "['" in text for text in said)
