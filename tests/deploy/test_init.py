"""`moored serve` as PID 1 of a PID namespace, which is what a container is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.service.support import Running, clean_environment, gone, until

from moored.embedded import SyncEmbeddedPostgres

# The kernel kills the whole namespace with its first process, and that with `unshare`.
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]

ORPHANS = """
import asyncio, os, subprocess
import moored

app = moored.App("orders")


@app.component
async def parent(ctx):
    # Each shell ends at once, and leaves a child behind that ends a little later.
    for _ in range(5):
        subprocess.run(["sh", "-c", "sleep 0.2 &"], check=True)
    # The status of a child of its own is not taken away by what reaps the orphans.
    process = await asyncio.create_subprocess_exec("sh", "-c", "exit 7")
    print("exit code", await process.wait(), "of a child of", os.getpid(), flush=True)
    await asyncio.Event().wait()
"""


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this user may not create PID namespaces: {tried.stderr.strip()}")


@contextmanager
def served(*arguments: str, cwd: Path) -> Iterator[Running]:
    """Run `moored serve` as PID 1 of a namespace, until the end of the block."""
    process: Any = subprocess.Popen(
        [*NAMESPACE, sys.executable, "-m", "moored.cli", "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=clean_environment(),
    )
    with process:
        try:
            service = Running(process)
            yield service
        finally:
            process.kill()
        service.wait()


def init_of(service: Running) -> psutil.Process:
    """Return the process that is PID 1 in its namespace."""
    return psutil.Process(service.process.pid).children()[0]


def test_orphans_are_reaped_and_sigterm_stops_in_order(tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text(ORPHANS)
    with served("orders:app", cwd=tmp_path) as service:
        service.wait_for(r"exit code 7 of a child of [2-9]")
        service.wait_active()
        init = init_of(service)
        until(lambda: len(init.children(recursive=True)) == 1, "only the service is left")
        init.terminate()
        assert service.wait() == 0
    assert service.lines[-1] == "moored: stopped"


def test_an_embedded_server_of_a_killed_service_is_shut_down(tmp_path: Path) -> None:
    with SyncEmbeddedPostgres(tmp_path / "data", options={"fsync": "off"}):
        pass  # here initdb has a result to copy
    with served("--data-dir", str(tmp_path / "data"), cwd=tmp_path) as service:
        service.wait_active()
        init = init_of(service)
        family = init.children(recursive=True)
        init.children()[0].kill()
        assert service.wait() == 128 + 9
        gone(family)
    # Its guard had the time to stop it, so that it needs no crash recovery.
    assert not (tmp_path / "data" / "data" / "postmaster.pid").exists()
