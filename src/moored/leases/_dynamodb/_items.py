"""DynamoDB's attributes, and the leases that they make up."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from .._store import Held, Holder

__all__ = [
    "HOLDER",
    "KEPT",
    "Item",
    "expression",
    "held",
    "holder_values",
    "millis",
    "number",
    "number_of",
    "text",
    "text_of",
]

Item = Mapping[str, Any]

#: For how many seconds a slot or a limit that nobody uses is kept, where the server's TTL is on.
KEPT = 7 * 24 * 3600

_NAME = re.compile(r"#(\w+)")

#: The attributes that say who holds a lease, for people.
HOLDER = ("service_name", "owner", "host", "pid")


def text(value: str) -> dict[str, str]:
    """A text, as DynamoDB wants it."""
    return {"S": value}


def number(value: int) -> dict[str, str]:
    """A number, as DynamoDB wants it."""
    return {"N": str(value)}


def text_of(item: Item, name: str) -> str:
    """A text; empty where there is none."""
    return str(item.get(name, {}).get("S", ""))


def number_of(item: Item, name: str, default: int = 0) -> int:
    """A whole number, or the default where there is none."""
    value = item.get(name, {}).get("N")
    return default if value is None else int(float(value) if "." in value else value)


def millis(seconds: float) -> int:
    """Milliseconds, never fewer than the seconds are."""
    return math.ceil(seconds * 1000)


def expression(values: Mapping[str, Any] | None = None, **parts: str) -> dict[str, Any]:
    """The arguments of a request with expressions.

    Attributes are written as #name, because DynamoDB reserves hundreds of words.
    """
    names = sorted({name for part in parts.values() for name in _NAME.findall(part)})
    arguments: dict[str, Any] = {f"{part}Expression": wanted for part, wanted in parts.items()}
    arguments["ExpressionAttributeNames"] = {f"#{name}": name for name in names}
    if values:
        arguments["ExpressionAttributeValues"] = {f":{name}": v for name, v in values.items()}
    return arguments


def holder_values(holder: Holder) -> dict[str, dict[str, str]]:
    """Who holds a lease, as attributes."""
    return {
        "service_name": text(holder.service_name),
        "owner": text(holder.owner),
        "host": text(holder.host),
        "pid": number(holder.pid),
    }


def held(key: str, known: str, item: Item, *, ends: float, latest: float) -> Held:
    """A live lease from its item; `ends` is when, and `latest` what time it is at most."""
    holder = Holder(
        service_name=text_of(item, "service_name"),
        owner=text_of(item, "owner"),
        host=text_of(item, "host"),
        pid=number_of(item, "pid"),
    )
    return Held(
        key=key,
        id=known,
        fence=number_of(item, "fence"),
        holder=holder,
        created_at=number_of(item, "created_ms") / 1000,
        expires_in=max(ends - latest, 0.0),
    )
