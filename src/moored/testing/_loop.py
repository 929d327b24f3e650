"""An event loop without a machine under it: virtual time, seeded order, no sockets, no threads.

One rule decides what a seed may reorder: **a task may be late, a callback never is.** asyncio
promises that callbacks run in the order in which they were scheduled, and code may rely on it (a
done-callback has run before the task that awaits the same future goes on). It promises nothing
about how soon a task that could run does run. So in each turn of the loop every callback runs, in
order, and a ready task may be held back to the next turn; whatever is already in the queue behind
it then overtakes it. What belongs to one task, or to one connection, never changes its order.

Virtual time moves only when nothing can run, straight to the next timer. Timers with the same
deadline fire in the order in which they were set (asyncio's own heap does not promise that).
With `timer_slack`, timers are as inexact as uvloop's: they also fire a little early, while `time()`
is still less than their deadline, or a little late, and close deadlines may change their order.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import Any, TypeVarTuple, Unpack
from weakref import WeakValueDictionary

from ..kernel._clock import Clock
from ._borders import Borders
from ._drift import Drift
from ._errors import Deadlock, Livelock, Stuck, TimeLimit
from ._hosts import CURRENT
from ._network import Network
from ._pipe import NETWORK
from ._tasks import SimFuture, SimTask
from ._trace import Trace
from ._waits import waiting, where

__all__ = ["EPOCH", "SimLoop"]

Ts = TypeVarTuple("Ts")

#: Wall time at the start of every schedule: 2026-01-01 00:00:00 UTC.
EPOCH = 1_767_225_600.0

_COMPACT_AT = 64


class SimLoop(Borders, asyncio.BaseEventLoop):
    """An asyncio event loop in virtual time, on which everything is decided by one seed.

    :param seed: decides the order of tasks, the network's latency, and `clock.random`.
    :param drift: whether tasks may be held back; without it the loop is as orderly as asyncio.
    :param lateness: how many virtual seconds a task may be late, as on a busy machine; 0 keeps
        virtual times exact.
    :param timer_slack: how many virtual seconds before or after its deadline a timer may fire; 0
        keeps timers exact.
    :param time_limit: virtual seconds after which a schedule counts as stuck.
    """

    #: Turns without any progress of the clock after which the loop gives up.
    livelock_after = 100_000

    # What is relied upon of asyncio's base class beyond its documentation; a test guards it.
    _check_closed: Callable[[], None]
    _ready: deque[asyncio.Handle]
    _stopping: bool
    _task_factory: Any
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
        # Debug mode measures real time and notes a stack per callback: neither belongs here.
        self.set_debug(False)
        self.seed = seed
        self.trace = trace
        self.digest = 0
        self.turns = 0
        self.time_limit = time_limit
        self.unhandled: list[dict[str, Any]] = []
        self.wall_offset = 0.0
        self.troubled = 0
        self._now = 0.0
        self._turns_now = 0
        self._serial = 0
        self._timers: list[tuple[float, int, asyncio.Handle]] = []
        self._cancelled_timers = 0
        self._tasks: WeakValueDictionary[int, SimTask] = WeakValueDictionary()
        self._rng = random.Random(seed)
        self._drift = Drift(self._rng, drift=drift, lateness=lateness, timer_slack=timer_slack)
        self._clock = Clock(self.time, lambda: EPOCH + self._now + self.wall_offset, self._chance())
        self.network = Network(self, self._chance())

    def _chance(self) -> random.Random:
        """A stream of chance of its own, so that one consumer does not shift another's."""
        return random.Random(self._rng.getrandbits(64))

    # Time

    @property
    def clock(self) -> Clock:
        """Virtual time and seeded chance, as the running host sees them."""
        process = CURRENT.get(None)
        return self._clock if process is None else process.host.clock

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As asyncio's, but timers with equal deadlines fire in the order of these calls.

        With `timer_slack` they fire around their deadline, except those of the network, which has
        latency of its own.
        """
        self._check_closed()
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if self._drift.timer_slack and context is not NETWORK:
            when = self._drift.fires_at(when, self._now)
        heapq.heappush(self._timers, (when, self.number(), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled_timers += 1
        if self._cancelled_timers > max(_COMPACT_AT, len(self._timers) // 2):
            self._timers = [timer for timer in self._timers if not timer[2]._cancelled]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """As asyncio's, without what its debug mode needs."""
        self._check_closed()
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    # Tasks

    def number(self) -> int:
        """The next number, for whatever must be told apart in every run of a seed."""
        self._serial += 1
        return self._serial

    def create_future(self) -> asyncio.Future[Any]:
        """A future with a number."""
        self._serial += 1
        future = SimFuture(loop=self)
        future.serial = self._serial
        return future

    def create_task(
        self,
        coro: Any,
        *,
        name: object = None,
        context: Context | None = None,
        **options: Any,
    ) -> Any:
        """A task with a number; names that asyncio would count globally are counted per loop."""
        if self._task_factory is not None:
            return super().create_task(coro, name=name, context=context, **options)
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
            process.frozen.append(task)
        return task

    def tasks(self) -> Iterator[SimTask]:
        """Tasks that have not ended, the oldest first."""
        return (task for task in list(self._tasks.values()) if not task.done())

    # Turns

    def _run_once(self) -> None:
        """One turn: every callback that is ready, and those ready tasks that are not held back."""
        self._wake()
        ready, count = self._ready, len(self._ready)
        drift, now = self._drift, self._now
        held: list[asyncio.Handle] = []
        slow: set[int] = set()
        for _ in range(count):
            handle: Any = ready.popleft()
            if handle._cancelled or (self.troubled and not self._may_run(handle)):
                continue
            task = getattr(handle._callback, "__self__", None)
            if isinstance(task, SimTask):
                if count > 1 and task.hold and drift.holds(task, slow):
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
        """Make something part of the digest; a string's hash would differ between processes."""
        self.digest = hash((self.digest, self._now, *numbers))

    def _note_step(self, task: SimTask) -> None:
        self.digest = hash((self.digest, self._now, task.serial))
        if self.trace is not None:
            self.trace.add(self._now, task.get_name(), f"runs at {where(task)}")

    def mark(self, who: str, what: str, *numbers: int) -> None:
        """Make something other than a task's step part of the trace and of the digest."""
        self.count(*numbers)
        if self.trace is not None:
            self.trace.add(self._now, who, what)

    def _wake(self) -> None:
        """Make due timers ready; when nothing is ready, move on to the next one."""
        self.turns += 1
        self._turns_now += 1
        if self._turns_now > self.livelock_after:
            raise self._stuck(Livelock, f"the clock has not moved for {self._turns_now:,} turns")
        ready, timers = self._ready, self._timers
        while timers:
            when, _, handle = timers[0]
            if handle._cancelled:
                self._cancelled_timers -= 1
            elif when <= self._now:
                ready.append(handle)
            elif ready or self._stopping:
                return
            else:
                self._advance(when)
                continue
            heapq.heappop(timers)
        if not ready and not self._stopping:
            raise self._stuck(Deadlock, "nothing can run and no timer is set")

    def _advance(self, when: float) -> None:
        if when > self.time_limit:
            raise self._stuck(TimeLimit, f"the limit of {self.time_limit:g} s is over")
        self._now = when
        self._turns_now = 0

    def be_patient_again(self) -> None:
        """Count the turns towards a livelock from zero."""
        self._turns_now = 0

    def forget_plans(self) -> None:
        """Drop everything that would still run."""
        self.be_patient_again()
        self._ready.clear()
        self._timers.clear()

    def _stuck(self, kind: type[Stuck], reason: str) -> Stuck:
        tasks = [task for task in self.tasks() if task.process is None or task.process.alive]
        paused = "".join(f"\n  {name} is paused" for name in self.network.paused_names())
        return kind(
            f"{reason} at {self._now:.6f} s of virtual time; {len(tasks)} tasks wait:\n"
            f"{waiting(tasks)}{paused}"
        )

    # Borders

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what nobody retrieved: it fails the schedule. To be cancelled is not to fail."""
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
        """As `call_soon`: there is only one thread in a simulation."""
        if self._thread_id not in (None, threading.get_ident()):
            raise self.refusal("call_soon_threadsafe from another thread")
        return self.call_soon(callback, *args, context=context)

    def __repr__(self) -> str:
        return f"<SimLoop seed {self.seed} at {self._now:.6f} s, {self.turns} turns>"
