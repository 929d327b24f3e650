"""The HTTP routes of a sessions part: list its sessions, and stop one.

=============================================  =============================================
``GET /v1/sessions/{part}/``                   the state of each session
``DELETE /v1/sessions/{part}/{profile}``       stop a session; `?drain=5` waits for its sends
=============================================  =============================================
"""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router

from moored.service import refusal
from moored.sessions import Sessions

__all__ = ["SESSIONS_PATH", "sessions_routes"]

SESSIONS_PATH = "/v1/sessions"
#: The longest time for which a request waits for the outcomes of sends.
MAX_DRAIN = 60.0


def sessions_routes(sessions: Sessions) -> Router:
    """Return the routes, below the path of their part."""

    async def listed(request: Request) -> Response:
        body = json.dumps({"sessions": sessions.status()}, default=str)
        return Response(body, media_type="application/json")

    async def stop(request: Request) -> Response:
        profile = request.path_params["profile"]
        try:
            drain = float(request.query_params.get("drain", "0"))
        except ValueError:
            drain = -1.0
        if not 0 <= drain <= MAX_DRAIN:
            return refusal(400, "invalid drain", f"drain must be from 0 to {MAX_DRAIN:g} seconds")
        if (session := sessions.whereis(profile)) is None:
            return refusal(404, "unknown session", f"there is no session of {profile!r}")
        await session.stop(drain=drain)
        return JSONResponse({"stopped": profile})

    return Router(
        [
            Route("/", listed, methods=["GET"]),
            Route("/{profile:path}", stop, methods=["DELETE"]),
        ]
    )
