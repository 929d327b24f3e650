"""Streams over HTTP: an ASGI app with server-sent events and WebSockets.

==============================  ==========================================================
``GET /v1/subscribe``           server-sent events; ``?channel=`` (several allowed), and
                                ``Last-Event-ID`` as a header or ``?last_event_id=``
``WebSocket /v1/subscribe``     the same events, each as one JSON message
``POST /v1/tickets``            a one-time ticket for ``?ticket=``, for the caller's tenant
``GET /v1/subscribe.js``        the client for browsers
==============================  ==========================================================

The tenant comes from the authenticator, never from the query.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from moored.kernel import Clock, SignalCall, awaited

from ._broker import Broker
from ._cut import ClientConnection
from ._events import BrokerOff, StreamStart, TooManyStreams, sse
from ._identity import Authenticator, Identity, Tickets, TokenRefused
from ._stream import LiveStream

__all__ = ["BrokerApp"]

log = logging.getLogger("moored.broker")

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

#: The paths, each with its method.
PATHS = {"/v1/subscribe": "GET", "/v1/tickets": "POST", "/v1/subscribe.js": "GET"}
#: Seconds between two checks of all streams.
TICK = 1.0
#: Seconds within which the streams end at a signal, one by one, and after which a client that does
#: not read is then cut: a server stops within five seconds.
DRAIN, STALLED = 2.0, 1.0
STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
SCRIPT_HEADERS: Headers = [
    (b"content-type", b"text/javascript; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"access-control-allow-origin", b"*"),
]


class _Refused(Exception):
    """An answer in place of a stream."""

    def __init__(self, status: int, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after = retry_after


class _HttpStream:
    """An open stream over HTTP."""

    __slots__ = ("_task", "client", "expires", "last_sent", "stalled", "stream", "writing_since")

    def __init__(
        self, stream: LiveStream, client: ClientConnection, expires: float | None, now: float
    ) -> None:
        self.stream = stream
        self.client = client
        #: When the credentials expire; by the time of the loop.
        self.expires = expires
        self.last_sent = now
        self.writing_since: float | None = None
        self.stalled = False
        self._task = asyncio.current_task()

    def abort(self) -> None:
        """Give up a client that does not read: cut its connection, or else cancel the response."""
        again, self.stalled = self.stalled, True
        if (again or not self.client.cut()) and self._task is not None:
            self._task.cancel()

    def forgive(self) -> None:
        """Undo the cancellations of the task, whose stream has ended."""
        if self._task is not None:
            while self._task.cancelling():
                self._task.uncancel()


class BrokerApp:
    """An ASGI app for the streams of a broker; it can be mounted in Starlette and FastAPI.

    While streams are open, SIGTERM and SIGINT drain the broker, because servers wait for open
    responses; the handlers of the server are called as well. A program that goes on accepts new
    streams again after ten seconds.

    :param authenticate: returns the identity for a token, which is sent as `Authorization: Bearer`
        or as `X-API-Key`.
    :param cookie: the name of a cookie that holds the token, for browsers; it is accepted from the
        same origin and from `origins` only.
    :param origins: the origins of pages that may open streams (CORS), such as
        `https://app.example`.
    :param keepalive: seconds after which an idle stream sends a comment, with the id after which
        the client would resume.
    :param send_timeout: seconds after which the connection of a client that does not read is cut;
        one second when the broker drains.
    :param retry: the seconds after which a client reconnects, at least and at most.
    """

    def __init__(
        self,
        broker: Broker,
        authenticate: Authenticator,
        *,
        cookie: str | None = None,
        origins: Iterable[str] = (),
        keepalive: float = 15.0,
        send_timeout: float = 30.0,
        retry: tuple[float, float] = (1.0, 3.0),
        clock: Clock | None = None,
    ) -> None:
        self.broker = broker
        self._authenticate = authenticate
        self._cookie = cookie
        self._origins = frozenset(origins)
        self._keepalive = keepalive
        self._send_timeout = send_timeout
        self._retry = retry
        self._clock = clock or Clock.current()
        self._tickets = Tickets(clock=self._clock)
        self._connections: dict[_HttpStream, None] = {}
        # The loop on which the next check of all streams is scheduled.
        self._checked_by: asyncio.AbstractEventLoop | None = None
        self._at_signals = SignalCall(partial(broker.drain_at_signal, DRAIN))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] not in ("http", "websocket"):
            return  # an app that this one is mounted in has its own lifespan
        request = _Request(scope)
        try:
            method = PATHS.get(request.path)
            if method is None:
                raise _Refused(404, f"there is nothing at {request.path}")
            if scope["type"] == "websocket":
                await receive()  # the request to connect
                await self._websocket(request, receive, send)
            elif request.method == "OPTIONS":
                await _respond(send, 204, b"", self._cors(request, preflight=True))
            elif request.method != method:
                raise _Refused(405, f"{request.path} accepts {method} only")
            elif request.path == "/v1/subscribe":
                await self._events(request, receive, send)
            elif request.path == "/v1/tickets":
                await self._ticket(request, send)
            else:
                await _respond(send, 200, _script(), SCRIPT_HEADERS)
        except _Refused as refused:
            await self._refuse(request, send, refused)

    # -- requests ------------------------------------------------------------------------------

    async def _events(self, request: _Request, receive: Receive, send: Send) -> None:
        stream, identity = await self._open(request)
        low, high = self._retry
        first = b"retry: %d\n" % (random.uniform(low, high) * 1000)

        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async def begin() -> None:
            headers = STREAM_HEADERS + self._cors(request)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            # In the block of the first event: some clients take a block of its own for an event.
            await write(first + (StreamStart(stream.start).sse if stream.start else b""))

        async def write_items(items: Collection[Any]) -> None:
            await write(b"".join([item.sse for item in items]))

        async def end(reason: str) -> None:
            if reason == "expired":
                await write(sse("expired", "{}", None))
            await write(b"", more=False)

        await self._serve(stream, identity, request, receive, begin, write_items, end)

    async def _websocket(self, request: _Request, receive: Receive, send: Send) -> None:
        stream, identity = await self._open(request)

        async def write_items(items: Collection[Any]) -> None:
            for item in items:
                await send({"type": "websocket.send", "text": item.json})

        async def end(reason: str) -> None:
            # 1013: try again later; 1012: the service restarts; 1008: not authorized any more.
            code = {"slow": 1013, "expired": 1008}.get(reason, 1012)
            await send({"type": "websocket.close", "code": code, "reason": reason})

        async def begin() -> None:
            await send({"type": "websocket.accept"})
            if stream.start:
                await write_items([StreamStart(stream.start)])

        await self._serve(stream, identity, request, receive, begin, write_items, end)

    async def _ticket(self, request: _Request, send: Send) -> None:
        identity = await self._identify(request, tickets=False)
        if (ticket := self._tickets.issue(identity)) is None:
            raise _Refused(503, "too many tickets are in use", self._tickets.lifetime)
        body = json.dumps({"ticket": ticket, "expires_in": self._tickets.lifetime}).encode()
        headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
        await _respond(send, 200, body, headers + self._cors(request))

    async def _refuse(self, request: _Request, send: Send, refused: _Refused) -> None:
        headers = [(b"content-type", b"application/json"), *self._cors(request)]
        if refused.retry_after is not None:
            headers.append((b"retry-after", b"%d" % refused.retry_after))
        if refused.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if refused.status == 405:
            headers.append((b"allow", PATHS[request.path].encode()))
        body = json.dumps({"error": str(refused)}).encode()
        if request.method:
            await _respond(send, refused.status, body, headers)
        elif request.may_refuse:
            await _respond(send, refused.status, body, headers, "websocket.http.response")
        else:
            # Before it is accepted, a server answers a close with the status 403.
            await send({"type": "websocket.close", "code": 1008, "reason": str(refused)[:120]})

    # -- a stream ------------------------------------------------------------------------------

    async def _open(self, request: _Request) -> tuple[LiveStream, Identity]:
        identity = await self._identify(request)
        named = [name for value in request.query("channel") for name in value.split(",") if name]
        allowed = self.broker.channels
        if identity.channels is not None:
            allowed = identity.channels if allowed is None else allowed & identity.channels
        for name in named:
            if not self.broker.has_channel(name) or (allowed is not None and name not in allowed):
                raise _Refused(404, f"there is no channel {name!r}")
        if allowed is not None and not allowed:
            raise _Refused(403, "the token allows none of the channels")
        after = request.header("last-event-id") or "".join(request.query("last_event_id")[:1])
        channels = frozenset(named) or allowed
        if not self.broker.begun:  # a load balancer may have another node, whose source has
            text = "live events have not begun here: their source is not connected yet"
            raise _Refused(503, text, random.uniform(1, 5))
        try:
            tenant, user = identity.tenant, identity.user
            return self.broker.open(tenant, channels, after=after, user=user), identity
        except BrokerOff as error:
            raise _Refused(503, str(error), random.uniform(5, 15)) from None
        except TooManyStreams as error:
            status = 503 if error.tenant is None else 429
            raise _Refused(status, str(error), random.uniform(5, 30)) from None
        except ValueError as error:
            raise _Refused(403, f"the tenant is not valid: {error}") from None

    async def _serve(
        self,
        stream: LiveStream,
        identity: Identity,
        request: _Request,
        receive: Receive,
        begin: Callable[[], Awaitable[None]],
        write_items: Callable[[Collection[Any]], Awaitable[None]],
        end: Callable[[str], Awaitable[None]],
    ) -> None:
        """Write a stream until it ends, or the client is gone."""
        subscriber = stream.subscriber
        loop = asyncio.get_running_loop()
        expires = None
        if identity.expires is not None:
            expires = loop.time() + identity.expires - self._clock.wall()
        client = ClientConnection(request.scope, receive)
        connection = _HttpStream(stream, client, expires, loop.time())
        self._at_signals.activate()
        self._connections[connection] = None
        if self._checked_by is not loop:
            self._checked_by = loop
            loop.call_later(TICK, self._tick, loop)
        watching = asyncio.ensure_future(_end_when_gone(receive, stream))
        try:
            connection.writing_since = connection.last_sent
            await begin()
            connection.writing_since = None
            while items := await stream.take():
                connection.writing_since = connection.last_sent = loop.time()
                await write_items(items)
                connection.writing_since = None
            if subscriber.end_reason != "gone":
                connection.writing_since = loop.time()
                await end(subscriber.end_reason)
        except OSError:
            pass  # the client is gone: some servers raise it, others ignore what is sent
        except asyncio.CancelledError:
            if not connection.stalled:
                client.cut()  # the server would wait until the client has read what was written
                raise
            connection.forgive()
        finally:
            self._connections.pop(connection, None)
            if not self._connections:
                self._at_signals.deactivate()
            if self.broker.stopping:
                loop.call_later(STALLED, client.cut_if_closing)
            self.broker.close(stream)
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check all streams now and then: a timer for each would cost more than its events."""
        now = loop.time()
        for connection in list(self._connections):
            try:
                self._check(connection, now)
            except Exception:  # the next check of this stream, and those of the others, come
                log.exception("%s: a stream could not be checked", self.broker.name)
        if self._connections:
            loop.call_later(TICK, self._tick, loop)
        else:
            self._checked_by = None

    def _check(self, connection: _HttpStream, now: float) -> None:
        patience = min(STALLED, self._send_timeout) if self.broker.draining else self._send_timeout
        since = connection.writing_since
        if connection.expires is not None and now >= connection.expires:
            connection.stream.subscriber.end("expired")
        if since is not None and now - since > patience:
            connection.abort()
        elif since is None and now - connection.last_sent >= self._keepalive:
            self.broker.keepalive(connection.stream)

    # -- who may do that -----------------------------------------------------------------------

    async def _identify(self, request: _Request, *, tickets: bool = True) -> Identity:
        token = request.token
        ticket = "".join(request.query("ticket")[:1])
        if token is None and ticket and tickets:
            if (identity := self._tickets.redeem(ticket)) is None:
                raise _Refused(401, "the ticket is not valid, or was used: request a new one")
            return identity
        if token is None and self._cookie is not None:
            token = request.cookie(self._cookie)
            if token is not None and not self._is_trusted(request):
                raise _Refused(403, "a cookie is not accepted from another origin")
        if not token:
            raise _Refused(401, "a token is needed, as Authorization: Bearer or X-API-Key")
        try:
            found: Identity | None = await awaited(self._authenticate(token))
            if found is None:
                raise TokenRefused("unknown", "the token is not known")
            if found.expires is not None and found.expires <= self._clock.wall():
                raise TokenRefused("expired", "the token has expired")
        except TokenRefused as error:
            self.broker.count_refused(f"token_{error.reason}")
            log.info("%s: a token is refused: %s", self.broker.name, error)
            status = 401 if error.retry_after is None else 503
            raise _Refused(status, str(error), error.retry_after) from error
        return found

    def _is_trusted(self, request: _Request) -> bool:
        """Whether the page that sends a cookie may open a stream."""
        origin = request.header("origin")
        if not origin:
            return request.header("sec-fetch-site") == "same-origin"
        return origin in self._origins or origin.partition("://")[2] == request.header("host")

    def _cors(self, request: _Request, *, preflight: bool = False) -> Headers:
        origin = request.header("origin")
        if origin not in self._origins:
            return [(b"vary", b"Origin")] if self._origins else []
        found = [(b"access-control-allow-origin", origin.encode()), (b"vary", b"Origin")]
        if self._cookie is not None:
            found.append((b"access-control-allow-credentials", b"true"))
        if preflight:
            names = b"authorization, last-event-id, x-api-key"
            found.append((b"access-control-allow-headers", names))
            found.append((b"access-control-allow-methods", b"GET, POST"))
            found.append((b"access-control-max-age", b"600"))
        return found


class _Request:
    """What is read of an ASGI scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        #: Empty for a WebSocket.
        self.method: str = scope.get("method", "")
        #: Whether a WebSocket can be refused with any status.
        self.may_refuse = "websocket.http.response" in (scope.get("extensions") or ())
        path: str = scope["path"]
        root: str = scope.get("root_path", "")
        # Mounted apps get the whole path, and their own prefix as the root path.
        self.path = path.removeprefix(root) if path.startswith(root + "/") else path
        self._headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        self._query = parse_qs(scope.get("query_string", b"").decode("latin-1"))

    def header(self, name: str) -> str:
        """The value of a header, or an empty string."""
        found: bytes = self._headers.get(name, b"")
        return found.decode("latin-1")

    def query(self, name: str) -> list[str]:
        """The values of a parameter."""
        return self._query.get(name, [])

    def cookie(self, name: str) -> str | None:
        """The value of a cookie.

        Each is parsed alone: other services of the host may set cookies in any syntax.
        """
        for each in self.header("cookie").split(";"):
            key, _, value = each.partition("=")
            if key.strip() == name:
                return value.strip().strip('"')
        return None

    @property
    def token(self) -> str | None:
        """The token of the headers."""
        scheme, _, token = self.header("authorization").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else self.header("x-api-key") or None


async def _end_when_gone(receive: Receive, stream: LiveStream) -> None:
    while (await receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
        pass
    stream.subscriber.end("gone")


@cache
def _script() -> bytes:
    return (files("moored.broker") / "static" / "subscribe.js").read_bytes()


async def _respond(
    send: Send, status: int, body: bytes, headers: Headers, kind: str = "http.response"
) -> None:
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
