"""Spans of time and times of day as text: "25.1 s", "2 min 5 s", "04:45:40"."""

from __future__ import annotations

from datetime import UTC, datetime

from moored.kernel import counted

__all__ = ["clock_time", "span"]


def span(seconds: float) -> str:
    """Return a span of time: with one decimal below a minute."""
    seconds = max(seconds, 0.0)
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{counted(whole // 86400, 'day')} {whole % 86400 // 3600} h"


def clock_time(wall: float) -> str:
    """Return a time of day, in the time zone of the service: "04:45:40"."""
    return f"{datetime.fromtimestamp(wall, tz=UTC).astimezone():%H:%M:%S}"
