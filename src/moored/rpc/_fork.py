"""Managers in a process that forks.

gRPC has threads of its own, and a fork copies none of them: a child that is forked while one of
them works may wait forever for its result. So no thread is inside gRPC during a fork: new calls are
delayed, calls in flight are awaited, and so is background work; a connect or a probe is interrupted
and made again after the fork. The parent then continues; the child starts without connections.

If a call (a stream, for instance) does not end within 0.2 s in total, gRPC may hang in the child:
managers refuse every call there. The same holds if a `grpc.aio` channel is open, because a thread
of gRPC polls for its events all the time.
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

#: Seconds that a fork waits for calls in flight; new calls and the forking thread wait meanwhile.
PATIENCE = 0.2
#: Seconds that a fork waits for locks at least; they are never held for long.
MOMENT = 0.02
#: Further seconds for gRPC's threads that watch a channel with connectivity callbacks: they wake up
#: every 0.2 s.
WATCHED = 0.05

_CALLS = (
    "gRPC calls were in flight that did not end soon, so gRPC may hang here: end streams "
    "before a fork, or start processes with the method spawn"
)
_ASYNCIO = (
    "a grpc.aio channel was open, so gRPC may hang here: fork before the first of them "
    "is opened, or after the last is closed, or start processes with the method spawn"
)

_DISABLED = (
    "gRPC's fork support was turned off (GRPC_ENABLE_FORK_SUPPORT), so gRPC cannot "
    "work here: leave that variable unset, or start processes with the method spawn"
)
# gRPC reads the variable once, too. Setting it to true does not help: the parent's calls may hang.
_disabled = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "1").lower() in ("0", "false", "no", "off")


class Forks(Protocol):
    """A manager that is notified of forks."""

    def _shut_gates(self) -> None: ...
    def _before_fork(self, patience: float) -> bool: ...
    def _lock_for_fork(self, patience: float) -> bool: ...
    def _after_fork_in_parent(self) -> None: ...
    def _after_fork_in_child(self) -> None: ...


class GrpcVisit:
    """A period in which a thread is inside gRPC, until `end`, which any thread may call.

    The constructor waits while a fork is in progress.
    """

    def __init__(self) -> None:
        #: Whether a fork has interrupted the visit: its failure may be due to that alone.
        self.interrupted = False
        self._interrupt: Callable[[], object] | None = None
        _gate.enter(self)

    def on_interrupt(self, act: Callable[[], object]) -> None:
        """Set the callback that interrupts the visit; its code must retry after the fork."""
        self._interrupt = act
        if self.interrupted:
            act()

    def hurry(self) -> None:
        """Interrupt the visit, because a fork waits for it."""
        self.interrupted = True
        if self._interrupt is not None:
            self._interrupt()

    def end(self) -> None:
        """End the visit; calling it twice is harmless."""
        _gate.leave(self)


class _Gate:
    """The current visits to gRPC, other than users' calls."""

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
        """Delay new visits, and wait for the current ones; return whether all have ended."""
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
#: Makes threads fork one after the other.
_forking = threading.Lock()
#: gRPC objects that a child has inherited: neither using nor freeing them is safe there.
_inherited: list[object] = []
#: Why gRPC was not quiet at the last fork, for the child to read.
_noise: str | None = None
#: Why gRPC may hang in this process.
_broken: str | None = None


def register(manager: Forks) -> None:
    """Notify the manager of forks, as long as it lives."""
    _known.add(manager)


@contextmanager
def inside() -> Iterator[None]:
    """Mark this thread as inside gRPC, for a short block."""
    visit = GrpcVisit()
    try:
        yield
    finally:
        visit.end()


def is_busy(live: LiveChannel) -> bool:
    """Whether calls or watchers of this generation are inside gRPC."""
    return bool(live.calls) or is_watched(live.channel)


def is_watched(channel: Any) -> bool:
    """Whether a thread of gRPC watches the state of a channel; it ends within 0.2 s."""
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
    """Keep an inherited object for the life of a child process."""
    _inherited.append(thing)


def _before() -> None:
    global _noise
    _forking.acquire()
    ends = monotonic() + PATIENCE
    for manager in _known:  # all first, so that their calls end at the same time
        manager._shut_gates()
    _drain(ends)
    gone = _gate.shut(max(0.0, ends - monotonic()))
    # Again: a connection may have been made meanwhile; from here on none can be.
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
    """Whether gRPC's poller thread for asyncio runs: it is always inside gRPC."""
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
