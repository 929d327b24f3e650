"""README is short, its table is that of the stored results, and its commands run in a new clone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.servers import free_port
from tools import figures

from .pages import ROOT, blocks, page
from .reader import Terminal, pattern


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


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_commands_of_the_readme_run_in_a_new_clone(tmp_path: Path) -> None:
    (block,) = blocks(page("README"), "console")
    command, _, shown = block.removeprefix("$ ").partition("\n")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    port = free_port()
    with Terminal.opened(f"{command} PORT={port}", clone) as terminal:
        terminal.wait_for("^" + pattern(shown.replace("8089", str(port))), limit=600)
