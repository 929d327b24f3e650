"""README is short, its table is that of the stored results, and all that it says can be done."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import httpx
import pytest
from tests.servers import free_port
from tests.service.support import answers, until
from tools import figures

from moored.embedded import SyncEmbeddedPostgres

from .pages import ROOT, blocks, last_commit, page
from .reader import FRESH, Terminal, pattern

INSTALL_LIMIT = 600.0
LIMIT = 90.0


def test_readme_has_less_than_150_lines() -> None:
    assert len(page("README").splitlines()) < 150


def test_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page("README"))
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_table_of_figures_is_that_of_the_stored_results() -> None:
    assert figures.written(page("README")) == page("README")


def test_table_of_figures_tells_short_runs_and_unknown_loads() -> None:
    full = {"date": "2026-11-18", "quick": False, "load": 0.5}
    short = {"date": "2026-11-17", "quick": True, "load": None}
    text = " ".join(figures.conditions([full, short]))
    assert "on 2026-11-18; 1 of 2 rows come from short runs" in text
    assert "not recorded for 1 of the rows" in text
    assert "; all rows come from full runs." in " ".join(figures.conditions([full]))
    assert "; all rows come from short runs (`--quick`)." in " ".join(figures.conditions([short]))


@pytest.mark.timeout(900)
def test_a_newcomer_follows_the_readme(tmp_path: Path) -> None:
    """Do what README says, from its first block to the last, in a copy of the last commit.

    The blocks run as they stand: the environment tells the ports, and where the host `db` is. The
    copy has the packages of these tests, as if it had installed them; in `make soak` it does.
    """
    clone = last_commit(tmp_path / "clone")
    if not FRESH:
        # The source files of this checkout, most of which were compiled for other tests.
        shutil.rmtree(clone / "src")
        (clone / "src").symlink_to(ROOT / "src")
        (clone / ".venv").mkdir()
        (clone / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
        for made in (".made", ".run", ".dev"):
            (clone / ".venv" / made).touch()
    text = (clone / "README.md").read_text()
    (demo, asked), (program,) = blocks(text, "console"), blocks(text)
    environment = {
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "MOORED_STATE_DIR": str(tmp_path / "state"),
        "PATH": f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(clone / "src"),
    }
    _start_the_demo(demo, clone, environment)
    (install,) = re.findall(r"`(pip install [^`]*)` in this checkout", text)
    for command in [install] * FRESH + ["make"]:
        _run(command, clone, environment)
    for target in set(re.findall(r"`make (\w+)`", text)):
        assert target in _run(f"make -n {target}", clone, environment)
    (clone / "orders.py").write_text(program)
    with SyncEmbeddedPostgres(user="app", database="orders") as server:
        environment |= {"PGHOSTADDR": server.host, "PGPORT": str(server.port)}
        _subscribe(asked, clone, environment | {"PGPASSWORD": server.password})


def _run(command: str, clone: Path, environment: dict[str, str]) -> str:
    with Terminal.opened(command, clone, **environment) as terminal:
        terminal.wait_ended(LIMIT)
        return terminal.printed


def _start_the_demo(block: str, clone: Path, environment: dict[str, str]) -> None:
    """Start it, open its link, and press Ctrl-C."""
    command, _, shown = block.removeprefix("$ ").partition("\n")
    port = str(free_port())
    with (
        Terminal.opened(command, clone, **environment, PORT=port) as terminal,
        httpx.Client(
            follow_redirects=True, timeout=LIMIT, trust_env=False, verify=False
        ) as browser,
    ):
        terminal.wait_for("^" + pattern(shown.replace("8089", port)), INSTALL_LIMIT)
        (link,) = re.findall(r"http://\S+\?token=\S+", terminal.printed)
        assert "<title>" in browser.get(link).raise_for_status().text
        status = browser.get(f"http://127.0.0.1:{port}/v1/status").raise_for_status()
        assert status.json()["ready"]


def _subscribe(block: str, clone: Path, environment: dict[str, str]) -> None:
    """Start the service, subscribe with the first command, and publish with the second."""
    port = str(free_port())
    curl, publish = (line.removeprefix("$ ") for line in block.splitlines())
    _, _, database = publish.rpartition(" ")
    _run(f"psql -c 'create table orders (id int)' {database}", clone, environment)
    _run(f"moored outbox install --database-url {database}", clone, environment)
    with Terminal.opened("uvicorn orders:api", clone, **environment, UVICORN_PORT=port) as service:
        service.wait_for("Application startup complete")
        until(lambda: answers(f"http://127.0.0.1:{port}/moored/v1/health?ready"), "it is ready")
        curl = curl.replace(":8000", f":{port}")
        with Terminal.opened(curl, clone, **environment) as browser:
            browser.wait_for("event: start\n")
            _run(publish, clone, environment)
            browser.wait_for("event: orders\ndata: {}\n")
