"""The service in a process of its own, on a new PostgreSQL: `python -m pytest`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import httpx
import pytest

HERE = Path(__file__).parent
KEY = {"X-API-Key": "key-of-acme"}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    directory, environ = tmp_path_factory.mktemp("data"), {**os.environ, "PORT": str(port)}
    with (
        subprocess.Popen([sys.executable, HERE / "dev.py"], cwd=directory, env=environ) as service,
        httpx.Client(base_url=base, timeout=60, trust_env=False) as client,
    ):
        try:
            while not is_ready(client):
                assert service.poll() is None, "the service has ended: see its output"
                time.sleep(0.1)
            yield client
        finally:
            service.terminate()


def is_ready(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.ConnectError):
        return client.get("/moored/v1/health?ready").is_success
    return False


def test_an_order_is_packed_and_both_are_shown_live(http: httpx.Client) -> None:
    with http.stream("GET", "/moored/v1/subscribe", headers=KEY) as stream:
        lines = islice(stream.iter_lines(), 30)  # an idle stream has a few lines every 15 s
        assert "event: start" in lines
        assert http.post("/orders/tea").json() == {"ordered": "tea"}
        data = (line.removeprefix("data: ") for line in lines if line.startswith('data: {"op"'))
        ordered, packed = json.loads(next(data)), json.loads(next(data))
    assert (ordered["op"], ordered["new"]["item"]) == ("insert", "tea")
    assert (packed["op"], packed["new"]["packed"]) == ("update", True)


def test_a_browser_without_a_key_is_refused(http: httpx.Client) -> None:
    assert http.get("/moored/v1/subscribe").status_code == 401
