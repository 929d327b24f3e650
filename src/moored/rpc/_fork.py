"""What happens to managers when their process is forked.

gRPC has threads of its own, and a fork copies none of them: a child that is made while one of them
is at work may wait for ever for what that one was about to do. So nobody is inside gRPC at the
moment of a fork: calls are held up, those under way are waited for, and so is what happens in the
background, where it is not interrupted: a connect or a probe that takes its time begins again
afterwards. The parent then goes on as if nothing had been; the child begins with no connection.

What does not end in time (a stream, say) leaves a child in which gRPC cannot be relied on: there
our managers refuse to work, instead of hanging. The same is so where a channel for asyncio is open:
a thread of gRPC's waits for its events all the time.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from ._channel_pool import lanes_of
from ._errors import ManagerClosed

__all__ = ["Herd", "Visit", "inside", "is_watched", "keep", "refuse_broken", "register"]

T = TypeVar("T")

#: How long a fork waits for calls that are under way.
PATIENCE = 5.0
#: How long it waits for locks, which are held for moments only.
MOMENT = 1.0

_CALLS = (
    "calls over gRPC were under way that did not end soon, so gRPC may hang here: end streams "
    "before a fork, or start processes with the method spawn"
)
_ASYNCIO = (
    "a channel of gRPC for asyncio was open, so gRPC may hang here: fork before the first of them "
    "is opened, or after the last is closed, or start processes with the method spawn"
)

_DISABLED = (
    "gRPC's own preparations for a fork were turned off (GRPC_ENABLE_FORK_SUPPORT), so gRPC cannot "
    "work here: leave that variable unset, or start processes with the method spawn"
)
# gRPC reads it once, too. To set it to true is no help either: calls of the parent may then hang.
_disabled = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "1").lower() in ("0", "false", "no", "off")


class Forks(Protocol):
    """What must be told of forks."""

    def _before_fork(self, patience: float) -> bool: ...
    def _lock_for_fork(self, patience: float) -> None: ...
    def _after_fork_in_parent(self) -> None: ...
    def _after_fork_in_child(self) -> None: ...


class Herd(Generic[T]):
    """Things that are known for as long as they live, and can be listed from any thread."""

    def __init__(self) -> None:
        self._members: dict[int, weakref.ref[T]] = {}

    def add(self, member: T) -> None:
        """Know it from now on."""
        key, members = id(member), self._members

        def forget(reference: weakref.ref[T]) -> None:
            if members.get(key) is reference:
                del members[key]

        members[key] = weakref.ref(member, forget)

    def __iter__(self) -> Iterator[T]:
        # One step for the interpreter, so nobody can come between.
        for reference in list(self._members.values()):
            if (member := reference()) is not None:
                yield member


class Visit:
    """Somebody is inside gRPC, from now until `end`, which may be on another thread.

    It begins with a wait while a fork is under way.
    """

    def __init__(self) -> None:
        #: A fork waits for it, or has waited: what failed may have failed for that alone.
        self.interrupted = False
        self._interrupt: Callable[[], object] | None = None
        _gate.enter(self)

    def on_interrupt(self, act: Callable[[], object]) -> None:
        """Say what makes its end come soon; who was interrupted tries again."""
        self._interrupt = act
        if self.interrupted:
            act()

    def hurry(self) -> None:
        """A fork waits for it."""
        self.interrupted = True
        if self._interrupt is not None:
            self._interrupt()

    def end(self) -> None:
        """Go out; twice is harmless."""
        _gate.leave(self)


class _Gate:
    """Who is inside gRPC on behalf of the managers, other than with a user's call."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may end a visit anywhere.
        self._changed = threading.Condition(threading.RLock())
        self._visits: set[Visit] = set()
        self._shut = False

    def enter(self, visit: Visit) -> None:
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._visits.add(visit)

    def leave(self, visit: Visit) -> None:
        with self._changed:
            self._visits.discard(visit)
            self._changed.notify_all()

    def shut(self, patience: float) -> bool:
        """Let nobody in, and wait for those inside; says whether all have gone."""
        deadline = monotonic() + patience
        with self._changed:
            self._shut = True
            visits = list(self._visits)
        for visit in visits:
            visit.hurry()
        with self._changed:
            while self._visits and (left := deadline - monotonic()) > 0:
                self._changed.wait(left)
            return not self._visits

    def open(self) -> None:
        with self._changed:
            self._shut = False
            self._changed.notify_all()


_gate = _Gate()
_known: Herd[Forks] = Herd()
#: Two threads may fork at the same time: one after the other.
_forking = threading.Lock()
#: What a child has inherited and may neither use nor free: to free it is to use it.
_inherited: list[object] = []
#: Who was inside gRPC at the last fork, as the child sees it.
_noise: str | None = None
#: Why gRPC cannot be relied on in this process.
_broken: str | None = None


def register(manager: Forks) -> None:
    """Tell it of forks from now on, as long as it lives."""
    _known.add(manager)


@contextmanager
def inside() -> Iterator[None]:
    """Within it, this thread is inside gRPC, for a moment."""
    visit = Visit()
    try:
        yield
    finally:
        visit.end()


def is_watched(channel: Any) -> bool:
    """Whether a thread of gRPC's watches the state of a channel, inside; it ends within 0.2 s."""
    states = (getattr(lane, "_connectivity_state", None) for lane in lanes_of(channel))
    return any(getattr(state, "polling", False) for state in states)


def refuse_broken() -> None:
    """Raise if this process was forked while gRPC was at work."""
    if _broken is not None:
        raise ManagerClosed(_broken)


def keep(thing: object) -> None:
    """Never free this, in a child."""
    _inherited.append(thing)


def _before() -> None:
    global _noise
    _forking.acquire()
    ends = monotonic() + PATIENCE
    _drain(ends)
    gone = _gate.shut(max(0.0, ends - monotonic()))
    # Again: a connection may have been made since, and now no other can be.
    quiet = _drain(ends) and gone
    _noise = None if quiet else _CALLS
    if _disabled:
        _noise = _DISABLED
    elif _polled():
        _noise = _ASYNCIO
    for manager in _known:
        manager._lock_for_fork(MOMENT)


def _polled() -> bool:
    """Whether gRPC's thread for asyncio is there: it is always inside."""
    return any("_poll_wrapper" in thread.name for thread in threading.enumerate())


def _drain(ends: float) -> bool:
    quiet = True
    for manager in _known:
        quiet = manager._before_fork(max(0.0, ends - monotonic())) and quiet
    return quiet


def _in_parent() -> None:
    _gate.open()
    for manager in _known:
        manager._after_fork_in_parent()
    _forking.release()


def _in_child() -> None:
    global _gate, _forking, _broken
    _gate, _forking = _Gate(), threading.Lock()
    if _noise is not None and _broken is None:
        _broken = f"process {os.getpid()} was forked while {_noise}"
    for manager in _known:
        manager._after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
