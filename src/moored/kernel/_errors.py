"""The errors of the kernel, one root for all of Moored.

::

    MooredError                  everything that Moored raises on purpose
    ├── ConfigError                settings are wrong: names each of them and the correction
    ├── SupervisionError
    │   ├── StartFailed            a child raised before started(), or did not call it in time
    │   ├── RestartIntensityExceeded  children failed too often; carries the history of causes
    │   ├── NotRunning             the supervisor is not running, so it starts no children
    │   └── RestartRequested       raised by a child that requests its own restart
    ├── AlreadyRegistered          the key has a live owner; carries the current value
    ├── NotRegistered              the key has no live owner
    ├── IllegalMove                the machine's chart does not allow this move
    ├── WaitTimeout                a status was not reached in time; names what is missing
    ├── BackoffExhausted           the last attempt that the policy allows has failed
    ├── FlightCancelled            a shared attempt was cancelled, and not by its callers
    ├── KeyedWorkError
    │   ├── QueueFull              one key has too many items waiting
    │   ├── WorkerCrashed          an earlier item of the key failed, so this one was not started
    │   └── WorkCancelled          `cancel()` ended this item, or it was never started
    ├── StaleGeneration            the object that the caller holds has been replaced
    └── DeadlineExceeded           the operation did not finish before its deadline

Every message names what failed, with the numbers, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._rules import Failure


class MooredError(Exception):
    """The root of every error that Moored raises on purpose."""


class ConfigError(MooredError):
    """Settings are wrong; each line of the message names one of them and the correction."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))

    @property
    def mistakes(self) -> tuple[str, ...]:
        """The lines of the message, one for each mistake."""
        return tuple(str(self).splitlines())


class SupervisionError(MooredError):
    """An error of a supervised child or its supervisor."""


class StartFailed(SupervisionError):
    """A child did not start; `child` is its name, and its error, if it raised, is chained."""

    def __init__(self, message: str, child: str) -> None:
        super().__init__(message)
        self.child = child


class NotRunning(SupervisionError):
    """The supervisor is not running, or was stopped before the child had started."""


class RestartIntensityExceeded(SupervisionError):
    """Children failed more often than the supervisor may restart them.

    `causes` holds the failures within the window, the oldest first; the last one is chained.
    """

    def __init__(self, message: str, causes: Sequence[Failure] = ()) -> None:
        super().__init__(message)
        self.causes = tuple(causes)


class RestartRequested(SupervisionError):
    """Raised by a child to request its own restart, after it has logged the reason itself.

    The supervisor treats it as any other failure, but logs it at DEBUG, without a traceback.
    """


class AlreadyRegistered(MooredError):
    """The key has a live owner; `current` is the value that it registered."""

    def __init__(self, key: Hashable, current: Any) -> None:
        super().__init__(
            f"{key!r} is already registered, by {current!r}; "
            "use that one, or stop its owner before registering another"
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
    """The chart of the machine does not allow this move."""


class WaitTimeout(MooredError, TimeoutError):
    """A status was not reached in time; the message names the conditions that are not met."""


class BackoffExhausted(MooredError):
    """The last attempt that a backoff policy allows has failed."""


class FlightCancelled(MooredError):
    """The shared attempt was cancelled, and not by its callers."""


class KeyedWorkError(MooredError):
    """An item of `KeyedWorkers` was not handled."""


class QueueFull(KeyedWorkError):
    """The queue of one key is full."""


class WorkerCrashed(KeyedWorkError):
    """An earlier item of the same key failed, so this item was not started."""


class WorkCancelled(KeyedWorkError):
    """The key, or all keys, were cancelled before this item was done."""


class StaleGeneration(MooredError):
    """The caller holds an object that has been replaced."""


class DeadlineExceeded(MooredError, TimeoutError):
    """The operation did not finish before its deadline."""
