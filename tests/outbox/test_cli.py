"""`moored outbox`, against a real PostgreSQL."""

from __future__ import annotations

import io
import json
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from moored.cli import main

Output = pytest.CaptureFixture[str]


@pytest.fixture
def database_url(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DATABASE_URL", url)
    return url


def test_install_prints_what_it_did_and_keeps_how_publishers_wake(
    database_url: str, capsys: Output
) -> None:
    chosen = ["--wake", "notify"]
    for given, found in (([], "stream"), ([], "stream"), (chosen, "notify"), ([], "notify")):
        assert main(["outbox", "install", "--schema", "other", *given]) == 0
        text = f"the outbox in schema other is installed, with --wake {found}\n"
        assert capsys.readouterr().out == text
    with psycopg.connect(database_url) as conn:
        conn.execute("select other.outbox_publish('orders', 'x')")
        conn.execute("drop schema other cascade")


def test_sql_prints_what_install_runs(database_url: str, capsys: Output) -> None:
    assert (
        main(["outbox", "sql", "--schema", "printed", "--wake", "poll", "--grant", "postgres"]) == 0
    )
    printed = capsys.readouterr().out
    assert "drop trigger if exists outbox_wake" in printed
    assert 'to "postgres";' in printed
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(printed.encode())
        conn.execute("select printed.outbox_publish('orders', 'x')")
        conn.execute("drop schema printed cascade")


def test_status_shows_consumers_and_the_culprit(database_url: str, capsys: Output) -> None:
    with (
        psycopg.connect(database_url) as culprit,
        psycopg.connect(database_url, autocommit=True) as conn,
    ):
        culprit.execute("select moored.outbox_publish('orders', 'secret')")
        conn.execute("select moored.outbox_publish('orders', 'x')")
        conn.execute(
            "insert into moored.outbox_cursors (consumer, cursor) values ('search', '1-1-0-0')"
        )
        assert main(["outbox", "status"]) == 0
        text = capsys.readouterr().out
        assert main(["outbox", "status", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["held_back"]["pid"] == culprit.info.backend_pid
    assert "delivery is held back: events have waited for" in text
    assert (
        f"for the end of the transaction of backend {shown['held_back']['pid']} in database" in text
    )
    assert "secret" not in text
    assert shown["held_back"]["query"] == "select moored.outbox_publish(…, …)"
    (consumer,) = shown["consumers"]
    assert consumer["name"] == "search"
    assert consumer["lag"] > 0
    assert shown["partitions"] == 5


def test_prune_reports_partitions(database_url: str, capsys: Output) -> None:
    assert main(["outbox", "prune", "--retain-days", "1"]) == 0
    assert capsys.readouterr().out == "0 partitions created; 0 partitions dropped\n"
    assert main(["outbox", "prune", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"created": 0, "dropped": 0}


def test_capture_and_uncapture(database_url: str, capsys: Output) -> None:
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("create table orders (id int, org text)")
        arguments = ["orders", "--channel", "{shop} %s", "--tenant-column", "org"]
        assert main(["outbox", "capture", *arguments]) == 0
        conn.execute("insert into orders values (1, 'acme')")
        assert main(["outbox", "uncapture", "orders"]) == 0
        conn.execute("insert into orders values (2, 'acme')")
        found = conn.execute("select channel, tenant from moored.outbox").fetchall()
    assert found == [("{shop} %s", "acme")]
    assert capsys.readouterr().out.splitlines() == [
        "every change of orders is published",
        "changes of orders are no longer published",
    ]


def test_uninstall_shows_what_it_drops_and_leaves_only_the_schema(
    database_url: str, capsys: Output
) -> None:
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("create table orders (id int)")
        assert main(["outbox", "capture", "orders"]) == 0
        conn.execute("create table moored.mine (id int)")
        conn.execute("select moored.outbox_publish('orders', 'x')")
        # Not a terminal: it asks nobody, and drops nothing.
        assert main(["outbox", "uninstall"]) == 2
        out, err = capsys.readouterr()
        assert "every change of orders is published" in out
        assert err == "moored: this drops the events, read or not: to confirm it, add --yes\n"
        conn.execute("select moored.outbox_publish('orders', 'x')")
        assert main(["outbox", "uninstall", "--yes"]) == 0
        assert capsys.readouterr().out.endswith("the outbox in schema moored is dropped\n")
        conn.execute("insert into orders values (1)")
        assert _left(conn) == ["mine"]
        assert main(["outbox", "install"]) == 0


@pytest.mark.parametrize(("answer", "code", "left"), [("n", 1, True), ("y", 0, False)])
def test_uninstall_asks_at_a_terminal(
    database_url: str, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, left: bool
) -> None:
    terminal = io.StringIO(f"{answer}\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["outbox", "uninstall"]) == code
    with psycopg.connect(database_url) as conn:
        assert ("outbox" in _left(conn)) is left


def test_uninstall_prints_what_it_runs(database_url: str, capsys: Output) -> None:
    assert main(["outbox", "uninstall", "--sql"]) == 0
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(capsys.readouterr().out.encode())
        assert _left(conn) == []


def test_uninstall_drops_nothing_while_a_view_depends_on_it(
    database_url: str, capsys: Output
) -> None:
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("create view recent as select * from moored.outbox")
        assert main(["outbox", "uninstall", "--yes"]) == 2
        assert "view recent depends on table moored.outbox" in capsys.readouterr().err
        conn.execute("select moored.outbox_publish('orders', 'x')")


def _left(conn: psycopg.Connection[Any]) -> list[str]:
    """Return the tables, views and functions in the schema of the outbox."""
    found = conn.execute(
        "select relname from pg_class where relnamespace = 'moored'::regnamespace"
        " and relkind in ('r', 'p', 'v')"
        " union all select proname from pg_proc where pronamespace = 'moored'::regnamespace"
    )
    return [name for (name,) in found]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["status", "--schema", "elsewhere"], "the outbox is not installed in this database"),
        (["install", "--schema", "My schema"], "schema='My schema' must consist of"),
        (["sql", "--schema", "My schema"], "schema='My schema' must consist of"),
        (["capture", "no_such_table"], 'relation "no_such_table" does not exist'),
    ],
)
def test_a_refused_command_prints_one_line(
    database_url: str, capsys: Output, arguments: list[str], error: str
) -> None:
    assert main(["outbox", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("moored: ")
    assert error in line


def test_a_role_without_rights_is_told_who_has_them(database_url: str, capsys: Output) -> None:
    assert main(["outbox", "install"]) == 0
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("create role nobody_here login password 'secret'")
        try:
            url = make_conninfo(database_url, user="nobody_here", password="secret")
            assert main(["outbox", "status", "--database-url", url]) == 2
        finally:
            conn.execute("drop role nobody_here")
    err = capsys.readouterr().err
    assert "permission denied for schema moored" in err
    assert "`moored outbox install --grant ROLE`" in err


@pytest.mark.parametrize(
    "command", ["install", "upgrade", "sql", "status", "prune", "capture", "uncapture", "uninstall"]
)
def test_help_has_an_example(capsys: Output, command: str) -> None:
    main(["outbox", command, "--help"])
    assert f"moored outbox {command}" in capsys.readouterr().out.split("Example")[1]
