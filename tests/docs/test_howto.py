"""The commands of the how-to pages are accepted, and print what the page shows.

They run in this process, with the addresses of real servers in place of the page's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.leases.redis_server import RedisServer
from tests.servers import require_server

from moored.cli import main

from .pages import ROOT, blocks, page
from .reader import Reader, pattern

#: The beginnings of commands that are not run here, and why.
NOT_RUN = {
    "pip install": "tests/test_extras.py checks the extras",
    "aws ": "it needs an account",
    "BIND_HOST=": "tests/leases starts the same server",
    "export ": "tests/reservoir reads these variables",
    "PGPASSFILE=": "it opens a prompt",
    "redis-cli": "tests/leases/test_redis.py reads these keys",
    "python -m moored.testing.proxy": "read as a whole page below",
    "MOORED_RESERVOIR_RATE=20 moored soak": "tests/cli/test_soak.py runs it for seconds",
    "moored serve --demo": "tests/browser/test_demo.py compares the output",
    "moored consumers retry": "tests/app/test_consumers.py retries what a service has parked",
    "moored explain": "tests/postgres compares the text with a lock of another process",
}
#: Commands whose output depends on the state of a server, so that only the exit code is checked.
NOT_COMPARED = (
    "moored doctor",
    "moored outbox status",
    "moored outbox upgrade",
    "moored outbox uninstall",
    "moored consumers list",
)
PREPARED = (
    "create schema shop; create table shop.orders (id int, org_id uuid); create table orders ()"
)


def commands() -> Iterator[tuple[str, str, str]]:
    """Yield the pages, their commands, and what each prints."""
    for path in sorted((ROOT / "docs").glob("*/*.md")):
        if path.parent.name in ("howto", "operations"):
            name = f"{path.parent.name}/{path.stem}"
            for block in blocks(page(name), "console"):
                for one in re.split(r"^\$ ", block.replace("\\\n", ""), flags=re.MULTILINE)[1:]:
                    command, _, shown = one.partition("\n")
                    yield name, command, shown


RUN = [each for each in commands() if not each[1].startswith(tuple(NOT_RUN))]


def test_every_command_that_is_not_run_exists() -> None:
    found = [command for _, command, _ in commands()]
    assert all(any(each.startswith(start) for each in found) for start in NOT_RUN)


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    with RedisServer(require_server("redis")) as server:
        yield server.url


def test_commands_print_what_the_page_shows(
    postgres_url: str,
    redis: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute(PREPARED)
    for name, command, shown in RUN:
        typed = re.sub(r"postgresql://\S+", postgres_url, command)
        typed = typed.replace("redis://cache/0", redis).replace("redis://cache", redis)
        # Without a comment, and without a program that the output is piped into.
        typed = re.split(r" +#| \| ", typed.replace("--grant app", "--grant postgres"))[0]
        program, *arguments = shlex.split(typed)
        assert program == "moored", (name, command)
        code = main(arguments)
        out, err = capsys.readouterr()
        assert code in (0, 1), (name, command, out, err)
        if shown and not command.startswith(NOT_COMPARED):
            assert re.fullmatch(pattern(shown), out), (name, command, out)


def test_the_page_of_the_fault_proxy_prints_what_it_shows(tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        reader.read("howto/fault-proxy")
