"""Errors, durations and counts as text, and values as plain data, in one way everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

from ._secrets import SECRETS

__all__ = [
    "causes_of",
    "counted",
    "describe",
    "duration",
    "plain",
    "program_of",
    "refuse",
    "shorten",
    "unmet",
]

#: Long enough for a driver's sentence, short enough that a thousand of them are nothing.
MAX_TEXT = 300
#: How far back the causes of an error are told.
MAX_CAUSES = 5
MAX_GROUP = 3

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def describe(error: BaseException) -> str:
    """An error in one line: its message, and in brackets its SQLSTATE and what kind it is.

    The secrets that this process was given (`SECRETS`) are hidden in it.
    """
    kind = type(error).__name__
    state = getattr(error, "sqlstate", None)
    if isinstance(state, str) and state:
        kind = f"{state} {_CAMEL.sub(' ', kind).lower()}"
    message = _message(error)
    return f"{message} ({kind})" if message else kind


def causes_of(error: BaseException) -> tuple[str, ...]:
    """The error and the errors that it was raised from, each described, the nearest first."""
    told: list[str] = []
    link: BaseException | None = error
    while link is not None and len(told) < MAX_CAUSES:
        told.append(describe(link))
        link = link.__cause__
    if link is not None:
        told.append("further causes, not kept")
    return tuple(told)


def duration(seconds: float) -> str:
    """A length of time as people say it: "4.2 s", "14 s", "8 m 12 s", "3 h 5 m", "2 days 4 h"."""
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
    """A number of things: "1 key", "2 keys"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def program_of(command_line: bytes) -> str:
    """A program as people call it: its name and subcommand; options may hold secrets."""
    words = [word.decode(errors="replace") for word in command_line.split(b"\0") if word]
    if words and PurePath(words[0]).name.startswith("python"):
        rest = words[2:] if words[1:2] == ["-m"] else words[1:]
        words = words[:1] if not rest or rest[0].startswith("-") else rest
    shown = [PurePath(word).name if place == 0 else word for place, word in enumerate(words[:2])]
    if len(shown) == 2 and not shown[1].replace("-", "").isalpha():
        shown.pop()
    return " ".join(word for word in shown if not word.startswith("-"))


def refuse(subject: str, mistakes: Iterable[str]) -> None:
    """Raise one ValueError that names all the mistakes, if there are any."""
    if found := list(mistakes):
        raise ValueError(f"{subject}: " + "; ".join(found))


def unmet(*checks: tuple[str, object, bool, str]) -> list[str]:
    """Return the mistakes in settings: each check is a name, its value, whether the value is
    right, and what it must be."""
    return [f"{name}={value!r} must be {what}" for name, value, right, what in checks if not right]


def plain(value: Any) -> Any:
    """The value as JSON can hold it; what it cannot hold appears as its repr."""
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
        # An error whose text cannot be had must not hide that there was an error.
        return "its message cannot be shown"
    return shorten(SECRETS.hide(text))


def _of_grpc(error: BaseException) -> str:
    """What an error of gRPC says; printed, it is a page that says it three times."""
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
    """The text on one line, cut where it gets long."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"
