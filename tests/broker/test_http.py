"""Streams over real HTTP: server-sent events, WebSockets, and who may open them."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import jwt
import pytest
import websockets
from tests.broker.serving import ACME, KEYS, OTHER, Stage, frozen, reading, served, stage
from tests.http_client import http_client

from moored.broker import (
    ApiKeys,
    Broker,
    BrokerApp,
    Identity,
    Jwt,
    MemorySource,
    SourceEvent,
    SourceGap,
)
from moored.testing import mutant

pytestmark = pytest.mark.every_loop

SECRET = "a secret of at least thirty-two bytes"


async def test_event_arrives_with_its_id_and_channel_and_only_at_its_tenant() -> None:
    async with stage() as on, reading(on.url) as acme, reading(on.url, "other-key") as other:
        await on.subscribers(2)
        on.publish(1)
        on.publish(2, OTHER, "refunds")
        on.publish(3)
        first, second = await acme.next(), await acme.next()
        assert first is not None
        assert second is not None
        assert (first.event, first.json()) == ("orders", {"org_id": ACME, "number": 1})
        assert second.json()["number"] == 3
        assert first.id != second.id
        found = await other.next()
        assert found is not None
        assert (found.event, found.json()["number"]) == ("refunds", 2)
        assert acme.retry is not None
        assert 1000 <= acme.retry <= 3000
        headers = acme.response.headers
        assert headers["content-type"].startswith("text/event-stream")
        assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
async def test_payload_of_several_lines_arrives_whole(end: str) -> None:
    async with stage() as on, reading(on.url) as acme:
        await on.subscribers(1)
        on.source.publish("orders", f"one{end}{end}two", tenant=ACME)
        found = await acme.next()
        assert found is not None
        assert found.data == "one\n\ntwo"


async def test_every_block_of_a_stream_is_an_event() -> None:
    """Some clients take a block that only has the time until a reconnection for an event."""
    async with stage() as on, reading(on.url) as acme:
        await on.subscribers(1)
        on.publish(1)
        text = ""
        async for part in acme.response.aiter_text():
            text += part
            if text.count("\n\n") == 2:
                break
        start, first, _ = text.split("\n\n")
        assert start.startswith("retry: ")
        assert "\nevent: start\n" in start
        assert "event: orders\n" in first


@pytest.mark.parametrize("way", ["header", "query"])
async def test_client_resumes_after_its_last_event(way: str) -> None:
    async with stage() as on:
        async with reading(on.url) as acme:
            await on.subscribers(1)
            on.publish(1)
            first = await acme.next()
        assert first is not None
        await on.subscribers(0)
        on.publish(2)
        on.publish(3, OTHER)
        on.publish(4)
        given: dict[str, Any] = {"headers": {"Last-Event-ID": first.id}}
        if way == "query":
            given = {"params": {"last_event_id": first.id}}
        async with reading(on.url, **given) as acme:
            found = [await acme.next(), await acme.next()]
            assert [each.json()["number"] for each in found if each is not None] == [2, 4]
            on.publish(5)
            last = await acme.next()
            assert last is not None
            assert last.json()["number"] == 5
        await on.subscribers(0)
        # Number 5 was read from the history, too, if it came before the end of that was found.
        assert on.broker.statistics().replayed in (2, 3)


async def test_client_with_an_unknown_or_too_old_id_gets_a_reset() -> None:
    async with stage(history=2) as on:
        async with reading(on.url) as acme:
            await on.subscribers(1)
            on.publish(1)
            first = await acme.next()
        assert first is not None
        for number in range(2, 6):
            on.publish(number)
        for last in (first.id, "of-another-process"):
            assert last is not None
            async with reading(on.url, headers={"Last-Event-ID": last}) as acme:
                found = await acme.next()
                assert found is not None
                assert found.event == "reset"
                assert found.id, "the next connection resumes after this id"
                on.publish(9)
                after = await acme.next()
                assert after is not None
                assert after.json()["number"] == 9
        assert on.broker.statistics().resets == {"history": 2}


async def test_gap_of_the_source_becomes_a_reset_with_the_id_to_resume_after() -> None:
    async with stage() as on, reading(on.url) as acme:
        await on.subscribers(1)
        on.source.gap("the listener was away")
        found = await acme.next()
        assert found is not None
        assert (found.event, found.json()) == ("reset", {"reason": "the listener was away"})
        on.publish(1)
        async with reading(on.url, headers={"Last-Event-ID": found.id}) as acme:
            resumed = await acme.next()
            assert resumed is not None
            assert resumed.event == "orders"


async def test_client_resumes_a_stream_that_ended_before_its_first_event() -> None:
    async with stage() as on:
        async with reading(on.url, params={"channel": "refunds"}) as acme:
            await on.subscribers(1)
            on.publish(1)
            on.publish(2, channel="refunds")
            await acme.next()
            assert acme.start
        async with reading(on.url, headers={"Last-Event-ID": acme.start}) as again:
            found = await again.next()
            assert found is not None
            assert found.json()["number"] == 1
            assert again.start is None, "a client that resumes has an id"


@pytest.mark.parametrize("last", ["1-1", "{}-", "{}--1", "{}-1e3", "{}-" + "9" * 5000, "é-1", "-"])
async def test_odd_last_event_id_gets_a_reset(last: str) -> None:
    async with stage() as on:
        own = on.broker._newest.id.partition("-")[0]
        given = {"Last-Event-ID": last.replace("{}", own).encode()}
        async with reading(on.url, headers=given) as acme:
            found = await acme.next()
            assert found is not None
            assert found.event == "reset"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic acme-key"}, 401),
        ({"x_api_key": "wrong"}, 401),
    ],
)
async def test_stream_without_a_valid_token_is_refused(headers: Any, status: int) -> None:
    async with stage() as on:
        answer = await on.get(f"/v1/subscribe?tenant={ACME}&org_id={ACME}", **headers)
        assert answer.status_code == status
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "token" in answer.json()["error"]


async def another_tenant_in_the_query() -> None:
    asked = {"tenant": OTHER, "org_id": OTHER}
    async with stage() as on, reading(on.url, params=asked) as acme:
        await on.subscribers(1)
        on.publish(1, OTHER)
        on.publish(2, ACME)
        found = await acme.next()
        assert found is not None
        assert found.json()["number"] == 2


async def test_tenant_in_the_query_is_ignored() -> None:
    await another_tenant_in_the_query()


async def test_a_tenant_taken_from_the_query_is_caught() -> None:
    async def from_query(self: BrokerApp, request: Any, **_: Any) -> Identity:
        return Identity(request.query("tenant")[0])

    with (
        mutant(BrokerApp, "_identify", from_query, name="tenant from the query"),
        pytest.raises(AssertionError),
    ):
        await another_tenant_in_the_query()


async def test_unknown_channel_is_not_found_and_a_known_one_filters() -> None:
    async with stage() as on:
        answer = await on.get("/v1/subscribe?channel=secrets", x_api_key="acme-key")
        assert answer.status_code == 404
        async with reading(on.url, params={"channel": "refunds"}) as acme:
            await on.subscribers(1)
            on.publish(1)
            on.publish(2, channel="refunds")
            found = await acme.next()
            assert found is not None
            assert found.json()["number"] == 2


async def test_token_for_some_channels_gets_only_those() -> None:
    def authenticate(token: str) -> Identity:
        return Identity(ACME, channels=frozenset(token.split("+")))

    async with stage(authenticate) as on:
        for token, wanted, status in (
            ("refunds", "?channel=orders", 404),
            ("secrets", "?channel=secrets", 404),
            ("secrets", "", 403),
        ):
            answer = await on.get(f"/v1/subscribe{wanted}", x_api_key=token)
            assert answer.status_code == status
        async with reading(on.url, "refunds+secrets") as acme:
            await on.subscribers(1)
            on.publish(1)
            on.publish(2, channel="refunds")
            found = await acme.next()
            assert found is not None
            assert found.json()["number"] == 2


async def test_unknown_path_is_not_found_and_another_method_is_not_allowed() -> None:
    async with stage() as on, http_client() as client:
        answer = await client.post(f"{on.url}/v1/subscribe")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
        answer = await on.get("/v1/tickets")
        assert (answer.status_code, answer.json()["error"]) == (
            405,
            "/v1/tickets accepts POST only",
        )
        assert (await on.get("/v1/nothing")).status_code == 404


async def test_limits_of_streams_answer_429_and_503_with_retry_after() -> None:
    async with stage(max_streams=2, max_streams_per_tenant=1) as on, reading(on.url):
        await on.subscribers(1)
        answer = await on.get("/v1/subscribe", x_api_key="acme-key")
        assert (answer.status_code, int(answer.headers["retry-after"]) > 0) == (429, True)
        async with reading(on.url, "other-key"):
            await on.subscribers(2)
            answer = await on.get("/v1/subscribe", x_api_key="other-key")
            assert (answer.status_code, int(answer.headers["retry-after"]) > 0) == (503, True)
        assert on.broker.statistics().refused == {"tenant": 1, "total": 1}


async def test_broker_without_a_source_answers_503() -> None:
    async with Broker(None, channels=["orders"]) as broker:
        async with (
            served(BrokerApp(broker, ApiKeys(KEYS))) as url,
            http_client() as client,
        ):
            answer = await client.get(f"{url}/v1/subscribe", headers={"X-API-Key": "acme-key"})
        assert answer.status_code == 503
        assert "off" in answer.json()["error"]


async def test_stream_is_refused_with_503_until_the_source_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moored.broker._broker.READY", 0.0)
    connected = asyncio.Event()

    class Late(MemorySource):
        async def events(self) -> AsyncGenerator[SourceEvent | SourceGap]:
            await connected.wait()
            async for item in super().events():
                yield item

    async with (
        asyncio.timeout(20),
        Broker(Late()) as broker,
        served(BrokerApp(broker, ApiKeys(KEYS))) as url,
    ):
        on = Stage(MemorySource(), broker, url)
        answer = await on.get("/v1/subscribe", x_api_key="acme-key")
        assert answer.status_code == 503
        assert 1 <= int(answer.headers["retry-after"]) <= 5
        assert "not connected yet" in answer.json()["error"]
        connected.set()
        await on.until(lambda: broker.up)
        async with reading(url, "acme-key") as stream:
            assert stream.response.status_code == 200


async def test_ticket_opens_one_stream() -> None:
    async with stage() as on, http_client() as client:
        headers = {"Authorization": "Bearer acme-key"}
        assert (await client.post(f"{on.url}/v1/tickets")).status_code == 401
        ticket = (await client.post(f"{on.url}/v1/tickets", headers=headers)).json()["ticket"]
        async with reading(on.url, None, params={"ticket": ticket}) as acme:
            await on.subscribers(1)
            on.publish(1)
            assert await acme.next() is not None
        assert (await on.get(f"/v1/subscribe?ticket={ticket}")).status_code == 401


async def test_cookie_is_accepted_from_the_same_and_from_named_origins_only() -> None:
    origins = ["https://app.example"]
    async with stage(app={"cookie": "session", "origins": origins}) as on:
        cookie = "session=acme-key"
        host = urlsplit(on.url).netloc
        for headers, status in (
            ({"origin": "https://evil.example"}, 403),
            ({"sec_fetch_site": "cross-site"}, 403),
            ({}, 403),
        ):
            answer = await on.get("/v1/subscribe", cookie=cookie, **headers)
            assert answer.status_code == status
        for allowed in (
            {"Origin": "https://app.example"},
            {"Sec-Fetch-Site": "same-origin"},
            {"Origin": f"http://{host}"},
            {"Origin": f"http://{host}", "Cookie": f'a[b]=c d; {cookie}; path="/x"'},
        ):
            async with reading(on.url, None, headers={"Cookie": cookie, **allowed}) as acme:
                assert acme.response.status_code == 200


async def test_cors_headers_name_the_allowed_origin_only() -> None:
    async with (
        stage(app={"origins": ["https://app.example"]}) as on,
        http_client() as client,
    ):
        url = f"{on.url}/v1/subscribe"
        good = await client.options(url, headers={"Origin": "https://app.example"})
        assert good.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in good.headers["access-control-allow-headers"]
        bad = await client.options(url, headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in bad.headers


async def test_stream_ends_when_its_token_expires() -> None:
    def token(seconds: float, **claims: Any) -> str:
        return jwt.encode({"exp": time.time() + seconds, **claims}, SECRET, algorithm="HS256")

    async with stage(Jwt(SECRET)) as on:
        for wrong in (
            token(-5, org_id=ACME),
            token(60),
            jwt.encode({"org_id": ACME}, SECRET, algorithm="HS256"),
            jwt.encode({"org_id": ACME, "exp": time.time() + 60}, "", algorithm="none"),
            jwt.encode({"org_id": ACME, "exp": time.time() + 60}, SECRET + "x", algorithm="HS256"),
        ):
            answer = await on.get("/v1/subscribe", authorization=f"Bearer {wrong}")
            assert answer.status_code == 401
        async with reading(on.url, token(3, org_id=ACME)) as acme, asyncio.timeout(20):
            await on.subscribers(1)
            on.publish(1)
            assert await acme.next() is not None
            found = await acme.next()
            assert found is not None
            assert found.event == "expired"
            assert await acme.next() is None


async def test_idle_stream_sends_comments() -> None:
    async with stage(app={"keepalive": 0.1}) as on, reading(on.url) as acme, asyncio.timeout(20):
        await acme.until_comment()
        assert acme.comments == ["keepalive"]


class Stuck:
    """A history whose server does not answer."""

    def position(self, id: str) -> int:
        return int(id)

    async def read(self, *_: Any) -> list[SourceEvent]:
        await asyncio.get_running_loop().create_future()
        raise AssertionError


async def test_stream_that_waits_for_its_history_sends_comments() -> None:
    async with (
        asyncio.timeout(20),
        stage(app={"keepalive": 0.1}, replay=Stuck()) as on,
        reading(on.url, headers={"Last-Event-ID": "1"}) as acme,
    ):
        for _ in range(2):
            await acme.until_comment()


async def test_client_that_hangs_up_is_removed() -> None:
    async with stage() as on:
        async with reading(on.url):
            await on.subscribers(1)
        await on.subscribers(0)


async def test_frozen_client_is_disconnected_and_delays_nobody() -> None:
    async with stage() as on:
        with frozen(on.url):
            async with reading(on.url) as acme, asyncio.timeout(60):
                await on.subscribers(2)
                numbers = 0
                while not on.broker.statistics().dropped and numbers < 5000:
                    numbers += 1
                    payload = {"org_id": ACME, "number": numbers, "text": "x" * 10_000}
                    on.source.publish("orders", json.dumps(payload))
                    found = await acme.next()
                    assert found is not None
                    assert found.json()["number"] == numbers
                before = on.broker.statistics()
                assert (before.dropped, before.buffer_high_water) == ({"slow": 1}, 64)
                on.publish(0)
                await acme.next()
                assert on.broker.statistics().delivered == before.delivered + 1


@pytest.mark.parametrize("wrapped", [False, True])
async def test_client_that_does_not_read_is_cut_after_the_send_timeout(
    wrapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage(app={"send_timeout": 0.5}, slow="drop", wrapped=wrapped) as on:
        with frozen(on.url) as line:
            await on.subscribers(1)
            while on.broker.statistics().dropped.get("slow", 0) == 0:
                on.source.publish("orders", json.dumps({"org_id": ACME, "text": "x" * 50_000}))
                await asyncio.sleep(0)
            await on.subscribers(0)
            await asyncio.to_thread(read_until_cut, line)
    # A server that knows that the client is gone does not complain about the response.
    assert "without completing response" not in caplog.text


def read_until_cut(line: socket.socket) -> None:
    with suppress(ConnectionError):
        while line.recv(1 << 20):
            pass


async def test_drain_ends_all_streams_and_refuses_new_ones() -> None:
    async with stage() as on, reading(on.url) as acme:
        await on.subscribers(1)
        on.publish(1)
        await on.until(lambda: on.broker.statistics().delivered == 1)
        await on.broker.drain(over=0.1)
        assert await acme.next() is not None
        assert await acme.next() is None
        assert (await on.get("/v1/subscribe", x_api_key="acme-key")).status_code == 503


async def test_app_can_be_mounted_under_a_prefix() -> None:
    async with stage(prefix="/live") as on, reading(on.url) as acme:
        await on.subscribers(1)
        on.publish(1)
        assert await acme.next() is not None
        script = await on.get("/v1/subscribe.js")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        assert "export function subscribe" in script.text
        assert (await on.get("/v1/nothing")).status_code == 404


async def test_websocket_gets_the_same_events() -> None:
    async with stage() as on:
        url = on.url.replace("http:", "ws:") + "/v1/subscribe?channel=orders"
        headers = {"Authorization": "Bearer acme-key"}
        async with websockets.connect(url, additional_headers=headers) as line:
            start = json.loads(await line.recv())
            assert (start["event"], start["id"]) == ("start", on.broker._newest.id)
            on.publish(1)
            found = json.loads(await line.recv())
            assert (found["event"], json.loads(found["data"])["number"]) == ("orders", 1)
        await on.subscribers(0)
        on.publish(2)
        again = f"{url}&last_event_id={found['id']}"
        async with websockets.connect(again, additional_headers=headers) as line:
            assert json.loads(json.loads(await line.recv())["data"])["number"] == 2
        for wrong, given, status in ((url, {}, 401), (f"{url}s", headers, 404)):
            with pytest.raises(websockets.InvalidStatus) as refused:
                await websockets.connect(wrong, additional_headers=given)
            assert refused.value.response.status_code == status
            assert b"error" in (refused.value.response.body or b"")
