"""Access control: tokens, sessions, host names, and the headers of every response."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from moored.kernel import Clock, Recorder, StatusMonitor, Supervisor
from moored.service import Config, _auth
from moored.service._app import make_app
from moored.service._browser_streams import BrowserStreams
from moored.service._connections import Connections
from moored.service._health import PartHealth
from moored.service._live import Live
from moored.service._metrics import EventCounter, registry_of
from moored.service._part_page import PartPages
from moored.service._view import View

pytestmark = pytest.mark.pure

TOKEN = "correct-horse"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
OPEN = Config(no_token=True)
LOCKED = (
    "/",
    "/v1/status",
    "/v1/explain/x",
    "/v1/events",
    "/v1/history",
    "/v1/map",
    "/v1/parts/lamp",
    "/metrics",
    "/static/page.js",
    "/nothing",
)


@asynccontextmanager
async def client(
    config: Config, base_url: str = "http://127.0.0.1:8089"
) -> AsyncIterator[httpx.AsyncClient]:
    """The app itself, without a socket, over a tree without children."""
    recorder = Recorder()
    health = PartHealth({"lamp": ("up",)})
    monitor = StatusMonitor(["up"], health.status, recorder=recorder)
    async with Supervisor("moored", recorder=recorder) as root:
        view = View(root.tree, monitor, health, recorder, Clock.current())
        streams = BrowserStreams()
        streams.close()  # a stream would never end here
        live = Live(view, (), view.truth, streams, "lamp")
        registry = registry_of(view, EventCounter(), streams, Connections())
        app = make_app(config, view, live, PartPages(view, live, ()), registry)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=base_url) as asking:
            yield asking


async def test_without_a_token_health_alone_is_served() -> None:
    async with client(Config()) as asking:
        assert (await asking.get("/v1/health")).status_code == 202
        for path in (*LOCKED, "/login", "/?token=x"):
            answer = await asking.get(path)
            assert (answer.status_code, answer.json()["error"]) == (403, "no token"), path
            assert "set admin_token (MOORED_ADMIN_TOKEN)" in answer.json()["detail"]


async def test_with_no_token_every_local_user_has_access() -> None:
    async with client(OPEN) as asking:
        assert (await asking.get("/v1/status")).status_code == 200
        assert (await asking.get("/")).status_code == 200
        assert (await asking.get("/?token=old")).status_code == 200


async def test_with_a_token_everything_but_health_requires_it() -> None:
    async with client(Config(admin_token=TOKEN)) as asking:
        assert (await asking.get("/v1/health")).status_code == 202
        for path in LOCKED:
            answer = await asking.get(path)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"] == "unauthorized"
        assert (await asking.get("/v1/status", headers=BEARER)).status_code == 200
        for wrong in (f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer", TOKEN):
            answer = await asking.get("/v1/status", headers={"Authorization": wrong})
            assert answer.status_code == 401, wrong


async def test_a_browser_gets_a_form_and_then_a_session() -> None:
    async with client(Config(admin_token=TOKEN)) as asking:
        form = await asking.get("/", headers={"Accept": "text/html,*/*"})
        assert form.status_code == 401
        assert 'action="login"' in form.text
        assert "www-authenticate" not in form.headers

        wrong = await asking.post("/login", data={"token": "guess"})
        assert wrong.status_code == 401
        assert "That is not the token" in wrong.text
        assert "set-cookie" not in wrong.headers

        right = await asking.post("/login", data={"token": TOKEN})
        assert (right.status_code, right.headers["location"]) == (303, "./")
        cookie = right.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert TOKEN not in cookie
        page = await asking.get("/")
        assert page.status_code == 200
        assert "Log out" in page.text
        assert (await asking.get("/v1/status")).status_code == 200

        assert (await asking.post("/logout")).status_code == 303
        assert (await asking.get("/v1/status")).status_code == 401


async def test_a_link_with_the_token_becomes_a_session_and_an_address_without_it() -> None:
    async with client(Config(admin_token=TOKEN)) as asking:
        wrong = await asking.get("/?token=guess")
        assert wrong.status_code == 401
        assert "That is not the token" in wrong.text
        assert "set-cookie" not in wrong.headers

        right = await asking.get(f"/?token={TOKEN}")
        assert (right.status_code, right.headers["location"]) == (303, "./")
        cookie = right.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
        assert TOKEN not in cookie
        assert (await asking.get("/")).status_code == 200
        # Only the page takes it from a link.
        asking.cookies.clear()
        assert (await asking.get(f"/v1/status?token={TOKEN}")).status_code == 401


async def test_services_on_two_ports_of_one_host_do_not_share_a_cookie() -> None:
    """A browser sends the cookies of a host to all its ports."""
    async with client(Config(admin_token=TOKEN)) as asking:
        for port in (8089, 8090):
            at = {"Host": f"127.0.0.1:{port}"}
            await asking.post("/login", data={"token": TOKEN}, headers=at)
        assert sorted(asking.cookies) == ["moored_session_8089", "moored_session_8090"]


async def test_the_read_token_may_read_and_change_nothing() -> None:
    async with client(Config(admin_token=TOKEN, read_token="reader")) as asking:
        bearer = {"Authorization": "Bearer reader"}
        assert (await asking.get("/metrics", headers=bearer)).status_code == 200
        refused = await asking.post("/metrics", headers=bearer)
        assert (refused.status_code, refused.json()["error"]) == (403, "read only")
        allowed = await asking.post("/metrics", headers=BEARER)
        assert allowed.status_code == 405  # there is no such route

        assert (await asking.get("/?token=reader")).status_code == 303
        assert (await asking.get("/v1/status")).status_code == 200
        assert (await asking.delete("/v1/sessions/x/y")).status_code == 403
        assert (await asking.post("/logout")).status_code == 303
        assert (await asking.get("/v1/status")).status_code == 401


async def test_a_session_expires_and_ends_when_the_token_changes() -> None:
    old = _auth.issue_session(TOKEN, now=0.0)
    other = _auth.issue_session("another", now=Clock.system().wall())
    async with client(Config(admin_token=TOKEN)) as asking:
        for session in (old, other):
            answer = await asking.get(
                "/v1/status", headers={"Cookie": f"moored_session_8089={session}"}
            )
            assert answer.status_code == 401


async def test_a_cookie_set_over_https_is_secure() -> None:
    async with client(Config(admin_token=TOKEN), "https://127.0.0.1:8089") as asking:
        answer = await asking.post("/login", data={"token": TOKEN})
        assert "Secure" in answer.headers["set-cookie"]


async def test_a_form_that_is_too_long_is_not_read() -> None:
    async with client(Config(admin_token=TOKEN)) as asking:
        answer = await asking.post("/login", content=b"token=" + b"x" * 100_000)
        assert answer.status_code == 413


@pytest.mark.parametrize("name", ["127.0.0.1:8089", "localhost", "[::1]:8089", "proxy.example"])
async def test_local_names_and_allowed_hosts_are_accepted(name: str) -> None:
    async with client(Config(no_token=True, allowed_hosts=("proxy.example",))) as asking:
        answer = await asking.get("/v1/status", headers={"Host": name})
        assert answer.status_code == 200


async def test_an_unknown_host_header_is_refused_by_a_local_service() -> None:
    async with client(OPEN) as asking:
        evil = {"Host": "evil.example:8089"}
        answer = await asking.get("/v1/status", headers=evil)
        assert answer.status_code == 421
        assert "allowed_hosts" in answer.json()["detail"]
        assert (await asking.get("/v1/health", headers=evil)).status_code == 202


async def test_a_public_service_accepts_any_host_header_because_it_has_a_token() -> None:
    async with client(Config(host="0.0.0.0", admin_token=TOKEN)) as asking:
        answer = await asking.get("/v1/status", headers={**BEARER, "Host": "any.example"})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://evil.example:8089",
        "http://127.0.0.1:8090",
        "http://localhost",
        "https://localhost:8089",
    ],
)
async def test_a_form_from_another_origin_is_refused_by_a_local_service(origin: str) -> None:
    async with client(OPEN) as asking:
        answer = await asking.post("/logout", headers={"Origin": origin})
        assert (answer.status_code, answer.json()["error"]) == (403, "foreign origin")
        own = await asking.post("/logout", headers={"Origin": "http://localhost:8089"})
        assert own.status_code == 303
        # It may ask, because it cannot read the answer.
        assert (await asking.get("/", headers={"Origin": origin})).status_code == 200


@pytest.mark.parametrize(
    ("origin", "code"),
    [
        ("https://moored.corp", 303),
        ("http://moored.corp", 303),
        ("https://moored.corp:444", 403),
        ("http://moored.corp:8090", 403),
    ],
)
async def test_a_page_on_another_port_of_a_public_name_is_refused(origin: str, code: int) -> None:
    async with client(Config(host="0.0.0.0", admin_token=TOKEN)) as asking:
        given = {"Origin": origin, "Host": "moored.corp"}
        assert (await asking.post("/logout", headers=given)).status_code == code


async def test_a_form_from_an_allowed_host_is_accepted() -> None:
    async with client(Config(no_token=True, allowed_hosts=("moored.corp",))) as asking:
        answer = await asking.post("/logout", headers={"Origin": "https://moored.corp"})
        assert answer.status_code == 303


async def test_headers_that_are_too_large_are_refused_before_they_are_read() -> None:
    async with client(Config(admin_token=TOKEN)) as asking:
        answer = await asking.get("/v1/health", headers={"Cookie": "a" * 40_000})
        assert answer.status_code == 431


async def test_errors_are_json_too() -> None:
    async with client(OPEN) as asking:
        missing = await asking.get("/v1/nothing")
        assert (missing.status_code, missing.json()["error"]) == (404, "not found")
        assert missing.json()["detail"] == "there is nothing at /v1/nothing"
        wrong = await asking.post("/v1/health")
        assert (wrong.status_code, wrong.json()["error"]) == (405, "method not allowed")
        assert "GET" in wrong.headers["allow"]
        assert (await asking.get("/static/secrets.txt")).status_code == 404


async def test_every_response_has_the_security_headers() -> None:
    async with client(OPEN) as asking:
        for path in ("/", "/v1/health", "/v1/status", "/static/page.css", "/nothing"):
            headers = (await asking.get(path)).headers
            assert headers["x-content-type-options"] == "nosniff", path
            # Under "no-referrer" a browser sends "Origin: null" with the page's own forms.
            assert headers["referrer-policy"] == "same-origin", path
            assert "frame-ancestors 'none'" in headers["content-security-policy"], path
            assert headers["cache-control"] in ("no-store", "no-cache"), path


async def test_the_page_loads_nothing_from_other_hosts() -> None:
    async with client(OPEN) as asking:
        page = await asking.get("/")
        assert "Log out" in page.text  # there, and hidden
        assert 'action="logout" hidden' in page.text
        for name in ("page.html", "page.js", "page.css", "icon-works.svg"):
            path = "/" if name == "page.html" else f"/static/{name}"
            text = (await asking.get(path)).text.replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text, name
            assert "https://" not in text, name
        assert (await asking.get("/static/page.js")).headers["content-type"].startswith("text/java")
