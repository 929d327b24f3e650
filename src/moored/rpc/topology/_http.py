"""One HTTP GET in a thread of its own, which can be aborted at any time.

The timeout of the standard library's client applies to each step (a connect, a read), not to the
whole request: a server that sends one byte at a time, or a name server that does not answer, could
delay it without limit. So the waiting task has the timeout, and aborts the request by shutting down
its socket.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from moored.kernel import start_thread

from .._config import redacted
from .._errors import ConfigError, TopologyError

__all__ = ["Answer", "Get", "HttpLocation", "NoHttpAnswer", "place_of"]

PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
#: The limit for a response, in bytes: a topology has a few lines.
MAX_BODY = 1 << 20
MAX_HOPS = 5
# The characters of a path that are not percent-encoded.
_SAFE = "/%:@!$&'()*+,;=~-._"


class NoHttpAnswer(Exception):
    """The request failed; another attempt may succeed."""


class HttpLocation(NamedTuple):
    """A parsed URL."""

    scheme: str
    host: str
    port: int
    path: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"

    def trusts(self, other: HttpLocation) -> bool:
        """Whether the token for this location may be sent to the other: it is the same server."""
        if other.host != self.host:
            return False
        upgraded = (self.scheme, other.scheme) == ("http", "https") and (
            (self.port, other.port) == (PORTS["http"], PORTS["https"])
        )
        return upgraded or (self.scheme, self.port) == (other.scheme, other.port)


class Answer(NamedTuple):
    """An HTTP response."""

    status: int
    body: bytes
    #: The location that answered, after redirects.
    place: HttpLocation


def place_of(url: str) -> HttpLocation:
    """Parse a URL; raise `ConfigError` if it is wrong."""
    with contextlib.suppress(ValueError):  # its text may quote a password: it is not shown
        parts = urlsplit(url)
        if parts.scheme in PORTS and parts.hostname:
            port, path = parts.port or PORTS[parts.scheme], quote(parts.path, safe=_SAFE)
            return HttpLocation(parts.scheme, parts.hostname, port, path)
    raise ConfigError(
        f"the topology cannot be fetched from {redacted(url)!r}: "
        "it must begin with http:// or https://, and have a host and a valid port"
    )


class Get:
    """A GET request, which starts at once; its outcome is in `future`."""

    def __init__(
        self,
        place: HttpLocation,
        headers: dict[str, bytes],
        *,
        timeout: float,
        context: Callable[[], ssl.SSLContext],
    ) -> None:
        self._place = place
        self._headers = headers
        self._timeout = timeout
        self._context = context
        self._socket: socket.socket | None = None
        self._given_up = False
        self.future: Future[Answer] = start_thread(self._run, name=f"GET {place.host}")

    def give_up(self) -> None:
        """Abort the request."""
        self._given_up = True
        self._shut()

    def _shut(self) -> None:
        if (connected := self._socket) is not None:
            # Not the shutdown of the TLS layer, which is not thread-safe.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connected, socket.SHUT_RDWR)

    def _run(self) -> Answer:
        place = self._place
        for _ in range(MAX_HOPS):
            try:
                status, target, body = self._ask(place)
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise NoHttpAnswer(f"{type(error).__name__}: {error}") from error
            if status not in REDIRECTS:
                return Answer(status, body, place)
            place = _redirected(place, target)
        raise TopologyError(f"{self._place} redirects more than {MAX_HOPS} times")

    def _ask(self, place: HttpLocation) -> tuple[int, str, bytes]:
        connection = self._connection(place)
        try:
            connection.connect()
            self._socket = connection.sock
            if self._given_up:
                raise NoHttpAnswer("the request was aborted")
            connection.request("GET", place.path, headers=self._headers)
            # The response is closed, too: without a length, it owns the socket.
            with contextlib.closing(connection.getresponse()) as answer:
                body = answer.read(MAX_BODY + 1)
                target = answer.getheader("location", "")
            if len(body) > MAX_BODY:
                raise TopologyError(
                    f"{place} sent more than {MAX_BODY} bytes: that is not a topology"
                )
            return answer.status, target, body
        finally:
            self._socket = None
            connection.close()

    def _connection(self, place: HttpLocation) -> http.client.HTTPConnection:
        if place.scheme == "https":
            return http.client.HTTPSConnection(
                place.host, place.port, timeout=self._timeout, context=self._context()
            )
        return http.client.HTTPConnection(place.host, place.port, timeout=self._timeout)


def _redirected(place: HttpLocation, target: str) -> HttpLocation:
    """Return the target of a redirect; raise if the token must not be sent there."""
    try:
        found = place_of(urljoin(str(place), target))
    except (ConfigError, ValueError):
        raise TopologyError(f"{place} redirects to an invalid URL") from None
    if not place.trusts(found):
        raise TopologyError(
            f"refused a redirect from {place} to {found.scheme}://{found.host}:{found.port}, which "
            "would leak the token: configure that host's URI directly"
        )
    return found
