"""No process of the server is left, whichever process is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.embedded.support import LIMIT, family, gone, owner, running, sql, until
from tests.programs import Program

from moored.embedded import EmbeddedError, Ended, SyncEmbeddedPostgres


def facts(process: Program) -> tuple[int, int, str, Path]:
    guard, pid, url, directory = json.loads(process.stdout.readline())
    return guard, pid, url, Path(directory)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.soak),
        pytest.param(signal.SIGINT, marks=pytest.mark.soak),
    ],
)
def test_a_killed_owner_leaves_nothing(number: signal.Signals) -> None:
    with owner("run") as process:
        guard, pid, url, directory = facts(process)
        sql(url, "create table t as select generate_series(1, 1000)")
        everything = family(guard)
        assert psutil.Process(pid) in everything
        assert len(everything) > 4
        process.send_signal(number)
        gone(everything)
        until(lambda: not directory.exists(), "the temporary directory removed")


def test_an_owner_that_exits_without_stop_leaves_nothing() -> None:
    with owner("exit_without_stop") as process:
        guard, _, _, directory = facts(process)
        everything = family(guard)
        process.stdin.close()
        assert process.wait(LIMIT) == 0
        gone(everything)
        assert not directory.exists()


def test_a_forgotten_directory_is_removed_at_the_end() -> None:
    with owner("forget_the_directory") as process:
        directory = Path(process.stdout.readline().strip())
        assert process.wait(LIMIT) == 0
        assert not directory.exists()


def test_a_killed_owner_during_initdb_leaves_nothing(tmp_path: Path) -> None:
    program = """
import sys
from moored.embedded import SyncEmbeddedPostgres
def told(text):
    print(text, flush=True)
SyncEmbeddedPostgres(sys.argv[1], on_progress=told).start()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "pg")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("creating the data directory")
        until(lambda: len(psutil.Process(process.pid).children(recursive=True)) >= 3, "initdb")
        everything = family(process.pid)
        process.kill()
        gone([one for one in everything if one.pid != process.pid])
    assert not (tmp_path / "pg" / "data").exists()
    with SyncEmbeddedPostgres(tmp_path / "pg") as pg:
        assert sql(pg.url, "select 1") == [(1,)]
    assert list((tmp_path / "pg").glob("data.new-*")) == []


def test_a_killed_guard_ends_the_server() -> None:
    with SyncEmbeddedPostgres() as pg:
        assert pg.guard_pid is not None
        everything = family(pg.guard_pid)
        os.kill(pg.guard_pid, signal.SIGKILL)
        assert pg.wait_ended(timeout=45) == Ended(status=None, expected=False)
        assert running(everything) == []
        pg.start()
        assert sql(pg.url, "select 1") == [(1,)]


def test_guard_and_owner_killed_together_leave_nothing(tmp_path: Path) -> None:
    with owner("run", str(tmp_path / "pg")) as process:
        guard, *_ = facts(process)
        everything = family(guard)
        os.kill(guard, signal.SIGKILL)
        process.kill()
        gone(everything)
    with SyncEmbeddedPostgres(tmp_path / "pg") as pg:
        assert pg.running


def test_forks_and_child_processes_do_not_keep_the_server_alive(tmp_path: Path) -> None:
    with owner("have_children", str(tmp_path / "pg")) as process:
        guard, *_ = facts(process)
        children = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        everything = family(guard)
        process.kill()
        try:
            gone(everything)
            with SyncEmbeddedPostgres(tmp_path / "pg") as pg:
                assert pg.running
            assert len(children) == 2
            assert running(children) == children
        finally:
            for child in children:
                child.kill()


def test_a_fork_cannot_end_the_server() -> None:
    with SyncEmbeddedPostgres() as pg:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                pg.stop()
                pg.kill()
            except EmbeddedError as error:
                code = 0 if f"belongs to process {os.getppid()}" in str(error) else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert pg.running
        assert sql(pg.url, "select 1") == [(1,)]


def test_the_guard_ignores_signals_and_has_its_own_session() -> None:
    with SyncEmbeddedPostgres() as pg:
        assert pg.guard_pid is not None
        assert os.getsid(pg.guard_pid) == pg.guard_pid != os.getsid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pg.guard_pid, number)
        assert sql(pg.url, "select 1") == [(1,)]
        assert pg.running


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's shared memory by /proc")
def test_a_killed_temporary_server_leaves_no_shared_memory() -> None:
    def segments() -> set[str]:
        table = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        return {line.split()[1] for line in table}

    with SyncEmbeddedPostgres() as pg:
        lines = (pg.data_dir / "data" / "postmaster.pid").read_text().splitlines()
        number = lines[6].split()[1]
        assert number in segments()
        pg.kill()
    assert number not in segments()
