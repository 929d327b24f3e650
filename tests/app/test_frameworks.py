"""An app runs within the lifespan of each web framework, and as a plain script."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from tests.http_client import http_client
from tests.service.support import clean_environment

from moored.app import App, ComponentContext
from moored.service import Config

LIMIT = 60.0


def with_fastapi(app: App) -> Any:
    api = FastAPI(lifespan=app.lifespan)
    api.mount("/moored", app.asgi)
    api.get("/hello", response_class=PlainTextResponse)(lambda: "hello")
    return api


def with_starlette(app: App) -> Any:
    hello = Route("/hello", lambda request: PlainTextResponse("hello"))
    return Starlette(routes=[Mount("/moored", app.asgi), hello], lifespan=app.lifespan)


def with_litestar(app: App) -> Any:
    from litestar import Litestar, MediaType, asgi, get

    @get("/hello", media_type=MediaType.TEXT)
    async def hello() -> str:
        return "hello"

    mounted = asgi("/moored", is_mount=True, copy_scope=True)(app.asgi)
    return Litestar([hello, mounted], lifespan=[app.lifespan], openapi_config=None)


def with_django(app: App) -> Any:
    # Django has no lifespan of its own: Starlette runs the app, and passes the rest on.
    import django  # type: ignore[import-untyped]
    from django.conf import settings  # type: ignore[import-untyped]
    from django.core.asgi import get_asgi_application  # type: ignore[import-untyped]
    from django.http import HttpResponse  # type: ignore[import-untyped]
    from django.urls import path  # type: ignore[import-untyped]

    if not settings.configured:
        settings.configure(ALLOWED_HOSTS=["127.0.0.1"], ROOT_URLCONF=__name__)
        django.setup()
    globals()["urlpatterns"] = [path("hello", lambda request: HttpResponse("hello"))]
    routes = [Mount("/moored", app.asgi), Mount("/", get_asgi_application())]
    return Starlette(routes=routes, lifespan=app.lifespan)


@asynccontextmanager
async def served(api: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Serve an ASGI app on a free port, and stop it."""
    server = uvicorn.Server(uvicorn.Config(api, log_config=None, lifespan="on"))
    listening = socket.create_server(("127.0.0.1", 0))  # accepts before the server has started
    serving = asyncio.create_task(server.serve([listening]))
    base = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        async with http_client(base) as asking:
            yield asking
    finally:
        server.should_exit = True
        await serving


@pytest.mark.every_loop
@pytest.mark.parametrize("framework", [with_fastapi, with_starlette, with_litestar, with_django])
async def test_a_framework_starts_serves_and_stops_it(framework: Callable[[App], Any]) -> None:
    app, seen = App("orders", config=Config(no_token=True)), list[str]()

    @app.component
    async def importer(ctx: ComponentContext) -> None:
        seen.append("starts")
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("stops")

    async with served(framework(app)) as asking:
        assert (await asking.get("/hello")).text == "hello"
        health = await asking.get("/moored/v1/health")
        assert health.json()["parts"] == {"importer": "active"}
        page = await asking.get("/moored/")
        assert "<title>moored</title>" in page.text
        assert (await asking.get("/moored/static/page.js")).status_code == 200
        assert seen == ["starts"]
    assert seen == ["starts", "stops"]


SCRIPT = """
import asyncio
import moored

app = moored.App("script")


@app.component
async def importer(ctx):
    print("starts", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("stops", flush=True)


async def main():
    async with app:
        await app.ready(timeout=60)
        print(app.status, flush=True)


{run}
"""


def test_a_script_runs_it_in_a_block(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(run="asyncio.run(main())"))
    command = [sys.executable, "script.py"]
    output = subprocess.check_output(
        command, cwd=tmp_path, env=clean_environment(), text=True, timeout=LIMIT
    )
    assert output.split() == ["starts", "active", "stops"]


def test_run_serves_it_until_a_signal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(run="raise SystemExit(app.run())"))
    with subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=clean_environment(MOORED_PORT="0"),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while "ready after" not in lines[-1]:
            lines.append(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
        assert "stops\n" in process.stdout.readlines()
