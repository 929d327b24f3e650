"""An event loop in virtual time, with an order of tasks that the seed decides.

One rule decides what a seed may reorder: **a task may be late, a callback never is.** asyncio
promises that callbacks run in the order in which they were scheduled, and code may rely on it (a
done-callback has run before the task that awaits the same future continues). asyncio does not
promise how soon a ready task runs. So in each turn of the loop every callback runs, in order, and a
ready task may be held back to the next turn, so that the queue behind it overtakes it. The order
of the steps of one task, and of the bytes of one connection, never changes.

Virtual time advances only when nothing is ready to run, to the next timer. Timers with the same
deadline fire in the order in which they were set (asyncio's heap does not promise that). With
`timer_slack`, timers are as inexact as uvloop's: they also fire a little early, while `time()` is
still less than their deadline, or a little late, and close deadlines may change their order.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import Any, TypedDict, TypeVarTuple, Unpack
from weakref import WeakValueDictionary

from moored.kernel import Clock

from ._drift import Drift
from ._errors import Deadlock, Livelock, Stuck, TimeLimit
from ._hosts import CURRENT
from ._loop_io import LoopIO
from ._network import Network
from ._pipe import NETWORK
from ._tasks import SimFuture, SimTask
from ._trace import Trace
from ._wait_report import describe_waits, location

__all__ = ["EPOCH", "ScheduleOptions", "SimLoop"]

Ts = TypeVarTuple("Ts")

#: Wall time at the start of every schedule: 2026-01-01 00:00:00 UTC.
EPOCH = 1_767_225_600.0


class ScheduleOptions(TypedDict, total=False):
    """The options of a schedule, which `SimLoop` describes."""

    drift: bool
    lateness: float
    timer_slack: float
    time_limit: float


class SimLoop(LoopIO, asyncio.BaseEventLoop):
    """An asyncio event loop in virtual time, whose schedule one seed decides.

    :param seed: decides the order of tasks, the network's latency, and `clock.random`.
    :param drift: whether tasks may be held back; False keeps asyncio's order.
    :param lateness: virtual seconds by which a task may be late, as on a busy machine; 0 keeps
        virtual times exact.
    :param timer_slack: virtual seconds by which a timer may fire before or after its deadline; 0
        keeps timers exact. uvloop's fire up to 0.001 s early.
    :param time_limit: virtual seconds after which a schedule counts as stuck.
    """

    #: Turns at one virtual time after which the loop raises `Livelock`.
    livelock_after = 100_000

    # Undocumented attributes of asyncio's base class that this class uses; a test guards them.
    _check_closed: Callable[[], None]
    _ready: deque[asyncio.Handle]
    _stopping: bool
    _thread_id: int | None

    def __init__(
        self,
        seed: int,
        *,
        drift: bool = True,
        lateness: float = 0.0,
        timer_slack: float = 0.0,
        time_limit: float = 3600.0,
        trace: Trace | None = None,
    ) -> None:
        super().__init__()
        # Debug mode measures real time, and records a stack per callback.
        self.set_debug(False)
        self.seed = seed
        self.trace = trace
        self.digest = 0
        self.turns = 0
        self.time_limit = time_limit
        self.unhandled: list[dict[str, Any]] = []
        self.wall_offset = 0.0
        #: Paused and killed processes; while there are any, each callback is checked.
        self.restricted = 0
        self._now = 0.0
        self._turns_now = 0
        self._serial = 0
        self._timers: list[tuple[float, int, asyncio.Handle]] = []
        #: Tasks of killed processes, and those that a host started: the collection of a pending
        #: task is reported as a defect.
        self.kept: dict[asyncio.Task[Any], None] = {}
        self._tasks: WeakValueDictionary[int, SimTask] = WeakValueDictionary()
        self._rng = random.Random(seed)
        self._drift = Drift(self._rng, drift=drift, lateness=lateness, timer_slack=timer_slack)
        self._clock = Clock(
            self.time, lambda: EPOCH + self._now + self.wall_offset, self._new_random()
        )
        self.network = Network(self, self._new_random())

    def _new_random(self) -> random.Random:
        """Return a random generator for one use, whose numbers do not depend on the other uses."""
        return random.Random(self._rng.getrandbits(64))

    # Time

    @property
    def clock(self) -> Clock:
        """The virtual time and the seeded random generator of the running host."""
        process = CURRENT.get(None)
        return self._clock if process is None else process.host.clock

    def time(self) -> float:
        """Return the virtual seconds since the start."""
        return self._now

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule a timer; timers with equal deadlines fire in the order of these calls.

        `timer_slack` does not apply to the timers of the network, which has a random latency.
        """
        self._check_closed()
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if self._drift.timer_slack and context is not NETWORK:
            when = self._drift.fires_at(when, self._now)
        heapq.heappush(self._timers, (when, self.number(), timer))
        return timer

    # Tasks

    def number(self) -> int:
        """Return the next serial number."""
        self._serial += 1
        return self._serial

    def create_future(self) -> asyncio.Future[Any]:
        """Create a future with a serial number."""
        future = SimFuture(loop=self)
        future.serial = self.number()
        return future

    def create_task(
        self,
        coro: Any,
        *,
        name: object = None,
        context: Context | None = None,
        **options: Any,
    ) -> Any:
        """Create a task with a serial number, which is also its default name."""
        self._check_closed()
        serial = self.number()
        process = CURRENT.get(None) if context is None else context.get(CURRENT)
        task = SimTask(
            coro,
            serial=serial,
            hold=self._drift.pace(),
            process=process,
            loop=self,
            name=f"Task-{serial}" if name is None else str(name),
            context=context,
            **options,
        )
        self._tasks[serial] = task
        if process is not None and not process.alive:
            self.kept[task] = None
        return task

    def tasks(self) -> Iterator[SimTask]:
        """Return the tasks that have not ended, the oldest first."""
        return (task for task in list(self._tasks.values()) if not task.done())

    # Turns

    def _run_once(self) -> None:
        """Run every ready callback, and the ready tasks that are not held back."""
        self._wake()
        ready, count = self._ready, len(self._ready)
        drift, now = self._drift, self._now
        held: list[asyncio.Handle] = []
        skipped: set[int] = set()
        for _ in range(count):
            handle: Any = ready.popleft()
            if handle._cancelled or (self.restricted and not self._may_run(handle)):
                continue
            task = getattr(handle._callback, "__self__", None)
            if isinstance(task, SimTask):
                if count > 1 and task.hold and drift.holds(task, skipped):
                    held.append(handle)
                    continue
                if drift.lateness and drift.delays(task, now):
                    heapq.heappush(self._timers, (task.late_until, self.number(), handle))
                    continue
                self._note_step(task)
            handle._run()
        ready.extendleft(reversed(held))

    def _may_run(self, handle: Any) -> bool:
        process = handle._context.get(CURRENT)
        return process is None or process.admits(handle)

    def count(self, *numbers: int) -> None:
        """Add numbers to the digest (not strings, whose hash differs between processes)."""
        self.digest = hash((self.digest, self._now, *numbers))

    def _note_step(self, task: SimTask) -> None:
        self.digest = hash((self.digest, self._now, task.serial))
        if self.trace is not None:
            self.trace.add(self._now, task.get_name(), f"runs at {location(task)}")

    def mark(self, who: str, what: str, *numbers: int) -> None:
        """Add an event to the trace, and numbers to the digest."""
        self.count(*numbers)
        if self.trace is not None:
            self.trace.add(self._now, who, what)

    def _wake(self) -> None:
        """Queue the timers that are due; if nothing is ready, advance to the next timer."""
        self.turns += 1
        self._turns_now += 1
        if self._turns_now > self.livelock_after:
            raise self._stuck(Livelock, f"virtual time stood still for {self._turns_now:,} turns")
        ready, timers = self._ready, self._timers
        while timers:
            when, _, handle = timers[0]
            if not handle._cancelled:
                if when > self._now:
                    if ready or self._stopping:
                        return
                    self._advance(when)
                    continue
                ready.append(handle)
            heapq.heappop(timers)
        if not ready and not self._stopping:
            raise self._stuck(Deadlock, "no task is ready and no timer is set")

    def _advance(self, when: float) -> None:
        if when > self.time_limit:
            raise self._stuck(
                TimeLimit, f"the next timer is past the limit of {self.time_limit:g} s"
            )
        self._now = when
        self._turns_now = 0

    def reset_turn_count(self) -> None:
        """Restart the count of turns that leads to `Livelock`."""
        self._turns_now = 0

    def drop_scheduled(self) -> None:
        """Drop all ready callbacks and timers."""
        self.reset_turn_count()
        self._ready.clear()
        self._timers.clear()

    def _stuck(self, kind: type[Stuck], reason: str) -> Stuck:
        tasks = [task for task in self.tasks() if task.process is None or task.process.alive]
        paused = "".join(f"\n  {name} is paused" for name in self.network.paused_names())
        return kind(
            f"{reason} at {self._now:.6f} s of virtual time; {len(tasks)} tasks wait:\n"
            f"{describe_waits(tasks)}{paused}"
        )

    # LoopIO

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep an unhandled exception, which fails the schedule; ignore cancellation."""
        if isinstance(context.get("exception"), asyncio.CancelledError):
            return
        self.unhandled.append(context)
        self.mark("loop", f"unhandled: {context.get('message')}: {context.get('exception')!r}")

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Schedule a callback; refuse calls from another thread."""
        if self._thread_id not in (None, threading.get_ident()):
            raise self.refusal("call_soon_threadsafe from another thread")
        return self.call_soon(callback, *args, context=context)

    def __repr__(self) -> str:
        return f"<SimLoop seed {self.seed} at {self._now:.6f} s, {self.turns} turns>"
