"""A gRPC server with Milvus's service: records its requests, and answers as a test says."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]
from pymilvus.grpc_gen import (  # type: ignore[import-untyped]
    common_pb2,
    milvus_pb2,
    milvus_pb2_grpc,
)
from tests.servers import free_port

__all__ = ["CALLERS", "LIMIT", "VIOLATION", "Server", "Service"]

CALLERS = 20
LIMIT = 120.0
VIOLATION = "code: STREAMING_CODE_REPLICATE_VIOLATION, cause: not primary"


class Service(milvus_pb2_grpc.MilvusServiceServicer):  # type: ignore[misc]
    """Records its calls; `refuse` and `accepts` decide its answers."""

    def __init__(self) -> None:
        self.greetings: list[dict[str, str]] = []
        self.client_options: list[dict[str, str]] = []
        self.calls: list[dict[str, str]] = []
        #: Old servers do not know Connect().
        self.greets = True
        self.refuse: grpc.StatusCode | None = None
        self.accepts: str | None = None
        self.greeting = common_pb2.Status()
        self.violations = 0
        self.moved = False
        self.held, self.go_on = threading.Semaphore(0), threading.Event()

    def Connect(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.greetings.append(dict(context.invocation_metadata()))
        self.client_options.append(dict(request.client_info.reserved))
        if not self.greets:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method")
        if self.refuse is not None:
            context.abort(self.refuse, "auth check failure, please check")
        if self.accepts not in (None, self.greetings[-1].get("authorization")):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token has expired")
        return milvus_pb2.ConnectResponse(
            status=self.greeting, identifier=1000 + len(self.greetings)
        )

    def GetVersion(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append(dict(context.invocation_metadata()))
        if self.refuse is not None:
            context.abort(self.refuse, "auth check failure, please check")
        return milvus_pb2.GetVersionResponse(status=common_pb2.Status(), version="1")

    def DropAlias(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Stands for a write; the alias "late" blocks until `go_on` is set."""
        if request.alias == "late":
            self.held.release()
            self.go_on.wait(LIMIT)
        if self.moved:
            self.violations += 1
            return common_pb2.Status(code=65535, reason=VIOLATION)
        return common_pb2.Status()


class Server:
    """The service on a port."""

    def __init__(self, address: str = "") -> None:
        self.service = Service()
        self.address = address or f"127.0.0.1:{free_port()}"
        self.uri = f"http://{self.address}"
        self._server = grpc.server(ThreadPoolExecutor(CALLERS + 4))
        milvus_pb2_grpc.add_MilvusServiceServicer_to_server(self.service, self._server)
        assert self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()
