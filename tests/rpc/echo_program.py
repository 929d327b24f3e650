"""A gRPC test server in its own process; run by `servers.py`.

Its methods take and return bytes; with `--stubs` it also serves what was generated into a folder.
It ends when its standard input does, so that it never outlives the test that started it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]


def echo(request: bytes, context: Any) -> bytes:
    return request


def count(request: bytes, context: Any) -> Iterator[bytes]:
    """Count to a number, then fail if a code is given: b"3" or b"3 ABORTED"."""
    number, _, code = request.decode().partition(" ")
    for each in range(int(number)):
        yield str(each).encode()
    if code:
        context.abort(grpc.StatusCode[code], "as asked")


def endless(request: bytes, context: Any) -> Iterator[bytes]:
    """Send a number at the requested interval until the client disconnects."""
    over = threading.Event()
    context.add_callback(over.set)
    for each in range(1_000_000):
        yield str(each).encode()
        if over.wait(float(request)):
            return


def collect(requests: Iterator[bytes], context: Any) -> bytes:
    return b"".join(requests)


def chat(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    for request in requests:
        yield b"re: " + request


def sleep(request: bytes, context: Any) -> bytes:
    time.sleep(float(request))
    return request


def fail(request: bytes, context: Any) -> bytes:
    """Fail with a code, immediately or after a delay: b"ABORTED" or b"ABORTED 0.5"."""
    code, _, seconds = request.decode().partition(" ")
    time.sleep(float(seconds or 0))
    context.abort(grpc.StatusCode[code], "as asked")
    raise AssertionError


class Rendezvous:
    """Calls that wait for each other, to count concurrent calls reliably."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._present = self._most = 0

    def meet(self, request: bytes, context: Any) -> bytes:
        """Return the peer of this call when the requested number of calls has arrived."""
        with self._changed:
            self._present += 1
            self._most = max(self._most, self._present)
            self._changed.notify_all()
            # The number counts once reached, also if the first calls have returned. A call that
            # waits in vain returns early: it must end before its stream does.
            self._changed.wait_for(
                lambda: self._most >= int(request), timeout=context.time_remaining() / 2
            )
            self._present -= 1
        return str(context.peer()).encode()

    def most(self, request: bytes, context: Any) -> bytes:
        """Return the largest number of concurrent calls, and reset it."""
        with self._changed:
            most, self._most = self._most, 0
        return str(most).encode()


class TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Accepts calls with the token; `Accept` is open to all, and changes it.

    A strict one also refuses health checks without the token.
    """

    def __init__(self, token: str, strict: bool) -> None:
        self.token = token
        self._strict = strict
        self._refuses = grpc.unary_unary_rpc_method_handler(self._refuse)

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        shown = dict(details.invocation_metadata).get("authorization", "")
        free = details.method.endswith("/Accept") or (
            not self._strict and not details.method.startswith("/test.Echo/")
        )
        if free or not self.token or shown == self.token:
            return continuation(details)
        return self._refuses

    def _refuse(self, request: bytes, context: Any) -> bytes:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not accepted")
        raise AssertionError

    def accept(self, request: bytes, context: Any) -> bytes:
        """Require this token from now on."""
        self.token = request.decode()
        return b""


def metadata(request: bytes, context: Any) -> bytes:
    """Return the metadata of the client as JSON, and send it back as well."""
    found = [(name, value) for name, value in context.invocation_metadata() if name[0] != ":"]
    context.send_initial_metadata((("initial", "here"),))
    context.set_trailing_metadata((("trailing", "there"),))
    return json.dumps([pair for pair in found if isinstance(pair[1], str)]).encode()


_tally: Counter[str] = Counter()


def tally(request: bytes, context: Any) -> bytes:
    """Count this word, and return the process id."""
    _tally[request.decode()] += 1
    return pid(request, context)


def tallied(request: bytes, context: Any) -> bytes:
    """Return how often each word was counted, as JSON."""
    return json.dumps(_tally).encode()


def limit(request: bytes, context: Any) -> bytes:
    """Return the remaining seconds of the call."""
    return str(context.time_remaining()).encode()


def pid(request: bytes, context: Any) -> bytes:
    return str(os.getpid()).encode()


MEETING = Rendezvous()

METHODS = {
    **{
        name: grpc.unary_unary_rpc_method_handler(method)
        for name, method in {
            "Echo": echo,
            "Sleep": sleep,
            "Fail": fail,
            "Metadata": metadata,
            "Limit": limit,
            "Pid": pid,
            "Tally": tally,
            "Tallied": tallied,
            "Meet": MEETING.meet,
            "Most": MEETING.most,
        }.items()
    },
    "Count": grpc.unary_stream_rpc_method_handler(count),
    "Endless": grpc.unary_stream_rpc_method_handler(endless),
    "Collect": grpc.stream_unary_rpc_method_handler(collect),
    "Chat": grpc.stream_stream_rpc_method_handler(chat),
}


def add_generated(server: grpc.Server, folder: Path) -> None:
    sys.path.insert(0, str(folder))
    messages = importlib.import_module("greeter_pb2")
    services = importlib.import_module("greeter_pb2_grpc")

    class Greeter(services.GreeterServicer):  # type: ignore[misc, name-defined]
        def Greet(self, request: Any, context: Any) -> Any:  # noqa: N802
            return messages.Greeting(text=f"hello {request.name}")

        def GreetMany(self, request: Any, context: Any) -> Any:  # noqa: N802
            for number in range(3):
                yield messages.Greeting(text=f"hello {request.name} {number}")

    services.add_GreeterServicer_to_server(Greeter(), server)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--tls", type=Path)
    parser.add_argument("--mutual", action="store_true")
    parser.add_argument("--stubs", type=Path)
    parser.add_argument("--token", default="")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--streams", type=int)
    options = parser.parse_args()
    door = TokenInterceptor(options.token, options.strict)
    more = [] if options.streams is None else [("grpc.max_concurrent_streams", options.streams)]
    # Two servers must not share a port: a test would reach either.
    server = grpc.server(
        ThreadPoolExecutor(64), options=[("grpc.so_reuseport", 0), *more], interceptors=(door,)
    )
    methods = {**METHODS, "Accept": grpc.unary_unary_rpc_method_handler(door.accept)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", methods),))
    checks = health.HealthServicer()
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    if options.stubs is not None:
        add_generated(server, options.stubs)
    address = f"{options.host}:{options.port}"
    if options.tls is None:
        server.add_insecure_port(address)
    else:
        key, pem, ca = (
            (options.tls / name).read_bytes() for name in ("server.key", "server.pem", "ca.pem")
        )
        theirs = (ca, True) if options.mutual else (None, False)
        server.add_secure_port(address, grpc.ssl_server_credentials([(key, pem)], *theirs))
    server.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
