"""The service in this process: real sockets and a real tree, with a part made for the test."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, get_args
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from tests.http_client import http_client
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from moored.kernel import Chart, Child, Context, Machine, MooredError, Tree
from moored.service import (
    HTTP,
    READY_STATES,
    Config,
    Part,
    Service,
    ServiceError,
    Status,
    Wiring,
)
from moored.service._browser_streams import BrowserStreams
from moored.service._listen import listen
from moored.service._serve import _ready

LIMIT = 30.0


@dataclass
class Lamp:
    """A part with one child that meets its condition, and fails, on command."""

    light: asyncio.Event = field(default_factory=asyncio.Event)
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    wiring: Wiring | None = None

    def build(self, wiring: Wiring) -> Sequence[Child]:
        self.wiring = wiring
        moves = {"dark": "lit", "lit": "dark"}
        chart = Chart(phases={"dark": (), "lit": ()}, moves=moves, initial="dark")
        self.machine = Machine("moored/lamp", chart, recorder=wiring.recorder)
        wiring.machines[self.machine] = "lamp"
        return [Child("bulb", self.run)]

    async def run(self, ctx: Context) -> None:
        ctx.started()
        await self.light.wait()
        self.light.clear()
        assert self.wiring is not None
        self.wiring.monitor.set("lamp_lit", detail="by hand")
        self.machine.move("lit", cause="somebody lit it")
        await self.broken.wait()
        self.broken.clear()
        self.machine.move("dark", cause="it broke")
        raise RuntimeError("the filament broke")

    def part(self) -> Part:
        return Part("lamp", self.build, conditions=("lamp_lit",), mounts={"/v1/lamp": _shine})


async def _shine(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(f"shining at {Request(scope).url.path}")(scope, receive, send)


@dataclass
class House:
    """A running service with one lamp, and a client for it."""

    service: Service
    lamp: Lamp
    client: httpx.AsyncClient
    said: list[str]

    async def light(self) -> None:
        self.lamp.light.set()
        await self.service.monitor.wait_until(lambda status: status == "active", LIMIT)


@asynccontextmanager
async def house(config: Config | None = None, part: Part | None = None) -> AsyncIterator[House]:
    config = config or Config(port=0, no_token=True)
    said: list[str] = []
    lamp = Lamp()
    with ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in listen(config.host, 0)]
        service = Service(config, sockets, say=said.append, parts=[part or lamp.part()])
        async with (
            service,
            http_client(service.view.address) as client,
        ):
            yield House(service, lamp, client, said)


@pytest.mark.every_loop
async def test_health_follows_the_conditions() -> None:
    async with house() as it:
        answer = await it.client.get("/v1/health")
        parts = {"lamp": "starting", "http": "active"}
        body = {"status": "starting", "parts": parts, "degraded": ["lamp"]}
        assert (answer.status_code, answer.json()) == (202, body)
        await it.light()
        await asyncio.wait_for(it.service.first_active, LIMIT)
        answer = await it.client.get("/v1/health")
        assert (answer.status_code, answer.json()["status"]) == (200, "active")
        assert answer.json()["degraded"] == []
        assert repr(it.service) == f"<Service at {it.service.view.address}: active>"
        it.lamp.broken.set()
        await it.service.monitor.wait_until(lambda status: status == "starting", LIMIT)
        assert (await it.client.get("/v1/health")).status_code == 202
        await it.light()
        assert (await it.client.get("/v1/health")).status_code == 200
        assert it.said[0].startswith("not ready: lamp_lit is lost: ")
        assert it.said[1] == "ready again"


async def test_the_status_is_the_whole_state() -> None:
    async with house() as it:
        await it.light()
        state = (await it.client.get("/v1/status")).json()
        assert [child["name"] for child in state["tree"]["children"]] == ["lamp", "http"]
        assert state["conditions"]["lamp_lit"]["detail"] == "by hand"
        assert state["conditions"]["http_ready"]["met"] is True
        assert state["machines"][0]["phase"] == "lit"
        assert state["events"]


async def test_a_component_is_explained_by_the_end_of_its_path() -> None:
    async with house() as it:
        await it.light()
        it.lamp.broken.set()
        await it.light()
        answer = (await it.client.get("/v1/explain/bulb")).json()
        assert answer["component"] == "moored/lamp/bulb"
        assert "because  the filament broke (RuntimeError)" in answer["explanation"]
        assert answer["events"][-1]["component"] == "moored/lamp/bulb"
        unknown = await it.client.get("/v1/explain/nothing")
        assert unknown.status_code == 404
        assert "moored/lamp" in unknown.json()["known"]


@pytest.mark.every_loop
async def test_a_stream_begins_with_the_state_and_goes_on_with_what_happens() -> None:
    async with house() as it, it.client.stream("GET", "/v1/events?events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        messages = _messages(stream)
        name, first = await anext(messages)
        assert (name, first["answer"]["state"]) == ("state", "starting")
        it.lamp.light.set()
        seen = []
        async for name, data in messages:
            seen.append(name)
            if name == "answer" and data["state"] == "works":
                break
        assert seen.count("event") >= 2  # the machine and the condition
        assert seen[0] == "event"


@pytest.mark.every_loop
async def test_streams_end_when_the_service_stops() -> None:
    async with http_client() as watching:
        async with house() as it:
            request = watching.build_request("GET", f"{it.service.view.address}/v1/events")
            stream = await watching.send(request, stream=True)
        await _drain(stream)


async def test_too_many_streams_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrowserStreams, "join", lambda self, topics: None)
    async with house() as it:
        answer = await it.client.get("/v1/events")
        assert (answer.status_code, answer.json()["error"]) == (503, "too many streams")


async def test_a_head_request_does_not_open_a_stream() -> None:
    async with house() as it:
        assert (await it.client.head("/v1/events")).status_code == 200
        assert "moored_streams 0.0" in (await it.client.get("/metrics")).text


async def test_a_stream_is_removed_when_its_client_disconnects() -> None:
    async with house() as it:
        async with it.client.stream("GET", "/v1/events") as stream:
            await anext(stream.aiter_lines())
            assert "moored_streams 1.0" in (await it.client.get("/metrics")).text
        async with asyncio.timeout(LIMIT):
            while "moored_streams 0.0" not in (await it.client.get("/metrics")).text:
                pass


async def test_the_metrics_include_the_tree_the_conditions_and_the_events() -> None:
    async with house() as it:
        await it.light()
        it.lamp.broken.set()
        await it.service.monitor.wait_until(lambda status: status == "starting", LIMIT)
        await it.light()
        answer = await it.client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        samples = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }
    assert samples["moored_active",] == 1
    assert samples["moored_child_up", "moored/http"] == 1
    assert samples["moored_child_restarts_total", "moored/lamp/bulb"] == 1
    assert samples["moored_condition_met", "lamp_lit"] == 1
    assert samples["moored_events_total", "failure", "moored/lamp/bulb"] == 1
    assert samples["moored_streams",] == 0
    assert ("process_open_fds",) in samples


async def test_a_mounted_app_has_the_same_access_checks() -> None:
    async with house(Config(port=0, admin_token="t0ken")) as it:
        assert (await it.client.get("/v1/lamp/x")).status_code == 401
        answer = await it.client.get("/v1/lamp/x", headers={"Authorization": "Bearer t0ken"})
        assert answer.text == "shining at /v1/lamp/x"


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    assert scope["type"] == "websocket"
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.send", "text": "shining"})
    await send({"type": "websocket.close"})


@pytest.mark.every_loop
@pytest.mark.parametrize(
    ("token", "headers", "enters"),
    [
        ("t0ken", {}, False),
        ("t0ken", {"Authorization": "Bearer wrong"}, False),
        ("t0ken", {"Cookie": "moored_session=1.2"}, False),
        ("t0ken", {"Authorization": "Bearer t0ken"}, True),
        (None, {}, True),
        (None, {"Origin": "http://evil.example"}, False),
        (None, {"Origin": "http://localhost:1"}, False),
        (None, {"Host": "evil.example"}, False),
    ],
)
async def test_a_websocket_has_the_same_access_checks(
    token: str | None, headers: dict[str, str], enters: bool
) -> None:
    lamp = Lamp()
    part = Part("lamp", lamp.build, conditions=("lamp_lit",), mounts={"/v1/lamp": _echo})
    async with house(Config(port=0, admin_token=token, no_token=token is None), part) as it:
        url = it.service.view.address.replace("http", "ws") + "/v1/lamp/"
        host = headers.get("Host")
        address = urlsplit(it.service.view.address)
        if host is not None:
            url = f"ws://{host}/v1/lamp/"
        connecting = connect(
            url,
            additional_headers={name: headers[name] for name in headers if name != "Host"},
            host=address.hostname,
            port=address.port,
            proxy=None,
            open_timeout=LIMIT,
        )
        if not enters:
            with pytest.raises(InvalidStatus) as caught:
                await connecting
            assert caught.value.response.status_code == 403
            return
        async with connecting as socket:
            assert await socket.recv() == "shining"


@pytest.mark.every_loop
async def test_http_that_fails_is_restarted_and_refuses_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with house() as it:
        (http,) = [
            task for task in asyncio.all_tasks() if task.get_name() == "moored/http: uvicorn"
        ]
        http.cancel()
        # The socket has stayed open: a request made meanwhile waits, and is answered.
        assert (await it.client.get("/v1/health")).status_code in (200, 202)
        assert [(each.name, each.restarts) for each in it.service.root.tree().children] == [
            ("lamp", 0),
            ("http", 1),
        ]
        await it.light()


async def test_forwarded_headers_of_a_proxy_are_ignored() -> None:
    async with house(Config(port=0, admin_token="t0ken")) as it:
        answer = await it.client.post(
            "/login", data={"token": "t0ken"}, headers={"X-Forwarded-Proto": "https"}
        )
        assert answer.status_code == 303
        assert "secure" not in answer.headers["set-cookie"].lower()
        assert "server" not in answer.headers


async def test_give_up_has_no_effect_after_the_service_was_active() -> None:
    async with house() as it:
        assert it.lamp.wiring is not None
        it.lamp.wiring.give_up(ServiceError("no bulb"))
        it.lamp.wiring.give_up(ServiceError("and no socket"))
        with pytest.raises(MooredError, match="no bulb"):
            await it.service.first_active
        await it.light()  # in an app that is a part of another program
        assert (await it.client.get("/v1/health?started")).status_code == 200
    async with house() as it:
        await it.light()
        assert it.lamp.wiring is not None
        it.lamp.wiring.give_up(ServiceError("too late"))
        assert it.service.first_active.exception() is None


async def test_a_part_may_end_the_service_at_any_time() -> None:
    async with house() as it:
        await it.light()
        assert it.lamp.wiring is not None
        it.lamp.wiring.fail(ServiceError("the house is sold"))
        it.lamp.wiring.fail(ServiceError("and empty"))
        with pytest.raises(MooredError, match="the house is sold"):
            await it.service.failed
    async with house() as it:
        assert it.lamp.wiring is not None
        it.lamp.wiring.fail(ServiceError("no bulb"))
        with pytest.raises(MooredError, match="no bulb"):
            await it.service.first_active


async def test_the_three_probes_ask_for_readiness_for_the_first_one_and_for_the_process() -> None:
    async def probes() -> list[int]:
        paths = [f"/v1/health?{each}" for each in ("live", "ready", "started")]
        return [(await it.client.get(path)).status_code for path in paths]

    async with house() as it:
        assert it.lamp.wiring is not None
        assert await probes() == [200, 503, 503]
        await it.light()
        await asyncio.wait_for(it.service.first_active, LIMIT)
        assert await probes() == [200, 200, 200]
        it.lamp.wiring.health("lamp", "failed", "the wrong password")
        assert await probes() == [200, 503, 200]


@pytest.mark.parametrize("word", get_args(Status))
async def test_the_health_of_the_service_follows_that_of_a_part(word: Status) -> None:
    async with house() as it:
        await it.light()
        assert it.lamp.wiring is not None
        it.lamp.wiring.health("lamp", word, "somebody says so")
        answer = await it.client.get("/v1/health")
        assert (answer.status_code, answer.json()["parts"]["lamp"]) == (HTTP[word], word)
        assert answer.json()["status"] == word
        ready = word in READY_STATES
        assert (await it.client.get("/v1/health?ready")).status_code == (200 if ready else 503)
        state = (await it.client.get("/v1/status")).json()
        assert state["conditions"]["lamp_lit"]["met"] is ready
        if word != "active":
            assert state["conditions"]["lamp_lit"]["detail"] == f"{word}: somebody says so"
            told = f"not ready: lamp_lit is lost: {word}: somebody says so"
            now = f"{word} now: somebody says so"
            assert it.said[-1] == (now if ready else told)
        it.lamp.wiring.health("lamp", "active", "it is mended")
        assert (await it.client.get("/v1/health")).status_code == 200


class Bulb:
    """A system that a part shows."""

    def statistics(self) -> dict[str, Any]:
        return {"lumen": 800}

    def explain(self) -> str:
        return "lit, because somebody lit it"

    def tree(self) -> Tree:
        return Tree("bulb", "running", 1.0, children=(Tree("filament", "running", 1.0),))


async def test_what_a_part_shows_is_in_the_status_the_tree_and_the_explanation() -> None:
    async with house() as it:
        assert it.lamp.wiring is not None
        it.lamp.wiring.systems["moored/lamp/bulb"] = Bulb()
        state = (await it.client.get("/v1/status")).json()
        assert state["lamp"] == {"lumen": 800}
        bulb = state["tree"]["children"][0]["children"][0]
        assert [child["name"] for child in bulb["children"]] == ["filament"]
        for name in ("lamp", "moored/lamp"):
            answer = (await it.client.get(f"/v1/explain/{name}")).json()
            assert answer["explanation"] == "lit, because somebody lit it"


class Broken(Bulb):
    """A system whose methods raise."""

    def statistics(self) -> dict[str, Any]:
        raise RuntimeError("no lumen today")

    def explain(self) -> str:
        raise RuntimeError("no words today")

    def tree(self) -> Tree:
        raise RuntimeError("no tree today")


class Unwritable(Bulb):
    """A system whose statistics JSON cannot represent."""

    def statistics(self) -> dict[str, Any]:
        return {"lumen": {(1, 2): 3}}


class BrokenCollector(Collector):
    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("lamp_lumen", "Brightness.", 800)
        raise RuntimeError("no metrics today")


@pytest.mark.parametrize("system", [Broken(), pytest.param(Unwritable(), marks=pytest.mark.soak)])
async def test_a_system_that_cannot_be_read_is_shown_as_broken_and_the_rest_works(
    system: Bulb,
) -> None:
    async with house() as it:
        assert it.lamp.wiring is not None
        it.lamp.wiring.systems["moored/lamp/bulb"] = system
        state = (await it.client.get("/v1/status")).json()
        assert "cannot be read" in state["lamp"]["error"]
        assert state["parts"] == {"lamp": "starting", "http": "active"}
        assert [child["name"] for child in state["tree"]["children"]] == ["lamp", "http"]
        assert (await it.client.get("/v1/explain/lamp")).status_code == 200
        assert (await it.client.get("/metrics")).status_code == 200
        for _ in range(101):  # more than there may be streams
            async with it.client.stream("GET", "/v1/events") as stream:
                assert stream.status_code == 200


async def test_a_collector_that_fails_does_not_take_the_other_metrics_away() -> None:
    lamp = Lamp()

    def build(wiring: Wiring) -> Sequence[Child]:
        wiring.collectors.append(BrokenCollector())
        return lamp.build(wiring)

    async with house(part=Part("lamp", build, conditions=("lamp_lit",))) as it:
        text = (await it.client.get("/metrics")).text
        assert "moored_active 0.0" in text
        assert "lamp_lumen" not in text
        assert "moored_collector_errors_total 1.0" in text


async def test_two_systems_of_one_part_are_both_shown() -> None:
    async with house() as it:
        assert it.lamp.wiring is not None
        it.lamp.wiring.systems["moored/lamp/bulb"] = Bulb()
        it.lamp.wiring.systems["moored/lamp/spare"] = Broken()
        state = (await it.client.get("/v1/status")).json()
        assert state["lamp/bulb"] == {"lumen": 800}
        assert "no lumen today" in state["lamp/spare"]["error"]
        answer = (await it.client.get("/v1/explain/lamp/bulb")).json()
        assert answer["explanation"] == "lit, because somebody lit it"


async def test_the_paths_that_the_tree_shows_can_be_explained() -> None:
    async with house() as it:
        assert it.lamp.wiring is not None
        it.lamp.wiring.systems["moored/lamp/bulb"] = Bulb()
        it.service.recorder.record("bulb/filament", "glowing", kind="state")
        for name in ("moored/lamp/bulb/filament", "lamp/bulb/filament", "filament"):
            answer = (await it.client.get(f"/v1/explain/{name}")).json()
            assert answer["component"] == "moored/lamp/bulb/filament"
            assert answer["explanation"].startswith("glowing for")
        known = (await it.client.get("/v1/explain/nothing")).json()["known"]
        assert "moored/lamp/bulb/filament" in known
        assert "bulb/filament" not in known
        for path in known:
            assert (await it.client.get(f"/v1/explain/{path}")).status_code == 200


async def test_a_part_that_does_not_work_is_not_shown_as_running() -> None:
    async with house() as it:
        wiring = it.lamp.wiring
        assert wiring is not None
        wiring.systems["moored/lamp/bulb"] = Bulb()
        wiring.health("lamp", "active", "it shines")

        async def states() -> list[str]:
            root = (await it.client.get("/v1/status")).json()["tree"]
            lamp, http = root["children"]
            return [each["state"] for each in (root, lamp, lamp["children"][0], http)]

        assert await states() == ["running"] * 4
        wiring.health("lamp", "waiting", "no current")
        assert await states() == ["waiting", "waiting", "waiting", "running"]
        metrics = (await it.client.get("/metrics")).text
        assert 'moored_child_up{path="moored/lamp"} 1.0' in metrics


async def test_the_line_about_the_start_names_the_parts() -> None:
    async with house() as it:
        await it.light()
        assert it.lamp.wiring is not None
        it.lamp.wiring.health("lamp", "active", "40 watts")
        assert _ready(it.service, 0.25) == "ready after 0.2 s: lamp: 40 watts"


async def test_after_a_recovery_the_explanation_shows_the_last_outage() -> None:
    async with house() as it:
        wiring = it.lamp.wiring
        assert wiring is not None
        wiring.systems["moored/lamp/bulb"] = Bulb()

        async def explained() -> list[str]:
            answer = (await it.client.get("/v1/explain/lamp")).json()
            return list(answer["explanation"].splitlines())

        wiring.health("lamp", "active", "it shines")
        assert await explained() == ["lit, because somebody lit it"]
        wiring.health("lamp", "degraded", "no light")
        wiring.health("lamp", "starting", "it burnt out")
        _, before, because = await explained()
        assert before.startswith("  now      lamp has failed, and is coming back since ")
        assert because == "  because  It burnt out."
        wiring.health("lamp", "active", "it shines again")
        _, before, because = await explained()
        (outage,) = (await it.client.get("/v1/outages")).json()["outages"]
        lasted = f"{outage['lasted']:.1f} s"
        assert re.fullmatch(rf"  before   lamp failed for {lasted}, from .* \(outage 1\)", before)
        assert because == "  because  It burnt out."
        # The nodes above and below show the outage in the tree, so they tell it, too.
        for path in ("moored", "moored/lamp/bulb/filament"):
            answer = (await it.client.get(f"/v1/explain/{path}")).json()
            assert answer["explanation"].splitlines()[-2:] == [before, because], path
        assert "before" not in (await it.client.get("/v1/explain/moored/http")).text


async def test_forcing_calls_every_last_resort() -> None:
    async with house() as it:
        called: list[int] = []
        assert it.lamp.wiring is not None
        it.lamp.wiring.last_resorts.append(lambda: called.append(1))
        it.service.force()
        assert called == [1]


async def _messages(stream: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    name = ""
    async for line in stream.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def _drain(stream: httpx.Response) -> None:
    async for _ in stream.aiter_bytes():
        pass
    await stream.aclose()
