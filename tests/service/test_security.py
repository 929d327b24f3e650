"""What a client without credentials, a web page of another host, or a log reader can learn."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount, Route, Router, WebSocketRoute

from moored.app import App, ComponentContext
from moored.broker import ApiKeys, MemorySource
from moored.kernel import SECRETS
from moored.service import BROKER_PATHS, Config, _auth

TOKEN = "a-token-of-twenty-characters"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
SHOP = "https://shop.example"
EVIL = "https://evil.example"
#: Served without a token: logout only deletes the cookie of its sender, and the broker asks for
#: the tokens of its tenants.
OPEN = {"/v1/health", "/logout", *BROKER_PATHS}


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[App]:
    """Run an app that has every kind of route."""
    app = App("shop", config=Config(**(settings or {"no_token": True})))
    app.sessions(storage="memory:")
    keys = ApiKeys({"key": "11111111-1111-1111-1111-111111111111"})
    app.broker(MemorySource(), channels=["orders"], authenticate=keys, origins=[SHOP])

    @app.component
    async def idle(ctx: ComponentContext) -> None:
        await asyncio.Event().wait()

    async with app:
        await app.ready(60)
        yield app


@asynccontextmanager
async def client(app: Any, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers=headers
    ) as asking:
        yield asking


def routes_of(routes: list[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the method and the path of every route, with "x" for each parameter."""
    for route in routes:
        if isinstance(route, Mount):
            inner = route.app
            assert isinstance(inner, Starlette | Router), "give it to this test, in another way"
            yield from routes_of(list(inner.routes), f"{prefix}{route.path}")
            yield "GET", f"{prefix}{route.path}/x"
        elif isinstance(route, Route):
            path = route.path_format.replace("{", "").replace("}", "")
            for method in route.methods or {"GET", "POST", "OPTIONS"}:
                yield method, f"{prefix}{path}"
        else:
            assert isinstance(route, WebSocketRoute), f"a new kind of route: {route!r}"
            yield "WEBSOCKET", f"{prefix}{route.path_format}"


async def all_routes(app: App) -> list[tuple[str, str]]:
    """Return all routes of a running app; its streams, which would never end here, are refused."""
    assert app.service is not None
    await app.service.drain()
    access: Any = app.service.asgi
    return sorted(set(routes_of(access._app.routes)))


async def raw(
    app: Any, path: str, kind: str = "http", client: str | None = "127.0.0.1", **headers: str
) -> dict[str, Any]:
    """Send a request whose path is not normalized by a client; return the first answer."""
    given = {"host": "localhost", **headers}
    scope: dict[str, Any] = {
        "type": kind,
        "method": "GET",
        "path": unquote(path),
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "server": ("localhost", 80),
        "client": client and (client, 1),
        "subprotocols": [],
        "extensions": {},
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if sent:
            await asyncio.Event().wait()
        return {"type": "http.request" if kind == "http" else "websocket.connect", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]


async def test_without_credentials_every_route_but_health_and_the_broker_is_refused() -> None:
    async with running(admin_token=TOKEN) as app, client(app.asgi) as asking:
        found = await all_routes(app)
        assert len(found) > 20
        assert ("DELETE", "/v1/sessions/sessions/profile") in found
        for method, path in found:
            if path in OPEN:
                continue
            if method == "WEBSOCKET":
                answer = await raw(app.asgi, path, "websocket")
                assert answer == {"type": "websocket.close", "code": 1008}, path
                continue
            refused = await asking.request(method, path)
            assert refused.status_code == 401, (method, path)
            allowed = await asking.request(method, path, headers={**BEARER, "Connection": "close"})
            assert allowed.status_code != 401 or path == "/login", (method, path)


async def test_the_broker_asks_for_the_token_of_a_tenant() -> None:
    async with running(admin_token=TOKEN) as app, client(app.asgi) as asking:
        for given in ({}, BEARER):
            assert (await asking.get("/v1/subscribe", headers=given)).status_code == 401
            assert (await asking.post("/v1/tickets", headers=given)).status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        "//v1/status",
        "/v1//status",
        "/./v1/status",
        "/v1/health/../status",
        "/v1/health/%2e%2e/status",
        "/v1/health%2f..%2fstatus",
        "/v1/health/",
        "//v1/health",
        "/v1/health/x",
        "/v1/health;x",
        "/v1/health%00",
        "/v1/health%20",
        "/V1/STATUS",
        "/V1/HEALTH",
        "/v1/status/",
        "/%2e/v1/status",
        "/v1/%73tatus",
        "/v1/subscribe/../status",
        "/v1/subscribe%2f..%2fstatus",
        "/login/../v1/status",
        "/login/",
        "/LOGIN",
        "/static/../openapi.json",
        "/static/%2e%2e%2fopenapi.json",
        "",
        "v1/status",
    ],
)
async def test_no_spelling_of_a_path_avoids_the_token(path: str) -> None:
    async with running(admin_token=TOKEN) as app:
        for mounted in (app.asgi, Starlette(routes=[Mount("/ops", app.asgi)])):
            prefix = "/ops" if isinstance(mounted, Starlette) else ""
            answer = await raw(mounted, prefix + path, accept="text/plain")
            # 404 and 307 are answers of the app around it, which does not know the path.
            assert answer["status"] in ((401, 404, 307) if prefix else (401,)), path


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "evil.example#localhost",
        "localhost:80@evil.example",
        "localhost:x",
        "[::1",
        "[::1].evil.example",
        "0.0.0.0",
        "",
    ],
)
async def test_a_page_that_rebinds_its_name_to_this_host_is_refused(host: str) -> None:
    async with running() as app:
        for path in ("/", "/v1/status", "/metrics", "/v1/sessions/sessions/", "/v1/subscribe"):
            answer = await raw(app.asgi, path, host=host)
            assert answer["status"] == 421, (path, host)


@pytest.mark.parametrize("address", ["192.0.2.1", "10.0.0.1", "2001:db8::1", "0.0.0.0", "unknown"])
async def test_without_a_token_only_clients_on_this_machine_have_access(address: str) -> None:
    """An app that is mounted in another one may be public, and a Host header can be forged."""
    async with running() as app:
        for path in ("/", "/v1/status", "/metrics", "/v1/sessions/sessions/", "/login"):
            assert (await raw(app.asgi, path, client=address))["status"] == 403, path
            assert (await raw(app.asgi, path, client="::1"))["status"] != 403, path
        assert (await raw(app.asgi, "/v1/health", client=address))["status"] == 200


async def test_without_a_token_clients_behind_a_proxy_have_no_access() -> None:
    async with running() as app, client(app.asgi) as asking:
        assert (await asking.get("/v1/status")).status_code == 200
        for name in ("Forwarded", "X-Forwarded-For"):
            answer = await asking.get("/v1/status", headers={name: "192.0.2.1"})
            assert answer.status_code == 403
        assert (await raw(app.asgi, "/v1/status", client=None))["status"] == 403  # a Unix socket


async def test_no_page_of_another_origin_may_read_a_route() -> None:
    preflight = {"Origin": EVIL, "Access-Control-Request-Method": "GET"}
    async with running() as app, client(app.asgi) as asking:
        for method, path in await all_routes(app):
            if method != "WEBSOCKET" and path != "/v1/subscribe.js":
                answer = await asking.request(method, path, headers={"Origin": EVIL})
                assert "access-control-allow-origin" not in answer.headers, (method, path)
            answer = await asking.options(path, headers=preflight)
            assert "access-control-allow-origin" not in answer.headers, path
        # The broker allows the origins that it was given, and reads no cookie for them.
        shop = await asking.options("/v1/subscribe", headers={**preflight, "Origin": SHOP})
        assert shop.headers["access-control-allow-origin"] == SHOP
        assert shop.headers["vary"].lower() == "origin"


async def test_secrets_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any]] = []

    def compare(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return secrets.compare_digest(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    async with running(admin_token=TOKEN) as app, client(app.asgi) as asking:
        wrong = {"Authorization": "Bearer a-token-of-twenty-characterX"}
        assert (await asking.get("/v1/status", headers=wrong)).status_code == 401
        assert compared.pop() == (b"a-token-of-twenty-characterX", TOKEN.encode())
        assert (await asking.post("/login", data={"token": "guess"})).status_code == 401
        assert compared.pop() == (b"guess", TOKEN.encode())
        cookie = {"Cookie": f"{_auth.COOKIE}=99999999999.forged"}
        assert (await asking.get("/v1/status", headers=cookie)).status_code == 401
        signature = hmac.new(TOKEN.encode(), b"moored session 99999999999", "sha256").hexdigest()
        assert compared.pop() == (b"forged", signature.encode())


async def test_the_document_describes_every_route() -> None:
    async with running() as app, client(app.asgi) as asking:
        document = (await asking.get("/openapi.json")).json()
        described = {
            (method.upper(), path.replace("{part}", "sessions").replace("{", "").replace("}", ""))
            for path, methods in document["paths"].items()
            for method in methods
        }
        served = set(await all_routes(app))
        assert described <= served
        methods = ("GET", "POST", "DELETE", "PUT", "PATCH")
        broker = {(method, path) for method in methods for path in BROKER_PATHS}
        assert {each for each in served if each[0] in methods} - broker - described == {
            ("GET", "/v1/sessions/sessions/x")
        }


async def test_planted_secrets_appear_in_no_output(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every URL and option has a password, and every server is unreachable."""
    caplog.set_level(logging.DEBUG)
    names = ("pool", "postgres", "notify", "grpc", "key", "component")
    planted = {name: f"{name}-{secrets.token_hex(8)}" for name in names}
    urls = {name: f"postgresql://app:{planted[name]}@127.0.0.1:1/x" for name in names}
    app = App("shop", config=Config(admin_token=TOKEN))
    app.pool(urls["pool"], required=False)
    app.postgres(urls["postgres"], notify_url=urls["notify"], state_dir=tmp_path, required=False)
    app.channel("http://127.0.0.1:1", token=planted["grpc"], required=False)
    keys = ApiKeys({planted["key"]: "11111111-1111-1111-1111-111111111111"})
    app.broker(MemorySource(), channels=["orders"], authenticate=keys)

    @app.component(required=False)
    async def component(ctx: ComponentContext) -> None:
        # A driver or a program may quote the whole URL in its error.
        SECRETS.add_from(urls["component"])
        raise OSError(f"cannot connect to {urls['component']}")

    async with app, client(app.asgi, **BEARER) as asking:
        for part in ("pool", "postgres", "component"):
            await until_explained(app, part, "connect")
        known = (await asking.get("/v1/explain/nothing")).json()["known"]
        paths = ["/", "/v1/status", "/v1/health", "/metrics", "/openapi.json", "/nothing"]
        paths += [f"/v1/explain/{each}" for each in known]
        texts = {path: (await asking.get(path)).text for path in paths}
        key = {"Authorization": f"Bearer {planted['key']}"}
        texts["ticket"] = (await asking.post("/v1/tickets", headers=key)).text
        texts["login"] = (await asking.post("/login", data={"token": planted["key"]})).text
        texts["repr"] = f"{app!r} {app.service!r} {app.tree()} {app.recorder.explain('shop')}"
    captured = capsys.readouterr()
    texts["log"] = caplog.text + captured.out + captured.err
    assert "connect" in texts["log"]
    assert json.loads(texts["/v1/status"])["parts"]["pool"] == "starting"
    exposed = {
        (name, place)
        for place, text in texts.items()
        for name, secret in {**planted, "token": TOKEN}.items()
        if secret in text
    }
    assert exposed == set()


async def until_explained(app: App, part: str, word: str) -> None:
    """Wait until the explanation of a part has a word."""
    async with asyncio.timeout(60):
        while word not in app.explain(part):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
