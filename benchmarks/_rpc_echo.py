"""The gRPC echo server of rpc_checkout.py, run as its own process.

The argument is the folder of the generated modules. The server prints its port, and exits at the
end of its standard input.
"""

from __future__ import annotations

import importlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]

PROTO = """
syntax = "proto3";
package bench;
message Text { string text = 1; }
service Echo { rpc Say (Text) returns (Text); }
"""


def serve(folder: str) -> None:
    """Reply to each request with its own message."""
    sys.path.insert(0, folder)
    services = importlib.import_module("echo_pb2_grpc")

    class Echo(services.EchoServicer):  # type: ignore[misc, name-defined]
        def Say(self, request: Any, context: Any) -> Any:  # noqa: N802
            return request

    server = grpc.server(ThreadPoolExecutor(4))
    services.add_EchoServicer_to_server(Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
