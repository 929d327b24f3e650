"""The user that runs the server: `nobody` for root, otherwise the user of the process."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.embedded.support import as_root, sql

import moored
from moored.embedded import BinariesNotFound, EmbeddedError, SyncEmbeddedPostgres, _binaries_copy
from moored.embedded._account import Account
from moored.embedded._binaries import Binaries
from moored.embedded._directory import Directory

NOBODY = 65534
OTHER = "daemon"  # the second user that every system has


@contextmanager
def directory_for_all() -> Iterator[Path]:
    """Make a directory that every user may enter, unlike root's tmp_path."""
    with tempfile.TemporaryDirectory(prefix="moored-test-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture
def outside() -> Iterator[Path]:
    with directory_for_all() as made:
        yield made


@pytest.fixture
def cache(outside: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for copies of binaries, instead of the system's."""
    place = outside / "cache"
    monkeypatch.setattr(_binaries_copy, "CACHE", place)
    return place


@pytest.fixture(scope="module")
def closed() -> Iterator[Path]:
    """A site-packages with the wheel's newest server, in a directory that only root may enter."""
    wheel = Binaries.find().prefix
    with directory_for_all() as made:
        site = made / "closed" / "site-packages"
        site.parent.mkdir(mode=0o700)
        shutil.copytree(wheel, site / wheel.parent.name / wheel.name)
        libraries = wheel.parent.with_name(wheel.parent.name + ".libs")
        if libraries.is_dir():
            shutil.copytree(libraries, site / libraries.name)
        (site / wheel.parent.name / "__init__.py").write_text("raise ImportError('not to be used')")
        yield site


def bin_dir(site: Path) -> Path:
    return next(site.glob("*/pginstall*/bin"))


@as_root
def test_root_drops_to_nobody(postgres: SyncEmbeddedPostgres) -> None:
    assert sql(postgres.url, "show data_directory") == [(str(postgres.data_dir / "data"),)]
    # What root writes, only root can write.
    assert {path.name for path in postgres.data_dir.iterdir() if path.stat().st_uid} == {"data"}
    server = psutil.Process(postgres.pid)
    assert server.username() == "nobody"
    assert set(server.uids()) == {NOBODY}
    assert 0 not in server.gids()
    # No group of root's stays with it.
    groups = Path(f"/proc/{postgres.pid}/status").read_text().partition("\nGroups:")[2]
    assert groups.splitlines()[0].split() == []


@as_root
def test_the_owner_of_the_directory_and_then_of_the_data_runs_the_server(tmp_path: Path) -> None:
    place = tmp_path / "pg"
    place.mkdir()
    shutil.chown(place, OTHER)
    for _ in range(2):
        with SyncEmbeddedPostgres(place, options={"fsync": "off"}) as pg:
            assert psutil.Process(pg.pid).username() == OTHER
        shutil.chown(place, "root")


@as_root
def test_a_machine_without_nobody_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr("pwd.getpwnam", unknown)
    with pytest.raises(EmbeddedError, match="the owner of data_dir"):
        Account.choose(Directory("/"))


@as_root
def test_data_below_a_closed_directory_can_be_used(outside: Path) -> None:
    below = outside / "closed" / "below"
    below.mkdir(parents=True)
    below.parent.chmod(0o700)
    below.chmod(0o700)
    pg = SyncEmbeddedPostgres(below / "pg", options={"fsync": "off"})
    with pg:
        sql(pg.url, "create table t as select generate_series(1, 10000) as n")
        pg.kill()
        pg.start()
        assert sql(pg.url, "select count(*) from t") == [(10000,)]
    with pg:
        assert sql(pg.url, "select count(*) from t") == [(10000,)]
    assert stat.S_IMODE(below.stat().st_mode) == 0o700


@as_root
def test_binaries_below_a_closed_directory_are_copied(closed: Path, cache: Path) -> None:
    told: list[str] = []
    with SyncEmbeddedPostgres(bin_dir=bin_dir(closed), on_progress=told.append) as pg:
        assert sql(pg.url, "select 1") == [(1,)]
        assert pg.bin_dir is not None
        assert pg.bin_dir.is_relative_to(cache)
        # A library that the server loads only on demand.
        sql(pg.url, "select pg_create_logical_replication_slot('s', 'pgoutput')")
    assert told[0].startswith("copying PostgreSQL")
    for path in cache.rglob("*"):
        status = path.stat()
        assert status.st_uid == 0
        assert stat.S_IMODE(status.st_mode) & 0o022 == 0
        assert stat.S_IMODE(status.st_mode) & 0o444 == 0o444
    told.clear()
    with SyncEmbeddedPostgres(bin_dir=bin_dir(closed), on_progress=told.append) as pg:
        assert pg.running
    assert told[0].startswith("creating")


@as_root
@pytest.mark.soak
def test_a_virtual_environment_below_a_closed_directory_can_be_used(
    closed: Path, outside: Path
) -> None:
    shutil.copytree(Path(moored.__file__).parent, closed / "moored")
    program = """
import sys
from moored.embedded import SyncEmbeddedPostgres, _binaries_copy
from pathlib import Path
_binaries_copy.CACHE = Path(sys.argv[1])
with SyncEmbeddedPostgres() as pg:
    print(_binaries_copy.__file__, pg.bin_dir, pg.version)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(outside / "cache")],
        env={**os.environ, "PYTHONPATH": str(closed)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stderr == ""
    source, used, version = done.stdout.split()
    assert Path(source).is_relative_to(closed)
    assert Path(used).is_relative_to(outside / "cache")
    assert version == Binaries.find().version


@as_root
def test_concurrent_copies_of_the_binaries_do_not_conflict(closed: Path, cache: Path) -> None:
    binaries = Binaries.at(bin_dir(closed))
    nobody = Account("nobody", NOBODY, NOBODY)
    copies: list[Binaries] = []

    def make() -> None:
        copies.append(_binaries_copy.accessible_binaries(binaries, nobody))

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(copies) == 3
    assert len(set(copies)) == 1
    assert len(list(cache.iterdir())) == 1
    assert Binaries.at(copies[0].bin_dir).version == binaries.version


@as_root
def test_a_copy_that_cannot_be_made_is_an_error(closed: Path, cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(BinariesNotFound, match="install Moored where every user may read it"):
        _binaries_copy.accessible_binaries(
            Binaries.at(bin_dir(closed)), Account("nobody", NOBODY, NOBODY)
        )


@as_root
def test_may_enter_follows_the_mode_bits(outside: Path) -> None:
    nobody = Account("nobody", NOBODY, NOBODY)
    room = outside / "a" / "b"
    room.mkdir(parents=True)
    assert nobody.may_enter(room)
    room.parent.chmod(0o700)
    assert not nobody.may_enter(room)
    os.chown(room.parent, 0, NOBODY)
    assert not nobody.may_enter(room)
    room.parent.chmod(0o710)
    assert nobody.may_enter(room)
    os.chown(room.parent, NOBODY, 0)
    room.parent.chmod(0o011)
    assert not nobody.may_enter(room)


def test_a_uid_without_a_name_is_used_as_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    account = Account.choose(Directory("/"))
    assert (account.name, account.uid) == ("4000000", 4_000_000)
    assert not account.foreign
    assert account.drop == ""


def test_a_data_directory_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedError, match="cannot be created: Not a directory"):
        SyncEmbeddedPostgres(tmp_path / "file" / "pg").start()


def python_for_everybody() -> str:
    nobody = Account("nobody", NOBODY, NOBODY)
    new_enough = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3"):
        there = Path(python).exists() and nobody.may_enter(Path(python).resolve().parent)
        if there and subprocess.run([python, "-c", new_enough]).returncode == 0:
            return python
    pytest.skip("there is no Python that an unprivileged user may run")


AS_NOBODY = """
import json, os, sys
from moored.embedded import EmbeddedError, SyncEmbeddedPostgres, default_data_dir
os.environ["XDG_STATE_HOME"] = sys.argv[2] + "/state"
report = {"uid": os.geteuid()}
try:
    SyncEmbeddedPostgres("/moored-nobody", bin_dir=sys.argv[1]).start()
except EmbeddedError as error:
    report["not writable"] = str(error)
os.mkdir(sys.argv[2] + "/readonly", 0o500)
try:
    SyncEmbeddedPostgres(sys.argv[2] + "/readonly", bin_dir=sys.argv[1]).start()
except EmbeddedError as error:
    report["read-only"] = str(error)
for number in (1, 2):
    with SyncEmbeddedPostgres(default_data_dir(), bin_dir=sys.argv[1]) as pg:
        report[f"run {number}"] = [os.stat(f"/proc/{pg.pid}").st_uid, str(pg.data_dir)]
        if number == 2:
            pg.kill()
            pg.start()
report["left"] = sorted(os.listdir(default_data_dir()))
print(json.dumps(report))
"""


@as_root
def test_an_unprivileged_user_can_run_the_server(outside: Path) -> None:
    python = python_for_everybody()
    shutil.copytree(Path(moored.__file__).parent, outside / "source" / "moored")
    home = outside / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    binaries = _binaries_copy.accessible_binaries(
        Binaries.find(), Account("nobody", NOBODY, NOBODY)
    )
    done = subprocess.run(
        [python, "-W", "error", "-c", AS_NOBODY, str(binaries.bin_dir), str(home)],
        env={"PYTHONPATH": str(outside / "source"), "PYTHONDONTWRITEBYTECODE": "1"},
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stderr == ""
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["uid"] == NOBODY
    assert "/moored-nobody cannot be created: Permission denied" in report["not writable"]
    assert "/readonly cannot be written to: Permission denied" in report["read-only"]
    place = f"{home}/state/moored/postgres"
    assert report["run 1"] == report["run 2"] == [NOBODY, place]
    assert report["left"] == ["data", "lock", "pgpass", "postgres.log"]
