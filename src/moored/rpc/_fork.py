"""What happens to managers when their process is forked.

gRPC has threads of its own, and a fork copies none of them: a child that is made while one of them
is at work may wait for ever for what that one was about to do. So nobody is inside gRPC at the
moment of a fork: calls are held up, those under way are waited for, and so is what happens in the
background, where it is not interrupted: a connect or a probe that takes its time begins again
afterwards. The parent then goes on as if nothing had been; the child begins with no connection.

What does not end within 0.2 s in all (a stream, say) leaves a child in which gRPC cannot be relied
on: there our managers refuse every call, instead of hanging. The same is so where a channel for
asyncio is open: a thread of gRPC's waits for its events all the time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Protocol

from moored.kernel import at_fork

from ._channel_pool import lanes_of
from ._clients import Clients
from ._errors import ManagerClosed
from ._live_channel import LiveChannel

__all__ = [
    "GrpcVisit",
    "inside",
    "is_broken",
    "is_busy",
    "is_watched",
    "keep",
    "refuse_broken",
    "register",
]

#: How long a fork waits for calls that are under way: other calls, and whoever forks, wait with it.
PATIENCE = 0.2
#: How long it waits for locks at least, which are held for moments only.
MOMENT = 0.02
#: How long for calls that an earlier fork has waited for in vain.
ENDLESS = 0.02
#: How much longer for gRPC's own threads that watch channels, where somebody subscribes to that:
#: each looks up after 0.2 s.
WATCHED = 0.05

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
    """A manager that is notified of forks."""

    def _shut_gates(self) -> None: ...
    def _before_fork(self, patience: float) -> bool: ...
    def _lock_for_fork(self, patience: float) -> bool: ...
    def _after_fork_in_parent(self) -> None: ...
    def _after_fork_in_child(self) -> None: ...


class GrpcVisit:
    """Somebody is inside gRPC, from now until `end`, which may be on another thread.

    It begins with a wait while a fork is under way.
    """

    def __init__(self) -> None:
        #: A fork waits for it, or has waited: what failed may have failed for that alone.
        self.interrupted = False
        self._interrupt: Callable[[], object] | None = None
        _gate.enter(self)

    def on_interrupt(self, act: Callable[[], object]) -> None:
        """Set what interrupts the visit; the interrupted code retries after the fork."""
        self._interrupt = act
        if self.interrupted:
            act()

    def hurry(self) -> None:
        """A fork waits for it."""
        self.interrupted = True
        if self._interrupt is not None:
            self._interrupt()

    def end(self) -> None:
        """End the visit; calling it twice is harmless."""
        _gate.leave(self)


class _Gate:
    """The visits to gRPC that are not calls of users."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may end a visit anywhere.
        self._changed = threading.Condition(threading.RLock())
        self._visits: set[GrpcVisit] = set()
        self._shut = False

    def enter(self, visit: GrpcVisit) -> None:
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._visits.add(visit)

    def leave(self, visit: GrpcVisit) -> None:
        with self._changed:
            self._visits.discard(visit)
            self._changed.notify_all()

    def shut(self, patience: float) -> bool:
        """Hold up new visits, and wait for those inside; return whether all have ended."""
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
_known: Clients[Forks] = Clients()
#: Two threads may fork at the same time: one after the other.
_forking = threading.Lock()
#: What a child has inherited and may neither use nor free: to free it is to use it.
_inherited: list[object] = []
#: Who was inside gRPC at the last fork, as the child sees it.
_noise: str | None = None
#: Why gRPC cannot be relied on in this process.
_broken: str | None = None


def register(manager: Forks) -> None:
    """Notify the manager of forks, as long as it lives."""
    _known.add(manager)


@contextmanager
def inside() -> Iterator[None]:
    """Within it, this thread is inside gRPC, for a moment."""
    visit = GrpcVisit()
    try:
        yield
    finally:
        visit.end()


def is_busy(live: LiveChannel) -> bool:
    """Whether calls or watchers of this generation are inside gRPC."""
    if not live.calls:
        live.endless = False
    return bool(live.calls) or is_watched(live.channel)


def is_watched(channel: Any) -> bool:
    """Whether a thread of gRPC's watches the state of a channel, inside; it ends within 0.2 s."""
    states = (getattr(lane, "_connectivity_state", None) for lane in lanes_of(channel))
    return any(getattr(state, "polling", False) for state in states)


def is_broken() -> bool:
    """Whether this process was forked while gRPC was at work."""
    return _broken is not None


def refuse_broken() -> None:
    """Raise if this process was forked while gRPC was at work."""
    if _broken is not None:
        raise ManagerClosed(_broken)


def keep(thing: object) -> None:
    """Never free this object, in a child."""
    _inherited.append(thing)


def _before() -> None:
    global _noise
    _forking.acquire()
    ends = monotonic() + PATIENCE
    for manager in _known:  # all first: what ends, ends at the same time
        manager._shut_gates()
    _drain(ends)
    gone = _gate.shut(max(0.0, ends - monotonic()))
    # Again: a connection may have been made since, and now no other can be.
    quiet = _drain(ends) and gone
    _noise = None if quiet else _CALLS
    if _disabled:
        _noise = _DISABLED
    elif _polled():
        _noise = _ASYNCIO
    ends = max(ends, monotonic() + MOMENT)
    for manager in _known:
        if not manager._lock_for_fork(max(0.0, ends - monotonic())):
            _noise = _noise or _CALLS


def _polled() -> bool:
    """Whether gRPC's thread for asyncio is there: it is always inside."""
    return any("_poll_wrapper" in thread.name for thread in threading.enumerate())


def _drain(ends: float) -> bool:
    quiet = True
    for manager in _known:
        quiet = manager._before_fork(ends - monotonic()) and quiet
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


at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
