"""Routes to a server: unreachable addresses, and servers that close TLS requests."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from tests.stream_server import stream_server

from moored.postgres import ConfigurationError, Postgres
from moored.postgres.report._health import Health
from moored.postgres.server import _resolver
from moored.postgres.server._faults import FaultVerdict, diagnose
from moored.postgres.server._resolver import TRIAL, Resolver
from moored.testing import FaultProxy

from .conftest import MakePostgres, Sql
from .names import NAME, Name, by_name, name_service, require_ipv6
from .server import LIMIT, following, ids, one, published, quicken, through, until

#: As long as a trial may take here, instead of 5 s.
SHORT = 1.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)
    monkeypatch.setattr(_resolver, "TRIAL", SHORT)
    for name in ("PGSSLMODE", "PGSSLROOTCERT", "PGSERVICE", "PGSERVICEFILE", "PGHOST"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> Name:
    return name_service(monkeypatch)


def port_of(url: str) -> int:
    return int(str(conninfo_to_dict(url)["port"]))


async def works(conninfo: str) -> bool:
    async with await psycopg.AsyncConnection.connect(conninfo) as conn:
        return await (await conn.execute("select 1")).fetchone() == (1,)


async def streams(pg: Postgres, sql: Sql, url: str, stream_id: str) -> None:
    """See a change come through it."""
    changes = pg.changes(tables=["orders"])
    await published(url, stream_id)
    await sql.execute("insert into orders values (1, 'x')")
    assert ids(await following(changes)) == [1]
    async with pg.connection() as conn:
        await conn.execute("insert into orders values (2, 'x')")
    assert ids(await following(changes)) == [2]


# -- IPv6, and no way there ----------------------------------------------------------------------


def test_a_trial_leaves_time_for_another_within_the_connect_timeout() -> None:
    assert TRIAL <= 5.0


async def test_a_refused_first_address_falls_back_to_ipv4(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, name: Name
) -> None:
    require_ipv6()
    name("::1", "127.0.0.1")
    async with make(replication_url=by_name(streamed_url)) as pg:
        await pg.wait_until_active(LIMIT)
        await streams(pg, sql, streamed_url, stream_id)


async def test_a_silent_first_address_falls_back_to_ipv4(
    sql: Sql,
    streamed_url: str,
    stream_id: str,
    name: Name,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    require_ipv6()
    name("::1", "127.0.0.1")
    url, port = by_name(streamed_url), port_of(streamed_url)
    async with FaultProxy("127.0.0.1", port, listen_host="::1", listen_port=port) as hole:
        hole.black_hole()
        began = time.monotonic()
        with caplog.at_level(logging.WARNING, "moored.postgres"):
            async with Postgres(url, stream_id=stream_id, state_dir=tmp_path, pool_size=4) as pg:
                await pg.wait_until_active(LIMIT)
                assert time.monotonic() - began < 3 * SHORT + 5.0
                await streams(pg, sql, streamed_url, stream_id)
        assert "the server is reached by IPv4 only" in caplog.text
        assert hole.statistics().accepted == 1  # found out once, for all connections


async def test_the_route_is_remembered_and_the_addresses_are_not(
    streamed_url: str, name: Name
) -> None:
    require_ipv6()
    name("::1", "127.0.0.1")
    url, port = by_name(streamed_url), port_of(streamed_url)
    resolver = Resolver()
    async with FaultProxy("127.0.0.1", port, listen_host="::1", listen_port=port) as hole:
        hole.black_hole()
        found = await asyncio.gather(*(resolver.conninfo(url) for _ in range(10)))
        assert hole.statistics().accepted == 1
        known = conninfo_to_dict(found[0])
        assert (known["host"], known["hostaddr"]) == (NAME, "127.0.0.1")
        assert len(set(found)) == 1
        name("::1", "127.0.0.9")
        assert conninfo_to_dict(await resolver.conninfo(url))["hostaddr"] == "127.0.0.9"
        name("::1", "127.0.0.1")
        hole.resume()
        resolver.forget()
        assert await resolver.conninfo(url) == url
        assert await works(url)


async def test_all_addresses_of_the_other_family_are_tried(streamed_url: str, name: Name) -> None:
    require_ipv6()
    name("::1", "127.0.0.9", "127.0.0.1")  # nobody listens on the second
    url, port = by_name(streamed_url), port_of(streamed_url)
    async with FaultProxy("127.0.0.1", port, listen_host="::1", listen_port=port) as hole:
        hole.black_hole()
        found = await Resolver().conninfo(url)
        assert conninfo_to_dict(found)["hostaddr"] == "127.0.0.9,127.0.0.1"
        assert await works(found)


async def test_an_error_is_raised_if_no_address_answers(streamed_url: str, name: Name) -> None:
    require_ipv6()
    name("::1", "127.0.0.9")
    port = port_of(streamed_url)
    async with (
        FaultProxy("127.0.0.1", port, listen_host="::1", listen_port=port) as one,
        FaultProxy("127.0.0.1", port, listen_host="127.0.0.9", listen_port=port) as other,
    ):
        one.black_hole()
        other.black_hole()
        with pytest.raises((psycopg.Error, OSError)) as caught:
            await Resolver(timeout=4.0).conninfo(by_name(streamed_url))
        assert (one.statistics().accepted, other.statistics().accepted) == (1, 1)
    found = diagnose(caught.value)
    assert (found.type, found.verdict) == ("connection_timeout", FaultVerdict.RETRY)
    assert "check the host, the port and firewalls" in str(found)


async def test_an_ipv6_address_as_host_is_used_unchanged(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    require_ipv6()
    async with FaultProxy("127.0.0.1", port_of(streamed_url), listen_host="::1") as proxy:
        url = by_name(through(streamed_url, proxy.port), "[::1]")
        async with make(replication_url=url) as pg:
            await pg.wait_until_active(LIMIT)
            await streams(pg, sql, streamed_url, stream_id)


async def test_an_unknown_host_name_is_an_error() -> None:
    url = f"postgresql://{NAME}/orders"
    with pytest.raises(psycopg.OperationalError) as caught:
        await Resolver().conninfo(url)
    assert diagnose(caught.value).type in ("nxdomain", "nxdomain_temporary")


# -- no TLS --------------------------------------------------------------------------------------

SSL_REQUEST = 80877103


class HangsUp:
    """A proxy that closes the first so many connections with a TLS request."""

    def __init__(self, port: int, times: int = 1000) -> None:
        self.asked = 0
        self.port = 0
        self._server = port
        self._times = times

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readexactly(8)
        if struct.unpack("!II", head)[1] == SSL_REQUEST:
            self.asked += 1
            if self.asked <= self._times:
                return
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server)
        server_writer.write(head)
        try:
            await asyncio.gather(copy(reader, server_writer), copy(server_reader, writer))
        finally:
            server_writer.close()
            with suppress(OSError):
                await server_writer.wait_closed()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()  # so that the other side ends too


@asynccontextmanager
async def hanging_up(url: str, times: int = 1000) -> AsyncIterator[tuple[HangsUp, str]]:
    """The URL that leads by it."""
    between = HangsUp(port_of(url), times)
    async with stream_server(between.serve) as between.port:
        yield between, through(url, between.port)


async def test_a_server_that_closes_tls_requests_is_reached_without_tls(
    sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with hanging_up(streamed_url) as (between, url):
        with caplog.at_level(logging.WARNING, "moored.postgres"):
            async with Postgres(url, stream_id=stream_id, state_dir=tmp_path, pool_size=4) as pg:
                await pg.wait_until_active(LIMIT)
                await streams(pg, sql, streamed_url, stream_id)
        assert "the server is reached without TLS" in caplog.text
        assert between.asked == 2  # and once more, to be sure


@pytest.mark.parametrize("mode", ["", "?sslmode=prefer"])
async def test_modes_that_permit_a_fallback_without_tls(streamed_url: str, mode: str) -> None:
    async with hanging_up(streamed_url) as (_, url):
        found = await Resolver().conninfo(url + mode)
        assert conninfo_to_dict(found)["sslmode"] == "disable"
        assert await works(found)


@pytest.mark.parametrize("mode", ["require", "verify-ca", "verify-full"])
async def test_modes_that_require_tls_never_fall_back(
    streamed_url: str, mode: str, tmp_path: Path
) -> None:
    async with hanging_up(streamed_url) as (_, url):
        with pytest.raises(psycopg.OperationalError) as caught:
            await Resolver().conninfo(f"{url}?sslmode={mode}")
    assert diagnose(caught.value).type == "connection_closed"


@pytest.mark.parametrize(
    "environment",
    [
        {"PGSSLMODE": "require"},
        {"PGSSLMODE": "verify-full"},
        {"PGSSLROOTCERT": "system"},
        {"PGSERVICE": "orders"},
    ],
    ids=str,
)
async def test_tls_required_by_the_environment_never_falls_back(
    streamed_url: str, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "services").write_text("[orders]\nsslmode=require\n")
    async with hanging_up(streamed_url) as (_, url):
        with monkeypatch.context() as variables:
            variables.setenv("PGSERVICEFILE", str(tmp_path / "services"))
            for variable, value in environment.items():
                variables.setenv(variable, value)
            with pytest.raises(psycopg.OperationalError):
                await Resolver().conninfo(url)


@pytest.mark.parametrize("parameter", ["sslrootcert=system", "service=orders"])
async def test_tls_required_by_other_parameters_never_falls_back(
    streamed_url: str, parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "services").write_text("[orders]\nsslmode=require\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    async with hanging_up(streamed_url) as (_, url):
        with pytest.raises(psycopg.OperationalError):
            await Resolver().conninfo(f"{url}?{parameter}")


async def test_a_server_that_was_down_for_a_moment_is_reached_with_tls(streamed_url: str) -> None:
    async with hanging_up(streamed_url, times=1) as (between, url):
        assert await Resolver().conninfo(url) == url
        assert between.asked == 2


async def test_a_silent_server_is_not_tried_without_tls(streamed_url: str) -> None:
    async with FaultProxy("127.0.0.1", port_of(streamed_url)) as proxy:
        proxy.black_hole()
        with pytest.raises((psycopg.Error, OSError)):
            await Resolver(timeout=1.0).conninfo(through(streamed_url, proxy.port))
        assert proxy.statistics().accepted == 1


async def test_the_next_run_tries_tls_again(streamed_url: str) -> None:
    resolver = Resolver()
    async with hanging_up(streamed_url, times=2) as (between, url):
        assert conninfo_to_dict(await resolver.conninfo(url))["sslmode"] == "disable"
        assert conninfo_to_dict(await resolver.conninfo(url))["sslmode"] == "disable"
        assert between.asked == 2
        resolver.forget()
        assert await resolver.conninfo(url) == url


async def test_the_error_of_the_server_is_raised(streamed_url: str) -> None:
    """The error without TLS (a wrong password) matters more than the closed TLS request."""
    known = conninfo_to_dict(streamed_url)
    async with hanging_up(streamed_url) as (_, url):
        wrong = url.replace(f":{known['password']}@", ":wrong@")
        with pytest.raises(psycopg.OperationalError) as caught:
            await Resolver().conninfo(wrong)
    assert diagnose(caught.value).type == "invalid_username_or_password"


# -- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://db/orders?nonsense=1", 'invalid URI query parameter: "nonsense"'),
        ("postgresql://app:se%cret@db/orders", "a percent sign is written %25"),
        ("postgresql://127.0.0.1/orders?sslmode=maybe", 'invalid sslmode value: "maybe"'),
        ("postgresql://127.0.0.1:port/orders", "port"),
        ("postgresql://127.0.0.1/orders?sslmode=prefer&sslrootcert=system", "weak sslmode"),
        ("host=127.0.0.1 orders", 'missing "="'),
    ],
)
async def test_an_invalid_url_is_fatal(url: str, said: str, tmp_path: Path) -> None:
    async with Postgres(url, state_dir=tmp_path, pool_size=2) as pg:
        with pytest.raises(ConfigurationError) as caught:
            await pg.wait_until_active(LIMIT)
    assert said in str(caught.value)
    assert "se%cret" not in str(caught.value)


# -- when what was found out is not so any more --------------------------------------------------


async def test_a_standby_finds_another_route_after_its_own_broke(
    make: MakePostgres,
    sql: Sql,
    streamed_url: str,
    name: Name,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wait for the lock may take days, and a reconnection is not a new run."""
    require_ipv6()
    monkeypatch.setattr(_resolver, "KEPT", 0.0)
    name("::1", "127.0.0.1")
    port = port_of(streamed_url)
    async with (
        make() as owner,
        FaultProxy("127.0.0.1", port, listen_host="::1", listen_port=port) as way,
    ):
        await owner.wait_until_active(LIMIT)
        async with make(replication_url=by_name(streamed_url), state_dir=tmp_path / "other"):
            await until(lambda: waiting(sql))
            before = await waiting(sql)
            way.black_hole()
            assert way.reset() > 0
            # The old one waits, too: a backend that waits for a lock does not look at its client.
            await until(lambda: waiting(sql, before), 3 * SHORT + 10.0)


async def waiting(sql: Sql, but: int = 0) -> int:
    """A backend that waits for a lock; 0 if there is none."""
    query = "select pid from pg_locks where locktype = 'advisory' and not granted and pid <> %s"
    return int(await one(sql, query, but) or 0)


async def test_a_pool_finds_another_route_after_its_own_broke(
    streamed_url: str,
    stream_id: str,
    name: Name,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_ipv6()
    monkeypatch.setattr(_resolver, "KEPT", 0.1)
    name("::1", "127.0.0.1")
    port = port_of(streamed_url)
    async with (
        FaultProxy("127.0.0.1", port, listen_host="::1", listen_port=port) as way,
        Postgres(
            by_name(streamed_url),
            replication_url=streamed_url,
            stream_id=stream_id,
            state_dir=tmp_path,
            pool_size=4,
        ) as pg,
    ):
        await pg.wait_until_active(LIMIT)
        await asyncio.sleep(0.2)  # so long that what was found out counts no more
        way.black_hole()
        assert way.reset() == 3
        await pg.monitor.wait_until(lambda status: status.health is not Health.ACTIVE, LIMIT)
        await pg.wait_until_active(3 * SHORT + 10.0)
        async with pg.connection() as conn:
            assert await one(conn, "select 1") == 1
