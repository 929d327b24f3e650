"""One condition of a status, and its wording."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from ._ownership import Reason
from ._words import describe, duration

__all__ = ["Condition", "StatusChange", "ending", "missing", "mistakes", "verb"]

S = TypeVar("S")


class Condition(NamedTuple):
    """One named condition: met or not, since when, and why."""

    name: str
    met: bool
    #: When it became so, in monotonic seconds.
    since: float
    #: What its owner said when it is met; why not, when it is not.
    detail: str | None


class StatusChange(NamedTuple, Generic[S]):
    """One condition has changed; the status may have changed with it."""

    status: S
    previous: S
    condition: Condition


def missing(conditions: Iterable[Condition], now: float) -> str:
    """The conditions that are not met, since when, and why, as text."""
    words = [
        f"{each.name} (for {duration(now - each.since)}: {each.detail or 'never set'})"
        for each in conditions
        if not each.met
    ]
    return f"missing: {', '.join(words)}" if words else "all its conditions are met"


def verb(old: Condition, new: Condition) -> str:
    """The change of a condition as text."""
    if old.met == new.met:
        return "is still met" if new.met else "is still missing"
    return "is met" if new.met else "is lost"


def ending(reason: Reason) -> str:
    """The end of an owner as text."""
    if isinstance(reason, BaseException):
        return describe(reason)
    return "it was stopped" if reason == "shutdown" else "it returned"


def mistakes(conditions: Sequence[str]) -> list[str]:
    """The mistakes in a declaration of conditions."""
    if isinstance(conditions, str):
        return [f"conditions must be a list of names: write [{conditions!r}]"]
    found = [] if conditions else ["conditions: there must be at least one"]
    doubled = [name for name in dict.fromkeys(conditions) if list(conditions).count(name) > 1]
    return found + [f"condition {name!r} is declared more than once" for name in doubled]
