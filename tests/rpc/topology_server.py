"""A real HTTP server that returns a topology, or misbehaves as a test says."""

from __future__ import annotations

import json
import ssl
import threading
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Reply", "TopologyServer", "body_of"]

Reply = Callable[["Conversation"], None]


def body_of(version: int | str, *clusters: tuple[str, str, int]) -> dict[str, Any]:
    """Milvus's answer, for clusters of (id, endpoint, capability)."""
    listed = [{"clusterId": n, "endpoint": e, "capability": c} for n, e, c in clusters]
    return {"code": 0, "data": {"version": str(version), "clusters": listed}}


class Conversation(BaseHTTPRequestHandler):
    """One request."""

    server: _Server

    def do_GET(self) -> None:
        owner = self.server.owner
        with owner.changed:
            owner.requests.append((self.path, dict(self.headers)))
            owner.changed.notify_all()
            reply = owner.script.popleft() if owner.script else owner.reply
        try:
            reply(self)
        except OSError:
            pass  # the client has left
        finally:
            with owner.changed:
                owner.ended += 1
                owner.changed.notify_all()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing."""

    def send(self, status: int, body: bytes, **headers: str) -> None:
        """Answer with this."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def gone(self, timeout: float = 30.0) -> bool:
        """Wait until the client has closed its side; return whether it did."""
        self.connection.settimeout(timeout)
        try:
            return not self.connection.recv(1)
        except ConnectionError:
            return True
        except OSError:
            return False


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    owner: TopologyServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that refuse our certificate."""


class TopologyServer:
    """Set `body` to change the topology; put replies into `script` for the requests to come."""

    def __init__(
        self, body: Any = None, *, host: str = "127.0.0.1", context: ssl.SSLContext | None = None
    ) -> None:
        self.body = body
        self.reply: Reply = self.tell
        self.script: deque[Reply] = deque()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.changed = threading.Condition()
        #: Number of finished conversations.
        self.ended = 0
        self._server = _Server((host, 0), Conversation)
        self._server.owner = self
        if context is not None:
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._scheme = "http" if context is None else "https"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )

    @property
    def port(self) -> int:
        """Its port."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The URI of the service."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def wait(self, condition: Callable[[], bool], timeout: float = 30.0) -> None:
        """Wait until a condition holds; it is checked when a request arrives or ends."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout)

    # -- replies -------------------------------------------------------------------------------

    def tell(self, talk: Conversation) -> None:
        """Answer with the current `body`."""
        talk.send(200, json.dumps(self.body).encode(), Content_Type="application/json")

    @staticmethod
    def status(number: int, **headers: str) -> Reply:
        """Make an answer with a status and no topology."""
        return lambda talk: talk.send(number, b"{}", **headers)

    @staticmethod
    def raw(body: bytes) -> Reply:
        """Make an answer with these bytes."""
        return lambda talk: talk.send(200, body)

    @staticmethod
    def hang(talk: Conversation) -> None:
        """Send no answer until the client disconnects."""
        assert talk.gone()

    def __enter__(self) -> TopologyServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
