"""The ASGI interface of an app: its routes, and its life if a server runs it directly."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

if TYPE_CHECKING:
    from ._app import App

__all__ = ["AppEndpoint"]


class AppEndpoint:
    """Answers requests while the app runs, and starts and stops it with an ASGI server."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or follow the lifespan of the server."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["path"].endswith("/") and not (scope.get("raw_path") or b"/").endswith(b"/"):
            # Litestar appends a slash to the path of a request for a mounted app.
            scope = {**scope, "path": scope["path"][:-1] or "/"}
        if self._app.service is None:
            await self._early(scope)(scope, receive, send)
        else:
            await self._app.service.asgi(scope, receive, send)

    def _early(self, scope: Scope) -> JSONResponse:
        """Return the answer before the start: a process that answers is live."""
        live = scope["path"].endswith("/v1/health") and "live" in Request(scope).query_params
        parts = dict.fromkeys(self._app.names, "starting")
        body = {"status": "starting", "parts": parts, "degraded": list(parts)}
        return JSONResponse(body, status_code=200 if live else 503)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with AsyncExitStack() as running:
            try:
                await running.enter_async_context(self._app.lifespan())
            except Exception as error:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})
