"""`moored serve module:attribute` runs a user's app, and an ASGI server runs it as any other."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import pytest
import uvicorn
from tests.http_client import http_client
from tests.programs import Program
from tests.service.support import clean_environment

from moored.app import App, ComponentContext
from moored.cli import main
from moored.service import Config

ORDERS = """
import asyncio
import moored

app = moored.App("orders")


@app.component
async def {name}(ctx):
    await asyncio.Event().wait()
"""


@contextmanager
def served(directory: Path, *arguments: str) -> Iterator[IO[str]]:
    """Run `moored serve` in a directory; yields its output. It must stop cleanly."""
    command = ("moored.cli", "serve", "orders:app", "--port", "0", *arguments)
    with Program(*command, cwd=directory, environ=clean_environment()) as program:
        try:
            yield program.stdout
            program.send_signal(signal.SIGTERM)
            assert program.wait(60) == 0
        finally:
            program.kill()


def address(output: IO[str]) -> str:
    """Return the address that it prints, once it is ready."""
    found = output.readline().split()[1].partition("/?")[0]
    while "ready after" not in (line := output.readline()):
        assert line, "it has ended"
    return found


def test_serve_runs_the_app_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text(ORDERS.format(name="importer"))
    with served(tmp_path) as output:
        answer = httpx.get(f"{address(output)}/v1/health", timeout=30, verify=False).json()
    parts = {"importer": "active", "http": "active"}
    assert answer == {"status": "active", "parts": parts, "degraded": []}


def test_serve_goes_on_without_an_optional_part_that_has_failed_for_good(tmp_path: Path) -> None:
    failing = 'app.sessions(storage="orders.py/below", required=False)'
    (tmp_path / "orders.py").write_text(ORDERS.format(name="importer") + failing)
    with served(tmp_path) as output:
        answer = httpx.get(f"{address(output)}/v1/health?started", timeout=30, verify=False)
    assert (answer.status_code, answer.json()["degraded"]) == (200, ["sessions"])


def test_with_reload_a_changed_file_is_run_anew(tmp_path: Path) -> None:
    orders = tmp_path / "orders.py"
    orders.write_text(ORDERS.format(name="importer"))
    with served(tmp_path, "--reload") as output:
        assert (
            "importer" in httpx.get(f"{address(output)}/v1/health", timeout=30, verify=False).text
        )
        orders.write_text(ORDERS.format(name="exporter"))
        os.utime(orders, (1, 1))  # another time than the last one, however coarse the clock is
        assert "a file has changed" in output.readline()
        while "stopped" not in output.readline():
            pass
        assert (
            "exporter" in httpx.get(f"{address(output)}/v1/health", timeout=30, verify=False).text
        )


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("nothing:app", "there is no module 'nothing' in"),
        ("orders:db", "orders has no app named 'db': it has app"),
        ("json:app", "json has no app named 'app': create one there with moored.App"),
        ("orders:app --demo", "--demo runs an app of its own: leave out orders:app, or --demo"),
    ],
)
def test_a_wrong_target_is_one_line(
    target: str,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "orders.py").write_text(ORDERS.format(name="importer"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "orders", raising=False)
    assert main(["serve", *target.split()]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.every_loop
async def test_an_asgi_server_starts_and_stops_it() -> None:
    app, seen = App("orders", config=Config()), []

    @app.component
    async def importer(ctx: ComponentContext) -> None:
        seen.append("starts")
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("stops")

    server = uvicorn.Server(uvicorn.Config(app.asgi, log_config=None))
    listening = socket.create_server(("127.0.0.1", 0))  # accepts before the server has started
    serving = asyncio.create_task(server.serve([listening]))
    async with asyncio.timeout(60):
        port = listening.getsockname()[1]
        async with http_client(f"http://127.0.0.1:{port}") as asking:
            assert (await asking.get("/v1/health")).json()["status"] == "active"
        server.should_exit = True
        await serving
    assert seen == ["starts", "stops"]
