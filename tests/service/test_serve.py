"""`moored serve` as a process, with real signals and a real PostgreSQL."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest
from tests.http_client import ONE_REQUEST
from tests.servers import free_port, require_server
from tests.service.support import (
    Running,
    clean_environment,
    gone,
    moored,
    own_stream,
    running,
    until,
)
from tests.soaking import some_of

from moored.cli import main
from moored.embedded import SyncEmbeddedPostgres
from moored.kernel import Child, Context
from moored.service import Config, Part, _service, serve, stored_token

#: Where services that the tests start store their tokens.
TOKENS = Path(os.environ["XDG_STATE_HOME"]) / "moored" / "tokens"


@pytest.mark.parametrize(
    "number",
    some_of([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], signal.SIGINT),
)
def test_a_signal_stops_everything_in_order_with_exit_code_0(
    number: signal.Signals, spare_data: Path
) -> None:
    with running("--data-dir", str(spare_data)) as service:
        service.wait_active()
        family = service.family()
        names = {process.name() for process in family}
        assert "postgres" in names
        assert service.stop(number) == 0
        gone(family)
    said = "\n".join(service.lines)
    assert (
        said.index("stopping (Ctrl-C") < said.index("stopping the server") < said.index("stopped")
    )
    assert "Traceback" not in said


def test_a_stop_before_the_service_is_ready_exits_with_0(tmp_path: Path) -> None:
    with running("--data-dir", str(tmp_path / "data")) as service:
        where = service.wait_for(
            "running a PostgreSQL of its own, which keeps its data in (.*) [(]"
        )
        assert where[1] == str(tmp_path / "data")
        service.wait_for("PostgreSQL: creating the data")
        family = service.family()
        assert service.stop() == 0
        gone(family)


def test_an_open_stream_does_not_delay_the_stop(postgres_url: str) -> None:
    with running("--database-url", postgres_url) as service:
        service.wait_active()
        url = f"{service.url}/v1/events"
        options: Any = {"timeout": 60, "trust_env": False, "verify": False}
        with httpx.stream("GET", url, headers=service.bearer, **options) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "retry: 1000"
            service.process.send_signal(signal.SIGTERM)
            for _ in lines:  # it ends by itself
                pass
        assert service.wait() == 0


def test_a_second_ctrl_c_forces_the_end_and_leaves_nothing(spare_data: Path) -> None:
    with running("--data-dir", str(spare_data)) as service:
        service.wait_active()
        family = service.family()
        # A stopped server cannot shut down in order, so the first Ctrl-C alone would wait for it.
        service.postgres().send_signal(signal.SIGSTOP)
        service.process.send_signal(signal.SIGINT)
        service.wait_for("PostgreSQL: stopping the server")
        assert service.process.returncode is None
        assert service.stop() == 130
        gone(family)


def test_a_third_ctrl_c_leaves_at_once_and_the_guard_cleans_up(spare_data: Path) -> None:
    with running("--data-dir", str(spare_data)) as service:
        service.wait_active()
        family = service.family()
        guard = service.postgres().parent()
        assert guard is not None
        guard.send_signal(signal.SIGSTOP)  # now not even the forced end gets through
        service.process.send_signal(signal.SIGINT)
        service.wait_for("stopping \\(Ctrl-C")
        service.process.send_signal(signal.SIGINT)
        service.wait_for("forced to end")
        assert service.stop() == 130
        guard.send_signal(signal.SIGCONT)
        gone(family)


def test_health_is_202_before_it_is_ready_and_200_after(tmp_path: Path) -> None:
    with running("--data-dir", str(tmp_path / "data")) as service:
        seen = [service.health()]

        def active() -> bool:
            seen.append(service.health())
            return seen[-1][0] == 200

        until(active, "active")
        assert seen[0] == (202, "starting")
        assert seen[-1] == (200, "active")
        assert {code for code, _ in seen[:-1]} == {202}
        assert service.stop() == 0


def test_a_server_that_dies_is_restarted_and_health_shows_it(spare_data: Path) -> None:
    with running("--data-dir", str(spare_data)) as service:
        service.wait_active()
        http = service.get("/v1/status").json()["tree"]["children"][1]
        manager = service.get("/v1/status").json()["tree"]["children"][0]["children"][1]
        before = service.postgres()
        before.kill()
        until(lambda: service.health()[0] == 202, "the loss is noticed")
        service.wait_active()
        assert service.postgres().pid != before.pid
        service.wait_for("ready again")
        state = service.get("/v1/status").json()
        server = state["tree"]["children"][0]["children"][0]
        assert server["name"] == "server"
        assert server["restarts"] == 1
        assert "SIGKILL" in server["last_failure"]
        # What follows it, and what shows it, were not restarted with it.
        again = state["tree"]["children"][0]["children"][1]
        assert again["generation"] == manager["generation"] == 1
        assert state["tree"]["children"][1]["generation"] == http["generation"] == 1
        assert service.stop() == 0


def test_a_server_that_must_move_to_another_port_is_found_there(spare_data: Path) -> None:
    with running("--data-dir", str(spare_data)) as service, ExitStack() as stack:
        service.wait_active()
        port = int(service.wait_for(r"ready after .* at 127\.0\.0\.1:(\d+)/postgres$")[1])
        seen = len(service.lines)

        def taken() -> bool:
            """Whether another program took the port before the server was restarted."""
            processes = [p for p in service.family() if p.name() == "postgres"]
            if processes:
                processes[0].kill()
                gone(processes[:1])
            try:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                return False
            return True

        until(taken, "its port is taken")
        service.wait_for("ready again", seen)
        detail = service.get("/v1/status").json()["conditions"]["postgres_ready"]["detail"]
        assert f":{port}/" not in detail
        assert service.stop() == 0


@pytest.mark.soak  # test_database does it without a process
def test_a_database_that_goes_away_is_waited_for(tmp_path: Path) -> None:
    with (
        SyncEmbeddedPostgres(tmp_path / "data") as server,
        running(environ={"DATABASE_URL": server.url}) as service,
    ):
        service.wait_active()
        assert {p.name() for p in service.family()}.isdisjoint({"postgres"})
        server.stop()
        until(lambda: service.health()[0] == 202, "the loss is noticed")
        server.start()
        service.wait_active()
        assert service.stop() == 0


@pytest.mark.soak  # test_database does it without a process
def test_a_database_that_is_a_little_late_is_waited_for(tmp_path: Path) -> None:
    server = SyncEmbeddedPostgres(tmp_path / "data")
    server.start()
    url = server.url
    server.stop()
    with running("--database-url", url, "--database-wait", "60") as service:
        until(lambda: _told(service, "connection_error"), "the first failure")
        server.start()
        service.wait_active()
        assert service.stop() == 0
    server.stop()


def test_an_unreachable_database_is_one_line_and_exit_code_2() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, but not listening
        port = nobody.getsockname()[1]
        url = f"postgresql://app:s3cret@127.0.0.1:{port}/orders"
        ended = moored("serve", "--port", "0", "--database-wait", "0.3", DATABASE_URL=url)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"moored: cannot reach PostgreSQL at 127.0.0.1:{port}/orders within ")
    assert "the server's address refuses connections" in line
    assert "Connection refused" in line
    assert "Start it, or correct DATABASE_URL;" in line
    assert "Traceback" not in ended.stdout
    assert "s3cret" not in ended.stdout + ended.stderr


def test_a_database_without_logical_replication_is_one_line_and_exit_code_2() -> None:
    with SyncEmbeddedPostgres(options={"wal_level": "replica"}) as server:
        ended = moored("serve", "--port", "0", "--database-url", server.url)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("moored: wal_level of the server is not logical ")
    assert line.endswith(
        "set wal_level = logical in postgresql.conf (on RDS: "
        "rds.logical_replication = 1) and restart the server; `moored doctor URL` reports it as "
        "wal_level"
    )
    assert "Traceback" not in ended.stdout


def test_a_revoked_privilege_is_waited_for() -> None:
    """After the start, a missing privilege is an outage; only a start fails because of it."""
    with SyncEmbeddedPostgres() as server, psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute("create role follower login replication password 'follows'")
        conn.execute("grant create on database postgres to follower")
        url = f"postgresql://follower:follows@127.0.0.1:{server.port}/postgres"
        with running("--database-url", url) as service:
            service.wait_active()
            conn.execute("alter role follower noreplication")
            conn.execute("select pg_terminate_backend(pid) from pg_stat_replication")
            service.wait_for(
                "no stream after .*: this user lacks the REPLICATION privilege .*: run ALTER ROLE"
            )
            until(lambda: service.health()[0] == 202, "the loss is shown")
            conn.execute("alter role follower replication")
            service.wait_active()
            assert service.stop() == 0
    assert "follows" not in "\n".join(service.lines).replace("follower", "")


@pytest.mark.soak  # test_database does it without a process
def test_a_second_service_waits_for_the_first_and_takes_over(postgres_url: str) -> None:
    own = {"MOORED_STREAM_ID": "hand_over"}
    with running("--database-url", postgres_url, environ=own) as first:
        first.wait_active()
        with running("--database-url", postgres_url, environ=own) as second:
            until(lambda: second.health() == (202, "waiting"), "it waits")
            second.wait_for("standing by, because the lock of moored_slot_hand_over is held by")
            assert first.stop() == 0
            second.wait_active()
            assert second.stop() == 0


def _told(service: Running, event: str) -> bool:
    stream = service.get("/v1/status").json().get("postgres", {})
    return event in stream.get("event_counts", {})


@pytest.mark.soak  # as an unreachable one
def test_a_silent_database_is_unreachable_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://app@127.0.0.1:{silent.getsockname()[1]}/orders"
        ended = moored("serve", "--port", "0", "--database-url", url, "--database-wait", "0.5")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "timed out. Start it, or correct --database-url" in line


def test_a_taken_port_is_one_line_that_says_what_to_do(service: Running) -> None:
    port = service.url.rpartition(":")[2]
    ended = moored("serve", "--port", port)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith(
        f"moored: cannot listen on 127.0.0.1:{port}: the port is in use by pid "
        f"{service.process.pid} ({sys.executable}"
    )
    assert ended.stderr.endswith("). Stop it, or choose another with --port.\n")


def test_a_second_service_on_the_same_data_directory_is_refused(service: Running) -> None:
    listening = service.get("/v1/status").json()
    assert listening["status"] == "active"
    data = service.process.args[service.process.args.index("--data-dir") + 1]
    ended = moored("serve", "--port", "0", "--data-dir", data)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("moored: the embedded PostgreSQL cannot start: the data directory ")
    assert str(service.process.pid) in line
    assert "--data-dir" in line
    assert service.health() == (200, "active")


def test_other_machines_are_refused_without_a_token() -> None:
    ended = moored("serve", "--host", "0.0.0.0", "--port", "0")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "requires an admin token: set MOORED_ADMIN_TOKEN" in line


def test_with_a_token_everything_but_health_requires_it(postgres_url: str) -> None:
    token = "correct-horse-battery-staple"
    environ = {"DATABASE_URL": postgres_url, "MOORED_ADMIN_TOKEN": token}
    with running("--host", "0.0.0.0", environ=environ) as service:
        base = service.url.replace("0.0.0.0", "127.0.0.1")
        options: Any = {"timeout": 60, "limits": ONE_REQUEST, "trust_env": False, "verify": False}
        with httpx.Client(base_url=base, **options) as client:
            until(lambda: client.get("/v1/health").status_code == 200, "active")
            for path in (
                "/v1/status",
                "/v1/events",
                "/v1/explain/http",
                "/metrics",
                "/",
                "/nothing",
            ):
                assert client.get(path).status_code == 401, path
            right = {"Authorization": f"Bearer {token}"}
            assert client.get("/v1/status", headers=right).status_code == 200
            wrong = {"Authorization": f"Bearer {token}x"}
            assert client.get("/v1/status", headers=wrong).status_code == 401
        assert service.stop() == 0
    assert token not in "\n".join(service.lines)


def test_every_line_is_json_with_log_format_json(postgres_url: str) -> None:
    with running("--database-url", postgres_url, "--log-format", "json") as service:
        service.wait_for('"event": "ready after')
        assert service.stop() == 0
    lines = [json.loads(line) for line in service.lines]
    assert lines[0]["event"].startswith("http://127.0.0.1:")
    assert {line["level"] for line in lines} == {"info"}


def test_the_token_of_the_start_is_for_this_user_and_ends_with_the_service(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    for arguments in ([], ["--log-format", "json"]):
        with running("--database-url", postgres_url, *arguments) as service:
            service.wait_for("ready after")
            port = service.url.rpartition(":")[2]
            stored = stored_token(int(port))
            assert stored is not None
            assert main(["status", "--url", service.url]) == 0
            (path,) = [each for each in TOKENS.iterdir() if each.name == port]
            assert (path.stat().st_mode & 0o777, TOKENS.stat().st_mode & 0o777) == (0o600, 0o700)
            assert service.stop() == 0
        seen.append(stored)
        assert not path.exists()
        told = [line for line in service.lines if stored in line]
        if arguments:
            assert told == []
            assert str(path) in service.lines[0]
        else:
            assert told == service.lines[:1]
    assert seen[0] != seen[1]


def test_the_link_of_another_user_is_a_url_for_commands(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with running("--database-url", postgres_url) as service:
        service.wait_for("ready after")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        assert main(["status", "--url", service.url]) == 2
        assert main(["status", "--url", service.link]) == 0


def test_a_user_without_a_directory_gets_a_token_too(postgres_url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environ = {"DATABASE_URL": postgres_url, "XDG_STATE_HOME": str(tmp_path / "file")}
    with running(environ=environ) as service:
        assert service.get("/v1/status").status_code == 200
    with running("--log-format", "json", environ=environ) as service:
        service.wait_for("could not be stored: set MOORED_ADMIN_TOKEN")


def test_no_token_gives_every_local_user_access_and_says_so(postgres_url: str) -> None:
    with running("--database-url", postgres_url, "--no-token") as service:
        assert service.link == service.url
        assert service.get("/v1/status").status_code == 200
        assert "open to every user of this machine" in service.lines[0]


def test_a_closed_stdout_does_not_end_the_service(postgres_url: str) -> None:
    command = [sys.executable, "-m", "moored.cli", "serve", "--port", "0"]
    with subprocess.Popen(
        [*command, "--database-url", postgres_url, "--log-level", "debug"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(**own_stream()),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().split()[1].partition("/?")[0]
        process.stdout.close()  # as after `moored serve | head -1`
        options: Any = {"timeout": 60, "trust_env": False, "verify": False}
        health = f"{url}/v1/health"
        until(lambda: httpx.get(health, **options).status_code == 200, "active")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


def test_ctrl_c_in_a_terminal_reaches_the_service_alone(spare_data: Path) -> None:
    ours, theirs = os.openpty()
    name = os.ttyname(theirs)
    # The leader of a new session gets the first terminal that it opens as its own.
    shell = ["sh", "-c", 'exec 0<>"$0" 1>&0 2>&0; exec "$@"', name]
    command = [sys.executable, "-m", "moored.cli", "serve", "--port", "0"]
    process = subprocess.Popen(
        [*shell, *command, "--data-dir", str(spare_data)],
        start_new_session=True,
        env=clean_environment(),
    )
    said = b""
    while b"ready after" not in said or b"moored: ready" not in said:
        said += os.read(ours, 4096)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.write(ours, b"\x03")
    while b"stopped" not in said:
        said += os.read(ours, 4096)
    assert process.wait(60) == 0
    gone(family)
    os.close(ours)
    os.close(theirs)
    # In order: the service stopped PostgreSQL, not the terminal's signal.
    assert said.index(b"stopping (Ctrl-C") < said.index(b"stopping the server (fast shutdown)")


def test_a_taken_port_of_the_embedded_server_is_one_line(spare_data: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = moored(
            "serve", "--port", "0", "--data-dir", str(spare_data), "--postgres-port", port
        )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("moored: the embedded PostgreSQL cannot start: ")
    assert f"127.0.0.1:{port}" in line


def test_the_port_of_the_embedded_server_can_be_chosen(spare_data: Path) -> None:
    port = free_port()
    with running("--data-dir", str(spare_data), "--postgres-port", str(port)) as service:
        service.wait_for(f"moored: ready after .*: PostgreSQL .* at 127.0.0.1:{port}/postgres$")
        assert service.stop() == 0


@pytest.mark.soak  # the tests of the embedded server run an installed one, too
def test_an_installed_postgres_can_be_run_instead(tmp_path: Path) -> None:
    bin_dir = Path(require_server("postgres")).parent
    data = str(tmp_path / "data")
    with running("--data-dir", data, "--postgres-bin-dir", str(bin_dir)) as service:
        service.wait_active()
        assert Path(service.postgres().exe()).parent == bin_dir
        assert service.stop() == 0


def test_a_service_that_is_killed_leaves_no_process_behind(spare_data: Path) -> None:
    with running("--data-dir", str(spare_data)) as service:
        service.wait_active()
        family = service.family()
        service.process.kill()
        gone(family)


def test_a_service_that_fails_prints_the_reason_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def burn(ctx: Context) -> None:
        ctx.started()
        raise RuntimeError("on fire")

    hopeless = Part("hopeless", lambda wiring: [Child("fuse", burn)], conditions=("lit",))
    monkeypatch.setattr(_service, "database_part", lambda config: hopeless)
    assert serve(Config(port=0)) == 1
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("moored: moored gave up: ")
    assert "RuntimeError: on fire" in out  # an unexpected failure keeps its traceback
