"""Managers in a process that forks.

A fork copies only the thread that forks. If no other thread was inside gRPC, the child can use
gRPC: there, every channel rests, and connects anew at its next call. Otherwise gRPC may hang or
crash in the child, which nothing can mend: every call there is refused, with an error that says
what to do. The fork itself waits for nothing.

The child decides, from its copy of the memory: between a check in the parent and the fork, another
thread could begin a call. Only threads are listed before the fork, because the child forgets them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from moored.kernel import LoopThread, at_fork

from ._clients import Clients
from ._errors import ManagerClosed

if TYPE_CHECKING:
    from ._gate import Gate

__all__ = [
    "enter",
    "inside",
    "is_broken",
    "keep",
    "leave",
    "leaves_soon",
    "must_not_wait",
    "refuse_broken",
    "register",
    "register_manager",
    "used",
]

_AFTER = "create the channels after the fork, or start processes with the method spawn"
_BUSY = (
    "gRPC was at work (a call, a stream, a connect, a connectivity callback or a server), so it "
    f"may hang here: {_AFTER}"
)
_ASYNCIO = f"a grpc.aio channel was open, so gRPC may hang here: {_AFTER}"
_DISABLED = (
    "gRPC's fork support was turned off (GRPC_ENABLE_FORK_SUPPORT), so gRPC cannot "
    "work here: leave that variable unset, or start processes with the method spawn"
)
# gRPC reads the variable once, too, and takes these words. Setting it to true does not help: the
# parent's calls may hang.
_disabled = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "1").strip().lower() in (
    *("0", "f", "false"),
    *("n", "no"),
)

#: All gates for threads, also of closed channels, whose calls may still be in flight.
_gates: Clients[Gate] = Clients()
_managers: Clients[Any] = Clients()
#: One entry for each thread that is inside gRPC, other than for a user's call.
_inside: list[None] = []
#: gRPC objects that a child has inherited: neither using nor freeing them is safe there.
_inherited: list[object] = []
#: Seconds that a thread of gRPC may stay inside after its work has ended: 0.2 in grpcio 1.85, and
#: longer on a busy machine.
LEAVING = 0.5
#: Until when such a thread may be inside.
_left_at = float("-inf")
#: Whether threads that are always inside gRPC ran before the last fork: those of servers, and the
#: poller of `grpc.aio`.
_served = _polled = False
#: Whether this process, or one that it was forked from, has connected.
_used = False
#: Why gRPC may hang in this process.
_broken: str | None = None


def register(gate: Gate) -> None:
    """Reset a gate in each child, as long as it lives."""
    _gates.add(gate)


def register_manager(manager: Any) -> None:
    """Call the manager's `_after_fork_in_child` in each child."""
    _managers.add(manager)


def enter() -> None:
    """Note that a thread is inside gRPC, until `leave`."""
    _inside.append(None)


def leave() -> None:
    """Note that a thread has left gRPC."""
    _inside.pop()


def used() -> None:
    """Note that gRPC has threads in this process from now on."""
    global _used
    _used = True


def leaves_soon() -> None:
    """Note that a thread of gRPC has lost its work, and leaves gRPC in a moment."""
    global _left_at
    _left_at = monotonic() + LEAVING


@contextmanager
def inside() -> Iterator[None]:
    """Mark this thread as inside gRPC, for a short block."""
    enter()
    try:
        yield
    finally:
        leave()


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


def _before() -> None:
    global _served, _polled
    targets = [getattr(thread, "_target", None) for thread in threading.enumerate()]
    names = [getattr(target, "__qualname__", "") for target in targets]
    _polled = any(name.endswith("._poll_wrapper") for name in names)
    _served = any(getattr(target, "__module__", "") == "grpc._server" for target in targets)


def _noise() -> str | None:
    """Return why gRPC was not quiet at the fork; None if it was."""
    if _disabled and _used:
        return _DISABLED
    if _polled:
        return _ASYNCIO
    leaving = monotonic() < _left_at
    busy = _inside or leaving or _served or any(gate.calls or gate.watched for gate in _gates)
    return _BUSY if busy else None


def _in_child() -> None:
    global _broken
    if _broken is None and (noise := _noise()) is not None:
        _broken = f"process {os.getpid()} was forked while {noise}"
    _inside.clear()
    for gate in _gates:
        gate.reset()
    for manager in _managers:
        manager._after_fork_in_child()


at_fork(before=_before, after_in_child=_in_child)
