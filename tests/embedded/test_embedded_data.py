"""The data directory: created once, used again, and by one process at a time."""

from __future__ import annotations

import functools
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from tests.embedded.support import LIMIT, as_root, owner, sql
from tests.servers import give

from moored.embedded import (
    DataDirectoryInUse,
    EmbeddedError,
    EmbeddedPostgres,
    SyncEmbeddedPostgres,
    VersionMismatch,
    default_data_dir,
)
from moored.embedded._binaries import Binaries
from moored.embedded._pgpass import pgpass_line, pgpass_passwords
from moored.testing import scaled

# Data that stays is synced to disk, which is slow on a machine that does much else.
Kept = functools.partial(SyncEmbeddedPostgres, options={"fsync": "off"})
AsyncKept = functools.partial(EmbeddedPostgres, options={"fsync": "off"})

# With characters that URLs and password files must quote; used together, for one run of initdb.
USER, PASSWORD = "o:d user", "p@ss:w/rd"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "pg"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a server that has been stopped."""
    place = tmp_path_factory.mktemp("stopped") / "pg"
    with Kept(place):
        pass
    return place


@pytest.fixture
def stopped(original: Path, place: Path) -> Path:
    """A directory of a stopped server for one test: a copy, which is quicker than a start."""
    subprocess.run(["cp", "-a", original, place], check=True)
    return place


async def test_a_second_start_uses_the_data_again(place: Path) -> None:
    async with AsyncKept(place) as first:
        sql(first.url, "create table kept as select 7 as n")
        password = first.password
    made = (place / "data" / "PG_VERSION").stat().st_ino
    async with AsyncKept(place) as second:
        assert sql(second.url, "select n from kept") == [(7,)]
        assert second.password == password
    assert (place / "data" / "PG_VERSION").stat().st_ino == made


def test_data_that_stays_is_written_to_disk(place: Path, postgres: SyncEmbeddedPostgres) -> None:
    with SyncEmbeddedPostgres(place) as pg:
        assert sql(pg.url, "show fsync") == [("on",)]
    assert sql(postgres.url, "show fsync") == [("off",)]  # its data is temporary


def test_only_the_owner_can_read_the_password_file(place: Path) -> None:
    with Kept(place) as pg:
        assert stat.S_IMODE((place / "pgpass").stat().st_mode) == 0o600
        assert stat.S_IMODE((place / "data").stat().st_mode) == 0o700
        without = re.sub(r":[^:@]*@", "@", pg.url)
        assert pg.password not in without
        with pytest.raises(psycopg.OperationalError, match="no password supplied"):
            sql(without, "select 1")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            sql(pg.url.replace(pg.password, "guess"), "select 1")


def test_the_password_file_is_one_that_psql_reads(place: Path) -> None:
    with Kept(place, user=USER, password=PASSWORD) as pg:
        assert pg.bin_dir is not None
        command = [str(pg.bin_dir / "psql"), "-h", pg.host, "-p", str(pg.port), "-U", pg.user]
        environment = {**os.environ, "PGPASSFILE": str(place / "pgpass"), "LC_ALL": "C"}
        done = subprocess.run(
            [*command, "-At", "-c", "select current_user", "postgres"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stderr == ""
        assert done.stdout.strip() == pg.user
        assert sql(pg.url, "select current_user") == [(pg.user,)]


def test_a_user_without_a_stored_password_is_an_error(stopped: Path) -> None:
    with pytest.raises(EmbeddedError, match="no password for 'second', only for 'postgres'"):
        Kept(stopped, user="second").start()


def test_a_lost_password_can_be_given(place: Path) -> None:
    with Kept(place, user=USER, password=PASSWORD) as pg:
        assert sql(pg.url, "select 1") == [(1,)]
    (place / "pgpass").unlink()
    with pytest.raises(EmbeddedError, match="no password for 'o:d user': pass"):
        Kept(place, user=USER).start()
    with Kept(place, user=USER, password=PASSWORD) as pg:
        assert sql(pg.url, "select 1") == [(1,)]


def test_incomplete_data_is_created_again(place: Path) -> None:
    left = place / "data.new-killed" / "data"
    left.mkdir(parents=True)
    (left / "PG_VERSION").write_text("18\n")
    with Kept(place) as pg:
        assert sql(pg.url, "select 1") == [(1,)]
    assert not left.exists()


def test_a_data_directory_of_postgres_itself_is_pointed_out(place: Path) -> None:
    place.mkdir()
    (place / "PG_VERSION").write_text("18\n")
    with pytest.raises(EmbeddedError, match=re.escape(f"move it to {place / 'data'}")):
        Kept(place).start()


def test_a_directory_with_other_files_is_refused_and_left_alone(place: Path) -> None:
    (place / "data").mkdir(parents=True)
    (place / "data" / "letters").write_text("dear")
    with pytest.raises(EmbeddedError, match="is not empty, and has no data of PostgreSQL"):
        Kept(place).start()
    assert (place / "data" / "letters").read_text() == "dear"


def test_an_empty_data_directory_is_used(place: Path) -> None:
    (place / "data").mkdir(parents=True)
    with Kept(place) as pg:
        assert sql(pg.url, "select 1") == [(1,)]


@pytest.mark.parametrize(
    "name",
    [
        "moored.conf",
        "../lock",
        pytest.param("postgresql.conf", marks=pytest.mark.soak),
        pytest.param("../postgres.log", marks=pytest.mark.soak),
    ],
)
def test_symbolic_links_in_the_data_directory_are_not_followed(
    stopped: Path, tmp_path: Path, name: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (stopped / "data" / name).unlink()
    (stopped / "data" / name).symlink_to(victim)
    if name == "moored.conf":
        with Kept(stopped):
            pass
    else:
        with pytest.raises(EmbeddedError, match="Too many levels of symbolic links"):
            Kept(stopped).start()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("PG_VERSION", "link"),
        ("postmaster.pid", "fifo"),
        pytest.param("PG_VERSION", "fifo", marks=pytest.mark.soak),
        pytest.param("postmaster.pid", "link", marks=pytest.mark.soak),
        pytest.param("postgresql.conf", "link", marks=pytest.mark.soak),
        pytest.param("postgresql.conf", "fifo", marks=pytest.mark.soak),
    ],
)
def test_links_and_fifos_left_by_an_attacker_are_neither_read_nor_waited_for(
    place: Path, tmp_path: Path, name: str, kind: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    with Kept(place) as pg:
        (place / "data" / name).unlink()
        if kind == "link":
            (place / "data" / name).symlink_to(victim)
        else:
            os.mkfifo(place / "data" / name)
        pg.kill()
    with pytest.raises(EmbeddedError) as caught:
        Kept(place, start_timeout=5.0).start()
    assert "precious" not in str(caught.value)
    assert victim.read_text() == "precious\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's files belong to another user")
def test_a_hard_link_to_a_file_of_root_is_not_read(stopped: Path) -> None:
    victim, link = stopped / "victim", stopped / "data" / "postgresql.conf"
    victim.write_text("precious")
    victim.chmod(0o600)
    link.unlink()
    os.link(victim, link)
    with pytest.raises(EmbeddedError, match="it is a link to a file of another user"):
        Kept(stopped).start()
    assert link.stat().st_ino == victim.stat().st_ino  # else its text is in a file of the server's


def test_a_fifo_in_the_place_of_the_log_is_not_waited_for(stopped: Path) -> None:
    (stopped / "postgres.log").unlink()
    os.mkfifo(stopped / "postgres.log")
    with pytest.raises(EmbeddedError, match=r"postgres\.log"):
        Kept(stopped).start()


@pytest.mark.parametrize("name", ["postgres", "o:d", "back\\slash", "c\\:d", ":", "\\"])
def test_passwords_by_user(name: str) -> None:
    line = pgpass_line(name, f"{name}!{name}")
    assert pgpass_passwords(f"# not this one\n{line}") == {name: f"{name}!{name}"}


def test_data_of_another_major_version_is_refused(stopped: Path) -> None:
    (stopped / "data" / "PG_VERSION").write_text("16\n")
    with pytest.raises(VersionMismatch, match=r"data of PostgreSQL 16, and this is PostgreSQL 18"):
        Kept(stopped, version=18).start()


@pytest.mark.soak
def test_without_a_version_the_data_decide(place: Path) -> None:
    with Kept(place, version=16) as pg:
        assert pg.version is not None
        assert pg.version.startswith("16.")
        sql(pg.url, "create table kept as select 7 as n")
    with Kept(place) as pg:
        assert sql(pg.url, "select n from kept") == [(7,)]


def test_a_second_server_on_one_directory_in_one_process_is_refused(place: Path) -> None:
    with Kept(place) as pg:
        with pytest.raises(DataDirectoryInUse, match=f"in use by process {os.getpid()}:") as caught:
            Kept(place).start()
        assert caught.value.pid == os.getpid()
        assert sql(pg.url, "select 1") == [(1,)]


def test_a_second_process_on_one_directory_is_refused(place: Path) -> None:
    with owner("run", str(place)) as process:
        assert str(place) in process.stdout.readline()
        with pytest.raises(DataDirectoryInUse, match=f"process {process.pid}:"):
            Kept(place).start()
        process.kill()
        process.wait()
        # Its server is still stopping, or has stopped: either way this one gets its turn.
        with Kept(place) as pg:
            assert pg.running


def test_many_processes_at_once_are_one_server(place: Path) -> None:
    count = scaled(6, least=3)
    with ExitStack() as stack:
        starts = [owner("start_if_free", str(place)) for _ in range(count)]
        processes = [stack.enter_context(start) for start in starts]
        printed = [process.stdout.readline() for process in processes]
        assert printed.count("in use\n") == count - 1
        for process in processes:
            process.stdin.close()
            assert process.wait(LIMIT) == 0


def test_a_server_started_by_another_program_is_refused(place: Path) -> None:
    with Kept(place) as pg:
        pid = pg.pid
        # As if another program than ours had started it: it knows nothing of our lock.
        (place / "lock").rename(place / "forgotten")
        with pytest.raises(DataDirectoryInUse, match=f"another PostgreSQL, process {pid}") as error:
            Kept(place).start()
        assert error.value.pid == pid
        assert sql(pg.url, "select 1") == [(1,)]


def test_a_stale_pid_file_is_ignored(place: Path) -> None:
    with Kept(place) as pg:
        pg.kill()
        stale = place / "data" / "postmaster.pid"
        # The number of a process that lives and is no server, with "ready" on the last line.
        lines = stale.read_text().splitlines()
        stale.write_text("\n".join([str(os.getppid()), *lines[1:]]) + "\n")
        assert lines[7].strip() == "ready"
        pg.start()
        assert sql(pg.url, "select 1") == [(1,)]


@pytest.mark.skipif(sys.platform != "linux", reason="it is found in /proc")
def test_a_pid_file_whose_pid_was_reused_is_removed(place: Path) -> None:
    told: list[str] = []
    with Kept(place, on_progress=told.append) as pg:
        user = (place / "data").stat().st_uid
        pg.kill()
        stale = place / "data" / "postmaster.pid"
        lines = stale.read_text().splitlines()
        other = subprocess.Popen(["sleep", "1000"], user=user)
        try:
            stale.write_text("\n".join([str(other.pid), *lines[1:]]) + "\n")
            pg.start()
            assert sql(pg.url, "select 1") == [(1,)]
            assert any(f"pid {other.pid} of the last server now belongs" in text for text in told)
        finally:
            other.kill()
            other.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="it is found in /proc")
def test_a_pid_file_whose_pid_was_reused_by_another_server_is_removed(
    place: Path, postgres: SyncEmbeddedPostgres
) -> None:
    with Kept(place) as pg:
        pg.kill()
        stale = place / "data" / "postmaster.pid"
        lines = stale.read_text().splitlines()
        stale.write_text("\n".join([str(postgres.pid), *lines[1:]]) + "\n")
        pg.start()
        assert sql(pg.url, "select 1") == [(1,)]
        assert sql(postgres.url, "select 1") == [(1,)]


@pytest.fixture
def programs() -> Iterator[Path]:
    """A bin directory that every user may enter, unlike root's tmp_path."""
    with tempfile.TemporaryDirectory(prefix="moored-test-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def test_initdb_that_fails_says_why_in_the_first_line(place: Path, programs: Path) -> None:
    real = Binaries.find().bin_dir
    (programs / "postgres").symlink_to(real / "postgres")
    full = 'initdb: error: could not write file "x/y": No space left on device'
    (programs / "initdb").write_text(f"#!/bin/sh\necho running\necho '{full}' >&2\nexit 1\n")
    (programs / "initdb").chmod(0o755)
    with pytest.raises(EmbeddedError) as caught:
        Kept(place, bin_dir=programs).start()
    assert "No space left on device" in str(caught.value).partition("\n")[0]


def test_a_copy_is_a_server_of_its_own(place: Path, tmp_path: Path) -> None:
    with Kept(place) as pg:
        sql(pg.url, "create table kept as select 7 as n")
    shutil.copytree(place, tmp_path / "copy")
    give(tmp_path / "copy" / "data", like=place / "data")
    with Kept(place) as one, Kept(tmp_path / "copy") as two:
        sql(one.url, "update kept set n = 8")
        assert sql(two.url, "select n from kept") == [(7,)]


def test_a_broken_data_directory_shows_the_log(stopped: Path) -> None:
    (stopped / "data" / "global" / "pg_control").unlink()
    with pytest.raises(EmbeddedError, match=r"(?s)during its start.*pg_control") as caught:
        Kept(stopped).start()
    assert "pg_control" in caught.value.log


def test_a_long_log_is_put_aside(stopped: Path) -> None:
    log = stopped / "postgres.log"
    log.write_bytes(b"x" * 10_000_001)
    with Kept(stopped) as pg:
        assert "ready to accept connections" in pg.log_tail()
        assert "xxx" not in pg.log_tail()
    assert (stopped / "postgres.log.1").stat().st_size == 10_000_001


def test_the_default_data_dir_depends_on_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_data_dir() == Path("/var/lib/moored/postgres")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_data_dir() == Path("/state/moored/postgres")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_data_dir() == Path("/home/somebody/.local/state/moored/postgres")


@as_root
def test_data_that_belong_to_root_are_refused(stopped: Path) -> None:
    give(stopped / "data", like=Path("/root"))
    with pytest.raises(EmbeddedError, match=r"(?s)during its start.*Permission denied"):
        Kept(stopped).start()
