"""The commands that query a running service, and those that need none."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import psycopg
import pytest
from tests.servers import free_port
from tests.service.support import Running, moored, running, until

from moored import __version__
from moored.cli import _show, main

Output = pytest.CaptureFixture[str]


def refused(capsys: Output, *arguments: str) -> str:
    """Run a command that must fail, and return its one line on stderr."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("moored: ")
    return line


def test_status_shows_the_conditions_and_the_tree(
    service: Running, bare: Path, capsys: Output
) -> None:
    assert main(["status", "--url", service.url]) == 0
    out = capsys.readouterr().out
    first = out.splitlines()[0]
    assert first.startswith(f"moored {__version__} at {service.url} works, up ")
    assert first.endswith(f"pid {service.process.pid}")
    assert "postgres_ready" in out
    assert "└─ http" in out
    assert "postgres  streaming for " in out
    assert "admin pool" in out
    assert "ready, 1 of 1, 0 in use, 0 waiting" in out
    assert "kept on the server" in out
    assert " behind, " in out


def test_status_is_one_object_for_programs(service: Running, bare: Path, capsys: Output) -> None:
    assert main(["status", "--url", service.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "active"


def test_status_exits_with_1_while_the_database_does_not_answer(bare: Path, capsys: Output) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://x@127.0.0.1:{silent.getsockname()[1]}/x"
        with running("--database-url", url, "--database-wait", "600") as service:
            assert main(["status", "--url", service.url]) == 1
            # Waiting from the moment on at which the manager is shown.
            assert re.search("(is starting|stands by), up ", capsys.readouterr().out)
            assert main(["explain", "--url", service.url]) == 0
            assert capsys.readouterr().out.startswith("Starting: 0 of 1 parts work: ")


def test_tree_shows_the_tree_alone(service: Running, bare: Path, capsys: Output) -> None:
    assert main(["tree", "--url", service.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["moored", "├─", *12 * "│", "└─"]
    assert "restarter" in lines[4]
    assert main(["tree", "--url", service.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["children"][1]["name"] == "http"


def test_top_shows_the_service_once_where_there_is_no_terminal(
    service: Running, bare: Path, capsys: Output
) -> None:
    assert main(["top", "--url", service.url]) == 0
    out = capsys.readouterr().out
    assert "Everything works: 1 part." in out
    assert "└─ http" in out
    assert main(["top", "--url", service.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sentence"] == "Everything works: 1 part."


def test_explain_without_a_component_shows_what_went_wrong(tmp_path: Path, capsys: Output) -> None:
    with running("--data-dir", str(tmp_path / "data")) as service:
        service.wait_active()
        assert main(["explain", "--url", service.url]) == 0
        assert capsys.readouterr().out == (
            "Everything works: 1 part.\n  no part has stopped working\n"
        )
        service.postgres().kill()
        until(lambda: bool(service.get("/v1/status").json()["outages"]), "the outage is seen")
        service.wait_active()
        assert main(["explain", "--url", service.url, "--last", "10m"]) == 0
        out = capsys.readouterr().out
        assert re.search(r"^  1 .*PostgreSQL.*, for ", out, re.MULTILINE)
        assert "because" in out
        assert main(["explain", "--url", service.url, "--last", "soon"]) == 2
        assert "'soon' is not a time: write 90s, 10m or 2h" in capsys.readouterr().err


def test_slots_are_listed_and_dropped(postgres_url: str, bare: Path, capsys: Output) -> None:
    name = f"left_behind_{os.getpid()}"
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (name,))
    assert main(["slots", "list", "--database-url", postgres_url, "--json"]) == 0
    (found,) = [each for each in json.loads(capsys.readouterr().out) if each["slot"] == name]
    assert (found["kind"], found["pid"], found["status"]) == ("logical", None, "reserved")
    assert main(["slots", "drop", "no_such_slot", "--database-url", postgres_url]) == 2
    assert "there is no slot 'no_such_slot': there are" in capsys.readouterr().err
    assert main(["slots", "drop", name, "--database-url", postgres_url]) == 0
    assert capsys.readouterr().out == f"dropped {name}\n"
    assert main(["slots", "list", "--database-url", postgres_url]) == 0
    assert name not in capsys.readouterr().out


def test_snapshot_writes_a_table_as_copy_does(
    postgres_url: str, bare: Path, capsys: Output
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("create table wares (id int primary key, name text, price int)")
        conn.execute(
            "insert into wares select n, 'ware ' || n, n % 7 from generate_series(1, 99) n"
        )
    target = bare / "wares.tsv"
    wanted = ["--database-url", postgres_url, "--where", "price < 5", "--column", "name"]
    assert main(["snapshot", "wares", *wanted, "--chunk-rows", "10", "-o", str(target)]) == 0
    assert "wares: 71 rows in " in capsys.readouterr().err
    rows = [line.split("\t") for line in target.read_text().splitlines()]
    assert rows == [[str(n), f"ware {n}"] for n in range(1, 100) if n % 7 < 5]
    assert main(["snapshot", "nothing", "--database-url", postgres_url]) == 2
    assert "nothing" in capsys.readouterr().err


def test_snapshot_writes_several_tables_into_a_directory(
    postgres_url: str, bare: Path, capsys: Output
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        for table in ("wares", "bills"):
            conn.execute(f"create table {table} (id int primary key)".encode())
            conn.execute(f"insert into {table} select generate_series(1, 30)".encode())
    tables = ["snapshot", "wares", "public.bills", "--database-url", postgres_url]
    assert main(tables) == 2
    assert "--output must be a directory" in capsys.readouterr().err
    assert main([*tables, "--chunk-rows", "7", "-o", str(bare)]) == 0
    for table in ("wares", "public.bills"):
        lines = (bare / f"{table}.tsv").read_text().splitlines()
        assert lines == [str(n) for n in range(1, 31)]
    assert main([*tables, "missing", "-o", str(bare)]) == 2
    assert "moored: the table missing does not exist" in capsys.readouterr().err


def test_snapshot_reports_a_url_without_a_server_at_once(bare: Path, capsys: Output) -> None:
    url = f"postgresql://app@127.0.0.1:{free_port()}/shop"
    assert main(["snapshot", "orders", "--database-url", url]) == 2
    assert "Connection refused" in capsys.readouterr().err


def test_explain_takes_the_end_of_a_path(service: Running, bare: Path, capsys: Output) -> None:
    assert main(["explain", "postgres", "--url", service.url]) == 0
    name, state, cause, so = capsys.readouterr().out.splitlines()
    assert name == "postgres"
    assert state.startswith("active: streaming for ")
    assert cause.startswith("  because  changes are streamed; everything up to ")
    assert so == "  so       there is nothing to do"
    assert main(["explain", "moored/postgres", "--url", service.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["component"] == "moored/postgres"


def test_a_row_of_a_table_that_is_piped_is_one_line(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    rows = _show.table("resource", "fence")
    rows.add_row("r" * 70, "1" * 30)
    _show.show({}, False, lambda out: out.print(rows))
    assert capsys.readouterr().out.splitlines()[1] == f"{'r' * 70}  {'1' * 30}"


@pytest.mark.parametrize(
    ("wanted", "known"),
    [
        ("database", "postgres, http"),  # the parts
        ("manger", "manager"),
        ("manager/c", "moored/postgres/manager/connection"),
    ],
)
def test_explain_of_an_unknown_component_lists_the_nearest_ones(
    service: Running, bare: Path, capsys: Output, wanted: str, known: str
) -> None:
    line = refused(capsys, "explain", wanted, "--url", service.url)
    assert line.startswith(f"moored: there is no component {wanted!r}; known: {known}")


def test_explain_of_a_component_takes_no_time(service: Running, bare: Path, capsys: Output) -> None:
    line = refused(capsys, "explain", "postgres", "--last", "10m", "--url", service.url)
    assert "--last shows all parts: leave out postgres, or --last" in line


def test_the_service_is_found_by_the_configuration(
    service: Running, bare: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = service.url.rpartition(":")[2]
    (bare / "moored.toml").write_text(f"port = {port}\n")
    assert main(["tree"]) == 0
    monkeypatch.setenv("MOORED_PORT", "9")
    assert main(["tree"]) == 2
    monkeypatch.setenv("MOORED_URL", service.url)
    assert main(["tree"]) == 0
    capsys.readouterr()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_not_trusted(bare: Path, capsys: Output) -> None:
    file = bare / "moored.toml"
    file.write_text("port = 1\n")
    os.chown(file, 65534, 65534)
    for command in (["status"], ["serve"], ["config", "--config", str(file)]):
        line = refused(capsys, *command)
        assert "moored.toml: it belongs to user 65534, so it is not trusted" in line


def test_a_file_that_others_can_write_to_is_not_trusted(bare: Path, capsys: Output) -> None:
    file = bare / "moored.toml"
    file.write_text("port = 1\n")
    file.chmod(0o646)
    assert "other users can write to it" in refused(capsys, "status")
    file.unlink()
    os.mkfifo(file)
    assert "it is not a file" in refused(capsys, "status")


def test_a_token_is_not_sent_to_a_host_from_another_source(
    bare: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOORED_ADMIN_TOKEN", "t0ken")
    (bare / "moored.toml").write_text('host = "192.0.2.1"\n')
    line = refused(capsys, "status")
    assert "the admin token from the environment is not sent to http://192.0.2.1:8089" in line
    (bare / "moored.toml").write_text('host = "0.0.0.0"\nport = 1\n')
    assert "no service responds at http://127.0.0.1:1" in refused(capsys, "status")
    monkeypatch.delenv("MOORED_ADMIN_TOKEN")
    monkeypatch.setenv("MOORED_HOST", "192.0.2.1")
    (bare / "moored.toml").write_text('admin_token = "t0ken"\n')
    line = refused(capsys, "status")
    assert "the admin token from moored.toml is not sent to http://192.0.2.1:8089" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "postgresql://app:s3crt@db/orders"],
        ["postgresql://app:s3crt@db/orders"],
        ["status", "--url", "http://admin:s3crt@127.0.0.1:1"],
        ["status", "--url", "ftp://admin:s3crt@127.0.0.1:1"],
        ["status", "--url", "http://127.0.0.1:1", "--admin-token", "s3crt\nx"],
        ["status", "--url", "http://127.0.0.1:s3crt?crt-pw@host"],
    ],
)
def test_no_secret_of_a_command_line_is_repeated(
    arguments: list[str], bare: Path, capsys: Output
) -> None:
    line = refused(capsys, *arguments)
    assert "s3" not in line
    assert "crt" not in line


def test_the_user_of_an_address_is_not_shown(
    service: Running, bare: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOORED_URL", service.url.replace("://", "://admin:s3crt@"))
    assert main(["status"]) == 0
    assert f" at {service.url} works" in capsys.readouterr().out


def test_components_are_completed_from_the_service_that_the_variable_names(
    service: Running, bare: Path
) -> None:
    completed = moored(
        cwd=bare,
        MOORED_URL=service.url,
        _MOORED_COMPLETE="complete_bash",
        COMP_WORDS="moored explain moored/post",
        COMP_CWORD="2",
    )
    assert "moored/postgres/manager/connection" in completed.stdout.split()


def test_an_unknown_home_directory_is_one_line_on_stderr(bare: Path, capsys: Output) -> None:
    line = refused(capsys, "config", "--data-dir", "~no-such-user/x")
    assert line.startswith("moored: --data-dir: '~no-such-user/x' has no home directory")


def test_an_unreachable_service_is_one_line_on_stderr(bare: Path, capsys: Output) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        for command in (["status"], ["tree"], ["explain", "x"]):
            assert refused(capsys, *command, "--url", url) == (
                f"moored: no service responds at {url} (Connection refused). "
                "Start one with `moored serve`, or choose another with --url."
            )


def test_another_program_at_the_address_is_one_line_on_stderr(
    bare: Path, capsys: Output, service: Running
) -> None:
    line = refused(capsys, "status", "--url", f"{service.url}/static")
    assert "responded to /v1/status with 404: there is nothing at /static/v1/status" in line
    assert "is not an address" in refused(capsys, "status", "--url", "ftp://x")
    assert "no service responds" in refused(capsys, "status", "--url", "http://127.0.0.1:99999")


def test_a_missing_token_is_an_error_and_a_given_one_is_sent(
    postgres_url: str, bare: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"MOORED_ADMIN_TOKEN": "t0ken", "DATABASE_URL": postgres_url}
    with running(environ=environ) as service:
        service.wait_active()
        line = refused(capsys, "status", "--url", service.url)
        assert line.endswith("set MOORED_ADMIN_TOKEN, or use --admin-token")
        assert main(["tree", "--url", service.url, "--admin-token", "t0ken"]) == 0
        monkeypatch.setenv("MOORED_ADMIN_TOKEN", "t0ken")
        assert main(["tree", "--url", service.url]) == 0
        monkeypatch.delenv("MOORED_ADMIN_TOKEN")
        port = service.url.rpartition(":")[2]
        (bare / "moored.toml").write_text(f'port = {port}\nadmin_token = "t0ken"\n')
        assert main(["tree"]) == 0
        capsys.readouterr()


def test_config_shows_each_value_and_its_source(
    bare: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://app:hunter2@db/orders")
    (bare / "moored.toml").write_text('admin_token = "hunter2"\n')
    assert main(["config", "--port", "9000"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert rows["port"] == ["9000", "--port"]
    assert rows["database_url"] == ["postgresql://app:***@db/orders", "DATABASE_URL"]
    assert rows["admin_token"] == ["***", "moored.toml"]
    assert rows["log_level"] == ["info", "default"]
    assert "hunter2" not in out
    assert main(["config", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["port"] == {"value": 8089, "from": "default"}
    assert told["admin_token"] == {"value": "***", "from": "moored.toml"}


def test_config_shows_where_the_data_will_be(bare: Path, capsys: Output) -> None:
    assert main(["config", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["data_dir"]["value"].endswith("moored/postgres")
    assert told["data_dir"]["from"] == "default"


def test_a_missing_or_unreadable_config_file_is_an_error(bare: Path, capsys: Output) -> None:
    assert refused(capsys, "config", "--config", "no.toml") == (
        "moored: --config: there is no file no.toml"
    )
    (bare / "bad.toml").write_bytes(b"\xff\xfe")
    assert "bad.toml: it cannot be read" in refused(capsys, "serve", "--config", "bad.toml")
    (bare / "other.toml").write_text("port = 1\n")
    assert main(["config", "--config", "other.toml"]) == 0
    assert "other.toml" in capsys.readouterr().out


def test_all_mistakes_are_reported_one_per_line(bare: Path, capsys: Output) -> None:
    assert main(["serve", "--port", "eighty", "--log-format", "xml", "--host", "::"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[1].strip() for line in err.splitlines()] == [
        "--port",
        "--log-format",
        "--host",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--prot", "1"], "--port"),
        (["serve", "orders:app", "extra"], "extra"),
        (["serve", "--port"], "--port"),
        (["sevre"], "sevre"),
        (["tree", "extra"], "extra"),
        (["--nothing"], "--nothing"),
    ],
)
def test_a_bad_option_is_one_line_that_points_to_the_help(
    arguments: list[str], said: str, bare: Path, capsys: Output
) -> None:
    line = refused(capsys, *arguments)
    assert said in line
    assert line.endswith(" --help.")
    assert "See moored" in line
