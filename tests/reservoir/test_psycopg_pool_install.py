"""Libraries that import psycopg_pool run with Moored's pools: the how-to page's programs.

`install()` changes the whole process, so each program runs in one of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict
from tests.docs.pages import all_blocks, page

PAGE = "howto/django-langgraph-procrastinate"
LIMIT = 120.0
REPLACED = """
import psycopg_pool
from moored import reservoir

for name in ("ConnectionPool", "AsyncConnectionPool", "NullConnectionPool",
             "AsyncNullConnectionPool", "PoolClosed", "PoolTimeout", "TooManyRequests"):
    assert getattr(psycopg_pool, name) is getattr(reservoir, name), name
"""
DJANGO = """
import django
from django.conf import settings
import settings as own

settings.configure(DATABASES=own.DATABASES, INSTALLED_APPS=["django.contrib.contenttypes"])
django.setup()
from django.contrib.contenttypes.models import ContentType
from django.core.management import call_command
from django.db import connection, transaction

call_command("migrate", verbosity=0)
with transaction.atomic():
    ContentType.objects.create(app_label="shop", model="order")
print(ContentType.objects.filter(app_label="shop").count(), "row")
print(connection.pool.statistics().max_size, type(connection.pool).__module__)
connection.close_pool()
"""


@pytest.fixture
def saved(tmp_path: Path, postgres_url: str) -> Path:
    """Return a directory with the page's programs, whose address is that of a server."""
    for block in all_blocks(page(PAGE)):
        if block.caption:
            text = block.text.replace("postgresql://app@db/orders", postgres_url)
            (tmp_path / block.caption).write_text(text)
    return tmp_path


def run(directory: Path, *arguments: str, code: int = 0) -> str:
    """Run Python; return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("absent", [False, True])
def test_the_names_of_psycopg_pool_are_moored_s(tmp_path: Path, absent: bool) -> None:
    hide = "import sys\nsys.modules['psycopg_pool'] = None\n" if absent else ""
    call = "from moored.reservoir.psycopg_pool import install\ninstall()\ninstall()\n"
    run(tmp_path, "-c", hide + call + REPLACED)


def test_a_module_that_has_psycopg_pool_s_own_classes_is_named(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text("from psycopg_pool import ConnectionPool as Any")
    call = "import library\nfrom moored.reservoir.psycopg_pool import install\ninstall()"
    printed = run(tmp_path, "-c", call, code=1)
    assert "before they are imported: library\n" in printed


def test_django_uses_the_pool(saved: Path, postgres_url: str) -> None:
    server = conninfo_to_dict(postgres_url)
    replaced = {"HOST": ("db", "host"), "NAME": ("orders", "dbname"), "USER": ("app", "user")}
    text = (saved / "settings.py").read_text()
    for name, (old, new) in replaced.items():
        assert f'"{name}": "{old}"' in text
        text = text.replace(f'"{name}": "{old}"', f'"{name}": {server[new]!r}')
    more = f'"PORT": {server["port"]!r}, "PASSWORD": {server.get("password")!r}, "OPTIONS"'
    (saved / "settings.py").write_text(text.replace('"OPTIONS"', more))
    assert run(saved, "-c", DJANGO) == "1 row\n20 moored.reservoir._pool_threads\n"


def test_langgraph_accepts_the_pool(saved: Path) -> None:
    assert run(saved, "checkpoints.py") == "0 checkpoints\n"


def test_procrastinate_creates_the_pool(saved: Path) -> None:
    shown = "        print(type(app.connector.pool).__module__)\n"
    text = (saved / "jobs.py").read_text()
    begins = "        await app.schema_manager"
    assert begins in text
    (saved / "jobs.py").write_text(text.replace(begins, shown + begins))
    assert "moored.reservoir._pool_async\nmail to ann\n" in run(saved, "jobs.py")
