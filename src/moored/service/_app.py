"""The HTTP routes. All but login and logout only read the view.

================================  =====================================================
``GET /v1/health``                the health of the service and its parts: 200, 202 or 503; with
                                  `?live`, `?ready` or `?started` 200 or 503; no token
``GET /v1/status``                the whole state
``GET /v1/explain/{component}``   why a component is in its present state
``GET /v1/outages``               what was broken, when, for how long, why, and what it cost
``GET /v1/events``                the state once, and then its changes (server-sent events)
``GET /v1/map``                   the parts and servers as they are drawn
``GET /v1/history``               numbers and states of the last `?span=` 120, 900 or 3600 seconds
``GET /v1/parts/{name}``          everything about one part or server
``GET /metrics``                  Prometheus
``GET /openapi.json``             the description of all routes, also of brokers and sessions
``GET /``                         the live page
``POST /login``, ``/logout``      a session for a browser
================================  =====================================================
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.types import ASGIApp

from ._access import LOGIN, LOGOUT, AccessControl, refusal
from ._assets import asset, page
from ._auth import Tokens
from ._config import Config
from ._health import probe
from ._history import SPANS
from ._live import Live
from ._login import MAX_FORM, Login
from ._part_page import PartPages
from ._view import View

__all__ = ["make_app"]

#: Seconds between comments on an idle stream: many proxies close one that is silent for a minute.
HEARTBEAT = 15.0


def make_app(
    config: Config,
    view: View,
    live: Live,
    pages: PartPages,
    registry: CollectorRegistry,
    *,
    mounts: Mapping[str, ASGIApp] | None = None,
    public: Mapping[str, ASGIApp] | None = None,
) -> ASGIApp:
    """Return the HTTP app, wrapped in `AccessControl`."""
    tokens = Tokens(config.admin_token, config.read_token)
    login = Login(tokens, view.clock.wall)
    routes = _Routes(view, live, pages, registry, has_login=bool(tokens))
    app = Starlette(
        routes=[
            Route("/v1/health", routes.health),
            Route("/v1/status", routes.status),
            Route("/v1/explain/{component:path}", routes.explain),
            Route("/v1/outages", routes.outages),
            Route("/v1/events", routes.events),
            Route("/v1/map", routes.map),
            Route("/v1/history", routes.history),
            Route("/v1/parts/{name:path}", routes.part),
            Route("/metrics", routes.metrics),
            Route("/openapi.json", routes.openapi),
            Route("/", routes.page),
            Route("/static/{name}", routes.static),
            Route(LOGIN, login.by_form, methods=["POST"]),
            Route(LOGOUT, login.logout, methods=["POST"]),
            *(Mount(path, app) for path, app in (mounts or {}).items()),
            *(Route(path, app) for path, app in (public or {}).items()),
            *(WebSocketRoute(path, app) for path, app in (public or {}).items()),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _server_error},
    )
    return AccessControl(
        app, config, tokens=tokens, login=login, public=public or (), wall=view.clock.wall
    )


class _Routes:
    def __init__(
        self,
        view: View,
        live: Live,
        pages: PartPages,
        registry: CollectorRegistry,
        *,
        has_login: bool,
    ) -> None:
        self._live = live
        self._pages = pages
        self._has_login = has_login
        self._view = view
        self._registry = registry

    async def health(self, request: Request) -> Response:
        status = self._view.status
        # Without reasons: only callers with the token may read those.
        body = {
            "status": status,
            "parts": self._view.parts(),
            "degraded": self._view.degraded(),
        }
        code = probe(request.query_params.keys(), status, started=self._view.started())
        return JSONResponse(body, status_code=code, headers={"Cache-Control": "no-store"})

    async def status(self, request: Request) -> Response:
        return _json(self._view.as_dict())

    async def explain(self, request: Request) -> Response:
        wanted = request.path_params["component"]
        known = self._view.components()
        found = self._view.find(wanted)
        if len(found) == 1:
            return _json(self._view.explain(found[0]))
        detail = (
            f"there is no component {wanted!r}"
            if not found
            else f"{wanted!r} matches several components"
        )
        body = {"error": "unknown component", "detail": detail, "known": found or list(known)}
        return JSONResponse(body, status_code=404)

    async def outages(self, request: Request) -> Response:
        return _json({"outages": self._view.truth.incidents()})

    async def events(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        client = self._live.join(events="events" in request.query_params)
        if client is None:
            return refusal(503, "too many streams", "close one of the open pages, then load again")

        async def body() -> AsyncIterator[bytes]:
            try:
                yield b"retry: 1000\n"  # of the first event: alone, some clients take it for one
                async for chunk in client.stream(heartbeat=HEARTBEAT):
                    yield chunk
            finally:
                self._live.streams.leave(client)

        # A proxy that buffers would delay the events.
        return StreamingResponse(
            body(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
        )

    async def map(self, request: Request) -> Response:
        return _json(self._live.map())

    async def history(self, request: Request) -> Response:
        wanted = request.query_params.get("span", str(SPANS[1]))
        if wanted not in map(str, SPANS):
            spans = ", ".join(map(str, SPANS))
            return refusal(400, "unknown span", f"span={wanted} must be one of {spans} seconds")
        return _json(self._live.history_of(int(wanted), request.query_params.get("part", "")))

    async def part(self, request: Request) -> Response:
        name = request.path_params["name"]
        if (found := self._pages.page(name)) is not None:
            return _json(found)
        known = ", ".join(self._live.graph.nodes) or "none"
        return refusal(
            404, "unknown part", f"there is no part or server {name!r}; there are {known}"
        )

    async def metrics(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"Content-Type": content_type})

    async def openapi(self, request: Request) -> Response:
        return asset("openapi.json") or Response(status_code=404)

    async def page(self, request: Request) -> Response:
        truth = self._view.truth
        answers = [f"  {label:<8} {words}" for label, words in truth.answer()["lines"]]
        nodes = [f"  {node}: {each.state}, {each.fact}" for node, each in truth.judged().items()]
        text = "\n".join([truth.sentence(), *answers, "", *nodes])
        return page(logout=self._has_login, text=text)

    async def static(self, request: Request) -> Response:
        found = asset(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return found


def _json(data: Mapping[str, Any]) -> Response:
    return Response(json.dumps(data, default=str), media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    code = error.status_code if isinstance(error, HTTPException) else 500
    phrase = HTTPStatus(code).phrase.lower()
    detail = {
        404: f"there is nothing at {request.url.path}",
        405: f"{request.method} is not supported at {request.url.path}",
        413: f"the login form is larger than {MAX_FORM} bytes",
    }.get(code, phrase)
    answer = refusal(code, phrase, detail)
    if isinstance(error, HTTPException) and error.headers:
        answer.headers.update(error.headers)
    return answer


async def _server_error(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this, so that it is logged with its traceback.
    return refusal(500, "internal server error", "see the log of the service for the cause")
