"""Errors, durations and counts as text, and values as plain data for JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from ._secrets import SECRETS

#: Characters of an error message.
MAX_TEXT = 300
#: Causes of an error.
MAX_CAUSES = 5
#: Errors of an exception group.
MAX_GROUP = 3

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def describe(error: BaseException) -> str:
    """Return an error as one line: its message, then in brackets its SQLSTATE and its type.

    The secrets of this process (`SECRETS`) are hidden in it.
    """
    kind = type(error).__name__
    state = getattr(error, "sqlstate", None)
    if isinstance(state, str) and state:
        kind = f"{state} {_CAMEL.sub(' ', kind).lower()}"
    message = _message(error)
    return f"{message} ({kind})" if message else kind


def causes_of(error: BaseException) -> tuple[str, ...]:
    """Return the error and the errors that it was raised from as texts, the nearest first."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < MAX_CAUSES:
        texts.append(describe(cause))
        cause = cause.__cause__
    if cause is not None:
        texts.append("further causes, not kept")
    return tuple(texts)


def duration(seconds: float) -> str:
    """Return a duration as text: "4.2 s", "14 s", "8 m 12 s", "3 h 5 m", "2 days 4 h"."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} m"
    return f"{counted(whole // 86400, 'day')} {whole % 86400 // 3600} h"


def counted(number: int, thing: str) -> str:
    """Return a number with its noun: "1 key", "2 keys"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def refuse(subject: str, mistakes: Iterable[str]) -> None:
    """Raise one `ValueError` that names all the mistakes, if there are any."""
    if found := list(mistakes):
        raise ValueError(f"{subject}: " + "; ".join(found))


def unmet(*checks: tuple[str, object, bool, str]) -> list[str]:
    """Return the mistakes in settings: each check is a name, its value, whether the value is
    right, and what it must be."""
    return [f"{name}={value!r} must be {what}" for name, value, right, what in checks if not right]


def plain(value: Any) -> Any:
    """Return the value as plain data for JSON; objects of other types appear as their repr."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return repr(value)


def _message(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return _group_message(error)
    try:
        text = _of_grpc(error) or str(error)
    except Exception:
        # An error whose __str__ raises must still be reported.
        return "its message cannot be shown"
    return shorten(SECRETS.hide(text))


def _of_grpc(error: BaseException) -> str:
    """Return the code and details of a gRPC error, whose `str()` is a page of repetitions."""
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    if not callable(code) or not callable(details):
        return ""
    return f"{code().name}: {details()}"


def _group_message(group: BaseExceptionGroup[BaseException]) -> str:
    shown = [describe(error) for error in group.exceptions[:MAX_GROUP]]
    if (more := len(group.exceptions) - len(shown)) > 0:
        shown.append(f"{more} more")
    return shorten(f"{group.message}: {', '.join(shown)}")


def shorten(text: str) -> str:
    """Return the text on one line, cut at `MAX_TEXT` characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"
