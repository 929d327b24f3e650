"""The faults of the demo, and the recovery from each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from moored.kernel import Context, Event, Tasks, awaited
from moored.service import Truth, Wiring, cost_words, costs_of, span

__all__ = ["DemoFault", "Faults", "Recovery"]

T = TypeVar("T")

#: Seconds between two looks while a recovery is measured.
LOOK = 0.01
#: Seconds after which a recovery counts as failed.
LIMIT = 90.0
#: Recoveries that are shown.
SHOWN = 10


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class DemoFault:
    """A fault that a button causes."""

    #: The last part of its route.
    name: str
    #: The text of its button.
    title: str
    #: What the button does.
    text: str
    #: Causes the fault; sync or async.
    strike: Callable[[], object]
    #: Returns how the fault was noticed, where no failure is recorded and no part is degraded.
    noticed: Callable[[], str | None] = _nothing
    #: Returns whether everything that the fault affects has noticed it, so that it may end.
    may_end: Callable[[], bool] = lambda: True
    #: Ends the fault.
    end: Callable[[], None] = _nothing
    #: Returns whether the recovery is complete, where the health of the parts does not show it.
    healed: Callable[[], bool] = lambda: True
    #: Returns why the fault cannot be struck now, or None.
    impossible: Callable[[], str | None] = _nothing


@dataclass
class Recovery:
    """The recovery from one fault.

    Its length is that of the outage, from the last sign of life on. If there was no outage, because
    every part worked all the time, it is measured from the press.
    """

    fault: str
    title: str
    wall: float
    noticed: str = ""
    noticed_after: float | None = None
    healthy_after: float | None = None
    failed: str = ""
    cost: dict[str, int] = field(default_factory=dict)
    #: The number of the outage; None without one.
    outage: int | None = None

    @property
    def lines(self) -> list[str]:
        """The story of it, in at most three lines."""
        found = [f"0 s {self.title}: done."]
        if self.noticed_after is not None:
            ms = f"{1000 * self.noticed_after:.0f} ms"
            after = ms if self.noticed_after < 1 else span(self.noticed_after)
            found.append(f"{after} Moored noticed: {self.noticed}.")
        if self.healthy_after is not None:
            cost = cost_words({k: n for k, n in self.cost.items() if n}) or "nothing failed"
            what = "No outage: every part worked on" if self.outage is None else "All work again"
            found.append(f"{span(self.healthy_after)} {what}; {cost}.")
        return found + ([self.failed] if self.failed else [])


class Faults:
    """Strikes one fault at a time, and measures each recovery.

    :param served_since: whether the load was served from end to end since a moment.
    """

    def __init__(
        self, faults: Mapping[str, DemoFault], served_since: Callable[[float], bool]
    ) -> None:
        self.faults = faults
        self._served_since = served_since
        self._recoveries: deque[Recovery] = deque(maxlen=SHOWN)
        self._tasks = Tasks()
        self._failure: Event | None = None
        self._ctx: Context | None = None

    def statistics(self) -> dict[str, Any]:
        """Return the buttons, and the recoveries, the newest first."""
        for each in self._recoveries:
            # Trouble that returns at once makes an outage longer.
            if each.outage is not None and (known := self._truth.incident(each.outage)) is not None:
                each.healthy_after, each.cost = known["lasted"], known["cost"]
        return {
            "faults": [
                {"name": each.name, "title": each.title, "text": each.text}
                for each in self.faults.values()
            ],
            "running": self.running,
            "recoveries": [asdict(each) for each in reversed(self._recoveries)],
            "lines": self._recoveries[-1].lines if self._recoveries else [],
            "last": {each.fault: each.healthy_after for each in self._recoveries},
        }

    @property
    def _truth(self) -> Truth:
        assert self._wiring.truth is not None  # set by the service before any part runs
        return self._wiring.truth

    @property
    def running(self) -> str | None:
        """The name of the fault whose recovery is being measured."""
        return self._recoveries[-1].fault if len(self._tasks) else None

    async def run(self, ctx: Context, wiring: Wiring) -> None:
        """Accept presses until this is cancelled."""
        self._ctx, self._wiring = ctx, wiring
        unsubscribe = wiring.recorder.subscribe(self._watch)
        try:
            await asyncio.Event().wait()
        finally:
            unsubscribe()
            await self._tasks.cancel()

    def press(self, name: str) -> bool:
        """Strike a fault, when all parts are active; returns False while another is measured."""
        if self._ctx is None or len(self._tasks):
            return False
        fault = self.faults[name]
        self._recoveries.append(Recovery(name, fault.title, self._wiring.clock.wall()))
        self._tasks.start(self._measure(self._ctx, fault, self._recoveries[-1]))
        return True

    def _watch(self, event: Event) -> None:
        if event.kind == "failure" and self._failure is None:
            self._failure = event

    async def _measure(self, ctx: Context, fault: DemoFault, recovery: Recovery) -> None:
        clock, systems, truth = self._wiring.clock, self._wiring.systems, self._truth
        before = costs_of(systems.values())
        cause = ctx.record(f"pressed: {fault.title}")
        try:
            async with asyncio.timeout(LIMIT):
                # Otherwise the recovery from an earlier failure would be measured.
                await _until(lambda: self._wiring.monitor.status() == "active")
                self._failure, pressed = None, clock.monotonic()
                truth.strikes(fault.name)
                await awaited(fault.strike())
                recovery.noticed, noticed_at = await _until(lambda: self._notice(fault))
                recovery.noticed_after = noticed_at - pressed
                ctx.record(f"noticed after {recovery.noticed_after:.2f} s", cause=recovery.noticed)
                await _until(fault.may_end)
                fault.end()
                await _until(
                    lambda: (
                        self._wiring.monitor.status() == "active"
                        and fault.healed()
                        and self._served_since(noticed_at)
                        and not truth.is_broken
                    )
                )
                measured = clock.monotonic() - pressed
                outage = truth.incident_by(fault.name, pressed)
                if outage is not None:
                    recovery.outage, recovery.cost = outage["id"], outage["cost"]
                recovery.healthy_after = measured if outage is None else outage["lasted"]
                text = "the load is served again from end to end, and every part works"
                ctx.record(f"{text}: {recovery.lines[-1]}", cause=cause)
        except Exception as error:
            fault.end()
            recovery.failed = f"not healthy after {LIMIT:g} s"
            if not isinstance(error, TimeoutError):
                recovery.failed = f"the fault could not be struck: {error}"
            ctx.record(recovery.failed, kind="failure", cause=cause)
        finally:
            truth.strikes(None)
            if recovery.outage is None:
                recovery.cost = dict(costs_of(systems.values()) - before)

    def _notice(self, fault: DemoFault) -> tuple[str, float] | None:
        """Return the first sign of the fault, and when it was seen."""
        if (event := self._failure) is not None:
            return (event.because[0] if event.because else event.text), event.at
        now = self._wiring.clock.monotonic()
        if text := fault.noticed():
            return text, now
        status = self._wiring.monitor.status()
        for each in self._wiring.monitor.conditions().values():
            detail = each.detail or each.name
            if status != "active" and (not each.met or detail.startswith(status)):
                return detail, now
        return None


async def _until(found: Callable[[], T | None]) -> T:
    """Poll until a result is true, and return it."""
    while True:
        if result := found():
            return result
        await asyncio.sleep(LOOK)
