"""Managers in a process that forks.

gRPC has threads of its own, and a fork copies none of them: a child that is forked while one of
them works may wait forever for its result. So no thread is inside gRPC during a fork: new calls are
delayed, calls in flight are awaited, and so is background work; a connect or a probe is interrupted
and made again after the fork. The loop thread stops between two steps, so that no change is half
made. The parent then continues; the child starts without connections.

If a call (a stream, for instance) does not end within 0.2 s in total, gRPC may hang in the child:
managers refuse every call there. The same holds if a `grpc.aio` channel is open, because a thread
of gRPC polls for its events all the time.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from moored.kernel import LoopThread, at_fork

from ._channel_pool import lanes_of
from ._clients import Clients
from ._errors import ManagerClosed
from ._live_channel import LiveChannel

if TYPE_CHECKING:
    from ._handler import Handler

__all__ = [
    "GrpcVisit",
    "inside",
    "is_broken",
    "is_busy",
    "is_watched",
    "keep",
    "must_not_wait",
    "refuse_broken",
    "register",
    "register_manager",
]

#: Seconds that a fork waits for calls in flight; new calls and the forking thread wait meanwhile.
PATIENCE = 0.2
#: Seconds that a fork waits for the loop thread at least; its steps are short.
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
#: All handlers for threads, also closed ones, whose calls may still be in flight.
_handlers: Clients[Handler] = Clients()
_managers: Clients[Any] = Clients()
#: Makes threads fork one after the other.
_forking = threading.Lock()
#: gRPC objects that a child has inherited: neither using nor freeing them is safe there.
_inherited: list[object] = []
#: Why gRPC was not quiet at the last fork, for the child to read.
_noise: str | None = None
#: The pause of the loop thread during the current fork.
_pause: _LoopPause | None = None
#: Why gRPC may hang in this process.
_broken: str | None = None


def register(handler: Handler) -> None:
    """Keep a handler out of gRPC during forks, as long as it lives."""
    _handlers.add(handler)


def register_manager(manager: Any) -> None:
    """Call the manager's `_after_fork_in_child` in each child."""
    _managers.add(manager)


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


def must_not_wait() -> bool:
    """Whether waiting would block forever: on the loop thread, or during interpreter shutdown."""
    return sys.is_finalizing() or LoopThread.shared().is_current


def keep(thing: object) -> None:
    """Keep an inherited object for the life of a child process."""
    _inherited.append(thing)


class _LoopPause:
    """Stops the loop thread between two steps, while a fork is in progress."""

    def __init__(self) -> None:
        self._stopped, self._over = threading.Event(), threading.Event()
        loop = LoopThread.shared()
        #: Whether the loop thread may be in the middle of a step.
        self._needed = loop.alive and not loop.is_current
        if self._needed:
            loop.submit(self._stop())

    async def _stop(self) -> None:
        self._stopped.set()
        self._over.wait()

    def reached(self, patience: float) -> bool:
        """Wait until the loop thread has stopped; return whether it has."""
        return not self._needed or self._stopped.wait(patience)

    def end(self) -> None:
        self._over.set()


def _before() -> None:
    global _noise, _pause
    _forking.acquire()
    ends = monotonic() + PATIENCE
    for handler in _handlers:  # all first, so that their calls end at the same time
        handler.shut_gate()
    # The loop thread first: from then on, no connection is made.
    _pause = _LoopPause() if len(_handlers) else None
    stopped = _pause is None or _pause.reached(PATIENCE)
    quiet = _drain(ends)
    gone = _gate.shut(max(MOMENT, ends - monotonic()))
    _noise = None if stopped and quiet and gone else _CALLS
    if _disabled:
        _noise = _DISABLED
    elif _polled():
        _noise = _ASYNCIO


def _polled() -> bool:
    """Whether gRPC's poller thread for asyncio runs: it is always inside gRPC."""
    return any("_poll_wrapper" in thread.name for thread in threading.enumerate())


def _drain(ends: float) -> bool:
    quiet = True
    for handler in _handlers:
        quiet = handler.drain(ends - monotonic()) and quiet
    return quiet


def _in_parent() -> None:
    _gate.open()
    if _pause is not None:
        _pause.end()
    for handler in _handlers:
        handler.resume()
    _forking.release()


def _in_child() -> None:
    global _gate, _forking, _broken
    _gate, _forking = _Gate(), threading.Lock()
    if _noise is not None and _broken is None:
        _broken = f"process {os.getpid()} was forked while {_noise}"
    for handler in _handlers:
        handler.reset()
    for manager in _managers:
        manager._after_fork_in_child()


at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
