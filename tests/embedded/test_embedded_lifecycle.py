"""Start, stop, restart and kill, as a caller sees them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import psycopg
import pytest
from tests.embedded.support import family, gone, running, sql, until

from moored.embedded import (
    EmbeddedError,
    EmbeddedPostgres,
    Ended,
    SyncEmbeddedPostgres,
    _launch,
)


@pytest.mark.every_loop
async def test_the_server_runs_and_leaves_no_process_or_file() -> None:
    async with EmbeddedPostgres() as pg:
        assert pg.running
        assert sql(pg.url, "select 1") == [(1,)]
        assert pg.pid is not None
        assert pg.guard_pid is not None
        everything = family(pg.guard_pid)
        directory = pg.data_dir
        assert directory.is_dir()
    assert pg.state == "stopped"
    assert not directory.exists()
    gone(everything)


def test_the_server_runs_without_asyncio() -> None:
    with SyncEmbeddedPostgres() as pg:
        assert sql(pg.url, "select 1") == [(1,)]
        assert pg.wait_ended(timeout=0) is None
    assert pg.wait_ended() == Ended(status=0, expected=True)


async def test_the_repr_shows_the_state_and_no_secret() -> None:
    pg = EmbeddedPostgres()
    assert repr(pg) == "<EmbeddedPostgres stopped, temporary data>"
    async with pg:
        assert repr(pg) == (
            f"<EmbeddedPostgres PostgreSQL {pg.version}, running, at 127.0.0.1:{pg.port}, "
            f"pid {pg.pid}, temporary data in {pg.data_dir}>"
        )
        assert pg.password not in repr(pg)
        await pg.kill()
        assert ", ended, " in repr(pg)
    assert repr(pg).endswith(", temporary data>")


async def test_url_and_wait_ended_before_the_start_are_errors() -> None:
    pg = EmbeddedPostgres()
    with pytest.raises(EmbeddedError, match="has not been started"):
        _ = pg.url
    with pytest.raises(EmbeddedError, match="has not been started"):
        await pg.wait_ended()
    await pg.stop()
    await pg.kill()


def test_a_second_start_is_refused(postgres: SyncEmbeddedPostgres) -> None:
    with pytest.raises(EmbeddedError, match=f"running already \\(pid {postgres.pid}\\)"):
        postgres.start()
    assert postgres.running


async def test_restart_keeps_address_and_data() -> None:
    async with EmbeddedPostgres() as pg:
        url, pid = pg.url, pg.pid
        sql(url, "create table kept as select 7 as n")
        await pg.restart()
        assert pg.url == url
        assert pg.pid != pid
        assert sql(url, "select n from kept") == [(7,)]


async def test_killed_under_load_it_keeps_what_was_committed() -> None:
    async with EmbeddedPostgres(options={"fsync": "on"}) as pg:
        sql(pg.url, "create table log (n int primary key)")
        committed = 0
        warm = asyncio.Event()

        async def load() -> None:
            nonlocal committed
            async with await psycopg.AsyncConnection.connect(pg.url, autocommit=True) as link:
                while True:
                    await link.execute("insert into log values (%s)", [committed + 1])
                    committed += 1
                    if committed == 200:
                        warm.set()

        loading = asyncio.create_task(load())
        await warm.wait()
        await pg.kill()
        with pytest.raises(psycopg.OperationalError):
            await loading
        assert committed >= 200
        await pg.start()
        # One more may have been committed without a response to the client.
        assert sql(pg.url, "select count(*), max(n) from log")[0] in [
            (committed, committed),
            (committed + 1, committed + 1),
        ]


async def test_kill_ends_a_backend_that_would_not_notice() -> None:
    async with EmbeddedPostgres() as pg:
        assert pg.guard_pid is not None
        busy = await psycopg.AsyncConnection.connect(pg.url, autocommit=True)
        async with busy:
            # A loop without a wait: such a backend does not look whether its server still lives.
            spin = asyncio.create_task(
                busy.execute("select count(*) from generate_series(1, 100000000000)")
            )
            backend = psutil.Process(busy.info.backend_pid)
            await asyncio.to_thread(until, lambda: backend.cpu_times().user > 0.05, "busy")
            everything = family(pg.guard_pid)
            assert backend in everything
            await pg.kill()
            assert running(everything) == []
            with pytest.raises(psycopg.OperationalError):
                await spin


async def test_a_server_that_ends_by_itself_is_noticed() -> None:
    async with EmbeddedPostgres() as pg:
        waiting = asyncio.create_task(pg.wait_ended())
        assert pg.pid is not None
        os.kill(pg.pid, signal.SIGKILL)
        ended = await waiting
        assert ended == Ended(status=-signal.SIGKILL, expected=False)
        assert str(ended) == "the server ended by itself, by SIGKILL"
        assert pg.state == "ended"
        assert not pg.running
        await pg.start()
        assert pg.running


async def test_a_cancelled_wait_ended_can_be_repeated() -> None:
    async with EmbeddedPostgres() as pg:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pg.wait_ended(), 0.01)
        waiting = asyncio.create_task(pg.wait_ended())
        await asyncio.sleep(0)
        await pg.stop()
        assert str(await waiting) == "the server ended as requested, with status 0"
        assert await pg.wait_ended() == await waiting


@pytest.mark.every_loop
async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    begun = asyncio.Event()
    pg = EmbeddedPostgres(tmp_path / "pg", on_progress=lambda text: begun.set())
    starting = asyncio.create_task(pg.start())
    await begun.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert pg.state == "stopped"
    assert sorted(path.name for path in (tmp_path / "pg").iterdir()) == ["lock", "postgres.log"]
    assert [child for child in psutil.Process().children() if "_guard.py" in child.cmdline()] == []
    await pg.start()
    assert pg.running
    await pg.stop()


async def test_a_start_that_is_cancelled_at_its_end_leaves_nothing() -> None:
    def on_progress(text: str) -> None:
        if text.startswith("ready"):
            starting.cancel()

    pg = EmbeddedPostgres(on_progress=on_progress)
    starting = asyncio.create_task(pg.start())
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert pg.state == "stopped"
    assert repr(pg).endswith(", temporary data>")


async def test_a_cancelled_stop_still_stops() -> None:
    pg = EmbeddedPostgres()
    await pg.start()
    assert pg.guard_pid is not None
    everything = family(pg.guard_pid)
    stopping = asyncio.create_task(pg.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert pg.state == "stopped"
    gone(everything)


@pytest.mark.every_loop
async def test_on_progress_is_called_on_the_loop(tmp_path: Path) -> None:
    told: list[str] = []
    loop = asyncio.get_running_loop()

    def on_progress(text: str) -> None:
        assert asyncio.get_running_loop() is loop
        if not text.startswith("still starting"):  # which appears only on a busy machine
            told.append(text)

    pg = EmbeddedPostgres(tmp_path / "pg", on_progress=on_progress)
    async with pg:
        pass
    first = list(told)
    assert [text.split()[0] for text in first] == ["creating", "starting", "ready", "stopping"]
    assert f"PostgreSQL {pg.version} on 127.0.0.1:{pg.port}" in first[1]
    told.clear()
    async with pg:
        await pg.kill()
        await pg.start()
    assert [text.split()[0] for text in told] == [
        *("starting", "ready"),
        *("killing", "starting", "ready"),
        "stopping",
    ]
    assert "recovering after a crash" in told[3]
    assert "recovering" not in told[0]


async def test_a_slow_start_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "_PROGRESS_INTERVAL", 0.05)
    told: list[str] = []
    async with EmbeddedPostgres(on_progress=told.append):
        pass
    news = [text for text in told if text.startswith("still starting after ")]
    assert news


async def test_stop_escalates_from_fast_to_immediate_to_sigkill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moored.embedded._cluster.KILL_TIMEOUT", 0.2)
    told: list[str] = []
    pg = EmbeddedPostgres(stop_timeout=0.2, on_progress=told.append)
    await pg.start()
    assert pg.pid is not None
    everything = family(pg.pid)
    # A stopped process handles no SIGINT and no SIGQUIT, as one that hangs in its disk would not.
    os.kill(pg.pid, signal.SIGSTOP)
    await pg.stop()
    assert [text.split()[0] for text in told[-3:]] == ["stopping", "the", "killing"]
    gone(everything)
