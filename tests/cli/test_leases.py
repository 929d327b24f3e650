"""`moored leases`, against leases in a real PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from moored.cli import main
from moored.leases import sync

Output = pytest.CaptureFixture[str]


@pytest.fixture
def holder(postgres_url: str, bare: Path) -> Iterator[sync.SyncLeases]:
    """A client that holds leases in the store."""
    with sync.connect(postgres_url, service_name="orders", owner="pool-1") as leases:
        yield leases


def refused(capsys: Output, *arguments: str) -> str:
    assert main(["leases", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("moored: ")
    return line


def held(
    leases: sync.SyncLeases, key: str, *, limit: int = 9, owner: str | None = None
) -> sync.SyncLease:
    lease = leases.acquire(key, limit=limit, owner=owner)
    assert lease is not None
    return lease


def test_list_shows_leases_and_their_holders(
    holder: sync.SyncLeases, postgres_url: str, capsys: Output
) -> None:
    second = held(holder, "db/users", owner="importer")
    first = held(holder, "db/orders")
    assert main(["leases", "list", "--store", postgres_url]) == 0
    header, *rows, last = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "key"
    assert rows[0].split()[:4] == ["db/orders", first.id[:12], "pool-1", "orders"]
    assert rows[1].split()[:3] == ["db/users", second.id[:12], "importer"]
    assert last == "2 live leases"
    assert main(["leases", "list", "--store", postgres_url, "--key", "db/users"]) == 0
    assert "db/orders" not in capsys.readouterr().out


def test_list_prints_json(
    holder: sync.SyncLeases, postgres_url: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = held(holder, "db/orders")
    monkeypatch.setenv("MOORED_LEASES_STORE", postgres_url)
    assert main(["leases", "list", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["id"] == lease.id
    assert shown["fence"] == lease.fence
    assert shown["owner"] == "pool-1"
    assert 0 < shown["expires_in"] <= 180
    assert set(shown) == {
        *("key", "id", "fence", "created_at", "expires_in"),
        *("service_name", "owner", "host", "pid"),
    }


def test_list_of_an_empty_store_says_0_live_leases(
    holder: sync.SyncLeases, postgres_url: str, capsys: Output
) -> None:
    assert main(["leases", "list", "--store", postgres_url]) == 0
    assert capsys.readouterr().out == "0 live leases\n"


def test_release_by_the_beginning_of_an_id(
    holder: sync.SyncLeases, postgres_url: str, capsys: Output
) -> None:
    lease, other = held(holder, "db"), held(holder, "db")
    assert main(["leases", "release", "--store", postgres_url, lease.id[:12]]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"released db {lease.id[:12]} (pool-1 of orders on ")
    assert last == "1 lease released"
    assert [each.id for each in holder.held()] == [other.id]


def test_release_all_of_a_key(holder: sync.SyncLeases, postgres_url: str, capsys: Output) -> None:
    for _ in range(3):
        held(holder, "db")
    kept = held(holder, "db/users")
    assert main(["leases", "release", "--store", postgres_url, "--key", "db", "--all"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 leases released"
    assert [each.id for each in holder.held()] == [kept.id]


def test_release_refuses_unknown_and_ambiguous_ids(
    holder: sync.SyncLeases, postgres_url: str, capsys: Output
) -> None:
    held(holder, "db")
    held(holder, "db")
    store = ("--store", postgres_url)
    line = refused(capsys, "release", *store, "zz")
    assert line == "moored: no live lease has an id that begins with 'zz'"
    line = refused(capsys, "release", *store, "")
    assert line == "moored: 2 leases have ids that begin with '': give more characters"
    assert "give the ids of the leases" in refused(capsys, "release", *store)
    assert "--all requires --key" in refused(capsys, "release", *store, "--all")
    assert "--all requires --key" in refused(capsys, "release", *store, "x", "--key", "a", "--all")
    assert len(holder.held()) == 2


def test_an_invalid_store_url_is_one_line_on_stderr(bare: Path, capsys: Output) -> None:
    assert "only in the process" in refused(capsys, "list", "--store", "memory://")
    assert "unknown scheme mongodb://" in refused(capsys, "list", "--store", "mongodb://x")
    assert "--store" in refused(capsys, "list")


def test_an_unreachable_store_is_one_line_on_stderr(bare: Path, capsys: Output) -> None:
    line = refused(capsys, "list", "--store", "postgresql://x:secret@127.0.0.1:1/x?timeout=1")
    assert "secret" not in line


@pytest.mark.parametrize(
    "store",
    [
        "postgresql://x:sesame%tulip@127.0.0.1:1/x",
        "postgresql://x:sesame@tulip@127.0.0.1:1/x",
        "postgresql://x:sesame/tulip@127.0.0.1:1/x",
        "postgresql://127.0.0.1:1/x?passw%6Frd=sesame%tulip",
        "redis://x:sesame@tulip@127.0.0.1:1/0",
        "redis://x:sesame/tulip@127.0.0.1:1/0",
        "redis://x:sesame?a=tulip@127.0.0.1:1/0",
        "redis://x:sesame#tulip@127.0.0.1:1/0",
        "x:sesame@127.0.0.1:1/0",
        "redis//x:sesame@127.0.0.1:1/0",
        "postgresql:/x:sesame=tulip@127.0.0.1:1/0",
    ],
)
def test_an_unescaped_password_in_a_store_url_is_refused(
    store: str, bare: Path, capsys: Output
) -> None:
    line = refused(capsys, "list", "--store", store)
    assert "sesame" not in line
    assert "tulip" not in line
