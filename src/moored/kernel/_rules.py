"""The decisions of a supervisor as plain functions: which children restart, when to give up."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, NamedTuple

from ._errors import MooredError
from ._ownership import Reason
from ._words import describe

#: Classes of other packages whose errors report a lost server: of DB-API, gRPC, HTTP and Redis.
_LOST = {"ConnectionError", "InterfaceError", "OperationalError", "RpcError", "TransportError"}


class Strategy(StrEnum):
    """Which siblings are restarted together with a child that failed."""

    ONE_FOR_ONE = "one_for_one"  #: the failed child alone
    ONE_FOR_ALL = "one_for_all"  #: every child
    REST_FOR_ONE = "rest_for_one"  #: the failed child and those started after it


class Restart(StrEnum):
    """Whether a child that ended is restarted."""

    PERMANENT = "permanent"  #: always
    TRANSIENT = "transient"  #: after a failure, not after a normal return
    TEMPORARY = "temporary"  #: never


class AutoShutdown(StrEnum):
    """Whether a supervisor ends when its significant children have ended permanently."""

    NEVER = "never"
    ANY_SIGNIFICANT = "any_significant"  #: when the first of them has ended
    ALL_SIGNIFICANT = "all_significant"  #: when the last of them has ended


# Plain strings are accepted too: a StrEnum equals its value.
StrategyName = Literal["one_for_one", "one_for_all", "rest_for_one"]
RestartName = Literal["permanent", "transient", "temporary"]
AutoShutdownName = Literal["never", "any_significant", "all_significant"]


def wants_restart(restart: Restart | RestartName, reason: Reason) -> bool:
    """Whether a child that ended by itself, for this reason, is restarted."""
    if restart == Restart.PERMANENT:
        return True
    return restart == Restart.TRANSIENT and isinstance(reason, BaseException)


def is_defect(error: Reason) -> bool:
    """Whether the end of a child needs a traceback: its error reports no lost server, and is none
    of our own, which explain themselves."""
    if isinstance(error, str):
        return False
    if isinstance(error, BaseExceptionGroup):
        return any(is_defect(each) for each in error.exceptions)
    if isinstance(error, OSError):
        return error.filename is not None  # of a file, and not of a socket
    names = {each.__name__ for each in type(error).__mro__}
    return not isinstance(error, MooredError | EOFError) and names.isdisjoint(_LOST)


def affected(strategy: Strategy, names: Sequence[str], failed: str) -> Sequence[str]:
    """Return the children that are restarted when one failed, in the order of starting."""
    if strategy is Strategy.ONE_FOR_ONE:
        return [failed]
    if strategy is Strategy.ONE_FOR_ALL:
        return list(names)
    return list(names[names.index(failed) :])


def ends_supervisor(auto: AutoShutdown, significant_left: int) -> bool:
    """Whether the supervisor ends now that a significant child has ended permanently."""
    if auto is AutoShutdown.ALL_SIGNIFICANT:
        return significant_left == 0
    return auto is AutoShutdown.ANY_SIGNIFICANT


class Failure(NamedTuple):
    """One failure of a child, as text, so that no exception and no frames are kept alive."""

    #: When the child failed, in monotonic seconds.
    at: float
    #: The name of the child.
    child: str
    #: The error, or "it returned".
    what: str


class Intensity:
    """The limit of restarts within a period: a sliding window that keeps the causes."""

    __slots__ = ("_window", "limit", "period")

    def __init__(self, limit: int, period: float) -> None:
        if limit < 0 or period <= 0:
            raise ValueError(
                f"intensity=({limit}, {period}) must be a number of restarts ≥ 0 "
                "and a period > 0 in seconds"
            )
        self.limit = limit
        self.period = period
        # A list: it is short, and an empty deque would cost every supervisor 600 bytes.
        self._window: list[Failure] = []

    def allows(self, now: float, child: str, reason: Reason) -> bool:
        """Count one restart; return False if it exceeds the limit."""
        what = describe(reason) if isinstance(reason, BaseException) else "it returned"
        self._window.append(Failure(now, child, what))
        while now - self._window[0].at > self.period:
            del self._window[0]
        return len(self._window) <= self.limit

    @property
    def causes(self) -> tuple[Failure, ...]:
        """The failures within the window, the oldest first."""
        return tuple(self._window)
