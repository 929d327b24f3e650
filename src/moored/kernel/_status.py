"""Health: named conditions, each owned by the task that set it, and a status computed from them.

- A condition is met until it is cleared or its owner ends, whichever comes first; the end of a
  former owner changes nothing.
- The status is a pure function of the conditions, computed anew at each change.
- A waiter for a status gets it even if the next change, before the waiter runs, undoes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from ._clock import Clock
from ._condition import Condition, StatusChange, ending, missing, mistakes, verb
from ._errors import WaitTimeout
from ._observers import Observers
from ._ownership import Reason, current_owner, when_ended
from ._recorder import Cause, Event, Recorder, in_words
from ._words import plain, refuse

__all__ = ["StatusMonitor"]

log = logging.getLogger("moored.kernel")

S = TypeVar("S")
Owner = asyncio.Task[Any]


class _Holder(NamedTuple):
    task: Owner
    release: Callable[[], None]


class StatusMonitor(Generic[S]):
    """Tracks named conditions and computes a status from them.

    `status` is a plain function that gets the conditions by name and returns the status, of any
    type. The monitor belongs to one event loop; setting, clearing and reading also work without
    a running loop.
    """

    def __init__(
        self,
        conditions: Sequence[str],
        status: Callable[[Mapping[str, Condition]], S],
        *,
        name: str = "status",
        clock: Clock | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        refuse(f"StatusMonitor {name!r}", mistakes(conditions))
        self.name = name
        self._clock = clock
        self._recorder = recorder
        self._function = status
        now = self._now()
        self._conditions = {each: Condition(each, False, now, None) for each in conditions}
        self._view = MappingProxyType(self._conditions)
        self._holders: dict[str, _Holder] = {}
        # A dict, because it is ordered: waiters are woken in the order in which they came.
        self._waiters: dict[asyncio.Future[S], Callable[[S], bool]] = {}
        self._observers: Observers[StatusChange[S]] = Observers(f"status {name!r}")
        self._status = status(self._view)
        self._record(_words(self._status), kind="state")

    def set(
        self,
        condition: str,
        *,
        owner: Owner | Literal["nobody"] | None = None,
        detail: str | None = None,
    ) -> None:
        """Mark the condition as met, until it is cleared or its owner ends.

        The owner is the running task unless another is given; `"nobody"` is for conditions that
        end only when they are cleared. A new owner takes the condition over from the old one.
        """
        self._known(condition)
        task = (owner or current_owner()) if owner != "nobody" else None
        self._hold(condition, task)
        self._change(condition, True, detail, cause=detail)

    def clear(self, condition: str, reason: Cause) -> None:
        """Mark the condition as not met, with the reason."""
        self._known(condition)
        self._hold(condition, None)
        self._change(condition, False, in_words(reason), cause=reason)

    def status(self) -> S:
        """Return the current status."""
        return self._status

    def conditions(self) -> Mapping[str, Condition]:
        """Return a copy of the conditions by name, in the declared order."""
        return MappingProxyType(dict(self._conditions))

    async def wait_until(self, predicate: Callable[[S], bool], timeout: float | None = None) -> S:
        """Wait for a status that the predicate accepts, and return it.

        Raises `WaitTimeout`, which names the conditions that are not met, and since when.
        """
        if predicate(self._status):
            return self._status
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[S] = loop.create_future()
        self._waiters[waiter] = predicate
        timer = None if timeout is None else loop.call_later(timeout, self._expire, waiter, timeout)
        try:
            return await waiter
        finally:
            del self._waiters[waiter]
            if timer is not None:
                timer.cancel()

    def subscribe(self, callback: Callable[[StatusChange[S]], None]) -> Callable[[], None]:
        """Add a callback for each change of a condition; returns a function that removes it."""
        return self._observers.add(callback)

    def as_dict(self) -> dict[str, Any]:
        """Return the status and the conditions as plain data for JSON."""
        now = self._now()
        return {
            "name": self.name,
            "status": plain(self._status),
            "conditions": {
                each.name: {"met": each.met, "for": now - each.since, "detail": each.detail}
                for each in self._conditions.values()
            },
        }

    def __repr__(self) -> str:
        met = sum(each.met for each in self._conditions.values())
        return (
            f"<StatusMonitor {self.name}: {_words(self._status)}, "
            f"{met} of {len(self._conditions)} conditions met, {len(self._waiters)} waiting>"
        )

    def _now(self) -> float:
        return (self._clock or Clock.current()).monotonic()

    def _known(self, name: str) -> None:
        if name not in self._conditions:
            known = ", ".join(self._conditions)
            raise ValueError(f"{self.name} has no condition {name!r}; it has {known}")

    def _hold(self, name: str, task: Owner | None) -> None:
        holder = self._holders.get(name)
        if holder is not None and holder.task is task:
            return
        if task is not None:
            # First, because this raises for an owner that has ended: then nothing may change.
            clean_up = partial(self._owner_ended, name, task)
            owned = when_ended(task, clean_up)
            self._holders[name] = _Holder(task, partial(owned.remove, clean_up))
        else:
            self._holders.pop(name, None)
        if holder is not None:
            holder.release()

    def _owner_ended(self, name: str, task: Owner, reason: Reason) -> None:
        del self._holders[name]
        words = f"its owner {task.get_name()} ended: {ending(reason)}"
        try:
            self._change(name, False, words, cause=words)
        except Exception as error:
            # The owner's other clean-ups must run even if the user's function raises.
            log.error("the status function of %s failed", self.name, exc_info=error)

    def _change(self, name: str, met: bool, detail: str | None, *, cause: Cause | None) -> None:
        old = self._conditions[name]
        new = Condition(name, met, old.since if old.met == met else self._now(), detail)
        if new == old:
            return
        self._conditions[name] = new
        event = self._record(f"{name} {verb(old, new)}", cause=cause)
        previous = self._status
        self._evaluate()
        if self._status != previous:
            self._record(_words(self._status), kind="state", cause=event)
        for waiter, predicate in tuple(self._waiters.items()):
            self._offer(waiter, predicate)
        self._observers.notify(StatusChange(self._status, previous, new))

    def _evaluate(self) -> None:
        try:
            self._status = self._function(self._view)
        except Exception as error:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_exception(error)
            raise

    def _offer(self, waiter: asyncio.Future[S], predicate: Callable[[S], bool]) -> None:
        if waiter.done():
            return
        try:
            if predicate(self._status):
                waiter.set_result(self._status)
        except Exception as error:
            waiter.set_exception(error)

    def _expire(self, waiter: asyncio.Future[S], timeout: float) -> None:
        if not waiter.done():
            words = f"{self.name} is {_words(self._status)!r} after waiting {timeout:g} s"
            why = missing(self._conditions.values(), self._now())
            waiter.set_exception(WaitTimeout(f"{words}; {why}"))

    def _record(self, text: str, *, kind: str = "info", cause: Cause | None = None) -> Event | None:
        if self._recorder is None:
            return None
        return self._recorder.record(self.name, text, kind=kind, cause=cause)


def _words(status: object) -> str:
    """Return the status as text."""
    named = isinstance(status, tuple) and type(status).__str__ is not object.__str__
    return str(status if named else plain(status))
