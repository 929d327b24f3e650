"""Reads settings from environment variables, and reports all invalid ones together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from moored.kernel import refuse

__all__ = ["Environment", "parse_duration"]

T = TypeVar("T")

_YES = ("1", "yes", "true", "on")
_NO = ("0", "no", "false", "off")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h))+")


def parse_duration(text: str) -> float:
    """Parse `660`, `0.5`, `45s`, `250ms`, `11m` or `1h30m` into seconds."""
    words = text.strip().lower()
    if _DURATION.fullmatch(words):
        return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(words))
    if re.fullmatch(r"\d+(\.\d+)?", words):
        return float(words)
    raise ValueError(f"{text!r} is not a duration: write 11m, 45s, 1h30m, 250ms, or seconds")


class Environment:
    """Reads variables with one prefix; `done()` raises one error that lists all invalid ones."""

    def __init__(self, prefix: str, variables: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._variables = variables
        self._mistakes: list[str] = []

    def flag(self, name: str, default: bool) -> bool:
        """Read a boolean."""
        found = self._read(name, _flag)
        return default if found is None else found

    def count(self, name: str, *, least: int = 1) -> int | None:
        """Read an integer."""

        def parse(text: str) -> int:
            if not text.isdecimal() or int(text) < least:
                raise ValueError(f"{text!r} is not an integer of at least {least}")
            return int(text)

        return self._read(name, parse)

    def rate(self, name: str) -> float | None:
        """Read a number per second."""
        return self._read(name, _rate)

    def duration(self, name: str) -> float | None:
        """Read a duration, in seconds."""
        return self._read(name, parse_duration)

    def lease_store(self) -> str | None:
        """Read the URL of the lease store, or the name of a DynamoDB table."""
        url = self._text("DISTRIBUTED_CONN_LEASE_URL")
        table = self._text("DISTRIBUTED_CONN_LEASE_TABLE")
        if url and table:
            self._mistakes.append(
                f"{self._prefix}DISTRIBUTED_CONN_LEASE_URL and …_TABLE are both set: keep one"
            )
        return url or (f"dynamodb://{table}" if table else None)

    def done(self) -> None:
        """Raise ValueError if any variable was invalid."""
        refuse("environment", self._mistakes)

    def _text(self, name: str) -> str | None:
        return self._variables.get(self._prefix + name, "").strip() or None

    def _read(self, name: str, parse: Callable[[str], T]) -> T | None:
        text = self._text(name)
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            self._mistakes.append(f"{self._prefix}{name}: {error}")
            return None


def _flag(text: str) -> bool:
    if text.lower() not in (*_YES, *_NO):
        raise ValueError(f"{text!r} is not a boolean: write true or false")
    return text.lower() in _YES


def _rate(text: str) -> float:
    number = text.removesuffix("/s")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{text!r} is not a number per second: write for example 100")
    return value
