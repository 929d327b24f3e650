"""One condition of a status, and the texts about it."""

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
    #: When `met` last changed, in monotonic seconds.
    since: float
    #: The detail that its owner gave if it is met; the reason if it is not.
    detail: str | None


class StatusChange(NamedTuple, Generic[S]):
    """A change of one condition, with the status before and after it."""

    status: S
    previous: S
    condition: Condition


def missing(conditions: Iterable[Condition], now: float) -> str:
    """Return the conditions that are not met, since when, and why, as text."""
    words = [
        f"{each.name} (for {duration(now - each.since)}: {each.detail or 'never set'})"
        for each in conditions
        if not each.met
    ]
    return f"missing: {', '.join(words)}" if words else "all its conditions are met"


def verb(old: Condition, new: Condition) -> str:
    """Return the change of a condition as text."""
    if old.met == new.met:
        return "is still met" if new.met else "is still missing"
    return "is met" if new.met else "is lost"


def ending(reason: Reason) -> str:
    """Return the reason why an owner ended, as text."""
    if isinstance(reason, BaseException):
        return describe(reason)
    return "it was stopped" if reason == "shutdown" else "it returned"


def mistakes(conditions: Sequence[str]) -> list[str]:
    """Return the mistakes in a declaration of conditions."""
    if isinstance(conditions, str):
        return [f"conditions must be a list of names: write [{conditions!r}]"]
    found = [] if conditions else ["conditions: there must be at least one"]
    doubled = [name for name in dict.fromkeys(conditions) if list(conditions).count(name) > 1]
    return found + [f"condition {name!r} is declared more than once" for name in doubled]
