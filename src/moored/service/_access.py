"""The access checks of every HTTP request, before it reaches a route or a mounted app."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import _auth
from ._assets import login_page
from ._config import Config
from ._connections import MAX_HEAD
from ._login import Login, token_in_link

__all__ = ["AccessControl", "refusal"]

#: Served without a token and for any Host header, for load balancers.
OPEN = frozenset({"/v1/health"})
#: Where a browser exchanges the token for a session, and ends it; they need no token.
LOGIN, LOGOUT = "/login", "/logout"
#: Stands for the method of a WebSocket handshake, which is a GET but not a safe one.
WEBSOCKET = "WEBSOCKET"
#: Methods that change nothing, and whose responses a page of another origin cannot read.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
NOT_SET = (
    "only /v1/health and live events are served, because no token is set: set admin_token "
    "(MOORED_ADMIN_TOKEN), or no_token (MOORED_NO_TOKEN=1) if every user of this machine may have "
    "access"
)
NOT_HERE = (
    "without a token (no_token) only clients on this machine have access: set admin_token "
    "(MOORED_ADMIN_TOKEN)"
)
UNAUTHORIZED = (
    "send the admin token in a header, Authorization: Bearer <token>, or open /?token=<token> in a "
    "browser; unless one is set as admin_token (MOORED_ADMIN_TOKEN), it is in the link that "
    "`moored serve` printed at its start"
)
READ_ONLY = "the read token may only read: send the admin token"
FOREIGN = (
    "the request comes from a web page of another scheme, host or port. If the page is this "
    "service's, behind a proxy: let the proxy pass the Host header on (nginx: proxy_set_header "
    "Host $http_host), and add its name to allowed_hosts (MOORED_ALLOWED_HOSTS)"
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
    """Checks Host, Origin and token, and adds security headers to every response.

    The allowed names in the Host header prevent DNS rebinding: a web page can make its own host
    name point to 127.0.0.1 and so reach a loopback service from a browser on this machine, but it
    cannot change the Host header. `public` are the paths of apps that check the origin and tokens
    of their own.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: Config,
        *,
        tokens: _auth.Tokens,
        login: Login,
        public: Iterable[str] = (),
        wall: Callable[[], float],
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._needs_token = not config.no_token
        self._trusted = frozenset(config.allowed_hosts)
        self._names = {*LOCAL_NAMES, config.host.lower(), *self._trusted}
        self._any_name = not config.is_local
        self._public = frozenset(public)
        self._wall = wall
        self._login = login

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
        name, _ = _auth.address_in(headers.get("host"))
        if not self._any_name and name not in self._names:
            return refusal(
                421,
                "unknown host",
                f"{name!r} is not an allowed name of this service; if it is the name of a proxy, "
                "add it to allowed_hosts (MOORED_ALLOWED_HOSTS)",
            )
        if path in self._public:
            return None
        if method not in SAFE_METHODS and self._is_foreign(scope, headers):
            return refusal(403, "foreign origin", FOREIGN)
        if not self._needs_token:
            here = _on_this_machine(scope) and PROXIED.isdisjoint(headers.keys())
            return None if here else refusal(403, "no token", NOT_HERE)
        if not self._tokens:
            return refusal(403, "no token", NOT_SET)
        return self._check_token(scope, path, method, headers)

    def _check_token(
        self, scope: Scope, path: str, method: str, headers: Headers
    ) -> Response | None:
        if path in (LOGIN, LOGOUT):
            return None
        is_page = path == "/" and method in ("GET", "HEAD")
        if is_page and (given := token_in_link(scope)) is not None:
            return self._login.by_token(Request(scope), given)
        right = self._tokens.right_of(headers, now=self._wall())
        if right == "admin" or (right == "read" and method in SAFE_METHODS):
            return None
        if right == "read":
            return refusal(403, "read only", READ_ONLY)
        if is_page and "text/html" in headers.get("accept", ""):
            return _login_page(headers)
        return refusal(401, "unauthorized", UNAUTHORIZED)

    def _is_foreign(self, scope: Scope, headers: Headers) -> bool:
        """Whether a web page of another scheme, host or port sent this request.

        Any page may open and read a WebSocket to this machine, and send forms to it, but the
        browser puts the page's origin into the Origin header. A page on another port is the same
        site, so the browser sends the session cookie with its requests.
        """
        origin = headers.get("origin")
        if origin is None:
            return False
        theirs, _, address = origin.partition("://")
        name, port = _auth.address_in(address)
        host, own_port = _auth.address_in(headers.get("host"))
        if name in self._trusted:
            return False  # of a proxy, whose scheme and port are not known here
        if self._any_name:
            # A proxy may have its own TLS, and pass a Host of its own.
            ports = _auth.port_of(port, theirs), _auth.port_of(own_port, theirs)
            return name == host and ports[0] != ports[1]
        ours = scope["scheme"].replace("ws", "http")
        return (name not in self._names) or (theirs, _auth.port_of(port, theirs)) != (
            ours,
            _auth.port_of(own_port, ours),
        )


def _on_this_machine(scope: Scope) -> bool:
    """Whether a client is on this machine; an app that is mounted in another one may be public.

    The client of a Unix socket is unknown: it may be a proxy.
    """
    try:
        return ip_address((scope.get("client") or ("",))[0]).is_loopback
    except ValueError:
        return False


def _login_page(headers: Headers) -> Response:
    answer = login_page()
    if headers.get("sec-fetch-site") == "cross-site":
        # With a link on another site's page, the browser keeps back a session that it may have,
        # also after the redirect; the page itself asks with it.
        answer.headers["Refresh"] = "0; url=./"
    return answer


def _path(scope: Scope) -> str:
    """Return the path below the one that the app is mounted at."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _with_safe_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _SAFE.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
