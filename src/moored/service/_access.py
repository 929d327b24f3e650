"""The access checks of every HTTP request, before it reaches a route or a mounted app."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import _auth
from ._connections import MAX_HEAD

__all__ = ["AccessControl", "refusal"]

#: Served without a token and for any Host header, for load balancers.
OPEN = frozenset({"/v1/health"})
#: Where a browser exchanges the token for a session; needs no token itself.
LOGIN = "/login"
#: Stands for the method of a WebSocket handshake, which is a GET but not a safe one.
WEBSOCKET = "WEBSOCKET"
#: Methods that change nothing, and whose responses a page of another origin cannot read.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
NO_TOKEN = (
    "without an admin token only clients on this machine have access: set admin_token "
    "(MOORED_ADMIN_TOKEN)"
)
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
#: Headers of a proxy, whose client may be anywhere.
PROXIED = frozenset({"forwarded", "x-forwarded-for"})

_SAFE = {
    "X-Content-Type-Options": "nosniff",
    # Not "no-referrer": browsers would then send the Origin "null" with the page's own forms.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


def refusal(status: int, error: str, detail: str) -> JSONResponse:
    """Return an error response as JSON: a short name for programs and a sentence for people."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return JSONResponse({"error": error, "detail": detail}, status_code=status, headers=headers)


class AccessControl:
    """Checks the Host header and the token, and adds security headers to every response.

    `names` are the allowed names in the Host header, None for any. They prevent DNS rebinding: a
    web page can make its own host name point to 127.0.0.1 and so reach a loopback service from a
    browser on this machine, but it cannot change the Host header. `public` are the paths of apps
    that check the origin and tokens of their own.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        names: Iterable[str] | None,
        public: Iterable[str] = (),
        wall: Callable[[], float],
        login_page: Callable[[], Response],
    ) -> None:
        self._app = app
        self._token = token
        self._names = None if names is None else frozenset(names)
        self._public = frozenset(public)
        self._wall = wall
        self._login_page = login_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the app, or refuse it."""
        if scope["type"] == "http":
            answer = self._check(scope, scope["method"])
            return await (answer or self._app)(scope, receive, _with_safe_headers(send))
        if scope["type"] == "websocket" and self._check(scope, WEBSOCKET):
            return await send({"type": "websocket.close", "code": 1008})
        return await self._app(scope, receive, send)

    def _check(self, scope: Scope, method: str) -> Response | None:
        path, headers = _path(scope), Headers(scope=scope)
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEAD:
            return refusal(431, "headers too large", f"send at most {MAX_HEAD} bytes of headers")
        if path in OPEN:
            return None
        if (
            self._names is not None
            and (name := _auth.name_in_host(headers.get("host"))) not in self._names
        ):
            return refusal(
                421,
                "unknown host",
                f"{name!r} is not an allowed name of this service; if it is the name of a proxy, "
                "add it to allowed_hosts (MOORED_ALLOWED_HOSTS)",
            )
        if path in self._public:
            return None
        if self._names is not None and _from_elsewhere(method, headers, self._names):
            return refusal(
                403,
                "foreign origin",
                "the request comes from a web page of another host; if it is the name of a proxy, "
                "add it to allowed_hosts (MOORED_ALLOWED_HOSTS)",
            )
        if self._token is None:
            here = _on_this_machine(scope) and PROXIED.isdisjoint(headers.keys())
            return None if here else refusal(403, "no token", NO_TOKEN)
        if path == LOGIN or self._knows_token(self._token, headers):
            return None
        if path == "/" and method in ("GET", "HEAD") and "text/html" in headers.get("accept", ""):
            return self._login_page()
        return refusal(
            401, "unauthorized", "send the admin token in a header: Authorization: Bearer <token>"
        )

    def _knows_token(self, token: str, headers: Headers) -> bool:
        given = _auth.bearer_of(headers.get("authorization"))
        if given is not None:
            return _auth.same(given, token)
        session = _auth.session_of(headers.get("cookie"))
        return _auth.session_holds(token, session, now=self._wall())


def _on_this_machine(scope: Scope) -> bool:
    """Whether a client is on this machine; an app that is mounted in another one may be public.

    The client of a Unix socket is unknown: it may be a proxy.
    """
    try:
        return ip_address((scope.get("client") or ("",))[0]).is_loopback
    except ValueError:
        return False


def _path(scope: Scope) -> str:
    """Return the path below the one that the app is mounted at."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _from_elsewhere(method: str, headers: Headers, names: frozenset[str]) -> bool:
    """Whether a web page of another host sent this request.

    Any page may open and read a WebSocket to this machine, and send forms to it, but the browser
    puts the page's host into the Origin header.
    """
    origin = headers.get("origin")
    if origin is None or method in SAFE_METHODS:
        return False
    return _auth.name_in_host(origin.partition("://")[2]) not in names


def _with_safe_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _SAFE.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
