"""How a recovery is measured: with an app of one component, which breaks on command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from moored.app import App, ComponentContext
from moored.demo import _faults
from moored.demo._demo import DemoApp
from moored.demo._faults import DemoFault, Faults
from moored.demo._panel import faults_part
from moored.service import Config
from moored.testing import running_app

LIMIT = 60.0


class Lamp:
    """A component that fails when it is broken, and a load that is served while it shines."""

    def __init__(self) -> None:
        self.broken = asyncio.Event()
        self.served_after = 0.0
        self.failed = 0

    async def run(self, ctx: ComponentContext) -> None:
        ctx.show(dict, costs=lambda: {"calls failed": self.failed})
        await self.broken.wait()
        self.broken.clear()
        self.failed += 3
        raise OSError("the filament broke")

    def served_since(self, moment: float) -> bool:
        return self.served_after > moment


@asynccontextmanager
async def faulty(lamp: Lamp, strike: Callable[[], object], **more: Any) -> AsyncIterator[Faults]:
    """Run the app; yield its faults, of which there is one."""
    fault = DemoFault("smash", "Smash", "", strike, **more)
    faults = Faults({"smash": fault}, lamp.served_since)
    app = App("house", config=Config())
    app.component(name="lamp")(lamp.run)
    app.add(faults_part(faults))
    async with running_app(app, timeout=LIMIT):
        yield faults


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not found():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_recovery_ends_when_all_parts_are_active_and_the_load_is_served() -> None:
    lamp, all_noticed, ended = Lamp(), asyncio.Event(), asyncio.Event()

    def now(faults: Faults) -> dict[str, Any]:
        return dict(faults.statistics()["recoveries"][0])

    async with faulty(lamp, lamp.broken.set, may_end=all_noticed.is_set, end=ended.set) as faults:
        assert faults.press("smash")
        assert not faults.press("smash")  # one at a time
        await until(lambda: now(faults)["noticed_after"] is not None)
        assert now(faults)["noticed"] == "the filament broke (OSError)"
        # The component is restarted, but nothing was served yet, and not all have noticed it.
        await asyncio.sleep(0.5)
        assert not ended.is_set()
        all_noticed.set()
        await until(ended.is_set)
        assert now(faults)["healthy_after"] is None
        assert faults.running == "smash"
        lamp.served_after = float("inf")
        await until(lambda: faults.running is None)
        assert now(faults)["healthy_after"] >= now(faults)["noticed_after"] + 0.4
        assert now(faults)["cost"] == {"calls failed": 3}
        assert now(faults)["failed"] == ""


@pytest.mark.parametrize(
    ("strike", "reason"),
    [
        (lambda: None, "not healthy after 0.2 s"),
        (lambda: 1 / 0, "the fault could not be struck: division by zero"),
    ],
)
async def test_a_recovery_that_does_not_happen_is_given_up(
    monkeypatch: pytest.MonkeyPatch, strike: Callable[[], object], reason: str
) -> None:
    monkeypatch.setattr(_faults, "LIMIT", 0.2)
    async with faulty(Lamp(), strike) as faults:
        assert faults.press("smash")
        await until(lambda: faults.running is None)
        (recovery,) = faults.statistics()["recoveries"]
        assert recovery["failed"] == reason
        assert recovery["healthy_after"] is None


async def test_a_fault_that_is_impossible_now_is_refused_with_the_reason(tmp_path: Path) -> None:
    demo = DemoApp(tmp_path)  # not started: it has no sessions
    demo.close()
    (app,) = faults_part(demo.faults).mounts.values()
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as asking:
        for name in ("cut-sessions", "take-over"):
            answer = await asking.post(f"/{name}")
            assert answer.status_code == 409
            assert answer.json() == {"error": "impossible", "detail": "no session is online"}
