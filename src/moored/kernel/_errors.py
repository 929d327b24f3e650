"""The errors of the kernel, one root for all of Moored.

::

    MooredError                  everything that Moored raises on purpose
    ├── ConfigError                settings or options are wrong: names them and the correction
    ├── SupervisionError
    │   ├── StartFailed            a child raised before started(), or did not call it in time
    │   ├── RestartIntensityExceeded  children failed too often; carries the history of causes
    │   ├── NotRunning             the supervisor has stopped, so it takes no children
    │   └── RestartRequested       raised by a child that wants to be started again
    ├── AlreadyRegistered          the key has a live owner; carries the current value
    ├── NotRegistered              the key has no live owner
    ├── IllegalMove                a machine was asked for a move that it does not declare
    ├── WaitTimeout                a status was not reached in time; says what is missing
    ├── BackoffExhausted           the last attempt that the policy allows has failed
    ├── FlightCancelled            a shared attempt was cancelled, and not by its callers
    ├── KeyedWorkError
    │   ├── QueueFull              one key has too much work waiting
    │   ├── WorkerCrashed          the work before this one failed, so this one was not started
    │   └── WorkCancelled          the key, or all of them, was cancelled before this was done
    ├── StaleGeneration            the object that the caller holds has been replaced since
    └── DeadlineExceeded           the operation did not finish before its deadline

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
    "ConfigError",
    "DeadlineExceeded",
    "FlightCancelled",
    "IllegalMove",
    "KeyedWorkError",
    "MooredError",
    "NotRegistered",
    "NotRunning",
    "QueueFull",
    "RestartIntensityExceeded",
    "RestartRequested",
    "StaleGeneration",
    "StartFailed",
    "SupervisionError",
    "WaitTimeout",
    "WorkCancelled",
    "WorkerCrashed",
]


class MooredError(Exception):
    """The root of every error that Moored raises on purpose."""


class ConfigError(MooredError):
    """Settings or options are wrong; each line of the text names one of them and the correction."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))

    @property
    def mistakes(self) -> tuple[str, ...]:
        """The mistakes, one line for each."""
        return tuple(str(self).splitlines())


class SupervisionError(MooredError):
    """An error of a supervised child or its supervisor."""


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


class RestartRequested(SupervisionError):
    """Raised by a child that wants to be started again, and has logged the reason itself.

    The supervisor treats it as any failure, but logs it for debugging only, without a traceback.
    """


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
    """The key has no live owner."""

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
    """The shared attempt was cancelled from outside, not by its callers."""


class KeyedWorkError(MooredError):
    """Work for one key of `KeyedWorkers` was not done."""


class QueueFull(KeyedWorkError):
    """The queue of one key is full."""


class WorkerCrashed(KeyedWorkError):
    """Earlier work of the same key failed, so this work was not started."""


class WorkCancelled(KeyedWorkError):
    """The key, or all of them, was cancelled before this work was done."""


class StaleGeneration(MooredError):
    """The caller holds an object that has been replaced since."""


class DeadlineExceeded(MooredError, TimeoutError):
    """The operation did not finish before its deadline."""
