"""The real servers of rpc_checkout.py, as context managers."""

from __future__ import annotations

import importlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from _rpc_echo import PROTO
from moored.embedded._ports import choose_port

__all__ = ["Echo", "echo_server", "milvus_server", "silent_server", "slow_topology"]

#: Seconds that a server may take to start.
START_TIMEOUT = 60.0


@contextmanager
def milvus_server(folder: Path) -> Iterator[str]:
    """Run milvus-lite in its own process; yield its URI."""
    port = choose_port()
    options = ["--data-dir", str(folder / "milvus"), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-m", "milvus_lite", "server", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[Any]) -> None:
    until = time.monotonic() + START_TIMEOUT
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("milvus-lite has not started")


@contextmanager
def silent_server() -> Iterator[str]:
    """Listen without ever accepting or replying; yield the URI."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


class Echo(NamedTuple):
    """A server with a generated service."""

    address: str
    #: Makes a stub over a channel.
    stub: Callable[[Any], Any]
    #: Makes a request; the reply has the same `text`.
    text: Callable[..., Any]


@contextmanager
def echo_server(folder: Path) -> Iterator[Echo]:
    """Run an echo server in its own process; yield it with stubs made by grpcio-tools."""
    (folder / "echo.proto").write_text(PROTO)
    tool = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--python_out=."]
    subprocess.run([*tool, "--grpc_python_out=.", "echo.proto"], cwd=folder, check=True)
    sys.path.insert(0, str(folder))
    messages = importlib.import_module("echo_pb2")
    services = importlib.import_module("echo_pb2_grpc")
    program = str(Path(__file__).with_name("_rpc_echo.py"))
    process = subprocess.Popen(
        [sys.executable, program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield Echo(f"127.0.0.1:{port}", services.EchoStub, messages.Text)
    finally:
        sys.path.remove(str(folder))
        process.kill()
        process.communicate()


@contextmanager
def slow_topology(uri: str, delay: float) -> Iterator[str]:
    """Run an HTTP server that reports `uri` as the primary after a delay; yield its URI."""
    members = [{"clusterId": "one", "endpoint": uri, "capability": 3}]
    body = json.dumps({"code": 0, "data": {"version": "1", "clusters": members}}).encode()

    class TopologyHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(delay)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), TopologyHandler) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/global-cluster"
        finally:
            server.shutdown()
            serving.join()
