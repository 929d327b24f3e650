"""`moored consumers`, against a real PostgreSQL; the retry by a service is in tests/app."""

from __future__ import annotations

import json
import secrets

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from moored.cli import main

Output = pytest.CaptureFixture[str]

PARK = """
insert into moored.parked (source, consumer, position, what, error, tries, content)
values ('stream default', %s, %s, %s, 'no item (ValueError)', 5, '')
"""


@pytest.fixture
def database_url(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DATABASE_URL", postgres_url)
    monkeypatch.setenv("COLUMNS", "200")
    return postgres_url


@pytest.fixture
def items(database_url: str) -> list[int]:
    """The numbers of three parked items."""
    assert main(["consumers", "install"]) == 0
    with psycopg.connect(database_url, autocommit=True) as conn:
        for consumer, n in (("search", 1), ("search", 2), ("mail", 3)):
            conn.execute(PARK, (consumer, str(n), f"transaction {n}"))
        return [row[0] for row in conn.execute("select id from moored.parked order by id")]


def test_a_database_without_the_table_has_no_parked_items(
    database_url: str, capsys: Output
) -> None:
    assert main(["consumers", "list"]) == 0
    assert capsys.readouterr().out == "0 parked items\n"


def test_the_list_shows_each_item_with_its_error(items: list[int], capsys: Output) -> None:
    capsys.readouterr()
    assert main(["consumers", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["number", "consumer", "of", "parked", "tries", "item", "error"]
    assert len(lines) == 5
    assert lines[1].split()[:2] == [str(items[0]), "search"]
    assert lines[1].endswith("no item (ValueError)")
    assert lines[-1] == "3 parked items"
    assert main(["consumers", "list", "--consumer", "mail", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert (only["id"], only["consumer"], only["what"]) == (items[2], "mail", "transaction 3")


def test_a_retry_without_a_running_consumer_waits_in_the_table(
    items: list[int], capsys: Output
) -> None:
    assert main(["consumers", "retry", str(items[0]), "--timeout", "0.1"]) == 1
    assert f"{items[0]} waits for the consumer 'search'" in capsys.readouterr().out
    assert main(["consumers", "retry", "--consumer", "mail", "--timeout", "0"]) == 0
    capsys.readouterr()
    assert main(["consumers", "list", "--json"]) == 0
    asked = {each["id"]: each["retry"] for each in json.loads(capsys.readouterr().out)}
    assert asked == {items[0]: True, items[1]: False, items[2]: True}


def test_dropped_items_are_deleted(items: list[int], capsys: Output) -> None:
    capsys.readouterr()
    assert main(["consumers", "drop", str(items[2])]) == 0
    assert capsys.readouterr().out == f"dropped {items[2]}: transaction 3\n"
    assert main(["consumers", "drop", "--consumer", "search", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"dropped": items[:2]}
    assert main(["consumers", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["drop"], "give the numbers of items, or --consumer NAME"),
        (["retry"], "give the numbers of items, or --consumer NAME"),
        (["drop", "987654"], "no item with the number 987654 is parked"),
        (["retry", "987654", "--consumer", "mail"], "no item of the consumer 'mail'"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], error: str, items: list[int], capsys: Output
) -> None:
    capsys.readouterr()
    assert main(["consumers", *arguments]) == 2
    assert error in capsys.readouterr().err


def test_a_role_without_rights_is_told_the_command_that_grants_them(
    items: list[int], database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    role = f"clerk_{secrets.token_hex(4)}"
    commands = (
        ["list"],
        ["retry", str(items[0]), "--timeout", "0"],
        ["drop", str(items[0])],
        ["install"],
    )

    def refused() -> list[bool]:
        monkeypatch.setenv("DATABASE_URL", make_conninfo(database_url, user=role, password="x"))
        capsys.readouterr()
        found = []
        for each in commands:
            code, error = main(["consumers", *each]), capsys.readouterr().err
            assert error.count("\n") == (code != 0)
            found.append(f"run `moored consumers install --grant {role}` as an owner" in error)
        monkeypatch.setenv("DATABASE_URL", database_url)
        return found

    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(f"create role {role} login password 'x'".encode())
        try:
            assert refused() == [True] * 4
            conn.execute(f"grant usage on schema moored to {role}".encode())
            conn.execute(f"grant select on moored.parked to {role}".encode())
            assert refused() == [False, True, True, True]
            assert main(["consumers", "install", "--grant", role]) == 0
            assert refused() == [False, False, False, True]
        finally:
            conn.execute(f"drop owned by {role}; drop role {role}".encode())


def test_sql_prints_what_install_runs(database_url: str, capsys: Output) -> None:
    assert main(["consumers", "sql", "--grant", "postgres"]) == 0
    printed = capsys.readouterr().out
    assert 'on moored.parked to "postgres";' in printed
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(printed.encode())
        conn.execute(PARK, ("search", "1", "transaction 1"))
    assert main(["consumers", "install", "--grant", "postgres"]) == 0
