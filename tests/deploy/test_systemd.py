"""Reports to systemd: a real datagram socket in its place, and a real `moored serve`."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.service.support import running

from moored.service._systemd import SystemdNotifier

ORDERS = """
import asyncio
import moored

app = moored.App("orders")


@app.component
async def importer(ctx):
    await asyncio.Event().wait()
"""


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket of systemd, in a directory."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.bind(str(tmp_path / "notify"))
        one.settimeout(90)
        yield one


def test_serve_reports_ready_health_watchdog_and_stopping(
    systemd: socket.socket, tmp_path: Path
) -> None:
    (tmp_path / "orders.py").write_text(ORDERS)
    environ = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "1000000"}
    reports: list[str] = []
    with running("orders:app", cwd=tmp_path, environ=environ) as service:
        while reports.count("WATCHDOG=1") < 2:
            reports.append(systemd.recv(4096).decode())
        service.process.send_signal(signal.SIGTERM)
        while not reports[-1].startswith("STOPPING=1"):
            reports.append(systemd.recv(4096).decode())
        assert service.wait() == 0
    ready = next(each for each in reports if each.startswith("READY=1"))
    assert "\nSTATUS=" in ready
    assert any("STATUS=active (importer active, http active)" in each for each in reports)
    assert reports.index(ready) < reports.index("WATCHDOG=1")


def test_an_abstract_socket_is_found_and_the_environment_is_cleared() -> None:
    name = f"moored-{os.getpid()}"
    environ = {"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.bind(f"\0{name}")
        one.settimeout(90)
        notifier = SystemdNotifier(environ)
        notifier.send("READY=1", "STATUS=active")
        assert one.recv(4096) == b"READY=1\nSTATUS=active"
    assert notifier.interval == 0  # the watchdog watches another process
    assert environ == {}
    notifier.send("STOPPING=1")  # nothing reads: the service is not affected


def test_without_systemd_nothing_is_sent() -> None:
    notifier = SystemdNotifier({})
    notifier.send("READY=1")
    assert notifier.interval == 0
