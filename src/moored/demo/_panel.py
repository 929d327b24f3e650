"""The faults as a part of the app: their state for the page, and a route for each button.

``POST /v1/break/{fault}`` has the access checks of all routes: requests of other sites are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moored.kernel import Child, Context, Tree
from moored.service import Part, Wiring, refusal

from ._faults import Faults

__all__ = ["faults_part"]

NAME = "faults"
#: The kind of the system, which the page shows as buttons.
KIND = "faults"
ROUTE = "/v1/break"


def faults_part(faults: Faults, notices: Sequence[str] = ()) -> Part:
    """Return the part; `notices` are printed at the start."""

    async def press(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in faults.faults:
            known = ", ".join(faults.faults)
            return refusal(404, "unknown fault", f"there is no fault {name!r}; there are {known}")
        if why := faults.faults[name].impossible():
            return refusal(409, "impossible", why)
        if not faults.press(name):
            detail = f"the recovery from {faults.running!r} is being measured: press again after it"
            return refusal(409, "busy", detail)
        return JSONResponse({"pressed": name}, status_code=202)

    def build(wiring: Wiring) -> list[Child]:
        async def run(ctx: Context) -> None:
            ctx.started()
            for text in notices:
                wiring.say(text)
            wiring.systems[ctx.path] = _ShownFaults(faults)
            try:
                await faults.run(ctx, wiring)
            finally:
                del wiring.systems[ctx.path]

        return [Child(KIND, run)]

    routes = [Route("/{name}", press, methods=["POST"])]
    return Part(NAME, build, mounts={ROUTE: Starlette(routes=routes)}, shown=False)


class _ShownFaults:
    def __init__(self, faults: Faults) -> None:
        self.statistics = faults.statistics

    def explain(self) -> str:
        return "the buttons of the demo, each of which breaks something"

    def tree(self) -> Tree:
        return Tree("", "running", 0.0)
