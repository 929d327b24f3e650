"""A gRPC channel that two clients share; their calls wait while the server restarts.

`rpc.channel` returns a `grpc.Channel`, to pass to a generated stub. All callers of the process that
name the same server share one connection, which is replaced once after a restart, however many
clients there are. The interceptor retries failed calls within their own timeout; omit it for calls
that must not be executed twice. With asyncio use `rpc.aio.channel(...)`; for TLS, `tls=True`
or `tls=grpc.ssl_channel_credentials(...)`. `rpc.ConnectionManager` has more options.

Expected output:

    alice: hello alice, from server 1
    bob: hello bob, from server 1
    the server is gone; both call, and wait
    the server is back
    alice: hello alice, from server 2
    bob: hello bob, from server 2
    1 connection, in generation 2
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc  # type: ignore[import-untyped]

from moored import rpc

GREET = "/example.Greeter/Greet"


def serve(number: int, port: int = 0) -> tuple[grpc.Server, int]:
    """Start a server in this process, whose replies have its number."""

    def greet(name: bytes, context: object) -> bytes:
        return b"hello %s, from server %d" % (name, number)

    methods = {"Greet": grpc.unary_unary_rpc_method_handler(greet)}
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("example.Greeter", methods),)
    )
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, port


class Client:
    """A client with one method, without generated code."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        channel = rpc.channel(f"127.0.0.1:{port}")
        retrying = grpc.intercept_channel(channel, rpc.RetryInterceptor(channel))
        self._greet = retrying.unary_unary(GREET)

    def call(self) -> str:
        answer: bytes = self._greet(self.name.encode(), timeout=30)
        return f"{self.name}: {answer.decode()}"


def main() -> None:
    server, port = serve(number=1)
    clients = [Client(name, port) for name in ("alice", "bob")]
    with rpc.ConnectionManager.get_instance() as manager, ThreadPoolExecutor(2) as threads:
        print(*threads.map(Client.call, clients), sep="\n")

        server.stop(grace=1).wait()
        print("the server is gone; both call, and wait")
        calls = [threads.submit(client.call) for client in clients]
        threading.Event().wait(0.5)
        assert not any(call.done() for call in calls)
        server, _ = serve(number=2, port=port)
        print("the server is back")
        print(*(call.result() for call in calls), sep="\n")

        connections = manager.get_stats()["connections"]
        print(len(connections), "connection, in generation", connections[0]["generation"])
    server.stop(grace=1).wait()


if __name__ == "__main__":
    main()
