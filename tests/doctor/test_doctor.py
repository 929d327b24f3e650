"""`moored doctor` and `examine()`: output, exit codes, secrets, and the manager's errors."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from moored.cli import main
from moored.cli._doctor import _show
from moored.postgres import Postgres
from moored.postgres.doctor import CHECKS, Check, Finding, _publication, _server, examine
from moored.postgres.doctor._check import Examined
from moored.postgres.server import _admin
from moored.postgres.server._faults import FAULTS

from .plants import PLANTS, Plant
from .world import PASSWORD, World

LIMIT = 30.0
PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "doctor.md").read_text()

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "NOTIFY_URL", "MOORED_REPLICATION_URL"):
        monkeypatch.delenv(name, raising=False)


def test_json_has_a_stable_shape(world: World, capsys: Output) -> None:
    world.run("alter role app noreplication")
    assert main(["doctor", world.url, "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    version = str(world.server.version)
    assert shown == {
        "ok": False,
        "connections": [
            {
                "url": "database_url",
                "place": f"{world.server.host}:{world.server.port}/shop",
                "user": "app",
                "version": version,
                "tls": False,
                "pooler": None,
            }
        ],
        "findings": [
            {
                "check": "replication_privilege",
                "severity": "stops",
                "problem": 'the role "app" may not replicate',
                "statements": ["ALTER ROLE app REPLICATION"],
                "advice": "",
            }
        ],
    }


def test_a_healthy_database_exits_with_0(world: World, capsys: Output) -> None:
    assert main(["doctor", world.url]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"database_url: PostgreSQL {world.server.version} at ")
    assert last == "nothing found: the server has everything that Moored needs"


def test_a_warning_exits_with_0_and_a_statement_stays_on_one_line(
    world: World, capsys: Output
) -> None:
    name = "a_table_with_a_long_name_that_would_not_fit_in_eighty_columns"
    world.own(
        f"create table {name} (id int)",
        f"create publication moored_publication_default for table {name}",
    )
    assert main(["doctor", world.url]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert f"ALTER TABLE public.{name} REPLICA IDENTITY FULL;" in lines
    assert lines[-1] == "1 finding: none stops Moored"


async def test_the_worst_finding_comes_first(world: World) -> None:
    world.own("alter table orders replica identity full")
    world.run("alter role app noreplication", "alter database shop set idle_session_timeout = '1h'")
    found = await examine(world.url, tables=["orders"])
    assert [each.severity.value for each in found.findings] == ["stops", "warns", "notes"]
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    _show(console, found)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.index("replication_privilege") < text.index("harmful_settings")
    assert "\x1b[" in text
    assert text.endswith("3 findings: 1 stops Moored\n")


@pytest.mark.parametrize("url", ["{wrong}", "{url}?sslmode=nonsense", "{url}?nonsense"])
def test_no_secret_is_printed(world: World, capsys: Output, url: str) -> None:
    wrong = world.url_with(password="wrong-secret")
    assert main(["doctor", url.format(wrong=wrong, url=world.url)]) == 1
    printed = "".join(capsys.readouterr())
    assert "reachability" in printed
    assert PASSWORD not in printed
    assert "wrong-secret" not in printed


def test_an_invalid_option_is_one_line_and_exit_code_2(world: World, capsys: Output) -> None:
    assert main(["doctor", world.url, "--stream-id", "Not A Name"]) == 2
    assert "stream_id='Not A Name'" in capsys.readouterr().err


async def test_a_running_instance_has_no_finding(world: World, tmp_path: Path) -> None:
    # So many connections are left only because those of the instance count.
    world.run("alter role app connection limit 24")
    async with Postgres(world.url, state_dir=tmp_path, pool_size=20) as pg:
        await pg.wait_until_active(LIMIT)
        found = await examine(world.url, tables=["orders"])
    assert found.findings == []


NAMED = [
    plant
    for plant in PLANTS
    if plant.name
    in (
        "no_replication_privilege",
        "no_create_privilege",
        "no_slot_left",
        "slot_of_another_program",
        "wrong_password",
    )
]


@pytest.mark.parametrize("plant", NAMED, ids=[plant.name for plant in NAMED])
async def test_an_error_of_the_manager_names_the_finding(
    world: World, tmp_path: Path, plant: Plant
) -> None:
    url = plant.plant(world).get("database_url", world.url)
    (finding,) = (await examine(url)).findings
    async with Postgres(url, state_dir=tmp_path, pool_size=2) as pg, asyncio.timeout(LIMIT):
        while f"`moored doctor URL` reports it as {finding.check}" not in pg.explain():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def test_errors_name_checks_that_exist() -> None:
    assert {fault.check for fault in FAULTS} - {""} <= {check.name for check in CHECKS}


async def test_a_check_without_an_answer_does_not_stop_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run("alter role app noreplication")
    monkeypatch.setattr(_admin, "TIMEOUT", 2.0)
    monkeypatch.setattr(_server.WalLevel, "query", "SELECT pg_sleep(60)")
    monkeypatch.setattr(_publication.CreatePrivilege, "query", "SELECT no_such_column")
    found = (await examine(world.url)).findings
    assert {each.check for each in found} == {
        "replication_privilege",
        "wal_level",
        "create_privilege",
    }
    unknown = [each.problem for each in found if each.check != "replication_privilege"]
    assert all(text.startswith("the check could not run: ") for text in unknown)


async def test_the_loss_of_the_server_ends_the_checks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def kill_server(check: Check, on: Examined) -> list[Finding]:
        await asyncio.to_thread(world.server.kill)
        await on.rows("SELECT 1")
        return []

    monkeypatch.setattr(_server.WalLevel, "run", kill_server)
    try:
        found = (await examine(world.url)).findings
    finally:
        world.restart()
    assert [each.check for each in found] == ["reachability", "wal_level"]


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_the_page_lists_every_check(check: type[Check]) -> None:
    found = str(check.__doc__).splitlines()[0]
    assert f"| `{check.name}` | {found} |" in PAGE
