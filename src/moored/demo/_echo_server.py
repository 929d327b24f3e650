"""A program: a gRPC server that returns each request. It ends when its standard input is closed.

Run as a file, so that its start imports nothing of Moored.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]


def _say(request: bytes, context: Any) -> bytes:
    return request


def main(address: str) -> None:
    """Serve at an address until standard input ends, which also happens when the parent dies."""
    server = grpc.server(ThreadPoolExecutor(4))
    methods = {"Say": grpc.unary_unary_rpc_method_handler(_say)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("demo.Echo", methods)])
    server.add_insecure_port(address)
    server.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop(grace=0.5).wait()


if __name__ == "__main__":
    main(sys.argv[1])
