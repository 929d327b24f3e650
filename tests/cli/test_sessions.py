"""`moored sessions`, against a running app whose sessions use no server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.service.support import Running, running

from moored.cli import main

Output = pytest.CaptureFixture[str]

TOKEN = "a-token-of-the-tests"
BOTS = """
import asyncio
import moored
from moored.sessions import Tcp
from moored.testing.demo import Demo

app = moored.App("bots")
accounts = app.sessions(name="accounts")


@app.component(once=True, after=["accounts"])
async def start(ctx):
    for profile in ("alice", "bob/phone", "carol"):
        await accounts.start(profile, Demo(Tcp("127.0.0.1", 9)), offline=True)
"""


@pytest.fixture(scope="module")
def bots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("bots")
    (directory / "bots.py").write_text(BOTS)
    with running("bots:app", cwd=directory, environ={"MOORED_ADMIN_TOKEN": TOKEN}) as service:
        service.wait_active()
        yield service


def listed(service: Running, capsys: Output, *options: str) -> list[str]:
    command = ["sessions", "list", "--url", service.url, "--admin-token", TOKEN, "--json"]
    assert main([*command, *options]) == 0
    return sorted(each["profile"] for each in json.loads(capsys.readouterr().out))


def test_list_shows_each_session(bots: Running, bare: Path, capsys: Output) -> None:
    assert main(["sessions", "list", "--url", bots.url, "--admin-token", TOKEN]) == 0
    out = capsys.readouterr().out
    assert "alice" in out
    assert "online" in out
    assert "sessions" in out
    assert {"alice"} <= set(listed(bots, capsys, "--state", "online"))
    assert listed(bots, capsys, "--state", "connecting/waiting") == []


def test_stop_ends_one_session(bots: Running, bare: Path, capsys: Output) -> None:
    command = ["sessions", "stop", "bob/phone", "--drain", "1", "--url", bots.url]
    assert main([*command, "--admin-token", TOKEN]) == 0
    assert capsys.readouterr().out == "stopped the session of bob/phone\n"
    assert "bob/phone" not in listed(bots, capsys)
    assert main([*command, "--admin-token", TOKEN]) == 2
    assert "there is no session of 'bob/phone'" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["accounts", "postgres"])
def test_the_part_can_be_named(part: str, bots: Running, bare: Path, capsys: Output) -> None:
    command = ["sessions", "list", "--url", bots.url, "--admin-token", TOKEN, "--part", part]
    assert main(command) == (0 if part == "accounts" else 2)
    assert ("there are accounts" in capsys.readouterr().err) == (part == "postgres")


def test_without_sessions_the_error_says_so(service: Running, bare: Path, capsys: Output) -> None:
    assert main(["sessions", "list", "--url", service.url]) == 2
    assert "the service has 0 parts with sessions" in capsys.readouterr().err


def test_only_the_token_and_pages_of_the_service_stop_a_session(
    bots: Running, bare: Path, capsys: Output
) -> None:
    assert main(["sessions", "stop", "alice", "--url", bots.url]) == 2
    assert "requires a token" in capsys.readouterr().err
    alice = f"{bots.url}/v1/sessions/accounts/alice"
    token = {"Authorization": f"Bearer {TOKEN}"}
    foreign = {**token, "Origin": "https://evil.example"}
    for url, headers, code in (
        (alice, {}, 401),
        (alice, foreign, 403),
        (f"{alice}?drain=x", token, 400),
        (f"{alice}?drain=nan", token, 400),
        (f"{alice}?drain=61", token, 400),
        (f"{alice}/none", token, 404),
    ):
        answer = httpx.delete(url, headers=headers, timeout=60, trust_env=False, verify=False)
        assert answer.status_code == code, url
    assert "alice" in listed(bots, capsys)
