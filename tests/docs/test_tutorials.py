"""The commands of every tutorial run in order, and print what the page shows.

At full scale each page is read in a new virtual environment, with the commands that install.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.servers import free_port, require_server

from .pages import ROOT
from .reader import Reader

TUTORIALS = sorted(path.stem for path in (ROOT / "docs" / "tutorial").glob("*.md"))
#: Other tests run such programs, so that only this page is read in `make test`.
REPRESENTATIVE = "whole-service"
#: The ports of the pages, which may be in use on this machine.
PORTS = ("1883", "1884", "5433", "8089", "50051")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == REPRESENTATIVE else [pytest.mark.soak])
        for name in TUTORIALS
    ],
)
def test_tutorial_does_what_it_shows(name: str, tmp_path: Path) -> None:
    if name == "bot":
        require_server("mosquitto")
    with Reader(tmp_path, {port: free_port() for port in PORTS}) as reader:
        reader.read(f"tutorial/{name}")
