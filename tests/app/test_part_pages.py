"""The pages of parts and servers: what they need, their settings, facts and steps."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from moored.app import App, AppError, ComponentContext
from moored.broker import MemorySource
from moored.kernel import Chart
from moored.service import Config


async def test_a_page_has_needs_facts_settings_steps_and_events() -> None:
    app = App("shop", config=Config(no_token=True))
    sessions = app.sessions(server="chat:5222", connect_rate=7.0)
    app.broker(MemorySource(), channels=["orders"], buffer=99)
    begun = asyncio.Event()

    @app.component(after=["sessions"], kind="importer", shutdown=2.0)
    async def importer(ctx: ComponentContext) -> None:
        door = ctx.machine(
            Chart(phases={"shut": (), "open": ()}, moves={"shut": "open"}, initial="shut")
        )
        door.move("open", cause="the importer has begun")
        ctx.record("it has begun")
        ctx.show(lambda: {"file": "<b>orders</b>.csv", "counters": {"rows": 12}})
        begun.set()
        await asyncio.Event().wait()

    transport = httpx.ASGITransport(app=app.asgi)
    async with app, httpx.AsyncClient(transport=transport, base_url="http://localhost") as asking:
        await begun.wait()
        assert len(sessions) == 0

        async def page(name: str) -> dict[str, Any]:
            answer = await asking.get(f"/v1/parts/{name}")
            assert answer.status_code == 200
            found: dict[str, Any] = answer.json()
            return found

        found = await page("importer")
        assert (found["kind"], found["needs"], found["serves"]) == ("importer", ["sessions"], [])
        assert ["File", "<b>orders</b>.csv"] in found["facts"]
        assert [words for _, words, _ in found["steps"]] == ["shut", "open"]
        assert "it has begun" in [text for _, text in found["events"]]
        assert found["tree"]["name"] == "importer"
        settings = {each["name"]: each for each in found["settings"]}
        assert (settings["shutdown"]["value"], settings["shutdown"]["default"]) == ("2", "5")
        assert settings["shutdown"]["own"]

        found = await page("sessions")
        assert (found["needs"], found["serves"]) == (["chat:5222"], ["importer"])
        assert ["Accounts", "0 of 0 online"] in found["facts"]
        own = {each["name"] for each in found["settings"] if each["own"]}
        assert own == {"connect_rate"}

        found = await page("broker")
        own = {each["name"] for each in found["settings"] if each["own"]}
        assert own == {"source", "channels", "buffer"}
        assert found["serves"] == ["browsers"]

        found = await page("chat:5222")
        assert (found["kind"], found["state"]) == ("chat server", "unknown")
        assert found["settings"] == []

        missing = await asking.get("/v1/parts/nothing")
        assert missing.status_code == 404
        assert "there are sessions, broker, importer" in missing.json()["detail"]


def test_the_settings_of_a_pool_are_those_of_its_configuration() -> None:
    app = App("shop", config=Config(no_token=True))
    app.pool("postgresql://app:secret-secret@db/orders", max_size=12, queue_target=2.0)
    part = app._parts["pool"]
    found = {each.name: each for each in part.settings()}
    assert (found["max_size"].value, found["max_size"].default) == ("12", "10")
    assert found["max_size"].help.startswith("The maximum number of physical connections")
    assert found["queue_target"].own
    assert not found["connect_timeout"].own
    assert "secret-secret" not in str(found)


@pytest.mark.parametrize("option", ["after", "uses"])
def test_a_component_names_parts_that_were_added_before(option: str) -> None:
    app = App("shop", config=Config(no_token=True))
    more: Any = {option: ["db"]}
    with pytest.raises(AppError, match=f"{option}='db' names no part that was added before"):
        app.component(name="importer", **more)(_nothing)


async def _nothing(ctx: ComponentContext) -> None: ...
