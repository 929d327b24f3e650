"""A stream that was active recovers from temporary outages by itself."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import Postgres
from moored.postgres.report._health import Health

from .conftest import Sql
from .server import LIMIT, connected, quicken, until

pytestmark = pytest.mark.every_loop

OUTAGES = {
    "a password that is being changed": (
        "alter role {role} password 'other'",
        "alter role {role} password 'right'",
        "password authentication failed",
    ),
    "a role that may not log in": (
        "alter role {role} nologin",
        "alter role {role} login",
        "not permitted to log in",
    ),
    "a database that takes no connections": (
        "alter database {database} allow_connections false",
        "alter database {database} allow_connections true",
        "not currently accepting connections",
    ),
}
END = "select pg_terminate_backend(pid) from pg_stat_activity where usename = %s"


@pytest.mark.parametrize("outage", OUTAGES)
async def test_a_temporary_fatal_error_is_retried_after_it_was_active(
    outage: str,
    streamed_url: str,
    stream_id: str,
    sql: Sql,
    postgres: SyncEmbeddedPostgres,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quicken(monkeypatch)
    breaks, mends, words = OUTAGES[outage]
    role = f"role_{stream_id}"
    known = psycopg.conninfo.conninfo_to_dict(streamed_url)
    names = {"role": role, "database": known["dbname"]}
    url = psycopg.conninfo.make_conninfo(streamed_url, user=role, password="right")
    async with connected(postgres.url) as admin:
        await admin.execute(f"create role {role} superuser login password 'right'".encode())
        try:
            async with Postgres(url, stream_id=stream_id, state_dir=tmp_path, pool_size=2) as pg:
                await pg.wait_until_active(LIMIT)
                await admin.execute(breaks.format(**names).encode())
                await admin.execute(END, (role,))

                async def told() -> bool:
                    return any(
                        event.name == "connection_error" and words in event.detail
                        for event in pg.last_events
                    )

                await until(told)
                assert pg.health is not Health.FAILED
                await admin.execute(mends.format(**names).encode())
                await pg.wait_until_active(LIMIT)
        finally:
            await admin.execute(mends.format(**names).encode())
            await sql.execute(f"reassign owned by {role} to current_user".encode())
            await admin.execute(f"drop role {role}".encode())
