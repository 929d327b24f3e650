"""`moored snapshot -o`: a file has all rows, or is left as it was."""

from __future__ import annotations

import os
import resource
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.programs import Program
from tests.service.support import LIMIT, clean_environment, until

from moored.cli import main

Output = pytest.CaptureFixture[str]

OLD = "rows of an earlier run\n"


@pytest.fixture
def wares(postgres_url: str) -> str:
    """A table of 99 rows; returns the URL of its database."""
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("create table wares (id int primary key)")
        conn.execute("insert into wares select generate_series(1, 99)")
    return postgres_url


def sleeps(url: str) -> bool:
    """Whether a statement of the snapshot waits in the server."""
    with psycopg.connect(url) as conn:
        return (
            conn.execute("select from pg_stat_activity where wait_event = 'PgSleep'").rowcount > 0
        )


@pytest.mark.parametrize("before", [None, OLD])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_file_that_looks_complete(
    number: signal.Signals, before: str | None, wares: str, tmp_path: Path
) -> None:
    target = tmp_path / "wares.tsv"
    if before is not None:
        target.write_text(before)
    # The first chunks are read, and the next one takes a minute.
    slow = ("--chunk-rows", "10", "--where", "id < 40 or pg_sleep(60) is null")
    arguments = ("snapshot", "wares", "--database-url", wares, *slow, "-o", str(target))
    with Program("moored.cli", *arguments, environ=clean_environment(), stderr=True) as program:
        until(lambda: sleeps(wares), "the chunk that sleeps")
        program.send_signal(number)
        assert program.wait(LIMIT) == 128 + number
        assert f"wares: stopped: {target} was not written" in program.stderr.read()
    assert (target.read_text() if target.exists() else None) == before
    assert os.listdir(tmp_path) == ([] if before is None else ["wares.tsv"])


def test_an_error_of_the_server_leaves_the_file_as_it_was(
    wares: str, tmp_path: Path, capsys: Output
) -> None:
    target = tmp_path / "wares.tsv"
    target.write_text(OLD)
    broken = ("--chunk-rows", "10", "--where", "1 / (id - 50) is not null")
    assert main(["snapshot", "wares", "--database-url", wares, *broken, "-o", str(target)]) == 2
    said = capsys.readouterr().err
    assert "division by zero" in said
    assert f"wares: stopped: {target} was not written" in said
    assert target.read_text() == OLD
    assert os.listdir(tmp_path) == ["wares.tsv"]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the files of this process, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_file_as_it_was(wares: str, tmp_path: Path, capsys: Output) -> None:
    target = tmp_path / "wares.tsv"
    target.write_text(OLD)
    with largest_file(100):
        assert main(["snapshot", "wares", "--database-url", wares, "-o", str(tmp_path)]) == 2
    assert f"moored: {target} cannot be written: File too large" in capsys.readouterr().err
    assert target.read_text() == OLD
    assert os.listdir(tmp_path) == ["wares.tsv"]


def test_a_file_is_replaced_with_its_mode_and_where_its_link_leads(
    wares: str, tmp_path: Path
) -> None:
    target, link = tmp_path / "wares.tsv", tmp_path / "link"
    target.write_text(OLD)
    target.chmod(0o640)
    link.symlink_to(target)
    assert main(["snapshot", "wares", "--database-url", wares, "-o", str(link)]) == 0
    assert link.is_symlink()
    assert target.read_text().split() == [str(n) for n in range(1, 100)]
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_device_or_a_pipe_is_written_directly(wares: str, tmp_path: Path, capsys: Output) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert main(["snapshot", "wares", "--database-url", wares, "-o", str(pipe)]) == 0
        assert os.read(reader, 10_000).split() == [str(n).encode() for n in range(1, 100)]
    finally:
        os.close(reader)
    assert main(["snapshot", "wares", "--database-url", wares, "-o", "/dev/full"]) == 2
    assert "/dev/full cannot be written: No space left on device" in capsys.readouterr().err
