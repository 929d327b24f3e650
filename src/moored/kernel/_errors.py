"""The errors of the kernel, one root for all of Moored.

::

    MooredError                  everything that Moored raises on purpose
    ├── SupervisionError
    │   ├── StartFailed            a child did not start: it raised, or it gave no sign in time
    │   ├── RestartIntensityExceeded  children failed too often; carries the history of causes
    │   └── NotRunning             the supervisor has stopped, so it takes no children
    ├── AlreadyRegistered          the key has a live owner; carries the current value
    ├── NotRegistered              nobody owns the key right now
    ├── IllegalMove                a machine was asked for a move that it does not declare
    ├── WaitTimeout                a status was not reached in time; says what is missing
    ├── BackoffExhausted           the last attempt that the policy allows has failed
    ├── FlightCancelled            a shared attempt was cancelled, and not by its callers
    ├── KeyedWorkError
    │   ├── QueueFull              one key has too much work waiting
    │   ├── WorkerCrashed          the work before this one failed, so this one was not started
    │   └── WorkCancelled          the key, or all of them, was cancelled before this was done
    ├── StaleGeneration            the user of something that has been replaced meanwhile
    └── DeadlineExceeded           the time for the whole operation is over

Every message says what broke, in numbers where there are any, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._rules import Failure

__all__ = [
    "AlreadyRegistered",
    "BackoffExhausted",
    "DeadlineExceeded",
    "FlightCancelled",
    "MooredError",
    "IllegalMove",
    "KeyedWorkError",
    "NotRegistered",
    "NotRunning",
    "QueueFull",
    "RestartIntensityExceeded",
    "StaleGeneration",
    "StartFailed",
    "SupervisionError",
    "WaitTimeout",
    "WorkCancelled",
    "WorkerCrashed",
]


class MooredError(Exception):
    """The root of every error that Moored raises on purpose."""


class SupervisionError(MooredError):
    """Something about a supervised child or its supervisor."""


class StartFailed(SupervisionError):
    """The child of this name did not start; what it raised, if anything, is chained."""

    def __init__(self, message: str, child: str) -> None:
        super().__init__(message)
        self.child = child


class NotRunning(SupervisionError):
    """The supervisor is not running, so it cannot do what was asked."""


class RestartIntensityExceeded(SupervisionError):
    """Children failed more often than the supervisor may restart them.

    `causes` holds the failures within the window, the oldest first; the last one is chained.
    """

    def __init__(self, message: str, causes: Sequence[Failure] = ()) -> None:
        super().__init__(message)
        self.causes = tuple(causes)


class AlreadyRegistered(MooredError):
    """The key has a live owner; `current` is the value that it registered."""

    def __init__(self, key: Hashable, current: Any) -> None:
        super().__init__(
            f"{key!r} is already registered, by {current!r}; "
            "use that one, or stop it before registering another"
        )
        self.key = key
        self.current = current


class NotRegistered(MooredError):
    """Nobody owns the key right now."""

    def __init__(self, key: Hashable) -> None:
        super().__init__(
            f"{key!r} is not registered now: its owner has not started, is being restarted, "
            "or has ended; wait for it with Via.wait()"
        )
        self.key = key


class IllegalMove(MooredError):
    """A machine was asked for a move that it does not declare."""


class WaitTimeout(MooredError, TimeoutError):
    """A status was not reached in time; the message says which conditions are missing."""


class BackoffExhausted(MooredError):
    """The last attempt that a backoff policy allows has failed."""


class FlightCancelled(MooredError):
    """The shared attempt was cancelled by somebody who is not one of its callers."""


class KeyedWorkError(MooredError):
    """Work for one key of `KeyedWorkers` was not done."""


class QueueFull(KeyedWorkError):
    """One key has as much work waiting as it may."""


class WorkerCrashed(KeyedWorkError):
    """Earlier work of the same key failed, so this work was not started."""


class WorkCancelled(KeyedWorkError):
    """The key, or all of them, was cancelled before this work was done."""


class StaleGeneration(MooredError):
    """The caller holds something that has been replaced meanwhile."""


class DeadlineExceeded(MooredError, TimeoutError):
    """The time for the whole operation is over."""
