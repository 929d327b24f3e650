"""Checks of topic filters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._codec import text_field

__all__ = ["check_filter", "unsupported"]


def unsupported(text: str, options: Mapping[str, Any]) -> int:
    """Return the reason code if the server does not support this filter; 0 if it does."""
    wild = "#" in text or "+" in text
    if wild and not options.get("wildcard_subscription_available", 1):
        return 0xA2
    if text.startswith("$share/") and not options.get("shared_subscription_available", 1):
        return 0x9E
    return 0


def check_filter(text: str) -> None:
    """Raise `ValueError` for an invalid topic filter, for which a server would end the link."""
    filter = text
    if text.startswith("$share/"):
        _, group, filter = (text + "//").split("/", 2)
        filter = filter[:-2]
        if not group or "+" in group or "#" in group:
            raise ValueError(f"a filter {_short(text)} without a group after $share/")
    if not filter:
        raise ValueError("an empty filter, or nothing after a group")
    *levels, last = filter.split("/")
    if any(one not in ("+",) and ("+" in one or "#" in one) for one in levels) or (
        last not in ("+", "#") and ("+" in last or "#" in last)
    ):
        raise ValueError(
            f"a filter {_short(text)} in which + or # is not a level of its own, or # not the last"
        )
    try:
        text_field(text)
    except ValueError as error:
        raise ValueError(f"a filter {_short(text)} that MQTT does not allow: {error}") from error


def _short(text: str) -> str:
    return repr(text if len(text) < 100 else f"{text[:100]}…")
