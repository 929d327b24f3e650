"""The service in this process: real sockets and a real tree, with a part made for the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from moored.kernel import Child, Context, MooredError, Machine, Tree
from moored.service import HTTP, Config, Part, Service, ServiceError, Status, Wiring, _feed
from moored.service._hub import Hub
from moored.service._listen import listen

LIMIT = 30.0


@dataclass
class Lamp:
    """A part: one child that meets its condition, and fails, when it is told to."""

    light: asyncio.Event = field(default_factory=asyncio.Event)
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    wiring: Wiring | None = None

    def build(self, wiring: Wiring) -> Sequence[Child]:
        self.wiring = wiring
        phases = {"dark": ["dark"], "lit": ["lit"]}
        moves = {"dark": "lit", "lit": "dark"}
        self.machine = Machine(
            "moored/lamp", phases=phases, moves=moves, initial="dark", recorder=wiring.recorder
        )
        wiring.machines.append(self.machine)
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
    """A running service with one lamp, and a client that knows its address."""

    service: Service
    lamp: Lamp
    client: httpx.AsyncClient
    said: list[str]

    async def light(self) -> None:
        self.lamp.light.set()
        await self.service.monitor.wait_until(lambda status: status == "active", LIMIT)


@asynccontextmanager
async def house(config: Config | None = None) -> AsyncIterator[House]:
    config = config or Config(port=0)
    said: list[str] = []
    lamp = Lamp()
    with ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in listen(config.host, 0)]
        service = Service(config, sockets, say=said.append, parts=[lamp.part()])
        async with (
            service,
            httpx.AsyncClient(
                base_url=service.view.address, trust_env=False, timeout=LIMIT
            ) as client,
        ):
            yield House(service, lamp, client, said)


async def test_health_follows_the_conditions() -> None:
    async with house() as it:
        answer = await it.client.get("/v1/health")
        parts = {"lamp": "starting", "http": "active"}
        body = {"status": "starting", "parts": parts}
        assert (answer.status_code, answer.json()) == (202, body)
        await it.light()
        await asyncio.wait_for(it.service.first_active, LIMIT)
        answer = await it.client.get("/v1/health")
        assert (answer.status_code, answer.json()["status"]) == (200, "active")
        assert repr(it.service) == f"<Service at {it.service.view.address}: active>"
        it.lamp.broken.set()
        await it.service.monitor.wait_until(lambda status: status == "starting", LIMIT)
        assert (await it.client.get("/v1/health")).status_code == 202
        await it.light()
        assert (await it.client.get("/v1/health")).status_code == 200
        assert it.said[0].startswith("not ready: lamp_lit is lost: ")
        assert it.said[1].startswith("ready again after ")


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


async def test_a_stream_begins_with_the_state_and_goes_on_with_what_happens() -> None:
    async with house() as it, it.client.stream("GET", "/v1/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        messages = _messages(stream)
        name, first = await anext(messages)
        assert (name, first["status"]) == ("state", "starting")
        it.lamp.light.set()
        seen = []
        async for name, data in messages:
            seen.append(name)
            if name == "state" and data["status"] == "active":
                break
        assert seen.count("event") >= 2  # the machine and the condition
        assert seen[0] == "event"


async def test_streams_end_when_the_service_stops() -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT) as watching:
        async with house() as it:
            request = watching.build_request("GET", f"{it.service.view.address}/v1/events")
            stream = await watching.send(request, stream=True)
        await _drain(stream)


async def test_too_many_streams_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "join", lambda self: None)
    async with house() as it:
        answer = await it.client.get("/v1/events")
        assert (answer.status_code, answer.json()["error"]) == (503, "too many streams")


async def test_asking_for_the_head_of_a_stream_does_not_open_one() -> None:
    async with house() as it:
        assert (await it.client.head("/v1/events")).status_code == 200


async def test_the_metrics_tell_the_tree_the_conditions_and_the_events() -> None:
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


async def test_a_part_can_mount_an_app_behind_the_same_door() -> None:
    async with house(Config(port=0, admin_token="t0ken")) as it:
        assert (await it.client.get("/v1/lamp/x")).status_code == 401
        answer = await it.client.get("/v1/lamp/x", headers={"Authorization": "Bearer t0ken"})
        assert answer.text == "shining at /v1/lamp/x"


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


async def test_a_part_may_give_up_only_before_the_first_time() -> None:
    async with house() as it:
        assert it.lamp.wiring is not None
        it.lamp.wiring.give_up(ServiceError("no bulb"))
        it.lamp.wiring.give_up(ServiceError("and no socket"))
        with pytest.raises(MooredError, match="no bulb"):
            await it.service.first_active
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


@pytest.mark.parametrize("word", get_args(Status))
async def test_health_follows_the_word_of_a_part(word: Status) -> None:
    async with house() as it:
        await it.light()
        assert it.lamp.wiring is not None
        it.lamp.wiring.health("lamp", word, "somebody says so")
        answer = await it.client.get("/v1/health")
        assert (answer.status_code, answer.json()["parts"]["lamp"]) == (HTTP[word], word)
        assert answer.json()["status"] == word
        state = (await it.client.get("/v1/status")).json()
        assert state["conditions"]["lamp_lit"]["met"] is (HTTP[word] == 200)
        if word != "active":
            assert state["conditions"]["lamp_lit"]["detail"] == f"{word}: somebody says so"
            told = f"not ready: lamp_lit is lost: {word}: somebody says so"
            now = f"{word} now: somebody says so"
            assert it.said[-1] == (now if HTTP[word] == 200 else told)
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


async def test_an_open_stream_gets_new_numbers_without_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_feed, "REFRESH", 0.05)
    async with house() as it, it.client.stream("GET", "/v1/events") as stream:
        messages = _messages(stream)
        async with asyncio.timeout(LIMIT):
            for _ in range(4):
                assert (await anext(messages))[0] == "state"


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
