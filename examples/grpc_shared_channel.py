"""Two clients share one gRPC channel; the server restarts, and their calls go on.

What the manager gives *is* a `grpc.Channel`: give it to a generated stub. It stays valid while the
connection in it is replaced, and is replaced once, however many clients there are. The interceptor
repeats calls that failed, within their own timeout; leave it out for calls that must not be
carried out twice.

Expected output:

    one channel for both: True
    alice: hello alice, from server 1
    bob: hello bob, from server 1
    the server is gone; both call, and wait
    the server is back
    alice: hello alice, from server 2
    bob: hello bob, from server 2
    2 generations, 2 clients
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc  # type: ignore[import-untyped]

from moored.rpc import ConnectionConfig, ConnectionManager, RetryInterceptor

GREET = "/example.Greeter/Greet"


def serve(life: int, port: int = 0) -> tuple[grpc.Server, int]:
    """A server in this process, which says in which life it is."""

    def greet(name: bytes, context: object) -> bytes:
        return b"hello %s, from server %d" % (name, life)

    methods = {"Greet": grpc.unary_unary_rpc_method_handler(greet)}
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("example.Greeter", methods),)
    )
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, port


class Client:
    """Somebody with a stub; here it has one method, and no generated code."""

    def __init__(self, name: str, manager: ConnectionManager, config: ConnectionConfig) -> None:
        self.name = name
        self.handler = manager.get_or_create(config, client=self)
        channel = grpc.intercept_channel(self.handler, RetryInterceptor(self.handler))
        self._greet = channel.unary_unary(GREET)

    def call(self) -> str:
        answer: bytes = self._greet(self.name.encode(), timeout=30)
        return f"{self.name}: {answer.decode()}"


def main() -> None:
    server, port = serve(life=1)
    config = ConnectionConfig.from_uri(f"http://127.0.0.1:{port}")
    with ConnectionManager() as manager, ThreadPoolExecutor(2) as threads:
        clients = [Client(name, manager, config) for name in ("alice", "bob")]
        print("one channel for both:", clients[0].handler is clients[1].handler)
        print(*threads.map(Client.call, clients), sep="\n")

        server.stop(grace=1).wait()
        print("the server is gone; both call, and wait")
        calls = [threads.submit(client.call) for client in clients]
        threading.Event().wait(0.5)
        assert not any(call.done() for call in calls)
        server, _ = serve(life=2, port=port)
        print("the server is back")
        print(*(call.result() for call in calls), sep="\n")

        (line,) = manager.get_stats()["connections"]
        print(f"{line['generation']} generations, {line['client_count']} clients")
    server.stop(grace=1).wait()


if __name__ == "__main__":
    main()
